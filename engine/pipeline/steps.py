"""Computes one step: a forward pass, then a token for each sampling row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.proto.errors import BatonError, InputError, InternalError

from ..sampling.sampler import sample
from ..scheduling.plan import Applied, Chunk, Sampled
from .model import ModelInputs, PipelineModel

F32 = npt.NDArray[np.float32]


class Queued(Protocol):
    """A step that a device computes while the host goes on."""

    def collect(self, failed: dict[bytes, BatonError]) -> list[Sampled]:
        """Wait for the sampled tokens; requests without a token go to ``failed``."""
        ...


class StepComputer(Protocol):
    """The part of a pipeline that depends on the model's device.

    ``can_stop``: an exception in ``layer_done`` ends the forward pass, and nothing is written
    after it. ``can_queue``: :meth:`queue` may queue steps.
    """

    can_stop: bool
    can_queue: bool

    def queue(
        self, chunks: Sequence[Chunk], *, fed: bool, applied: Applied | None = None
    ) -> Queued | None:
        """Queue a decode step without waiting for it; None if :meth:`run` must compute it.

        ``fed``: the step that was queued last draws the tokens of the chunks, and may still run. At
        most two steps are queued at a time. ``applied``: called before masks are read.
        """
        ...

    def run(
        self,
        chunks: Sequence[Chunk],
        inputs: ModelInputs,
        failed: dict[bytes, BatonError],
        applied: Applied | None = None,
    ) -> list[Sampled]:
        """Run the rows of ``chunks`` and sample; requests without a token go to ``failed``.

        ``applied``: called before masks are read. Raises if the forward pass itself fails.
        """
        ...

    def clear(self, pool: F32, block: int) -> None:
        """Zero a block in all layers before the next run."""
        ...


class HostSteps:
    """Runs the model and samples on the host."""

    can_stop = True
    can_queue = False

    def __init__(self, model: PipelineModel) -> None:
        self._model = model

    def queue(
        self, chunks: Sequence[Chunk], *, fed: bool, applied: Applied | None = None
    ) -> Queued | None:
        """Return None: the host computes every step at once."""
        return None

    def run(
        self,
        chunks: Sequence[Chunk],
        inputs: ModelInputs,
        failed: dict[bytes, BatonError],
        applied: Applied | None = None,
    ) -> list[Sampled]:
        """Run the rows and sample row by row."""
        logits = self._model.execute(inputs).next_token_logits
        if logits is None:
            raise InternalError("the model returns no logits")
        if applied is not None and masked(chunks):
            applied()
        return sample_rows(logits, [c for c in chunks if c.sample is not None], failed)

    def clear(self, pool: F32, block: int) -> None:
        """Zero a block."""
        pool[:, block] = 0


def masked(chunks: Sequence[Chunk]) -> bool:
    """True if a grammar constrains the token of any chunk."""
    return any(c.sample is not None and c.sample.mask is not None for c in chunks)


def sample_rows(
    logits: F32, chunks: Sequence[Chunk], failed: dict[bytes, BatonError]
) -> list[Sampled]:
    """Sample a token per row of ``logits``; rows that cannot be sampled go to ``failed``."""
    sampled = []
    # A sum is finite only if every logit is: NaN and infinities survive addition.
    finite = np.isfinite(logits.sum(axis=1))
    for row, chunk, usable in zip(logits, chunks, finite, strict=True):
        if chunk.sample is None:
            continue
        if not usable:
            failed[chunk.request] = InternalError("the model produced non-finite logits")
            continue
        try:
            token, logprobs = sample(row, chunk.sample)
        except InputError as error:  # an error of the request's grammar
            failed[chunk.request] = error
            continue
        except Exception as error:  # one request's bad parameters fail this request only
            failed[chunk.request] = InternalError(f"sampling: {describe(error)}")
            continue
        sampled.append(Sampled(chunk.request, token, logprobs))
    return sampled


def describe(error: Exception) -> str:
    """Return the error's type and message on one line."""
    return f"{type(error).__name__}: {error}"
