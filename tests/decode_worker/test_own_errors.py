"""An exception of a decode core's own code harms one attempt, whatever raised."""

from __future__ import annotations

import pytest

from baton.decode_worker.core import DecodeCore
from baton.decode_worker.events import FrameFailed
from baton.decode_worker.job import Job
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.sequence import Sequence
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_data import ReceiverData
from baton.kv_transfer.receiver_grants import ReceiverGrants
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Adopt,
    Grant,
    Heartbeat,
    KVFrame,
    Terminal,
    Tokens,
)
from baton.worker.events import Exit, StepDone, Tick
from baton.worker.membership import Membership
from baton.worker.own_errors import METRIC, failure_text

from .bench import KEY, LAYOUT, Bench

OTHER = b"o" * 16


@pytest.fixture
def bench():
    bench = Bench()
    bench.faulty = True
    return bench


def plant(monkeypatch, owner, name, chosen=lambda *_: True, *, after=False):
    original = getattr(owner, name)

    def planted(*arguments, **named):
        result = original(*arguments, **named) if after else None
        if chosen(*arguments):
            raise KeyError("planted")
        return result if after else original(*arguments, **named)

    monkeypatch.setattr(owner, name, planted)


def two(bench):
    bench.run(KEY)
    bench.run(OTHER)
    bench.take(Tokens)


def check(bench):
    """Only KEY has ended; the other request goes on to its own end."""
    (terminal,) = bench.take(Terminal)
    assert (terminal.request, terminal.code) == (KEY, "internal")
    assert terminal.message == failure_text("decode-0")
    assert bench.core.dropped[METRIC] and not [a for a in bench.other if isinstance(a, Exit)]
    for _ in range(12):
        bench.finish()
    (terminal,) = bench.take(Terminal)
    assert (terminal.request, terminal.status) == (OTHER, "maximum_length")
    assert bench.cache.pool.used == 0


def test_a_result_of_one_sequence_that_raises_ends_that_request(bench, monkeypatch):
    two(bench)
    plant(monkeypatch, Sequence, "accept", lambda one, *_: one.request.startswith(KEY))
    bench.finish()
    check(bench)


def test_a_token_that_cannot_be_sent_on_ends_that_request(bench, monkeypatch):
    two(bench)
    real = DecodeCore._engine_event

    def planted(self, job, event, runs, now):
        if job.key[0] == KEY:
            raise KeyError("planted")
        return real(self, job, event, runs, now)

    monkeypatch.setattr(DecodeCore, "_engine_event", planted)
    bench.finish()
    check(bench)


def test_an_adopt_that_raises_ends_that_request(bench, monkeypatch):
    two(bench)
    plant(monkeypatch, Job, "replay", lambda job, _: job.key[0] == KEY)
    bench.hear(Adopt(request=KEY, position=0))
    monkeypatch.undo()
    assert not bench.take(Terminal)  # the message names no attempt: the router asks again
    bench.hear(Adopt(request=KEY, position=0))
    assert bench.take(Tokens)


def test_a_deadline_that_raises_ends_its_request_and_no_other(bench, monkeypatch):
    two(bench)
    ends = []
    real = DecodeCore._end

    def planted(self, job, now, **ending):
        ends.append(job.key[0])
        if ends.count(KEY) == 1 and job.key[0] == KEY:
            raise KeyError("planted")
        return real(self, job, now, **ending)

    monkeypatch.setattr(DecodeCore, "_end", planted)
    bench.later(61.0)
    codes = {m.request: m.code for m in bench.take(Terminal)}
    assert codes == {KEY: "internal", OTHER: "deadline_exceeded"}


def test_a_reserve_that_raises_leaks_no_block(bench, monkeypatch):
    plant(monkeypatch, ReceiverGrants, "grant_message")
    bench.reserve(KEY)
    monkeypatch.undo()
    assert not bench.core.receiver.granted and bench.cache.pool.used == 0
    bench.run(OTHER)
    assert bench.take(Tokens)


def test_a_frame_that_cannot_be_recorded_frees_its_grant(bench, monkeypatch):
    bench.reserve(KEY)
    (grant,) = bench.to_peer(Grant)
    plant(monkeypatch, ReceiverData, "on_frame")
    bench.send(grant)
    assert not bench.core.receiver.granted and bench.cache.pool.used == 0


def test_a_frame_that_cannot_be_written_fails_its_handoff(bench):
    bench.reserve(KEY)
    (grant,) = bench.to_peer(Grant)
    frame = KVFrame(grant.grant, 0, 0, 2, 0, 1, 2 * LAYOUT.block_bytes, 77)
    assert bench.core.receiver.data.locate(frame) is not None
    bench.feed(FrameFailed(frame, KeyError("planted")))
    assert not bench.core.receiver.granted and bench.cache.pool.used == 0
    bench.core.check_integrity()


def test_a_part_of_a_tick_that_raises_leaves_the_other_parts(bench, monkeypatch):
    bench.take(Heartbeat)
    plant(monkeypatch, Receiver, "tick")
    unowned = bench.core.errors.unowned
    bench.later(1.0)
    assert bench.take(Heartbeat)
    assert bench.core.errors.unowned - unowned >= 20  # so the clock ends the process


def test_a_heartbeat_that_raises_leaves_the_deadlines(bench, monkeypatch):
    bench.run(KEY)
    plant(monkeypatch, Membership, "tick")
    bench.now += 61.0
    bench.feed(Tick())
    (terminal,) = bench.take(Terminal)
    assert terminal.code == "deadline_exceeded"


@pytest.mark.parametrize("name", ["plan", "apply"])
def test_an_error_of_the_engine_as_a_whole_ends_the_incarnation(bench, monkeypatch, name):
    bench.run(KEY)
    (plan,) = bench.plans[:1]
    plant(monkeypatch, Scheduler, name)
    bench.faulty = True
    if name == "apply":
        actions = bench.core.handle(StepDone(None), bench.now)
    else:
        bench.plans.clear()
        monkeypatch.setattr(type(bench.core._steps), "running", property(lambda _: False))
        actions = bench.core.handle(Tick(), bench.now)
    (leaving,) = [action for action in actions if isinstance(action, Exit)][:1]
    assert leaving.restart and leaving.own_error and plan


def test_books_that_do_not_agree_after_an_error_end_the_incarnation(bench, monkeypatch):
    bench.run(KEY)
    plant(monkeypatch, DecodeCore, "_deserted")
    monkeypatch.setattr(bench.core._jobs, "_by_name", {})
    actions = bench.core.handle(Tick(), bench.now)
    assert any(isinstance(action, Exit) and action.own_error for action in actions)


def test_an_aborted_request_whose_abort_raised_is_aborted_again(bench, monkeypatch):
    two(bench)
    plant(monkeypatch, Receiver, "abort")
    bench.hear(Abort(request=KEY, attempt=1, reason="x"))
    monkeypatch.undo()
    bench.hear(Abort(request=KEY, attempt=1, reason="x"))
    assert bench.take(Aborted)
    bench.core.check_integrity()
