"""A worker's registration with its routers."""

from __future__ import annotations

import pytest

from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import (
    Aborted,
    Busy,
    Heartbeat,
    Hello,
    Moved,
    Rejected,
    RequestState,
    Terminal,
    Tokens,
    WorkerLoad,
)
from baton.worker.events import Exit, Log
from baton.worker.membership import EngineState, Membership, WorkerIdentity, moved_to

from ..model_cards import model_card

CARD = model_card()
KEY = b"k" * 16
ENGINE = EngineState(progress=3, busy=True, step_s=0.5)


def make(*routers) -> Membership:
    me = WorkerIdentity("w", "decode", 7, 42, "ipc:///w", "pool", CARD, 16)
    return Membership(me, routers)


@pytest.fixture
def member() -> Membership:
    return make("one", "two")


def exits(member, now):
    return [a for a in member.tick(now, ENGINE, WorkerLoad) if isinstance(a, Exit)]


def up(member, router="one", now=0.0, requests=()):
    return member.up(router, WorkerLoad(kv_blocks_total=9), list(requests), now)


def terminal(attempt=1, key=KEY, position=12):
    return Terminal(request=key, attempt=attempt, position=position, status="maximum_length")


def end(member, now=0.0, expires=60.0, router="one", attempt=1, tokens=(5, 6)):
    return member.end(router, terminal(attempt), now, expires, 10, 10, list(tokens))


def tick(member, now):
    return [a for a in member.tick(now, ENGINE, WorkerLoad) if not is_beat(a)]


def is_beat(action):
    return isinstance(action.message, Heartbeat)


# ------------------------------------------------------------------ Hello and Heartbeat


def test_hello_says_who_it_is_and_what_it_holds(member):
    held = RequestState(b"h" * 16, 2, 13, 10, router="one")
    end(member)
    first, again = up(member, requests=[held])
    hello = first.message
    assert isinstance(hello, Hello)
    assert (hello.version, hello.worker, hello.role, hello.pool) == (
        PROTOCOL_VERSION,
        "w",
        "decode",
        "pool",
    )
    assert (hello.incarnation, hello.pid, hello.max_batch, hello.load.kv_blocks_total) == (
        7,
        42,
        16,
        9,
    )
    assert hello.requests == [held, RequestState(KEY, 1, 12, 10, done=True, router="one")]
    assert again.message == terminal()  # at once, before its repetition is due


def test_a_router_hears_its_own_terminals_only(member):
    end(member)
    assert [type(a.message) for a in up(member, "two")] == [Hello]


def test_hello_says_when_it_drains(member):
    member.draining = True
    assert up(member)[0].message.draining


def test_heartbeats_go_to_all_routers_that_are_up(member):
    up(member)
    up(member, "two")
    beats = member.tick(1.0, ENGINE, WorkerLoad)
    assert sorted(a.router for a in beats) == ["one", "two"]
    beat = beats[0].message
    assert (beat.incarnation, beat.progress, beat.busy, beat.step_s) == (7, 3, True, 0.5)
    assert member.tick(1.1, ENGINE, WorkerLoad) == []
    member.dropped["data_frames"] += 2
    member.down("two")
    (beat,) = member.tick(1.3, ENGINE, WorkerLoad)
    assert (beat.router, beat.message.dropped) == ("one", {"data_frames": 2})
    assert member.connected == 1


def test_hellos_asked_for_are_not_many(member):
    assert member.may_introduce(1.0)
    assert not member.may_introduce(1.05)
    assert member.may_introduce(1.2)


@pytest.mark.parametrize(
    ("code", "restart"),
    [("endpoint_dead", True), ("version_mismatch", False), ("model_mismatch", False)],
)
def test_some_rejections_end_the_process(code, restart):
    (action,) = make("one").rejected("one", Rejected(code=code, message="because"))
    assert action == Exit("because", restart)


def test_hello_says_whether_another_router_has_the_worker(member):
    assert not up(member)[0].message.elsewhere
    member.welcomed("one", b"k" * 16, 0.0)
    assert not up(member)[0].message.elsewhere
    assert up(member, "two")[0].message.elsewhere
    member.down("one")
    assert not up(member, "two")[0].message.elsewhere


MISMATCH = Rejected(code="version_mismatch", message="4, not 2")


def test_what_one_router_refuses_another_may_take(member):
    """During a rolling update the routers have two versions."""
    up(member)
    up(member, "two")
    member.welcomed("two", b"k" * 16, 0.0)
    assert isinstance(member.rejected("one", MISMATCH, 1.0)[0], Log)
    assert not exits(member, 100.0)
    member.down("two")
    assert exits(member, 101.0) == [Exit("4, not 2", restart=False)]


def test_a_worker_no_router_takes_ends(member):
    assert isinstance(member.rejected("one", MISMATCH, 1.0)[0], Log)
    assert member.rejected("two", MISMATCH, 1.1) == [Exit("4, not 2", restart=False)]


def test_a_refused_worker_waits_a_while_for_the_other_router(member):
    member.rejected("one", MISMATCH, 1.0)
    assert not exits(member, 3.9)
    assert exits(member, 4.1)


def test_a_router_that_takes_a_worker_after_all_has_not_refused_it(member):
    member.rejected("one", MISMATCH, 1.0)
    member.welcomed("one", b"k" * 16, 0.0)
    member.down("one")
    assert not exits(member, 100.0)


def test_other_rejections_are_noted(member):
    (action,) = member.rejected("one", Rejected(code="decode_failed", message="x"))
    assert isinstance(action, Log)


# ------------------------------------------------------------------ terminals


def test_a_terminal_is_repeated_until_acknowledged(member):
    up(member)
    assert [a.message for a in end(member)] == [terminal()]
    assert tick(member, 0.4) == []
    assert [a.message for a in tick(member, 0.6)] == [terminal()]
    assert tick(member, 0.7) == []
    assert [a.message for a in tick(member, 1.2)] == [terminal()]
    member.acknowledged("two", [(KEY, 1)])
    assert member.unacknowledged, "it is not the other router's"
    member.acknowledged("one", [(KEY, 1), (b"unknown", 1)])
    assert tick(member, 5.0) == []
    assert member.unacknowledged == 0


def test_a_terminal_is_not_said_to_a_router_that_is_away(member):
    end(member)
    assert tick(member, 1.0) == []
    assert [a.message for a in up(member, now=2.0)][1:] == [terminal()]


def test_a_terminal_is_kept_to_its_deadline_and_a_little_at_least(member):
    up(member)
    end(member, now=10.0, expires=9.0)
    assert tick(member, 11.0)
    assert tick(member, 12.1) == []
    assert member.unacknowledged == 0


@pytest.mark.parametrize(("draining", "patience"), [(False, 60.0), (True, 5.0)])
def test_nothing_is_kept_for_ever_for_a_router_that_is_gone_for_good(member, draining, patience):
    up(member)
    member.draining = draining
    tick(member, 1.0)
    end(member, now=1.0, expires=600.0)
    member.give_back("one", (b"o" * 16, 1), [Busy(request=b"o" * 16, attempt=1)], 1.0, 600.0)
    member.down("one")
    tick(member, 2.0)
    tick(member, 2.0 + patience - 0.1)
    assert member.unacknowledged == 2
    tick(member, 2.0 + patience)
    assert member.unacknowledged == 0


def test_a_router_that_came_back_in_time_hears_its_terminals(member):
    up(member)
    end(member, expires=600.0)
    for beginning in (0.0, 50.0, 100.0):
        member.down("one")
        tick(member, beginning + 1.0)
        tick(member, beginning + 49.0)
        up(member, now=beginning + 49.5)
        tick(member, beginning + 49.6)
    assert member.unacknowledged == 1


def test_an_acknowledgement_of_another_attempt_changes_nothing(member):
    end(member, attempt=2)
    member.acknowledged("one", [(KEY, 1)])
    assert member.has_ended(KEY, 2)
    assert not member.has_ended(KEY, 1)


def test_an_abort_ends_terminals_of_its_attempt_and_lower_ones(member):
    for attempt in (1, 2, 3):
        end(member, attempt=attempt)
    member.forget(KEY, 2)
    assert [member.has_ended(KEY, attempt) for attempt in (1, 2, 3)] == [False, False, True]


# ------------------------------------------------------------------ adoption


@pytest.mark.parametrize(
    ("position", "run"), [(10, (10, [5, 6])), (11, (11, [6])), (0, (10, [5, 6])), (12, None)]
)
def test_adopt_repeats_what_is_missing_and_the_end(member, position, run):
    end(member)
    actions = member.adopt("one", KEY, position)
    assert isinstance(actions[-1].message, Terminal)
    said = [(r.position, r.tokens) for a in actions[:-1] for r in a.message.runs]
    assert said == ([run] if run else [])


def test_adopt_takes_the_highest_attempt(member):
    end(member, attempt=1, tokens=[1])
    end(member, attempt=3, tokens=[3])
    tokens, _ = member.adopt("one", KEY, 10)
    assert (tokens.message.runs[0].attempt, tokens.message.runs[0].tokens) == (3, [3])


def test_adopt_by_another_router_moves_the_request(member):
    end(member)
    moved, tokens, ended = member.adopt("two", KEY, 10)
    assert (moved.router, moved.message) == ("one", Moved(request=KEY, router="two"))
    assert {tokens.router, ended.router} == {"two"}
    assert isinstance(tokens.message, Tokens)
    up(member, "two")
    assert [a.router for a in tick(member, 1.0)] == ["two"]


def test_adopt_of_an_unknown_request_is_answered(member):
    (answer,) = member.adopt("one", KEY, 10)
    assert answer.message == Aborted(request=KEY, attempt=0)


def test_nobody_is_told_of_a_move_that_is_none():
    assert moved_to("one", "one", KEY) == []


# ------------------------------------------------------------------ given back


def test_what_is_given_back_is_said_until_it_is_aborted(member):
    up(member)
    busy = Busy(request=KEY, attempt=1)
    assert [a.message for a in member.give_back("one", (KEY, 1), [busy], 0.0, 60.0)] == [busy]
    assert [a.message for a in tick(member, 0.6)] == [busy]
    assert member.unacknowledged == 1
    member.forget(KEY, 1)
    assert tick(member, 2.0) == []
    assert member.unacknowledged == 0


def test_what_is_given_back_is_dropped_at_its_deadline(member):
    up(member)
    member.give_back("one", (KEY, 1), [Busy(request=KEY, attempt=1)], 0.0, 1.0)
    assert tick(member, 1.5) == []
    assert member.unacknowledged == 0


def test_what_is_given_back_waits_for_its_router(member):
    busy = Busy(request=KEY, attempt=1)
    member.give_back("one", (KEY, 1), [busy], 0.0, 60.0)
    assert tick(member, 1.0) == []
    up(member, now=1.1)
    assert [a.message for a in tick(member, 1.2)] == [busy]
