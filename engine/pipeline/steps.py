"""Computing one step: a forward pass, then a token for each row that wants one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...proto.errors import BatonError, InputError, InternalError
from ..plan import Chunk, Sampled
from ..sampler import sample
from .model import ModelInputs, PipelineModel

F32 = npt.NDArray[np.float32]


class StepComputer(Protocol):
    """What a pipeline leaves to the device its model is on.

    ``can_stop``: whether what ``layer_done`` raises ends the pass there; nothing is written later.
    """

    can_stop: bool

    def run(
        self, chunks: Sequence[Chunk], inputs: ModelInputs, failed: dict[bytes, BatonError]
    ) -> list[Sampled]:
        """Run the rows of ``chunks`` and draw; requests that got no token go to ``failed``.

        What fails the pass itself is raised.
        """
        ...

    def clear(self, pool: F32, block: int) -> None:
        """Make a block zeros in all layers, before what is run next."""
        ...


class HostSteps:
    """The model, and the sampler on the host."""

    can_stop = True

    def __init__(self, model: PipelineModel) -> None:
        self._model = model

    def run(
        self, chunks: Sequence[Chunk], inputs: ModelInputs, failed: dict[bytes, BatonError]
    ) -> list[Sampled]:
        """Run the rows and draw row by row."""
        logits = self._model.execute(inputs).next_token_logits
        if logits is None:
            raise InternalError("the model gives no logits")
        return sample_rows(logits, [c for c in chunks if c.sample is not None], failed)

    def clear(self, pool: F32, block: int) -> None:
        """Make a block zeros."""
        pool[:, block] = 0


def sample_rows(
    logits: F32, chunks: Sequence[Chunk], failed: dict[bytes, BatonError]
) -> list[Sampled]:
    """Draw a token per row of ``logits``; rows that cannot be drawn from go to ``failed``."""
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
        except InputError as error:  # what a grammar says of itself
            failed[chunk.request] = error
            continue
        except Exception as error:  # one request's parameters, one failure
            failed[chunk.request] = InternalError(f"sampling: {describe(error)}")
            continue
        sampled.append(Sampled(chunk.request, token, logprobs))
    return sampled


def describe(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}"
