"""Decides which sequences hold KV blocks: admission to the batch, growth and preemption. Pure.

Invariants:

* a sequence is preempted only for a sequence before it in rank (priority, then arrival), so the
  first in rank always progresses. A sequence fails only if the whole pool cannot hold it;
* no step is out while blocks are freed here, so nothing writes to them.
"""

from __future__ import annotations

from baton.proto.errors import CapacityError

from ..cache.paged_cache import PagedCache
from .events import Event, Failed
from .queues import Queues
from .sequence import Sequence


class Admission:
    """Moves sequences between the queues and the batch, and gives them blocks of ``cache``.

    ``growth``: tokens for which an admitted sequence gets additional blocks.
    """

    def __init__(self, cache: PagedCache, queues: Queues, growth: int) -> None:
        self.preemptions = 0  # since the start
        self.prefix_hit_tokens = 0  # since the start
        self._cache = cache
        self._queues = queues
        self._growth = growth
        self._refused: tuple[Sequence, int] | None = None
        self._failed: list[Event] = []

    def update(self, max_batch: int, budget: int, now: float) -> list[Event]:
        """Give the running sequences room for their next tokens, then fill the batch.

        ``max_batch``: maximum running sequences. ``budget``: prefill tokens of the next step.
        Returns the failures of sequences that the whole pool cannot hold.
        """
        self._make_room()
        self._admit(max_batch, budget, now)
        failed, self._failed = self._failed, []
        return failed

    def _make_room(self) -> None:
        """Get blocks for all tokens of the running sequences; preempt the last in rank if short."""
        for sequence in tuple(self._queues.running):
            allocation = sequence.allocation
            if allocation is None or sequence.num_tokens <= allocation.capacity:
                continue
            if not self._cache.fits(sequence.num_tokens):
                self._fail(sequence)
                continue
            while not self._cache.grow(allocation, sequence.num_tokens):
                holders = self._queues.holders()
                if len(holders) == 1:
                    break  # only grants hold the other blocks: keep these and skip a step
                victim = _victim(holders, sequence)
                self._preempt(victim)
                if victim is sequence:
                    break

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks. The tokens are later computed again or found in the prefix cache."""
        sequence.free(self._cache)
        sequence.num_computed_tokens = 0
        self._queues.send_back(sequence)
        sequence.preemptions += 1
        self.preemptions += 1

    def _fail(self, sequence: Sequence) -> None:
        tokens, room = sequence.num_tokens, self._cache.num_blocks * self._cache.block_size
        message = f"{tokens} tokens need more KV blocks than this worker has ({room} tokens)"
        self._queues.leave(sequence)
        sequence.aborted = True
        sequence.free(self._cache)
        self._failed.append(Failed(sequence.request, CapacityError.code, message))

    def _admit(self, max_batch: int, budget: int, now: float) -> None:
        """Fill the batch by rank. If a waiting sequence has no room, only ready ones pass it."""
        running = self._queues.running
        left = (s.num_tokens - s.num_computed_tokens for s in running)
        budget -= sum(n for n in left if n > 1)
        while len(running) < max_batch:
            sequence = self._next(budget)
            if sequence is None:
                return
            if sequence.admitted is None:
                sequence.admitted = now
            running.append(sequence)
            count = sequence.num_tokens - sequence.num_computed_tokens
            budget -= count if count > 1 else 0

    def _next(self, budget: int) -> Sequence | None:
        waiting, ready = self._queues.waiting, self._queues.ready
        while waiting and not self._cache.fits(waiting[0].num_tokens):
            self._fail(waiting[0])
        waiting_first = waiting and (not ready or waiting[0].rank < ready[0].rank)
        if waiting_first and budget > 0 and self._reserve(waiting[0]):
            return waiting.pop(0)
        return ready.pop(0) if ready else None

    def _reserve(self, sequence: Sequence) -> bool:
        """Reserve blocks for all known tokens and some growth, starting with the cached prefix."""
        available, alone = self._cache.pool.available, not self._queues.running
        if self._refused is not None and not alone:
            refused, then = self._refused
            if refused is sequence and available <= then:
                return False  # nothing was freed since: skip the walk over the hashes
        # Log-probabilities of a prompt need all of its rows, and a cached block has none.
        hashes = [] if sequence.prompt_log_probs is not None else sequence.extend_hashes()
        tokens = sequence.num_tokens
        growth = min(sequence.remaining_tokens, self._growth)
        source = sequence.source
        allocation = self._cache.reserve(hashes, tokens, growth, source)
        if allocation is None and alone:
            allocation = self._cache.reserve(hashes, tokens, source=source)
        self._refused = (sequence, available) if allocation is None else None
        if allocation is None:
            return False
        sequence.allocation = allocation
        found = allocation.cached_blocks * self._cache.block_size
        before = sequence.cached_tokens if sequence.preemptions else found
        sequence.cached_tokens = min(before, found)  # the others were or will be computed
        sequence.num_computed_tokens = found
        self.prefix_hit_tokens += found
        return True


def _victim(holders: list[Sequence], sequence: Sequence) -> Sequence:
    """Return the sequence to preempt for ``sequence``: the last in rank, images last.

    A decode worker cannot compute images again.
    """
    after = [s for s in holders if s.rank > sequence.rank]
    return max(after, key=lambda s: (s.images is None, s.rank), default=sequence)
