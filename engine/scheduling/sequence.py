"""One request inside the engine: its context, its blocks and the progress of its KV.

Invariant: KV is valid for the tokens below ``num_computed_tokens``, and
``num_computed_tokens < num_tokens``. So there is always a token left to compute, and its logits
give the next token. A sequence has no "prefill" or "decode" state.
"""

from __future__ import annotations

import numpy as np

from ...proto.contexts.matching import Matcher
from ...proto.contexts.outputs import TokenLogProbs
from ...proto.contexts.status import GenerationStatus
from ...proto.contexts.text import TextContext
from ...proto.contexts.tokens import FUTURE_TOKEN
from ...proto.hashing import block_hashes
from ..cache.paged_cache import Allocation, PagedCache
from .plan import Chunk, Int32, SampleSpec, TokenMask

_NO_HISTORY: Int32 = np.empty(0, np.int32)
_UNKNOWN: Int32 = np.array([FUTURE_TOKEN], np.int32)


class Sequence:
    """A request that the scheduler works on.

    ``request``: key of the request. ``context``: tokens, status and sampling parameters; it
    grows only through :meth:`accept`. ``num_tokens``: its tokens, prompt and generated;
    ``prompt_length``: tokens of the original request; ``end_length``: maximum tokens.
    ``salt``: keys the block hashes (tenant and model). ``priority``: lower goes first, ties
    by arrival. ``stream_from``: first prompt token that the receiver lacks; if set, finished
    layers are reported during a step. ``arrival``, ``admitted``, ``first_token``: times in
    seconds of the caller's clock.
    """

    __slots__ = (
        "aborted", "admitted", "allocation", "arrival", "block_size", "cached_tokens", "context",
        "end_length", "eos", "first_token", "hashes", "mask", "min_length", "needs_history",
        "num_computed_tokens", "num_tokens", "priority", "prompt_length", "rank", "request",
        "salt", "stream_from",
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
        stream_from: int | None = None,
    ) -> None:
        self.request = request
        self.context = context
        self.block_size = block_size
        self.salt = salt
        self.priority = priority
        self.arrival = arrival
        self.stream_from = stream_from
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
        params = context.sampling_params
        limit = params.max_new_tokens
        longest = context.max_length
        self.end_length = longest if limit is None else min(longest, self.prompt_length + limit)
        self.min_length = context.prompt_length + params.min_new_tokens
        self.eos = () if context.ignore_eos else tuple(sorted(context.eos_token_ids))
        self.needs_history = params.needs_penalties
        self.mask = None if context.matcher is None else _mask_of(context.matcher)

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
            tokens = self._tokens(start * self.block_size, end * self.block_size)
            parent = self.hashes[-1] if self.hashes else b""
            self.hashes += block_hashes(tokens, self.block_size, self.salt, parent)
        return self.hashes

    def chunk(self, count: int, *, stream_layers: bool = False) -> Chunk:
        """Return the next ``count`` uncomputed tokens as work for the executor."""
        if self.allocation is None:
            raise ValueError("a sequence without blocks has no chunk")
        start = self.num_computed_tokens
        end = start + count
        sample = self._sample_spec(end) if end == self.num_tokens else None
        table = self.allocation.block_table
        return Chunk(self.request, start, self._tokens(start, end), table, sample, stream_layers)

    @property
    def can_go_on_unseen(self) -> bool:
        """True if a step may be planned before the token of the previous step is known.

        Penalties and grammars need each token before the next one can be sampled.
        """
        return not self.needs_history and self.context.matcher is None

    def chunk_ahead(self) -> Chunk:
        """Return the token that the running step samples, as work for the step after it.

        The context holds a placeholder for this token until :meth:`accept`. ``num_tokens`` counts
        known tokens only.
        """
        if self.allocation is None:
            raise ValueError("a sequence without blocks has no chunk")
        self.context.update_with_future_token()
        sample = self._sample_spec(self.num_tokens + 1)
        return Chunk(self.request, self.num_tokens, _UNKNOWN, self.allocation.block_table, sample)

    def accept(self, token: int, logprobs: TokenLogProbs | None) -> None:
        """Append a sampled token; the context's status then shows if the request ended.

        Raises ValueError, and changes nothing, if the context rejects the token.
        """
        context = self.context
        if len(context.tokens) > self.num_tokens:
            context.realize_future_token(token, logprobs)
        else:
            context.update(token, logprobs)
        self.num_tokens += 1
        if self.num_tokens >= self.end_length and not context.is_done:
            context.update_status(GenerationStatus.MAXIMUM_LENGTH)

    def _tokens(self, start: int, end: int) -> Int32:
        return self.context.tokens.all[start:end].astype(np.int32)

    def _sample_spec(self, position: int) -> SampleSpec:
        return SampleSpec(
            self.context.sampling_params,
            position,
            self._tokens(0, position) if self.needs_history else _NO_HISTORY,
            self.prompt_length,
            self.eos if position < self.min_length else (),
            self.context.log_probabilities,
            self.mask,
        )


def _mask_of(matcher: Matcher) -> TokenMask | None:
    """Return the matcher as a mask, or None if it can only accept or reject tokens."""
    return matcher if isinstance(matcher, TokenMask) else None
