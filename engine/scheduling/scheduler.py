"""Decides which tokens the next step computes.

There are no phases. Every sequence has tokens whose KV is computed and tokens whose KV is
not, and each step lets *computed tokens catch up with total tokens*. A sequence with one
token left to compute is a decode row. A sequence with more is a prefill chunk, cut by the token
budget. The step that catches up samples the next token. Chunked prefill, prefix hits,
recompute after preemption and the arrival of a handoff differ only in the
``num_computed_tokens`` to start from.

Invariants, after every call:

* a sequence is waiting, ready or running (:mod:`.queues`), or prefilled. A prefilled sequence has
  left the queues and keeps its blocks until :meth:`Scheduler.release`;
* at most two steps are out, the second planned ahead while the first runs. Blocks of their
  sequences are freed only after the last of these results is applied. A step whose sequences have
  all left is reported once (:meth:`Scheduler.take_unwanted`), because it need not be finished;
* the first in rank always progresses (:mod:`.admission`).

The scheduler uses no device, socket or clock, and does not interpret tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from baton.proto.contexts.status import GenerationStatus
from baton.proto.errors import BatonError, InternalError
from baton.proto.wire.messages import Buckets, WorkerLoad
from baton.runtime.metrics.families import GAP_S, STEP_SECONDS, STEP_TOKENS, TOKENS, Histogram

from ..cache.paged_cache import Allocation, PagedCache
from .admission import Admission
from .events import ChunkDone, Event, Failed, Finished, Prefilled, TokenEvent
from .plan import Chunk, Sampled, Scored, StepPlan, StepResult
from .queues import Queues
from .sequence import Sequence
from .step_time import ChunkBudget

_Rows = dict[bytes, tuple[Sequence, int]]
"""Sequences of a step and the number of tokens it computes for each, by request."""

APPLY_FAILED = "the result of a step could not be applied; the worker's log has the cause"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one step.

    ``max_batch``: maximum running sequences. ``token_budget``: maximum prefill tokens per step, 0 =
    unlimited; decode rows are not counted, so neither can starve the other. ``step_seconds``:
    target duration of a step with prefill tokens, 0 = none (:class:`.step_time.ChunkBudget`). It is
    shorter beside a decode row whose ``step_limit`` is.
    ``one_token``: prefill mode, a sequence leaves after its first token. ``growth``: tokens for
    which an admitted sequence gets additional blocks, to avoid early preemption.
    """

    max_batch: int = 32
    token_budget: int = 0
    step_seconds: float = 0.0
    one_token: bool = False
    growth: int = 64


class Scheduler:
    """Continuous batching over one :class:`PagedCache`: ``plan``, compute, ``apply``, again."""

    def __init__(self, config: SchedulerConfig, cache: PagedCache) -> None:
        self.config = config
        self.cache = cache
        self.steps = 0  # number of applied steps: the engine's progress
        self._queues = Queues()
        self._prefilled: set[Sequence] = set()
        self._out: deque[_Rows] = deque()  # rows of the steps not applied yet, oldest first
        self._left = False  # a sequence of such a step has left since the last take_unwanted()
        self._unwanted: set[int] = set()  # steps that take_unwanted() has reported
        self._events: list[Event] = []
        self._prompt_tokens = self._generated_tokens = 0  # since the start
        self._compute_seconds = 0.0
        self._encode_seconds = 0.0
        self._image_tokens = 0  # of computed prompts
        self._encoder_tokens = 0  # of the prompts of pictures
        self._step_rows = 0  # of pictures
        self._step_seconds = Histogram(GAP_S)
        self._step_tokens = Histogram(TOKENS)
        self._admission = Admission(cache, self._queues, 0 if config.one_token else config.growth)
        self._budget = ChunkBudget(config.token_budget, config.step_seconds)
        self._tight: tuple[float, ChunkBudget] | None = None  # beside rows with a limit, and that

    # ------------------------------------------------------------------ adding and removing

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a request without computed tokens; ``now`` becomes its arrival."""
        sequence.arrival = now
        self._queues.enter(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Add a request whose KV is complete up to the last token (a handoff)."""
        allocation, computed = sequence.allocation, sequence.num_tokens - 1
        if allocation is None or not allocation.live or allocation.capacity < computed:
            raise InternalError("an adopted sequence has no room for the KV it claims")
        if sequence.num_computed_tokens != computed:
            raise InternalError("an adopted sequence must have exactly one token to compute")
        self._queues.enter(sequence)

    def abort(self, request: bytes) -> bool:
        """Remove a request. Return False if the scheduler does not have it.

        Its blocks are free on return, unless a step that is out may still write to them
        (:meth:`is_inflight`). Then :meth:`apply` of that step frees them and drops its result.
        """
        sequence = self._queues.find(request)
        if sequence is None:
            return False
        self._queues.leave(sequence)
        self._let_go(sequence)
        return True

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a :class:`Prefilled` sequence; they stay cached."""
        if sequence not in self._prefilled:
            raise InternalError("only a prefilled sequence can be released, and only once")
        self._prefilled.remove(sequence)
        sequence.free(self.cache)

    def is_inflight(self, request: bytes) -> bool:
        """True if a step that is out works on ``request``, even if it was aborted."""
        return any(request in rows for rows in self._out)

    @property
    def steps_out(self) -> int:
        """Number of planned steps whose results are not applied yet."""
        return len(self._out)

    def take_unwanted(self) -> list[int]:
        """Return the numbers of steps whose sequences have all left, each step once.

        Such steps may be abandoned, but their results must still be applied.
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
        return self._queues.requests

    @property
    def prefilled(self) -> frozenset[bytes]:
        """Requests that hold blocks until :meth:`release`."""
        return frozenset(sequence.request for sequence in self._prefilled)

    @property
    def wants_prompts(self) -> bool:
        """True if the next step can compute more prompt tokens than its sequences have."""
        return self._queues.tokens_waiting < self._tokens_of_step()

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed since the start."""
        return self._prompt_tokens

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs."""
        return len(self._queues) > 0

    @property
    def blocks_wanted(self) -> int:
        """Blocks already promised to local requests; excluded from new grants."""
        queues, cache = self._queues, self.cache
        wanted = cache.blocks_for(queues.waiting[0].num_tokens) if queues.waiting else 0
        for sequence in queues.running:
            allocation = sequence.allocation
            if allocation is not None and allocation.capacity < sequence.num_tokens:
                wanted += 1
        return wanted

    @property
    def tokens_waiting(self) -> int:
        """Number of tokens not computed yet, without decode rows."""
        return self._queues.tokens_waiting

    def _is_out(self, sequence: Sequence) -> bool:
        request = sequence.request
        return any(rows[request][0] is sequence for rows in self._out if request in rows)

    # ------------------------------------------------------------------ the next step

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can run; then see :meth:`take_events`.

        Raises InternalError while a step is out.
        """
        if self._out:
            raise InternalError("the result of the last step is not applied yet")
        budget = self._tokens_of_step()
        self._events += self._admission.update(self.config.max_batch, budget, now)
        rows: _Rows = {}
        chunks = self._chunks(rows, min(budget, self._tokens_of_step()))
        if not chunks:
            return None
        self._out.append(rows)
        return StepPlan(self.steps, chunks)

    def plan_ahead(self) -> StepPlan | None:
        """Return the step after the running one, so that the executor need not wait for a plan.

        Its rows are the tokens that the running step samples. None unless every running sequence
        samples a token, can continue before that token is known and has room for it, and no queued
        sequence could join; otherwise planning needs the result first. A request that ends with its
        token has a surplus row in this step. That row's result is dropped, and the request's blocks
        are kept until then.
        """
        queues = self._queues
        joins = (queues.waiting or queues.ready) and len(queues.running) < self.config.max_batch
        if len(self._out) != 1 or joins or self.config.one_token:
            return None
        running = self._out[0]
        rows: list[Sequence] = []
        for sequence in queues.running:
            if not _draws(sequence, running):
                return None
            tokens, allocation = sequence.num_tokens, sequence.allocation
            if sequence.end_length - tokens <= 1:
                continue  # it certainly ends with the running step
            if allocation is None or not sequence.can_go_on_unseen:
                return None
            if allocation.capacity <= tokens and not self.cache.grow(allocation, tokens + 1):
                return None
            rows.append(sequence)
        if not rows:
            return None
        self._out.append({s.request: (s, 1) for s in rows})
        return StepPlan(self.steps + 1, tuple([s.chunk_ahead() for s in rows]), ahead=True)

    def _tokens_of_step(self) -> int:
        """Return the prefill tokens of the next step: fewer beside rows with a short limit.

        Smaller steps cost more per token, so a limit has a budget that learns from its own steps.
        """
        usual = self.config.step_seconds
        limits = [s.step_limit for s in self._queues.running if s.step_limit and _is_row(s)]
        least = min(limits, default=0.0)
        if not least or 0 < usual <= least:
            return self._budget.tokens
        if self._tight is None or self._tight[0] != least:
            self._tight = least, ChunkBudget(self.config.token_budget, least)
        return min(self._budget.tokens, self._tight[1].tokens)

    def _chunks(self, out: _Rows, budget: int) -> tuple[Chunk, ...]:
        """Return decode rows first, then prefill chunks in admission order within the budget.

        The computed tokens of each sequence are added to ``out``.
        """
        rows: list[Chunk] = []
        prefills: list[Chunk] = []
        one_token = self.config.one_token
        for sequence in self._queues.running:
            tokens, allocation = sequence.num_tokens, sequence.allocation
            count = tokens - sequence.num_computed_tokens
            if allocation is None or allocation.capacity < tokens:
                continue  # no blocks in this step
            if count > 1:
                count = sequence.next_count(budget, alone=not prefills)
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
        """Apply the result of a step; results of aborted requests are dropped."""
        if result.step != self.steps or not self._out:
            raise InternalError(f"step {result.step} is not the running step ({self.steps})")
        self._unwanted.discard(self.steps)
        self.steps += 1
        self._compute_seconds += result.seconds
        self._encode_seconds += result.encode_seconds
        rows = self._out.popleft()
        counts = [count for _, count in rows.values()]
        self._step_seconds.observe(result.seconds)
        self._step_tokens.observe(sum(counts))
        if max(counts) > 1 and not result.abandoned and not result.scored:
            # Encoding depends on the images, so it gives no cost of tokens. Logits of every row of
            # a prompt cost more than the rows themselves.
            tokens = sum(_computed(sequence, count) for sequence, count in rows.values())
            seconds, drawing = result.seconds - result.encode_seconds, counts.count(1)
            self._budget.learn(tokens, seconds, drawing)
            if self._tight is not None:
                self._tight[1].learn(tokens, seconds, drawing)
        events = self.take_events()
        sampled = {drawn.request: drawn for drawn in result.sampled}
        scores: dict[bytes, list[Scored]] = {}
        for scored in result.scored:
            scores.setdefault(scored.request, []).append(scored)
        for request, (sequence, count) in rows.items():
            if sequence.aborted:
                self._let_go(sequence)
            elif request in result.failed:
                error = result.failed[request]
                self._fail(sequence, error.code, str(error), events)
            else:
                made = len(events)
                try:
                    for scored in scores.get(request, ()):
                        sequence.take_scores(scored.start, scored.records)
                    self._advance(sequence, count, sampled.get(request), now, events)
                except Exception as error:  # ends this sequence; the others have their results
                    del events[made:]
                    self._fail(sequence, InternalError.code, APPLY_FAILED, events, error)
        return events

    def take_events(self) -> list[Event]:
        """Return the events of :meth:`plan`; :meth:`apply` returns them with its own."""
        events, self._events = self._events, []
        return events

    def _advance(
        self, sequence: Sequence, count: int, drawn: Sampled | None, now: float, events: list[Event]
    ) -> None:
        computed = sequence.num_computed_tokens
        if computed < sequence.prompt_length:
            self._prompt_tokens += count
            if computed + count >= sequence.prompt_length:
                if sequence.images is not None:
                    self._image_tokens += sequence.images.num_tokens
                if sequence.picture is not None:
                    self._encoder_tokens += sequence.picture.encoder_tokens
        elif sequence.picture is not None:
            self._step_rows += sequence.picture.step_rows
        computed += count
        sequence.num_computed_tokens = computed
        allocation = sequence.allocation
        if allocation is not None and computed // self.cache.block_size > allocation.published:
            self.cache.publish(
                allocation, sequence.extend_hashes(), computed, sequence.tokens_between
            )
        if computed < sequence.num_tokens:
            events.append(ChunkDone(sequence.request, computed))
        elif drawn is None:
            self._fail(sequence, InternalError.code, "the step sampled no token", events)
        else:
            self._accept(sequence, drawn, now, events)

    def _accept(self, sequence: Sequence, drawn: Sampled, now: float, events: list[Event]) -> None:
        position, logprobs = sequence.num_tokens, drawn.logprobs
        scores = sequence.prompt_log_probs
        token = drawn.token if sequence.given is None else sequence.given
        try:
            sequence.accept(token, logprobs)
        except ValueError as error:  # a grammar rejected the token: only this request fails
            code = error.code if isinstance(error, BatonError) else InternalError.code
            self._fail(sequence, code, str(error), events)
            return
        self._generated_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = now
        request, status = sequence.request, sequence.context.status
        done = status is not GenerationStatus.ACTIVE
        preview = None if done else drawn.result
        prompt = None if scores is None else bytes(scores)
        sequence.prompt_log_probs = None  # a replay or a recomputation needs none
        events.append(TokenEvent(request, position, token, logprobs, preview, prompt))
        if done:
            self._queues.leave(sequence)
            self._let_go(sequence)
            events.append(Finished(request, status.value, drawn.result))
        elif self.config.one_token:
            self._queues.leave(sequence)
            self._prefilled.add(sequence)
            events.append(Prefilled(request))

    # ------------------------------------------------------------------ ending

    def _fail(
        self,
        sequence: Sequence,
        code: str,
        message: str,
        events: list[Event],
        cause: Exception | None = None,
    ) -> None:
        """End a sequence, wherever an error of its step has left it."""
        self._prefilled.discard(sequence)
        if self._queues.find(sequence.request) is sequence:
            self._queues.leave(sequence)
        self._let_go(sequence)
        events.append(Failed(sequence.request, code, message, cause))

    def _let_go(self, sequence: Sequence) -> None:
        """Free the blocks of a removed sequence after the last step that writes to them."""
        sequence.aborted = True
        if self._is_out(sequence):
            self._left = True
        else:
            sequence.free(self.cache)

    # ------------------------------------------------------------------ accounting

    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""
        pool = self.cache.pool
        return WorkerLoad(
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            requests_running=len(self._queues.running),
            requests_waiting=len(self._queues.waiting) + len(self._queues.ready),
            tokens_waiting=self.tokens_waiting,
            prefix_hit_tokens=self._admission.prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._admission.preemptions,
            compute_seconds=self._compute_seconds,
            step_rows=self._step_rows,
            encode_seconds=self._encode_seconds,
            image_tokens=self._image_tokens,
            encoder_tokens=self._encoder_tokens,
            histograms={
                STEP_SECONDS: _buckets(self._step_seconds),
                STEP_TOKENS: _buckets(self._step_tokens),
            },
        )

    def check_integrity(
        self, others: Iterable[Allocation] = (), held: Iterable[Allocation] = ()
    ) -> None:
        """Raise InternalError unless every block is accounted for.

        ``others``: live allocations outside the scheduler (grants of the decode worker).
        ``held``: blocks kept for readers.
        """
        self._queues.check_integrity()
        holders = {*self._queues.holders(), *self._prefilled}
        holders |= {sequence for rows in self._out for sequence, _ in rows.values()}
        live = [s.allocation for s in holders if s.allocation is not None]
        self.cache.check_integrity([*live, *others], held)


def _buckets(histogram: Histogram) -> Buckets:
    return Buckets(list(histogram.counts), histogram.total)


def _computed(sequence: Sequence, count: int) -> int:
    """Return how many of the next ``count`` tokens the model's layers compute."""
    start, images = sequence.num_computed_tokens, sequence.images
    return count if images is None else count - images.unread(start, start + count)


def _is_row(sequence: Sequence) -> bool:
    """True if the next step samples a token after others of the sequence."""
    return sequence.num_tokens - sequence.num_computed_tokens == 1


def _draws(sequence: Sequence, rows: _Rows) -> bool:
    """True if a step with these rows samples the next token of ``sequence``."""
    owner, count = rows.get(sequence.request, (None, 0))
    return owner is sequence and sequence.num_computed_tokens + count == sequence.num_tokens
