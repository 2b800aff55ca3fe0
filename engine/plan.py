"""What the scheduler tells the executor to compute in one step, and what comes back.

These structs never leave the process; arrays are shared, not copied. The scheduler makes
them on the I/O thread, the executor reads them on the compute thread, and neither touches
an object the other may change: ``tokens``, ``block_table`` and ``history`` are snapshots, and
a ``mask`` is advanced only between the steps of its request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..proto.errors import BatonError, InternalError
from ..proto.outputs import TokenLogProbs
from ..proto.sampling import SamplingParams

Int32 = npt.NDArray[np.int32]
OnLayers = Callable[[bytes, int], None]
"""Called with a request and the end of its layers whose keys and values are final."""
Bools = npt.NDArray[np.bool_]


@runtime_checkable
class TokenMask(Protocol):
    """A grammar's say in the next token; asked on the compute thread, while a step runs."""

    def allowed(self) -> Bools:
        """Which tokens may come next, bool ``[vocab]``."""
        ...


@dataclass(slots=True, frozen=True)
class SampleSpec:
    """How to draw the token behind a chunk.

    ``position``: absolute index of the token drawn (the Philox counter).
    ``history``: int32, all tokens before it, or empty when no penalty needs them.
    ``prompt_length``: boundary inside ``history`` between prompt and generated.
    ``banned``: token ids that may not be drawn (EOS before ``min_new_tokens``).
    ``logprobs``: 0 = off, n = also the n most likely tokens.
    ``mask``: what a grammar leaves to draw from, or None.
    """

    params: SamplingParams
    position: int
    history: Int32
    prompt_length: int
    banned: tuple[int, ...] = ()
    logprobs: int = 0
    mask: TokenMask | None = None


@dataclass(slots=True, frozen=True)
class Chunk:
    """Consecutive tokens of one request to run through the model in this step.

    ``tokens``: int32 ``[n]``, the inputs at positions ``start .. start+n``.
    ``block_table``: int32, pool block of each logical block, covering ``start + n`` tokens.
    ``sample``: draw a token from the last row's logits, or None (chunk of a longer prompt).
    ``stream_layers``: report finished layers while the step runs (handoff overlaps compute).
    """

    request: bytes
    start: int
    tokens: Int32
    block_table: Int32
    sample: SampleSpec | None = None
    stream_layers: bool = False


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass: decode rows first, then prefill chunks.

    ``ahead``: planned before the tokens of the step before were known. Each chunk is the one
    token that step draws for its request; :func:`realized` puts them in.
    """

    step: int
    chunks: tuple[Chunk, ...]
    ahead: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(len(c.tokens) for c in self.chunks)


@dataclass(slots=True, frozen=True)
class Sampled:
    """One token drawn."""

    request: bytes
    token: int
    logprobs: TokenLogProbs | None = None


@dataclass(slots=True, frozen=True)
class StepResult:
    """Outcome of a plan. ``failed``: the requests whose step failed, and why.

    ``abandoned``: it was not computed to its end, so ``seconds`` say nothing of its tokens.
    """

    step: int
    sampled: tuple[Sampled, ...]
    seconds: float
    num_tokens: int
    failed: dict[bytes, BatonError] = field(default_factory=dict)
    abandoned: bool = False


def realized(
    plan: StepPlan, drawn: Mapping[bytes, int], failed: dict[bytes, BatonError]
) -> Sequence[Chunk]:
    """The chunks of a plan, with the tokens ``drawn`` in the step before where it lacks them.

    Requests for which that step drew nothing go to ``failed``; they have ended meanwhile.
    """
    if not plan.ahead:
        return plan.chunks
    chunks = []
    for chunk in plan.chunks:
        token = drawn.get(chunk.request)
        if token is None:
            failed[chunk.request] = InternalError("the step before drew no token")
        else:
            chunks.append(replace(chunk, tokens=np.array([token], np.int32)))
    return chunks


def abandoned_step(plan: StepPlan, seconds: float) -> StepResult:
    """The result of a step that was left after ``seconds``, because nobody waited for its rows."""
    why = InternalError("the step was left")
    failed: dict[bytes, BatonError] = {c.request: why for c in plan.chunks}
    return StepResult(plan.step, (), seconds, plan.num_tokens, failed, abandoned=True)


def failed_step(plan: StepPlan, error: Exception) -> StepResult:
    """The result of a step that raised as a whole: all its requests fail, the engine goes on."""
    why = InternalError(f"{type(error).__name__}: {error}")
    return StepResult(plan.step, (), 0.0, plan.num_tokens, {c.request: why for c in plan.chunks})
