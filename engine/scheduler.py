"""Which tokens are computed in the next step.

There are no phases: every sequence has tokens whose KV is computed and tokens whose KV is
not, and each step lets *computed tokens catch up with total tokens*. A sequence with one
token left to compute is a decode row; with more it is a prefill chunk, cut by the token
budget. The step that catches up draws the next token. Chunked prefill, prefix hits,
recompute after preemption and the arrival of a handoff are all the same thing: another
``num_computed_tokens`` to start from.

Invariants, after every call:

* a sequence is waiting, ready or running (:mod:`.roster`), or prefilled: then it has left and
  keeps its blocks until :meth:`Scheduler.release`;
* at most two steps are out, the second planned ahead while the first runs; blocks of their
  sequences are not freed before the last of their results is in; one whose sequences have all
  left is told of (:meth:`Scheduler.take_unwanted`), as it need not be computed to its end;
* a sequence is preempted only for one of lower rank (priority, then arrival), so the first of
  them always gets on; it fails only when the whole pool could not hold it.

The scheduler knows no device, socket or clock, and nothing of what the tokens mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from ..proto.errors import BatonError, CapacityError, InternalError
from ..proto.messages import WorkerLoad
from .cache import Allocation, PagedCache
from .chunk_budget import ChunkBudget
from .events import ChunkDone, Event, Failed, Finished, Prefilled, TokenEvent
from .plan import Chunk, Sampled, StepPlan, StepResult
from .roster import Roster, by_rank
from .sequence import Sequence

_Rows = dict[bytes, tuple[Sequence, int]]
"""Sequences of a step and how many of their tokens it computes, by request."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one step.

    ``max_batch``: sequences running at once. ``token_budget``: prefill tokens per step, 0 for
    no limit; decode rows come on top, so neither can starve the other. ``step_seconds``: how
    long a step with prefill tokens should take, 0 for any time (:mod:`.chunk_budget`).
    ``one_token``: prefill mode, a sequence leaves with its first token. ``growth``: tokens
    beyond the known ones a sequence gets room for when it is admitted, against early preemption.
    """

    max_batch: int = 32
    token_budget: int = 0
    step_seconds: float = 0.0
    one_token: bool = False
    growth: int = 64


class _Counters:
    """Sums since start, for :class:`WorkerLoad`."""

    __slots__ = (
        "compute_seconds", "generated_tokens", "preemptions", "prefix_hit_tokens", "prompt_tokens"
    )  # fmt: skip

    def __init__(self) -> None:
        self.compute_seconds = 0.0
        self.generated_tokens = 0
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0


class Scheduler:
    """Continuous batching over one :class:`PagedCache`: ``plan``, compute, ``apply``, again."""

    def __init__(self, config: SchedulerConfig, cache: PagedCache) -> None:
        self.config = config
        self.cache = cache
        self.steps = 0  # steps applied: the engine's progress
        self._roster = Roster()
        self._prefilled: set[Sequence] = set()
        self._out: deque[_Rows] = deque()  # of the steps not applied yet, oldest first
        self._left = False  # a sequence of one of them has left since they were looked through
        self._unwanted: set[int] = set()  # of them, those that were told of
        self._events: list[Event] = []
        self._refused: tuple[Sequence, int] | None = None
        self._counters = _Counters()
        self._budget = ChunkBudget(config.token_budget, config.step_seconds)

    # ------------------------------------------------------------------ requests come and go

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a request of which nothing is computed; ``now`` becomes its arrival."""
        sequence.arrival = now
        self._roster.enter(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Take a request whose KV is in its allocation up to the last token (a handoff)."""
        allocation, computed = sequence.allocation, sequence.num_tokens - 1
        if allocation is None or not allocation.live or allocation.capacity < computed:
            raise InternalError("an adopted sequence has no room for the KV it claims")
        if sequence.num_computed_tokens != computed:
            raise InternalError("an adopted sequence has one token to compute")
        self._roster.enter(sequence)

    def abort(self, request: bytes) -> bool:
        """Drop a request; False when it is not here.

        Its blocks are free on return, unless a step that is out may still write to them
        (:meth:`is_inflight`): then :meth:`apply` of that step frees them and drops its result.
        """
        sequence = self._roster.find(request)
        if sequence is None:
            return False
        self._roster.leave(sequence)
        self._let_go(sequence)
        return True

    def release(self, sequence: Sequence) -> None:
        """Free the blocks a :class:`Prefilled` sequence kept; they stay cached."""
        if sequence not in self._prefilled:
            raise InternalError("only a prefilled sequence can be released, and only once")
        self._prefilled.remove(sequence)
        self._free(sequence)

    def is_inflight(self, request: bytes) -> bool:
        """Whether a step that is out works on ``request``, aborted or not."""
        return any(request in rows for rows in self._out)

    @property
    def inflight(self) -> frozenset[bytes]:
        """Requests of the steps that are out."""
        return frozenset(request for rows in self._out for request in rows)

    @property
    def steps_out(self) -> int:
        """Steps planned whose results are not in."""
        return len(self._out)

    def take_unwanted(self) -> list[int]:
        """Numbers of the steps that are out and that nobody waits for, each of them told once.

        They may be abandoned where they are; their results are to be applied all the same.
        """
        if not self._left:
            return []
        self._left = False
        found = [
            step
            for step, rows in enumerate(self._out, self.steps)
            if step not in self._unwanted and all(s.aborted for s, _ in rows.values())
        ]
        self._unwanted.update(found)
        return found

    @property
    def requests(self) -> frozenset[bytes]:
        """Requests that wait or run."""
        return self._roster.requests

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return len(self._roster) > 0

    @property
    def blocks_wanted(self) -> int:
        """Blocks that requests already here need next; who grants blocks to others leaves these."""
        roster, cache = self._roster, self.cache
        wanted = cache.blocks_for(roster.waiting[0].num_tokens) if roster.waiting else 0
        for sequence in roster.running:
            allocation = sequence.allocation
            if allocation is not None and allocation.capacity < sequence.num_tokens:
                wanted += 1
        return wanted

    @property
    def tokens_waiting(self) -> int:
        """Tokens not yet computed, decode rows not counted."""
        return self._roster.tokens_waiting

    def _is_out(self, sequence: Sequence) -> bool:
        request = sequence.request
        return any(rows[request][0] is sequence for rows in self._out if request in rows)

    # ------------------------------------------------------------------ the next step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run; then see :meth:`take_events`.

        Raises InternalError while a step is out.
        """
        if self._out:
            raise InternalError("the result of the last step is not in yet")
        self._make_room()
        self._admit(now)
        rows: _Rows = {}
        chunks = self._chunks(rows)
        if not chunks:
            return None
        self._out.append(rows)
        return StepPlan(self.steps, chunks)

    def plan_ahead(self) -> StepPlan | None:
        """The step behind the one that runs, so that the executor need not wait for a plan.

        Its rows are the tokens the running step draws. None unless every running sequence draws
        one and can go on without it being seen, has room for it, and nobody who could join
        waits: then planning has to see the result first. A request that ends by its token has
        one row too many in this step; its result is dropped and its blocks stay until then.
        """
        roster = self._roster
        joins = (roster.waiting or roster.ready) and len(roster.running) < self.config.max_batch
        if len(self._out) != 1 or joins or self.config.one_token:
            return None
        running = self._out[0]
        rows = [s for s in roster.running if s.remaining_tokens > 1]  # the others end for certain
        if not rows or not all(_draws(s, running) for s in roster.running):
            return None
        if not all(self._may_go_on(s) for s in rows):
            return None
        self._out.append({s.request: (s, 1) for s in rows})
        chunks = tuple(s.chunk_ahead() for s in rows)
        return StepPlan(self.steps + 1, chunks, ahead=True)

    def _may_go_on(self, sequence: Sequence) -> bool:
        allocation = sequence.allocation
        if allocation is None or not sequence.can_go_on_unseen:
            return False
        return self.cache.grow(allocation, sequence.num_tokens + 1)

    def _make_room(self) -> None:
        """Blocks for all tokens of every running sequence, preempting the highest rank."""
        for sequence in tuple(self._roster.running):
            allocation = sequence.allocation
            if allocation is None or sequence.num_tokens <= allocation.capacity:
                continue
            if not self.cache.fits(sequence.num_tokens):
                self._fail_for_room(sequence)
                continue
            while not self.cache.grow(allocation, sequence.num_tokens):
                holders = self._roster.holders()
                if len(holders) == 1:
                    break  # only grants are in the way: keep the blocks and skip a step
                victim = max(holders, key=by_rank)
                self._preempt(victim)
                if victim is sequence:
                    break

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks and compute all tokens again later, or find them in the prefix cache."""
        self._free(sequence)
        sequence.num_computed_tokens = 0
        self._roster.send_back(sequence)
        self._counters.preemptions += 1

    def _fail_for_room(self, sequence: Sequence) -> None:
        tokens, room = sequence.num_tokens, self.cache.num_blocks * self.cache.block_size
        message = f"{tokens} tokens need more KV blocks than this worker has ({room} tokens)"
        self._fail(sequence, CapacityError.code, message, self._events)

    def _admit(self, now: float) -> None:
        """Fill the batch by rank; a waiting sequence without room lets only ready ones pass."""
        running = self._roster.running
        left = (s.num_tokens - s.num_computed_tokens for s in running)
        budget = self._budget.tokens - sum(n for n in left if n > 1)
        while len(running) < self.config.max_batch:
            sequence = self._next(budget)
            if sequence is None:
                return
            if sequence.admitted is None:
                sequence.admitted = now
            running.append(sequence)
            count = sequence.num_tokens - sequence.num_computed_tokens
            budget -= count if count > 1 else 0

    def _next(self, budget: int) -> Sequence | None:
        waiting, ready = self._roster.waiting, self._roster.ready
        while waiting and not self.cache.fits(waiting[0].num_tokens):
            self._fail_for_room(waiting[0])
        waiting_first = waiting and (not ready or waiting[0].rank < ready[0].rank)
        if waiting_first and budget > 0 and self._reserve(waiting[0]):
            return waiting.pop(0)
        return ready.pop(0) if ready else None

    def _reserve(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens and some growth, starting with the cached prefix."""
        available, alone = self.cache.pool.available, not self._roster.running
        if self._refused is not None and not alone:
            refused, then = self._refused
            if refused is sequence and available <= then:
                return False  # nothing was freed since: spare the walk over its hashes
        hashes, tokens = sequence.extend_hashes(), sequence.num_tokens
        growth = 0 if self.config.one_token else sequence.remaining_tokens
        allocation = self.cache.reserve(hashes, tokens, min(growth, self.config.growth))
        if allocation is None and alone:
            allocation = self.cache.reserve(hashes, tokens)
        self._refused = (sequence, available) if allocation is None else None
        if allocation is None:
            return False
        sequence.allocation = allocation
        sequence.cached_tokens = allocation.cached_blocks * self.cache.block_size
        sequence.num_computed_tokens = sequence.cached_tokens
        self._counters.prefix_hit_tokens += sequence.cached_tokens
        return True

    def _chunks(self, out: _Rows) -> tuple[Chunk, ...]:
        """Decode rows first, then prefill chunks in order of admission within the budget.

        What they compute is entered into ``out``.
        """
        rows: list[Chunk] = []
        prefills: list[Chunk] = []
        budget = self._budget.tokens
        one_token = self.config.one_token
        for sequence in self._roster.running:
            tokens, allocation = sequence.num_tokens, sequence.allocation
            count = tokens - sequence.num_computed_tokens
            if allocation is None or allocation.capacity < tokens:
                continue  # found no room in this step
            if count > 1:
                count = min(count, budget)
                budget -= count
                place = prefills
            else:
                place = rows
            if count:
                streams = one_token and sequence.stream_from is not None
                place.append(sequence.chunk(count, stream_layers=streams))
                out[sequence.request] = (sequence, count)
        return (*rows, *prefills)

    # ------------------------------------------------------------------ the step's result

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Book what the step computed; results of requests aborted meanwhile are dropped."""
        if result.step != self.steps or not self._out:
            raise InternalError(f"step {result.step} is not the one that runs ({self.steps})")
        self._unwanted.discard(self.steps)
        self.steps += 1
        self._counters.compute_seconds += result.seconds
        rows = self._out.popleft()
        counts = [count for _, count in rows.values()]
        if max(counts) > 1 and not result.abandoned:
            self._budget.learn(sum(counts), result.seconds)
        events = self.take_events()
        sampled = {drawn.request: drawn for drawn in result.sampled}
        for request, (sequence, count) in rows.items():
            if sequence.aborted:
                self._let_go(sequence)
            elif request in result.failed:
                error = result.failed[request]
                self._fail(sequence, error.code, str(error), events)
            else:
                self._advance(sequence, count, sampled.get(request), now, events)
        return events

    def take_events(self) -> list[Event]:
        """Events that came up in :meth:`plan`; :meth:`apply` returns them with its own."""
        events, self._events = self._events, []
        return events

    def _advance(
        self, sequence: Sequence, count: int, drawn: Sampled | None, now: float, events: list[Event]
    ) -> None:
        if sequence.num_computed_tokens < sequence.prompt_length:
            self._counters.prompt_tokens += count
        sequence.num_computed_tokens += count
        self._publish(sequence)
        if sequence.num_computed_tokens < sequence.num_tokens:
            events.append(ChunkDone(sequence.request, sequence.num_computed_tokens))
        elif drawn is None:
            self._fail(sequence, InternalError.code, "the step drew no token", events)
        else:
            self._accept(sequence, drawn, now, events)

    def _accept(self, sequence: Sequence, drawn: Sampled, now: float, events: list[Event]) -> None:
        position = sequence.num_tokens
        try:
            sequence.accept(drawn.token, drawn.logprobs)
        except ValueError as error:  # a grammar refused the token: this request's failure only
            code = error.code if isinstance(error, BatonError) else InternalError.code
            self._fail(sequence, code, str(error), events)
            return
        self._counters.generated_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = now
        events.append(TokenEvent(sequence.request, position, drawn.token, drawn.logprobs))
        if sequence.context.is_done:
            self._roster.leave(sequence)
            self._let_go(sequence)
            events.append(Finished(sequence.request, sequence.context.status.value))
        elif self.config.one_token:
            self._roster.leave(sequence)
            self._prefilled.add(sequence)
            events.append(Prefilled(sequence.request))

    def _publish(self, sequence: Sequence) -> None:
        allocation, computed = sequence.allocation, sequence.num_computed_tokens
        if allocation is not None and computed // self.cache.block_size > allocation.published:
            self.cache.publish(allocation, sequence.extend_hashes(), computed)

    # ------------------------------------------------------------------ ends

    def _fail(self, sequence: Sequence, code: str, message: str, events: list[Event]) -> None:
        self._roster.leave(sequence)
        self._let_go(sequence)
        events.append(Failed(sequence.request, code, message))

    def _let_go(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that has left, once no step that is out writes to them."""
        sequence.aborted = True
        if self._is_out(sequence):
            self._left = True
        else:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        allocation, sequence.allocation = sequence.allocation, None
        if allocation is not None:
            self.cache.free(allocation)

    # ------------------------------------------------------------------ books

    def load(self) -> WorkerLoad:
        """State and sums for heartbeats."""
        pool, counters = self.cache.pool, self._counters
        return WorkerLoad(
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            requests_running=len(self._roster.running),
            requests_waiting=len(self._roster.waiting) + len(self._roster.ready),
            tokens_waiting=self.tokens_waiting,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            compute_seconds=counters.compute_seconds,
        )

    def check_integrity(
        self, others: Iterable[Allocation] = (), held: Iterable[Allocation] = ()
    ) -> None:
        """Raise InternalError unless every block is accounted for.

        ``others``: live allocations outside the scheduler (grants of the decode worker).
        ``held``: blocks that are kept for readers.
        """
        self._roster.check_integrity()
        holders = {*self._roster.holders(), *self._prefilled}
        holders |= {sequence for rows in self._out for sequence, _ in rows.values()}
        live = [s.allocation for s in holders if s.allocation is not None]
        self.cache.check_integrity([*live, *others], held)


def _draws(sequence: Sequence, rows: _Rows) -> bool:
    """Whether a step of these rows draws the next token of ``sequence``."""
    owner, count = rows.get(sequence.request, (None, 0))
    return owner is sequence and sequence.num_computed_tokens + count == sequence.num_tokens
