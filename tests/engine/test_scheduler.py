"""The scheduler against a token function that reads its inputs back from the KV pool.

A :class:`TokenFunction` replaces the model: "computing KV" stores each token in the
slot its block table names, and the next token is a hash of all tokens read back through the
table. A wrong position, chunk boundary, block or prefix hit therefore changes the stream.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.engine.scheduling.events import ChunkDone, Event, Failed, Finished, Prefilled, TokenEvent
from baton.engine.scheduling.plan import (
    Chunk,
    Sampled,
    Scored,
    StepPlan,
    StepResult,
    abandoned_step,
    realized,
)
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import FUTURE_TOKEN
from baton.proto.errors import BatonError, InternalError, SchemaTooComplex
from baton.proto.sampling import SamplingParams

VOCABULARY = 23
EOS = 0


def next_token(tokens: np.ndarray, banned: tuple[int, ...]) -> int:
    """Return a token that depends on all tokens before it and on their order."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=8)
    token = int.from_bytes(digest.digest(), "little") % VOCABULARY
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


@dataclass(frozen=True)
class Request:
    """A request of a test, and the tokens that it must get."""

    prompt: tuple[int, ...]
    max_new_tokens: int | None = 8
    min_new_tokens: int = 0
    ignore_eos: bool = False
    max_length: int = 1_000

    def context(self, emitted: tuple[int, ...] = ()) -> TextContext:
        params = SamplingParams(
            max_new_tokens=self.max_new_tokens, min_new_tokens=self.min_new_tokens, seed=1
        )
        context = TextContext(
            max_length=self.max_length,
            tokens=np.array(self.prompt, np.int64),
            sampling_params=params,
            eos_token_ids={EOS},
            ignore_eos=self.ignore_eos,
        )
        for token in emitted:
            context.update(token)
        return context

    def alone(self, room: int = 1 << 30) -> tuple[list[int], str]:
        """Tokens and end of this request if it runs alone, in a pool of ``room`` tokens."""
        tokens = list(self.prompt)
        while True:
            drawn = len(tokens) - len(self.prompt)
            if len(tokens) > room:
                return tokens[len(self.prompt) :], "overloaded"
            banned = (EOS,) if drawn < self.min_new_tokens and not self.ignore_eos else ()
            tokens.append(next_token(np.array(tokens), banned))
            stream = tokens[len(self.prompt) :]
            if tokens[-1] == EOS and not self.ignore_eos:
                return stream, "end_of_sequence"
            if len(tokens) >= self.max_length or len(stream) == self.max_new_tokens:
                return stream, "maximum_length"


class TokenFunction:
    """Executes step plans on a pool that stores tokens instead of keys and values."""

    def __init__(self, cache: PagedCache) -> None:
        self.block_size = cache.block_size
        self.pool = np.full((cache.num_blocks, cache.block_size), -1, np.int32)
        self.drawn: dict[bytes, int] = {}
        self.step_s, self.token_s = 0.01, 0.0

    def write(self, table: np.ndarray, start: int, tokens: np.ndarray) -> None:
        positions = np.arange(start, start + len(tokens))
        self.pool[table[positions // self.block_size], positions % self.block_size] = tokens

    def execute(self, plan: StepPlan) -> StepResult:
        failed: dict[bytes, BatonError] = {}
        chunks = realized(plan, self.drawn, failed)
        for chunk in chunks:
            self.write(chunk.block_table, chunk.start, chunk.tokens)
        drawn = tuple(self.draw(chunk) for chunk in chunks if chunk.sample is not None)
        self.drawn = {row.request: row.token for row in drawn}
        seconds = self.step_s + self.token_s * plan.num_tokens
        return StepResult(plan.step, drawn, seconds, plan.num_tokens, failed)

    def draw(self, chunk: Chunk) -> Sampled:
        end = chunk.start + len(chunk.tokens)
        assert chunk.sample is not None and chunk.sample.position == end
        read = self.pool[chunk.block_table].ravel()[:end]
        return Sampled(chunk.request, next_token(read, chunk.sample.banned))


@dataclass
class Stream:
    """The results of one request."""

    request: Request
    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    end: str | None = None
    aborted: bool = False
    computed: int = 0


class Driver:
    """A scheduler, its executor and the checks that follow every call."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **config: Any) -> None:
        self.cache = PagedCache(num_blocks, block_size)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.cache)
        self.function = TokenFunction(self.cache)
        self.streams: dict[bytes, Stream] = {}
        self.grants: list[tuple[Stream, Allocation]] = []
        self.abandoned = 0
        self.plans: list[StepPlan] = []  # not applied yet
        self.unwanted: set[int] = set()  # those of them that need not be computed
        self._keys = itertools.count()

    def sequence(self, request: Request, emitted: tuple[int, ...] = ()) -> Sequence:
        key = next(self._keys).to_bytes(16, "big")
        sequence = Sequence(
            key,
            request.context(emitted),
            block_size=self.cache.block_size,
            salt=b"salt",
            arrival=float(len(self.streams)),
        )
        self.streams[key] = Stream(request, sequence, list(emitted))
        return sequence

    def add(self, request: Request) -> bytes:
        sequence = self.sequence(request)
        self.scheduler.add(sequence, float(len(self.streams)))
        self.check()
        return sequence.request

    def grant(self, request: Request) -> bool:
        """Reserve blocks as a decode worker does; False without room."""
        prompt = np.array(request.prompt)
        if len(request.alone()[0]) == 1:
            return True  # ends with its first token: never handed over
        sequence = self.sequence(request)
        hashes = sequence.extend_hashes()
        allocation = self.cache.reserve(hashes, len(prompt), 3)
        if allocation is None:
            del self.streams[sequence.request]
            return False
        start = allocation.cached_blocks * self.cache.block_size
        self.function.write(allocation.block_table, start, prompt[start:])
        self.grants.append((self.streams[sequence.request], allocation))
        self.check()
        return True

    def adopt(self, index: int = 0) -> None:
        """Commit a grant: the sequence takes its allocation and first token."""
        stream, allocation = self.grants.pop(index)
        sequence = stream.sequence
        self.cache.publish(allocation, sequence.hashes, sequence.num_tokens)
        first = stream.request.alone()[0][0]
        sequence.accept(first, None)
        stream.tokens.append(first)
        sequence.allocation = allocation
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self.scheduler.adopt(sequence)
        self.check()

    def abort(self, key: bytes) -> None:
        stream = self.streams[key]
        held = stream.sequence.allocation
        known = self.scheduler.abort(key)
        assert known == (stream.end is None and not stream.aborted)
        if not known:
            return
        stream.aborted = True
        if held is not None:
            assert held.live == self.scheduler.is_inflight(key)
        self.check()

    def start(self) -> StepPlan | None:
        plan = self.scheduler.plan(0.0)
        self.book(self.scheduler.take_events())
        return self.out(plan)

    def ahead(self) -> StepPlan | None:
        return self.out(self.scheduler.plan_ahead())

    def out(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
        assert self.scheduler.steps_out == len(self.plans) <= 2
        self.check()
        return plan

    def finish(self, failed: dict[bytes, BatonError] | None = None) -> list[Event]:
        plan = self.plans.pop(0)
        if plan.step in self.unwanted:
            self.unwanted.remove(plan.step)
            self.function.drawn, result, failed = {}, abandoned_step(plan, 0.001), None
            self.abandoned += 1
        else:
            result = self.function.execute(plan)
        if failed:
            kept = tuple(s for s in result.sampled if s.request not in failed)
            self.function.drawn = {row.request: row.token for row in kept}
            failed = {**result.failed, **failed}
            result = StepResult(result.step, kept, 0.01, result.num_tokens, failed)
        events = self.scheduler.apply(result, 1.0)
        self.book(events)
        self.check()
        return events

    def step(self) -> list[Event]:
        return self.finish() if self.start() is not None else []

    def run(self, limit: int = 10_000) -> None:
        """Step until no request is left; a starving request would exceed the limit of steps."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            assert self.start() is not None or not self.scheduler.has_work, "no progress"
            if self.plans:
                self.finish()
        raise AssertionError("a request starves")

    def book(self, events: list[Event]) -> None:
        for event in events:
            stream = self.streams[event.request]
            assert not stream.aborted and stream.end is None, "an event after the end"
            match event:
                case TokenEvent(position=position, token=token):
                    assert position == len(stream.request.prompt) + len(stream.tokens)
                    stream.tokens.append(token)
                case ChunkDone(num_computed_tokens=computed):
                    assert computed < stream.sequence.num_tokens
                    stream.computed = computed
                case Finished(status=status):
                    stream.end = status
                case Failed(code=code):
                    stream.end = code
                case Prefilled():
                    stream.end = "prefilled"

    def check(self) -> None:
        self.scheduler.check_integrity(allocation for _, allocation in self.grants)

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        rows = [len(chunk.tokens) for chunk in plan.chunks]
        assert len({chunk.request for chunk in plan.chunks}) == len(rows) <= config.max_batch
        for chunk in plan.chunks:
            known = self.streams[chunk.request].sequence.num_tokens + plan.ahead
            whole = chunk.start + len(chunk.tokens) == known
            assert (chunk.sample is not None) == whole
        is_row = [len(c.tokens) == 1 and c.sample is not None for c in plan.chunks]
        prefill = rows[sum(is_row) :]
        assert all(is_row[: len(rows) - len(prefill)]), "decode rows come first"
        assert not config.token_budget or sum(prefill) <= config.token_budget
        slots = [
            (int(c.block_table[p // self.cache.block_size]), p % self.cache.block_size)
            for c in plan.chunks
            for p in range(c.start, c.start + len(c.tokens))
        ]
        assert len(set(slots)) == len(slots), "two rows write to one slot"

    def check_streams(self) -> None:
        """Every request gets the tokens it gets alone, up to its abort."""
        room = self.cache.num_blocks * self.cache.block_size
        for stream in self.streams.values():
            tokens, end = stream.request.alone(room)
            if stream.aborted or stream.end == "internal":
                assert stream.tokens == tokens[: len(stream.tokens)]
            elif stream.end == "prefilled":
                whole = stream.request.alone()[0]
                assert stream.tokens == whole[:1] and len(whole) > 1
            else:
                assert (stream.tokens, stream.end) == (tokens, end)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, VOCABULARY), k=length))


LONG = Request(prompt(20), max_new_tokens=12, ignore_eos=True)
OTHER = Request(prompt(7, 5), max_new_tokens=12, ignore_eos=True)


# ------------------------------------------------------------------------------ single cases


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 7, 64])
def test_chunks_give_the_tokens_of_one_pass(budget: int) -> None:
    driver = Driver(token_budget=budget)
    driver.add(LONG)
    driver.run()
    driver.check_streams()
    assert driver.cache.pool.used == 0


def test_decode_rows_come_first_and_on_top_of_the_budget() -> None:
    driver = Driver(token_budget=4)
    driver.add(Request(prompt(3), ignore_eos=True))
    driver.step()
    driver.add(LONG)
    plan = driver.start()
    assert plan is not None
    assert [(c.start, len(c.tokens)) for c in plan.chunks] == [(3, 1), (0, 4)]
    assert plan.chunks[1].sample is None


def test_a_step_with_prompt_tokens_gets_as_many_as_the_time_it_should_take_allows() -> None:
    driver = Driver(300, token_budget=200, step_seconds=0.02)  # every step takes 0.01 s
    driver.add(Request(prompt(900), ignore_eos=True))
    sizes = []
    while (plan := driver.start()) is not None and len(plan.chunks[0].tokens) > 1:
        sizes.append(len(plan.chunks[0].tokens))
        driver.finish()
    assert sizes[:2] == [64, 128] and max(sizes) == 200
    driver.finish()
    driver.run()
    driver.check_streams()


def test_chunks_are_smaller_beside_a_stream_with_a_short_limit() -> None:
    driver = Driver(900, token_budget=512, step_seconds=0.1)
    driver.function.token_s = 0.0005
    driver.add(Request(prompt(3), max_new_tokens=90, ignore_eos=True))
    limited = driver.add(Request(prompt(3, 1), max_new_tokens=30, ignore_eos=True))
    driver.streams[limited].sequence.step_limit = 0.045
    driver.step()  # both have their first token
    driver.add(Request(prompt(3000, 2), max_new_tokens=1, max_length=3_100))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    while (plan := driver.start()) is not None and len(plan.chunks[-1].tokens) > 1:
        beside = any(chunk.request == limited for chunk in plan.chunks)
        seconds[beside].append(0.01 + 0.0005 * plan.num_tokens)
        driver.finish()
    assert max(seconds[True][2:]) <= 0.045 * 1.01 and max(seconds[True]) > 0.04
    assert 0.09 < max(seconds[False]) <= 0.1 * 1.01
    driver.finish()
    driver.run()
    driver.check_streams()


def test_prefill_is_first_come_first_served_and_fills_the_budget() -> None:
    driver = Driver(token_budget=8)
    first, second = (driver.add(Request(prompt(n, n), ignore_eos=True)) for n in (5, 6))
    plan = driver.start()
    assert plan is not None
    assert [(c.request, len(c.tokens)) for c in plan.chunks] == [(first, 5), (second, 3)]


def test_nobody_gets_blocks_before_the_budget_can_reach_it() -> None:
    driver = Driver(token_budget=8)
    for n in range(3):
        driver.add(Request(prompt(20, n)))
    driver.step()
    driver.step()
    assert driver.scheduler.load().requests_running == 1
    driver.step()
    assert driver.scheduler.load().requests_running == 2


def test_lower_priority_value_goes_first() -> None:
    driver = Driver(max_batch=1)
    late = driver.sequence(Request(prompt(5)))
    driver.add(Request(prompt(6)))
    late.priority = -1
    driver.scheduler.add(late, 99.0)
    plan = driver.start()
    assert plan is not None and plan.chunks[0].request == late.request


def test_prefix_hit_skips_computed_tokens() -> None:
    driver = Driver(block_size=4)
    driver.add(LONG)
    driver.run()
    follower = Request((*LONG.prompt, *LONG.alone()[0]), max_new_tokens=4, ignore_eos=True)
    driver.add(follower)
    plan = driver.start()
    assert plan is not None
    # 31 tokens were computed: 7 full blocks, generated ones among them.
    assert plan.chunks[0].start == 28
    driver.finish()
    driver.run()
    driver.check_streams()
    assert driver.scheduler.load().prefix_hit_tokens == 28


def test_whole_cached_prompt_computes_one_block_again() -> None:
    driver = Driver(block_size=4)
    driver.add(LONG)
    driver.run()
    driver.add(LONG)
    plan = driver.start()
    assert plan is not None and plan.chunks[0].start == 16


def test_preemption_recomputes_the_latest_and_changes_no_token() -> None:
    driver = Driver(num_blocks=9, block_size=4, growth=0)
    requests = [Request(prompt(8, n), max_new_tokens=16, ignore_eos=True) for n in range(3)]
    keys = [driver.add(request) for request in requests]
    order = []
    while driver.scheduler.has_work:
        order += [e.request for e in driver.step() if isinstance(e, Finished)]
    assert order[0] == keys[0]
    assert driver.scheduler.load().preemptions >= 2
    driver.check_streams()


def test_waiting_request_gets_the_first_blocks_that_come_free() -> None:
    driver = Driver(num_blocks=6, block_size=4, growth=0)
    short, long = ((8, 2), (8, 9))
    keys = [driver.add(Request(prompt(n, m), m, ignore_eos=True)) for n, m in (short, long)]
    waits = driver.add(Request(prompt(9, 1), ignore_eos=True))
    plans = [driver.start()]
    while not any(isinstance(event, Finished) for event in driver.finish()):
        plans.append(driver.start())
    assert all(plan and [c.request for c in plan.chunks] == keys for plan in plans)
    plan = driver.start()
    assert plan is not None and [c.request for c in plan.chunks] == [keys[1], waits]


def test_lone_request_may_fill_the_pool_and_then_fails_for_capacity() -> None:
    driver = Driver(num_blocks=3, block_size=4)
    fits = Request(prompt(8), max_new_tokens=5, ignore_eos=True)
    too_long = Request(prompt(8, 1), max_new_tokens=20, ignore_eos=True)
    never = Request(prompt(13, 2))
    for request in (fits, too_long, never):
        driver.add(request)
    driver.run()
    assert [s.end for s in driver.streams.values()] == ["maximum_length"] + ["overloaded"] * 2
    driver.check_streams()


@pytest.mark.parametrize("arrival", [0.0, 9.0])
def test_request_waits_for_grants_to_go_and_does_not_fail(arrival: float) -> None:
    driver = Driver(num_blocks=4, block_size=4, growth=0)
    driver.add(Request(prompt(8), max_new_tokens=6, ignore_eos=True))
    driver.step()
    assert driver.grant(Request(prompt(5, 3), ignore_eos=True))
    # The next token needs a third block, and the grant holds it.
    assert driver.start() is None and driver.scheduler.has_work
    assert driver.scheduler.load().preemptions == 0
    assert driver.scheduler.blocks_wanted == 1
    driver.grants[0][0].sequence.arrival = arrival
    driver.adopt()
    driver.run()
    driver.check_streams()


def test_adopted_request_joins_without_prefill() -> None:
    driver = Driver()
    assert driver.grant(LONG)
    driver.adopt()
    plan = driver.start()
    assert plan is not None
    assert (plan.chunks[0].start, len(plan.chunks[0].tokens)) == (20, 1)
    driver.finish()
    driver.run()
    driver.check_streams()
    assert driver.scheduler.load().prompt_tokens == 0


def test_adopt_refuses_a_sequence_whose_kv_is_not_there() -> None:
    driver = Driver()
    sequence = driver.sequence(LONG)
    with pytest.raises(InternalError, match="no room"):
        driver.scheduler.adopt(sequence)
    sequence.allocation = driver.cache.reserve([], sequence.num_tokens)
    with pytest.raises(InternalError, match="one token"):
        driver.scheduler.adopt(sequence)


def test_aborting_a_running_step_frees_its_blocks_when_the_result_is_in() -> None:
    driver = Driver()
    key = driver.add(LONG)
    driver.start()
    assert driver.scheduler.is_inflight(key)
    driver.abort(key)
    assert driver.cache.pool.used > 0
    assert driver.finish() == []
    assert driver.cache.pool.used == 0
    # What the aborted step computed was never declared valid.
    assert driver.cache.pool.cached == 0


def test_same_request_may_come_back_while_its_aborted_step_runs() -> None:
    driver = Driver()
    key = driver.add(LONG)
    driver.start()
    driver.abort(key)
    again = Sequence(key, LONG.context(), block_size=4)
    driver.scheduler.add(again, 2.0)
    assert driver.finish() == []
    driver.streams[key] = Stream(LONG, again)
    driver.run()
    driver.check_streams()


def test_abort_of_the_unknown_is_false() -> None:
    assert not Driver().scheduler.abort(bytes(16))


def test_only_one_step_is_out() -> None:
    driver = Driver()
    driver.add(LONG)
    plan = driver.start()
    assert plan is not None
    with pytest.raises(InternalError, match="not applied yet"):
        driver.scheduler.plan(0.0)
    result = driver.function.execute(plan)
    driver.scheduler.apply(result, 0.0)
    with pytest.raises(InternalError, match="not the running step"):
        driver.scheduler.apply(result, 0.0)


# ------------------------------------------------------------------------------ ahead


def test_a_step_planned_ahead_gets_its_tokens_from_the_step_before() -> None:
    driver = Driver()
    keys = [driver.add(LONG), driver.add(Request(prompt(7, 5), max_new_tokens=9, ignore_eos=True))]
    driver.start()
    for _ in range(7):
        ahead = driver.ahead()
        assert ahead is not None and {c.request for c in ahead.chunks} == set(keys)
        assert [c.tokens.tolist() for c in ahead.chunks] == [[FUTURE_TOKEN]] * 2
        assert driver.ahead() is None, "two steps are out"
        driver.finish()
    while driver.plans:
        driver.finish()
    driver.run()
    driver.check_streams()


def test_a_history_ahead_gets_the_token_of_the_step_before() -> None:
    driver = Driver()
    sequence = driver.sequence(LONG)
    sequence.needs_history = True
    driver.scheduler.add(sequence, 0.0)
    driver.start()
    for drawn in (71, 72, 73):
        plan = driver.ahead()
        assert plan is not None
        (chunk,) = realized(plan, {sequence.request: drawn}, {})
        assert chunk.sample is not None
        known = sequence.context.tokens.all.tolist()
        assert chunk.sample.history.tolist() == [*known, drawn]
        assert chunk.sample.position == len(known) + 1 == chunk.start + 1
        driver.finish()


def test_a_request_that_ends_before_its_step_ahead_keeps_its_blocks_until_then() -> None:
    driver = Driver()
    request = next(r for r in (Request(prompt(5, n), 30) for n in range(99)) if early(r))
    key = driver.add(request)
    driver.start()
    for _ in range(len(request.alone()[0])):
        assert driver.ahead() is not None
        driver.finish()
    assert driver.streams[key].end == "end_of_sequence"
    assert driver.cache.pool.used > 0 and driver.scheduler.is_inflight(key)
    assert driver.finish() == [] and driver.cache.pool.used == 0
    driver.check_streams()


def early(request: Request) -> bool:
    tokens, end = request.alone()
    return end == "end_of_sequence" and len(tokens) > 3


def test_an_abort_waits_for_both_steps() -> None:
    driver = Driver()
    key, other = driver.add(LONG), driver.add(Request(prompt(9, 3), 12, ignore_eos=True))
    driver.start()
    driver.ahead()
    driver.abort(key)
    driver.finish()
    assert driver.scheduler.is_inflight(key)
    used = driver.cache.pool.used
    driver.finish()
    assert not driver.scheduler.is_inflight(key) and driver.cache.pool.used < used
    driver.run()
    assert driver.streams[other].end == "maximum_length"
    driver.check_streams()


def test_a_failure_before_the_step_ahead_fails_it_once() -> None:
    driver = Driver()
    bad, good = driver.add(LONG), driver.add(Request(prompt(7, 5), 12, ignore_eos=True))
    driver.start()
    driver.ahead()
    driver.finish({bad: InternalError("out of luck")})
    assert driver.streams[bad].end == "internal" and driver.scheduler.is_inflight(bad)
    assert {event.request for event in driver.finish()} == {good}
    driver.run()
    driver.check_streams()


def test_who_could_join_is_not_passed_over() -> None:
    driver = Driver(max_batch=2)
    for seed in range(2):
        driver.add(Request(prompt(9, seed), 12, ignore_eos=True))
    driver.start()
    third = driver.add(LONG)
    assert driver.ahead() is not None, "the batch is full: nobody can join"
    driver.finish()
    driver.finish()
    driver.scheduler.config = SchedulerConfig(max_batch=3)
    plan = driver.start()
    assert plan is not None and third in {chunk.request for chunk in plan.chunks}
    driver.finish()
    driver.add(LONG)
    driver.scheduler.config = SchedulerConfig(max_batch=4)
    driver.start()
    driver.add(Request(prompt(4, 8)))
    driver.scheduler.config = SchedulerConfig(max_batch=5)
    assert driver.ahead() is None


@pytest.mark.parametrize("kind", ["prefill", "chunk", "room", "limit"])
def test_what_has_to_see_the_token_is_not_planned_ahead(kind: str) -> None:
    driver = Driver(
        num_blocks=5 if kind == "room" else 9,
        one_token=kind == "prefill",
        token_budget=4 * (kind == "chunk"),
        growth=0,
    )
    request = LONG if kind != "limit" else Request(prompt(20), 1, ignore_eos=True)
    sequence = driver.sequence(request)
    driver.scheduler.add(sequence, 0.0)
    driver.start()
    assert driver.ahead() is None
    driver.finish()
    assert sequence.context.tokens.all[-1] != FUTURE_TOKEN


def test_a_step_with_a_grammar_is_planned_ahead_and_its_mask_knows_the_token_before() -> None:
    """A token that the grammar refuses ends its request; its row in the next step is surplus."""

    class Counting:
        def __init__(self, refused: int) -> None:
            self.consumed, self.refused = 0, refused

        def consume_token(self, token: int) -> bool:
            self.consumed += 1
            return self.consumed != self.refused

        def allowed(self) -> npt.NDArray[np.bool_]:
            return np.ones(VOCABULARY, np.bool_)

    driver = Driver(max_batch=2)
    matchers = [Counting(0), Counting(3)]
    for matcher, request in zip(matchers, (LONG, OTHER), strict=True):
        key = driver.add(request)
        driver.streams[key].sequence.constrain(matcher)
    driver.start()
    driver.finish()
    driver.start()
    for consumed in range(1, 5):
        assert [m.consumed for m in matchers] == [consumed, min(consumed, 3)]
        plan = driver.ahead()
        assert plan is not None and plan.ahead
        specs = [chunk.sample for chunk in plan.chunks]
        assert len(specs) == 1 + (consumed < 3)
        assert all(s is not None and s.mask is m for s, m in zip(specs, matchers, strict=False))
        driver.finish()
    assert driver.streams[key].end == "internal"


def test_same_request_twice_is_refused() -> None:
    driver = Driver()
    key = driver.add(LONG)
    with pytest.raises(InternalError, match="already"):
        driver.scheduler.add(Sequence(key, LONG.context(), block_size=4), 0.0)


@pytest.mark.parametrize("error", [InternalError, SchemaTooComplex])
def test_failed_step_fails_its_requests_alone(error: type[BatonError]) -> None:
    driver = Driver()
    bad, good = driver.add(LONG), driver.add(Request(prompt(7, 5)))
    driver.start()
    driver.finish({bad: error("out of luck")})
    assert driver.streams[bad].end == error.code
    assert driver.cache.match(driver.streams[bad].sequence.hashes, 9) == []
    driver.run()
    assert driver.streams[good].tokens == driver.streams[good].request.alone()[0]


@pytest.mark.parametrize("code", ["internal", "schema_too_complex"])
def test_refused_token_fails_its_request_alone(code: str) -> None:
    class Refusal:
        def consume_token(self, token: int) -> bool:
            if code == "internal":
                return False
            raise SchemaTooComplex("cannot be followed")

    driver = Driver()
    bad, good = driver.add(LONG), driver.add(Request(prompt(7, 5)))
    driver.streams[bad].sequence.context.set_matcher(Refusal())
    driver.run()
    assert driver.streams[bad].end == code
    assert driver.streams[good].tokens == driver.streams[good].request.alone()[0]


def test_scores_that_cannot_be_taken_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    bad, good = driver.add(LONG), driver.add(Request(prompt(7, 5)))

    def take(sequence: Sequence, start: int, records: bytes) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(Sequence, "take_scores", take)
    plan = driver.start()
    assert plan is not None
    name = driver.streams[bad].sequence.request
    apply = driver.scheduler.apply

    def scored(result: StepResult, now: float) -> list[Event]:
        return apply(replace(result, scored=(Scored(name, 0, b""),)), now)

    monkeypatch.setattr(driver.scheduler, "apply", scored)
    driver.finish()
    monkeypatch.undo()
    driver.run()
    assert driver.streams[bad].end == "internal"
    assert driver.streams[good].tokens == driver.streams[good].request.alone()[0]


def test_prefill_mode_keeps_blocks_until_released() -> None:
    driver = Driver(one_token=True, token_budget=8)
    key = driver.add(LONG)
    sequence = driver.streams[key].sequence
    sequence.stream_from = 0
    computed = []
    while driver.scheduler.has_work:
        plan = driver.start()
        assert plan is not None and plan.chunks[0].stream_layers
        computed += [e.num_computed_tokens for e in driver.finish() if isinstance(e, ChunkDone)]
    assert computed == [8, 16]
    assert driver.streams[key].end == "prefilled"
    assert sequence.num_computed_tokens == 20 == sequence.num_tokens - 1
    assert driver.cache.pool.used == 5
    assert not driver.scheduler.abort(key)
    driver.scheduler.release(sequence)
    assert (driver.cache.pool.used, driver.cache.pool.cached) == (0, 5)
    with pytest.raises(InternalError, match="only once"):
        driver.scheduler.release(sequence)


def test_prefill_mode_ends_a_request_of_one_token() -> None:
    driver = Driver(one_token=True)
    driver.add(Request(prompt(9), max_new_tokens=1, ignore_eos=True))
    driver.run()
    driver.check_streams()
    assert driver.cache.pool.used == 0


def test_replay_goes_on_behind_the_emitted_tokens() -> None:
    driver = Driver()
    whole, end = LONG.alone()
    sequence = driver.sequence(LONG, tuple(whole[:5]))
    driver.scheduler.add(sequence, 0.0)
    driver.run()
    stream = driver.streams[sequence.request]
    assert (stream.tokens, stream.end) == (whole, end)


@pytest.mark.parametrize("minimum", [1, 4])
def test_end_is_banned_below_min_new_tokens(minimum: int) -> None:
    seeds = (Request(prompt(6, n), 12, minimum) for n in range(400))
    request = next(r for r in seeds if r.alone() != Request(r.prompt, 12).alone())
    driver = Driver()
    driver.add(request)
    driver.run()
    driver.check_streams()


def test_history_travels_only_for_penalties() -> None:
    driver = Driver()
    sequence = driver.sequence(Request(prompt(5)))
    sequence.needs_history = True
    driver.scheduler.add(sequence, 0.0)
    driver.add(Request(prompt(6)))
    plan = driver.start()
    assert plan is not None
    first, second = (c.sample for c in plan.chunks)
    assert first is not None and second is not None
    assert first.history.tolist() == list(prompt(5)) and first.history.dtype == np.int32
    assert len(second.history) == 0


def test_load_counts_what_policies_need() -> None:
    driver = Driver(max_batch=1, token_budget=8)
    driver.add(LONG)
    driver.add(Request(prompt(6, 1)))
    driver.step()
    load = driver.scheduler.load()
    assert (load.requests_running, load.requests_waiting) == (1, 1)
    assert (load.prompt_tokens, load.tokens_waiting) == (8, 12 + 6)
    assert load.kv_blocks_total == 64 and load.kv_blocks_used == 8
    driver.run()
    load = driver.scheduler.load()
    assert load.kv_blocks_used == 0 and load.kv_blocks_cached > 0
    assert load.prompt_tokens == 26
    assert load.generated_tokens == sum(len(s.tokens) for s in driver.streams.values())


# ------------------------------------------------------------------------------ random runs


class Mix:
    """One seeded run: arrivals, grants, handoffs and aborts at random moments.

    ``foresight``: probability that a step is planned ahead, where that is possible.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.driver = Driver(
            num_blocks=rng.choice([6, 9, 14, 40]),
            block_size=rng.choice([1, 2, 4, 8]),
            max_batch=rng.choice([1, 2, 5, 16]),
            token_budget=rng.choice([0, 1, 5, 16]),
            growth=rng.choice([0, 0, 3, 64]),
            one_token=rng.random() < 0.25,
        )
        self.foresight = rng.choice([0.0, 0.5, 1.0])
        self.ahead = self.wasted = 0
        self.stems = [prompt(rng.randint(4, 24), seed * 3 + n) for n in range(2)]

    def request(self) -> Request:
        rng = self.rng
        stem = rng.choice(self.stems)
        tail = rng.choices(range(1, VOCABULARY), k=rng.randint(0, 4))
        return Request(
            (*stem[: rng.randint(1, len(stem))], *tail),
            max_new_tokens=rng.choice([1, 2, 7, 20]),
            min_new_tokens=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.5,
            max_length=rng.choice([30, 1_000]),
        )

    def disturb(self) -> None:
        """Do what the I/O thread may do at any time, also during a step."""
        driver, rng = self.driver, self.rng
        if rng.random() < 0.35:
            driver.add(self.request())
        if rng.random() < 0.15 and not driver.scheduler.config.one_token:
            driver.grant(self.request())
        if driver.grants and rng.random() < 0.4:
            self.settle_grant()
        granted = {stream.sequence.request for stream, _ in driver.grants}
        if (keys := driver.streams.keys() - granted) and rng.random() < 0.08:
            driver.abort(rng.choice(sorted(keys)))
        told = driver.scheduler.take_unwanted()
        assert not driver.unwanted.intersection(told)
        driver.unwanted.update(told)
        self.release(0.3)

    def settle_grant(self) -> None:
        driver, index = self.driver, self.rng.randrange(len(self.driver.grants))
        if self.rng.random() < 0.8:
            driver.adopt(index)
        else:
            stream, allocation = driver.grants.pop(index)
            stream.aborted = True
            driver.cache.free(allocation)
            driver.check()

    def release(self, chance: float) -> None:
        for stream in self.driver.streams.values():
            sequence = stream.sequence
            if stream.end == "prefilled" and sequence.allocation and self.rng.random() < chance:
                self.driver.scheduler.release(sequence)

    def plan_ahead(self) -> None:
        """Plan the step after the running one; requests that end have a surplus row in it."""
        driver = self.driver
        if len(driver.plans) > 1 or self.rng.random() >= self.foresight:
            return
        plan = driver.ahead()
        if plan is not None:
            self.ahead += 1
            streams = [driver.streams[chunk.request] for chunk in plan.chunks]
            own = [s.request.alone()[0] for s in streams]
            self.wasted += sum(
                len(s.tokens) + 1 == len(tokens) for s, tokens in zip(streams, own, strict=True)
            )

    def run(self, steps: int) -> None:
        driver, rng = self.driver, self.rng
        for _ in range(steps):
            self.disturb()
            if driver.plans or driver.start() is not None:
                self.disturb()
                self.plan_ahead()
                self.disturb()
                hit = driver.plans[0].chunks[0].request if rng.random() < 0.02 else None
                driver.finish({hit: InternalError("bad luck")} if hit else None)
        while driver.plans:
            driver.finish()
        while driver.grants:
            self.settle_grant()
        for _ in range(20_000):
            self.release(1.0)
            if not driver.scheduler.has_work:
                break
            driver.step()
        assert not driver.scheduler.has_work, "a request starves"
        self.release(1.0)
        driver.check()
        driver.check_streams()
        assert driver.cache.pool.used == 0


@pytest.mark.parametrize("part", range(4))
def test_random_runs_stream_what_each_request_gives_alone(part: int) -> None:
    preemptions = hits = aborted = ahead = wasted = abandoned = 0
    for seed in range(part * 60, part * 60 + 60):
        mix = Mix(seed)
        mix.run(steps=60)
        load = mix.driver.scheduler.load()
        preemptions += load.preemptions
        hits += load.prefix_hit_tokens
        ahead += mix.ahead
        wasted += mix.wasted
        abandoned += mix.driver.abandoned
        aborted += sum(stream.aborted for stream in mix.driver.streams.values())
    # The runs must reach the rare paths often.
    assert preemptions > 80 and hits > 1_000 and aborted > 50
    assert ahead > 100 and wasted > 4 and abandoned > 4, (ahead, wasted, abandoned)
