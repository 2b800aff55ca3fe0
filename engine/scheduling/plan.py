"""The plan of one step, from the scheduler to the executor, and its result.

These structs stay in the process; arrays are shared, not copied. The scheduler creates
them on the I/O thread and the executor reads them on the compute thread. Neither touches
an object that the other may change: ``tokens``, ``block_table`` and ``history`` are snapshots, and
a ``mask`` is advanced only while no step reads it: a step planned ahead reads it after the step
before is applied (:data:`Applied`).

Nobody changes a struct. Those of which a step has one per row are not frozen, because creating a
frozen dataclass takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.contexts.tiled_images import SeenImages
from baton.proto.errors import BatonError, InternalError
from baton.proto.picture_requests import Picture
from baton.proto.sampling import SamplingParams

Int32 = npt.NDArray[np.int32]
OnLayers = Callable[[bytes, int], None]
"""Called with a request and the end of its layers whose KV is final."""
Unwanted = Callable[[], bool]
"""Called on the compute thread; True if no request needs the running step any more."""
Bools = npt.NDArray[np.bool_]
Applied = Callable[[], object]
"""Returns once the scheduler has applied the step before, so that grammars know its tokens."""


@runtime_checkable
class TokenMask(Protocol):
    """A grammar's constraint on the next token; read on the compute thread during a step."""

    def allowed(self) -> Bools:
        """Return the allowed next tokens, bool ``[vocab]``."""
        ...


@dataclass(slots=True)
class SampleSpec:
    """How to sample the token after a chunk.

    ``position``: absolute index of the sampled token (the Philox counter).
    ``history``: int32, all earlier tokens of the text, or empty if no penalty needs them. In a plan
    ahead the last one is missing, until :func:`realized`.
    ``prompt_length``: boundary in ``history`` between prompt and generated tokens.
    ``banned``: token ids that must not be sampled (EOS before ``min_new_tokens``).
    ``logprobs``: 0 = off, n = also the n most likely tokens.
    ``mask``: constraint of a grammar, or None.
    """

    params: SamplingParams
    position: int
    history: Int32
    prompt_length: int
    banned: tuple[int, ...] = ()
    logprobs: int = 0
    mask: TokenMask | None = None


@dataclass(slots=True, frozen=True)
class ChunkImage:
    """The part of an image in a chunk: rows whose inputs are the image's features.

    ``row``: first of these rows in the chunk (in :class:`ModelInputs`: in the step). ``first``,
    ``count``: the features that they get; ``first`` is above 0 if a prefix hit ends inside the
    image. ``key``: 16 bytes, identifies tenant and image. ``pixels``: uint8 ``[H, W, 3]``, or
    empty in a context whose pixels were dropped. ``grid``: rows and columns in patches, or in tiles
    if cross-attention reads the image.
    """

    row: int
    first: int
    count: int
    key: bytes
    pixels: npt.NDArray[np.generic]
    grid: tuple[int, int]


@dataclass(slots=True, frozen=True)
class PromptScore:
    """The prompt tokens of a chunk whose log-probabilities are wanted.

    ``targets``: int32 ``[k]``, the tokens after the chunk's first k rows. ``top``: number of the
    most likely tokens to report beside each.
    """

    targets: Int32
    top: int


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one request to run through the model in this step.

    ``tokens``: int32 ``[n]``, the inputs at positions ``start .. start+n``.
    ``block_table``: int32, pool block of each logical block, covering ``start + n`` tokens.
    ``sample``: how to sample from the last row's logits; None if more of the prompt follows.
    ``stream_layers``: report finished layers during the step, so that handoff overlaps compute.
    ``images``: parts of images in the chunk. ``rope_positions``: int32 ``[3, n]``, or None if they
    are the positions plus ``rope_delta``, which holds for all tokens after the last image.
    ``picture``: of a request for a picture. ``seen``: the images that cross-attention reads.
    ``has_left()``: of a picture, whether its request has ended meanwhile, so that nobody needs its
    part of the step; it may be called on any thread.
    ``score``: log-probabilities of prompt tokens to compute, or None.
    """

    request: bytes
    start: int
    tokens: Int32
    block_table: Int32
    sample: SampleSpec | None = None
    stream_layers: bool = False
    images: tuple[ChunkImage, ...] = ()
    rope_positions: Int32 | None = None
    rope_delta: int = 0
    picture: Picture | None = None
    seen: SeenImages | None = None
    has_left: Callable[[], bool] | None = None
    score: PromptScore | None = None

    @property
    def rows(self) -> int:
        """Rows of the forward pass: a token each, or all rows of a picture's denoising step."""
        if self.picture is None or self.start < self.picture.length:
            return len(self.tokens)
        return self.picture.step_rows


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass: decode rows first, then prefill chunks.

    ``ahead``: planned before the tokens of the previous step were known. Each chunk is then the
    token that the previous step samples for its request; :func:`realized` fills it in.
    """

    step: int
    chunks: tuple[Chunk, ...]
    ahead: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        if self.ahead:  # a token of each request, and no picture
            return len(self.chunks)
        return sum(c.rows for c in self.chunks)


@dataclass(slots=True)
class Sampled:
    """One sampled token. ``result``: a PNG: of a picture with its last token, else a preview."""

    request: bytes
    token: int
    logprobs: TokenLogProbs | None = None
    result: bytes | None = None


@dataclass(slots=True, frozen=True)
class Scored:
    """Log-probabilities of prompt tokens after the rows from position ``start`` on.

    ``records``: see :mod:`...proto.prompt_log_probs`.
    """

    request: bytes
    start: int
    records: bytes


@dataclass(slots=True, frozen=True)
class StepResult:
    """The result of a plan. ``failed``: requests whose step failed, and the reason.

    ``abandoned``: the step was not finished for all its requests, so ``seconds`` must not be used
    for estimates.
    ``encode_seconds``: the part of ``seconds`` that encoded images. ``scored``: of prompt tokens.
    """

    step: int
    sampled: tuple[Sampled, ...]
    seconds: float
    num_tokens: int
    failed: dict[bytes, BatonError] = field(default_factory=dict)
    abandoned: bool = False
    encode_seconds: float = 0.0
    scored: tuple[Scored, ...] = ()


def realized(
    plan: StepPlan, drawn: Mapping[bytes, int], failed: dict[bytes, BatonError]
) -> Sequence[Chunk]:
    """Return the chunks of a plan; a plan ahead gets the tokens ``drawn`` in the previous step.

    Requests without a token from that step have ended in the meantime and are added to ``failed``.
    """
    if not plan.ahead:
        return plan.chunks
    chunks = []
    for chunk in plan.chunks:
        token = drawn.get(chunk.request)
        if token is None:
            failed[chunk.request] = InternalError("the previous step sampled no token")
        else:
            chunks.append(_with_token(chunk, np.array([token], np.int32)))
    return chunks


def _with_token(chunk: Chunk, token: Int32) -> Chunk:
    spec = chunk.sample
    if spec is not None and len(spec.history):
        spec = replace(spec, history=np.concatenate((spec.history, token)))
    return replace(chunk, tokens=token, sample=spec)


def abandoned_step(plan: StepPlan, seconds: float) -> StepResult:
    """Return the result of a step abandoned after ``seconds`` because no request needed it."""
    why = InternalError("the step was abandoned")
    failed: dict[bytes, BatonError] = {c.request: why for c in plan.chunks}
    return StepResult(plan.step, (), seconds, plan.num_tokens, failed, abandoned=True)


STEP_FAILED = "a step of this request failed; the worker's log has the cause"
"""Everything that a client learns about an exception of the engine."""


def failed_step(plan: StepPlan, error: Exception) -> StepResult:
    """Return the result of a step that raised: all its requests fail, the engine continues."""
    why = InternalError(STEP_FAILED)
    why.__cause__ = error
    return StepResult(plan.step, (), 0.0, plan.num_tokens, {c.request: why for c in plan.chunks})
