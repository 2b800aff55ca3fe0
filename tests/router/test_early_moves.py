"""Requests that leave a suspect worker before the worker timeout, when a replay is cheaper."""

import msgspec
import pytest

from baton.proto.wire.messages import (
    Abort,
    Assign,
    Heartbeat,
    WorkerLoad,
)

from .conftest import Bench, make_config
from .test_liveness import silence, states

IDLE = WorkerLoad()
FAST = WorkerLoad(prompt_tokens=10_000, compute_seconds=1.0)
SLOW = WorkerLoad(prompt_tokens=10, compute_seconds=1.0)


def beat(worker, load=IDLE, **fields):
    worker.say(Heartbeat(incarnation=worker.hello.incarnation, progress=0, load=load, **fields))


def silent(bench, seconds, *heard, load=FAST):
    """Advance the clock; only ``heard`` send heartbeats, prefill workers with ``load``."""
    for _ in range(round(seconds / 0.05)):
        bench.advance(0.05, beats=False)
        for worker in heard:
            beat(worker, load if worker.hello.role == "prefill" else IDLE)


class Streaming:
    """A prefill worker, two decode workers, and a stream at one of these."""

    def __init__(self, **fields):
        bench = self.bench = Bench(make_config())
        self.prefill = bench.join("prefill")
        decodes = [bench.join("decode", number) for number in range(2)]
        self.key, self.assign = bench.run(**fields)
        self.prefill.report(self.assign)
        self.decode = bench.decode_of(self.assign)
        self.decode.tokens(self.key, self.request.base, 5)
        decodes.remove(self.decode)
        self.other = decodes[0]

    @property
    def request(self):
        return self.bench.core.table.requests[self.key]

    def silent(self, seconds, load=FAST):
        silent(self.bench, seconds, self.prefill, self.other, load=load)

    def moved(self):
        return self.bench.take(self.prefill, Assign)


@pytest.fixture
def streaming():
    return Streaming()


def test_a_stream_moves_after_half_a_second_of_suspicion_if_a_replay_is_quick(streaming):
    streaming.silent(1.4)
    assert states(streaming.bench)[streaming.decode.id] == "suspect"
    assert not streaming.moved()
    streaming.silent(0.3)
    (assign,) = streaming.moved()
    assert (assign.decode, assign.attempt) == (streaming.other.endpoint, 2)
    assert assign.emitted == [5]
    request = streaming.request
    assert (request.losses, request.deaths, len(request.doubts)) == (0, 0, 1)


def test_a_stream_whose_replay_takes_longer_waits_longer():
    """A prompt of 20 tokens at 10 tokens per second."""
    streaming = Streaming(prompt=20)
    streaming.silent(3.0, load=SLOW)
    assert not streaming.moved()
    streaming.silent(0.4, load=SLOW)
    assert streaming.moved()


def test_a_worker_that_returns_in_time_keeps_its_stream_and_later_its_attempt_is_aborted(streaming):
    streaming.silent(1.3)
    beat(streaming.decode)
    streaming.silent(0.3)
    assert not streaming.moved()
    streaming.silent(1.5)
    assert streaming.moved()
    beat(streaming.decode)
    assert not streaming.request.doubts
    streaming.bench.advance(0.5)
    assert {abort.attempt for abort in streaming.bench.take(streaming.decode, Abort)} == {1}
    streaming.decode.tokens(streaming.key, 11, 9)
    assert streaming.bench.streamed(streaming.key) == [(10, 5)], "tokens of the old attempt"


def test_the_death_of_a_worker_that_a_stream_left_early_counts_once(streaming):
    streaming.silent(1.7)
    (assign,) = streaming.moved()
    streaming.prefill.accept(assign)
    streaming.silent(4.0)
    assert states(streaming.bench)[streaming.decode.id] == "dead"
    request = streaming.request
    assert (request.deaths, request.blame, request.doubts) == (1, 1.0, frozenset())
    assert request.losses == 0


def test_streams_share_the_blame_whether_they_left_early_or_not():
    streaming = Streaming()
    bench = streaming.bench
    pinned = bench.submit("pinned", target_endpoint=streaming.decode.endpoint, pin="strict")
    assign = bench.one(streaming.prefill, Assign)
    streaming.prefill.accept(assign)
    streaming.prefill.report(assign)
    streaming.decode.tokens(pinned, 10, 5)
    streaming.silent(1.7)
    assert [assign.request for assign in streaming.moved()] == [streaming.key]
    streaming.silent(4.0)
    assert {request.blame for request in bench.core.table.requests.values()} == {0.5}


@pytest.mark.parametrize("why", ["no other decode worker", "it is full", "it is silent too"])
def test_a_stream_stays_if_no_other_worker_is_free(streaming, why):
    bench = streaming.bench
    if why == "no other decode worker":
        streaming.other.gone()
        bench.workers.remove(streaming.other)
        heard = [streaming.prefill]
    elif why == "it is full":
        bench.core.registry.find(streaming.other.id).max_batch = 0
        heard = [streaming.prefill, streaming.other]
    else:
        heard = [streaming.prefill]
    silent(bench, 3.5, *heard)
    assert not streaming.moved()


def test_a_stream_stays_while_no_worker_has_shown_how_fast_it_is(streaming):
    silence(streaming.bench, 4.0, streaming.prefill, streaming.other)
    assert not streaming.moved()


def test_after_a_pause_of_the_router_a_suspect_worker_may_report_first(streaming):
    bench = streaming.bench
    streaming.silent(1.2)
    bench.now += 3.0  # the router itself paused
    bench.advance(0.05, beats=False)
    for worker in (streaming.prefill, streaming.other):
        beat(worker, FAST)
    bench.advance(0.3, beats=False)
    assert not streaming.moved()
    beat(streaming.decode)
    streaming.silent(0.3)
    assert states(bench)[streaming.decode.id] == "ready"


def test_a_worker_without_progress_loses_its_streams_too(streaming):
    for _ in range(34):
        streaming.silent(0.05)
        beat(streaming.decode, busy=True)
    assert states(streaming.bench)[streaming.decode.id] == "suspect"
    assert len(streaming.moved()) == 1


def test_each_early_move_doubles_the_next_wait(streaming):
    streaming.silent(1.7)
    (assign,) = streaming.moved()
    assert streaming.request.early_moves == 1
    streaming.prefill.accept(assign)
    streaming.prefill.report(msgspec.structs.replace(assign))
    beat(streaming.decode)
    streaming.decode, streaming.other = streaming.other, streaming.decode
    streaming.silent(1.8)
    assert not streaming.moved()
    streaming.silent(0.4)
    assert streaming.moved()
