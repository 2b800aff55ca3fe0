"""One request inside the engine: its context, its blocks and the progress of its KV.

Invariant: KV is valid for the tokens below ``num_computed_tokens``, and
``num_computed_tokens < num_tokens``. So there is always a token left to compute, and its logits
give the next token. A sequence has no "prefill" or "decode" state.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from baton.proto.contexts.images import IMAGE_KEY_BYTES
from baton.proto.contexts.matching import Matcher
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.contexts.rope_positions import merged_grids, rope_positions
from baton.proto.contexts.status import GenerationStatus
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import FUTURE_TOKEN
from baton.proto.contexts.vision import (
    TextAndVisionContext,
    context_grids,
    context_rope_delta,
    is_tiled,
    seen_images,
    spans_of,
)
from baton.proto.hashing import ImageSpan, block_hashes
from baton.proto.picture_requests import Picture
from baton.proto.picture_runs import PictureRun
from baton.proto.prompt_log_probs import record_type, records_bytes

from ..cache.paged_cache import Allocation, PagedCache
from .plan import Chunk, ChunkImage, Int32, PromptScore, SampleSpec, TokenMask

_NO_HISTORY: Int32 = np.empty(0, np.int32)
_UNKNOWN: Int32 = np.array([FUTURE_TOKEN], np.int32)


class Sequence:
    """A request that the scheduler works on.

    ``request``: key of the request. ``context``: tokens, status and sampling parameters; it
    grows only through :meth:`accept`. ``num_tokens``: its tokens, prompt and generated;
    ``prompt_length``: tokens of the original request; ``end_length``: maximum tokens.
    ``salt``: keys the block hashes (tenant and model). ``priority``: lower goes first, ties
    by arrival. ``source``: key of the worker that sent its KV, whose cached blocks it may use.
    ``images``: the context's images, or None. ``picture``: of a request for a picture;
    its prompt is computed in one step. ``stream_from``: first prompt token
    that the receiver lacks; if set, finished layers are reported during a step. ``given``: the next
    token if it is known, which is accepted instead of the sampled one. ``prompt_log_probs``:
    records of the prompt's tokens, filled as they are computed; None: not wanted. ``step_limit``:
    most seconds of a step with a chunk of a prompt beside its tokens; 0: none. ``arrival``,
    ``admitted``, ``first_token``: times in seconds of the caller's clock. Raises InputError if
    images and grids contradict each other.
    """

    __slots__ = (
        "aborted", "admitted", "allocation", "arrival", "block_size", "cached_tokens", "context",
        "end_length", "eos", "first_token", "given", "hashes", "images", "mask", "min_length",
        "needs_history", "num_computed_tokens", "num_tokens", "picture", "preemptions", "priority",
        "prompt_length", "prompt_log_probs", "rank", "request", "salt", "source", "step_limit",
        "stream_from",
    )  # fmt: skip

    def __init__(
        self,
        request: bytes,
        context: TextContext,
        *,
        block_size: int,
        salt: bytes = b"",
        priority: int = 0,
        arrival: float = 0.0,
    ) -> None:
        self.request = request
        self.context = context
        self.block_size = block_size
        self.salt = salt
        self.source = b""
        self.priority = priority
        self.arrival = arrival
        self.stream_from: int | None = None
        self.step_limit = 0.0
        self.rank: tuple[int, float, int] = (priority, arrival, 0)  # last: set by the scheduler
        self.allocation: Allocation | None = None
        self.num_tokens = len(context.tokens)
        self.prompt_length = context.prompt_length
        self.num_computed_tokens = 0
        self.cached_tokens = 0
        self.hashes: list[bytes] = []
        self.aborted = False
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.given: int | None = None
        self.preemptions = 0
        params = context.sampling_params
        limit = params.max_new_tokens
        longest = context.max_length
        self.end_length = longest if limit is None else min(longest, self.prompt_length + limit)
        self.min_length = context.prompt_length + params.min_new_tokens
        self.eos = () if context.ignore_eos else tuple(sorted(context.eos_token_ids))
        self.needs_history = params.needs_penalties
        self.mask = None if context.matcher is None else _mask_of(context.matcher)
        # A replay needs none: the client got them with the first token.
        self.prompt_log_probs: bytearray | None = None
        if context.log_probabilities_echo and self.num_tokens == self.prompt_length:
            size = records_bytes(self.prompt_length, context.log_probabilities)
            self.prompt_log_probs = bytearray(size)
        self.images: SequenceImages | None = None
        self.picture: Picture | None = None
        if isinstance(context, PictureRun):
            self.picture = context.picture
        elif isinstance(context, TextAndVisionContext) and context.images:
            self.images = SequenceImages(context, salt)

    def constrain(self, matcher: Matcher) -> None:
        """Constrain the next tokens by a grammar; ``matcher`` has accepted all tokens so far."""
        self.context.set_matcher(matcher)
        self.mask = _mask_of(matcher)

    def free(self, cache: PagedCache) -> None:
        """Return the blocks to ``cache``, if the sequence holds any."""
        allocation, self.allocation = self.allocation, None
        if allocation is not None:
            cache.free(allocation)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens the request may still generate."""
        return max(self.end_length - self.num_tokens, 0)

    def extend_hashes(self) -> list[bytes]:
        """Return the hashes of all full blocks; only those of new blocks are computed."""
        start, end = len(self.hashes), self.num_tokens // self.block_size
        if start < end:
            tokens = self.tokens_between(start * self.block_size, end * self.block_size)
            parent = self.hashes[-1] if self.hashes else b""
            spans = self.images.spans(start * self.block_size) if self.images else ()
            self.hashes += block_hashes(tokens, self.block_size, self.salt, parent, spans)
        return self.hashes

    def hashes_by(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks of a size, which another worker may have."""
        if block_size == self.block_size:
            return self.extend_hashes()
        tokens = self.tokens_between(0, self.num_tokens // block_size * block_size)
        spans = self.images.spans(0) if self.images else ()
        return block_hashes(tokens, block_size, self.salt, b"", spans)

    def chunk(self, count: int, *, stream_layers: bool = False) -> Chunk:
        """Return the next ``count`` uncomputed tokens as work for the executor."""
        if self.allocation is None:
            raise ValueError("a sequence without blocks has no chunk")
        start = self.num_computed_tokens
        end = start + count
        sample = self._sample_spec(end) if end == self.num_tokens else None
        table = self.allocation.block_table
        tokens, images = self.tokens_between(start, end), self.images
        if images is None:
            chunk = Chunk(self.request, start, tokens, table, sample, stream_layers)
            if self.picture is not None:
                chunk.picture, chunk.has_left = self.picture, lambda: self.aborted
            if self.prompt_log_probs is not None:
                chunk.score = self._score(start, end)
            return chunk
        return Chunk(
            self.request,
            start,
            tokens,
            table,
            sample,
            stream_layers,
            images.parts(start, end),
            images.rope_positions(start, end),
            images.delta,
            seen=images.seen,
        )

    def _score(self, start: int, end: int) -> PromptScore | None:
        """Return the prompt tokens that the rows ``start .. end`` predict."""
        targets = self.tokens_between(start + 1, min(end + 1, self.prompt_length))
        return PromptScore(targets, self.context.log_probabilities) if len(targets) else None

    def take_scores(self, start: int, records: bytes) -> None:
        """Store the records of the prompt tokens after the rows from ``start`` on."""
        if self.prompt_log_probs is not None:
            first = start * record_type(self.context.log_probabilities).itemsize
            self.prompt_log_probs[first : first + len(records)] = records

    def next_count(self, budget: int, *, alone: bool) -> int:
        """Return the number of tokens of the next prefill chunk, at most ``budget``.

        No chunk ends inside an image. An image that does not fit is taken whole if the chunk is
        ``alone`` in its step, else the chunk waits. So does the row of a picture.
        """
        start = self.num_computed_tokens
        if self.picture is not None:
            return self.num_tokens - start if alone else 0
        count = max(0, min(self.num_tokens - start, budget))
        if self.images is None or not count:
            return count
        return self.images.aligned_count(start, count, whole=alone)

    @property
    def can_go_on_unseen(self) -> bool:
        """True if a step may be planned before the token of the previous step is known.

        A step of pictures takes so long that those which arrive meanwhile should join the next one.
        """
        return self.picture is None

    def chunk_ahead(self) -> Chunk:
        """Return the token that the running step samples, as work for the step after it."""
        if self.allocation is None:
            raise ValueError("a sequence without blocks has no chunk")
        start, table = self.num_tokens, self.allocation.block_table
        sample = self._sample_spec(start + 1)
        if self.images is None:
            return Chunk(self.request, start, _UNKNOWN, table, sample)
        delta, seen = self.images.delta, self.images.seen
        return Chunk(self.request, start, _UNKNOWN, table, sample, rope_delta=delta, seen=seen)

    def accept(self, token: int, logprobs: TokenLogProbs | None) -> None:
        """Append a sampled token; the context's status then shows if the request ended.

        Raises ValueError, and changes nothing, if the context rejects the token.
        """
        context = self.context
        context.update(token, logprobs)
        self.num_tokens += 1
        if self.num_tokens >= self.end_length and context.status is GenerationStatus.ACTIVE:
            context.update_status(GenerationStatus.MAXIMUM_LENGTH)

    def tokens_between(self, start: int, end: int) -> Int32:
        """Return the tokens at the positions ``[start, end)``."""
        return self.context.tokens.all[start:end].astype(np.int32)

    def _sample_spec(self, position: int) -> SampleSpec:
        # Penalties are for tokens of the text: the ids of aspect ratios before it are no tokens.
        before = 0 if self.images is None else self.images.num_before
        return SampleSpec(
            self.context.sampling_params,
            position,
            self.tokens_between(before, position) if self.needs_history else _NO_HISTORY,
            self.prompt_length - before,
            self.eos if position < self.min_length else (),
            self.context.log_probabilities,
            self.mask,
        )


def _mask_of(matcher: Matcher) -> TokenMask | None:
    """Return the matcher as a mask, or None if it can only accept or reject tokens."""
    return matcher if isinstance(matcher, TokenMask) else None


# --------------------------------------------------------------------------- images


class SequenceImages:
    """The images of a context with at least one image.

    ``delta``: rope position minus position of the tokens after the last image. ``salt``: of the
    tenant and model; the hash of an image comes from the client, so features are not shared between
    tenants. ``seen``: the images if cross-attention reads them, else None. ``num_before``: their
    positions before the text. Raises InputError if images and grids contradict each other.
    """

    def __init__(self, context: TextAndVisionContext, salt: bytes) -> None:
        self._spans = context.image_spans()
        self._places = spans_of(context)
        self.seen = seen_images(context) if is_tiled(context) else None
        self.num_before = 0 if self.seen is None else self.seen.end
        self._merged: list[tuple[int, int]] = []
        if self.seen is None:
            grids = np.asarray(context_grids(context))
            self._merged = merged_grids(self._places, grids)
            shapes = [(int(rows), int(columns)) for _, rows, columns in grids]
        else:
            shapes = list(self.seen.canvases)
        self.delta = context_rope_delta(context)
        self._end = self._places[-1][1]
        self.num_tokens = sum(end - start for start, end, _ in self._spans)
        self._images = [
            ChunkImage(
                row=start,
                first=0,
                count=end - start,
                key=blake2b(key, key=salt[:64], digest_size=IMAGE_KEY_BYTES).digest(),
                pixels=image.pixel_values,
                grid=shape,
            )
            for (start, end, key), image, shape in zip(
                self._spans, context.images, shapes, strict=True
            )
        ]

    def spans(self, start: int) -> list[ImageSpan]:
        """Return the spans for block hashes of the tokens from ``start`` on."""
        return [(a - start, b - start, key) for a, b, key in self._spans if b > start]

    def aligned_count(self, start: int, count: int, *, whole: bool) -> int:
        """Return how many of ``count`` tokens from ``start`` on a chunk takes without cutting.

        It ends before the image that contains its end. If this is the image at its start, it takes
        the whole image, or nothing unless ``whole``.
        """
        for first, last in self._places:
            if first < start + count < last:
                if first > start:
                    return first - start
                return last - start if whole else 0
        return count

    def rope_positions(self, start: int, end: int) -> Int32 | None:
        """Return rope positions of the tokens, int32 ``[3, n]``.

        None after the last image, and if cross-attention reads the images.
        """
        if start >= self._end or self.seen is not None:
            return None
        return rope_positions(self._places, self._merged, start, end)

    def unread(self, start: int, end: int) -> int:
        """Return how many of the tokens the layers do not compute: those before the text."""
        return max(0, min(end, self.num_before) - start)

    def parts(self, start: int, end: int) -> tuple[ChunkImage, ...]:
        """Return the parts of images among the tokens ``[start, end)``."""
        found = []
        for image in self._images:
            low, high = max(image.row, start), min(image.row + image.count, end)
            if low < high:
                part = ChunkImage(
                    low - start, low - image.row, high - low, image.key, image.pixels, image.grid
                )
                found.append(part)
        return tuple(found)
