"""The client's decisions between several routers."""

from __future__ import annotations

import pytest

from baton.client.events import (
    Answered,
    Ask,
    Connected,
    Disconnected,
    Ended,
    Look,
    Malformed,
    Reached,
    Received,
    Reconnect,
    Start,
    Tick,
)
from baton.client.routers import router_addresses
from baton.proto.errors import ConfigError, ConnectionLost, RouterClosing, VersionMismatch
from baton.proto.ids import request_key
from baton.proto.wire.messages import Pong, Rejected, Resume, Status, Submit, Submitted, Terminal

from .bench import SECRET, Bench, spec

A, B, C = "ipc:///a", "ipc:///b", "tcp://c:1"


def moves(actions):
    return [a.address for a in actions if isinstance(a, Reconnect)]


def opened(*addresses):
    bench = Bench(*addresses)
    bench.open()
    bench.run(3, [7])
    return bench


# --------------------------------------------------------------------------- the list


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (A, (A,)),
        (f"{A},{B}", (A, B)),
        (f" {A} , {C} ", (A, C)),
        ([A, C, A], (A, C)),
        ("ipc:///with,comma,tcp://c:1", ("ipc:///with,comma", C)),
        ((B,), (B,)),
    ],
)
def test_a_list_of_addresses(given, found):
    assert router_addresses(given) == found


@pytest.mark.parametrize("given", ["", [], f"{A},", "tcp://a:1,b:2", [A, None], 5, b"ipc:///a"])
def test_what_is_no_list_of_addresses(given):
    with pytest.raises(ConfigError):
        router_addresses(given)


# --------------------------------------------------------------------------- leaving a router


def test_a_lost_router_is_left_at_once_with_all_streams():
    bench = opened(A, B)
    assert moves(bench.do(Disconnected())) == [B]
    bench.do(Connected(b"other"))
    (resume,) = bench.sent
    assert isinstance(resume, Resume)
    assert (resume.position, resume.emitted, resume.secret) == (4, [7], SECRET)
    bench.hear(Submitted(request_id="r", request=resume.request, secret=SECRET, attempt=5))
    bench.run(4, [8], attempt=5)
    assert bench.tokens == [8]


def test_a_silent_router_is_left_sooner_than_the_only_one():
    several, single = opened(A, B), opened(A)
    assert moves(several.later(1.4)) == []
    assert moves(several.later(0.3)) == [B]
    assert moves(single.later(1.7)) == []


@pytest.mark.parametrize(
    ("addresses", "step", "left"),
    [((A,), 1.0, [A]), ((A,), 3.1, []), ((A, B), 0.4, [B]), ((A, B), 1.6, [])],
)
def test_a_late_tick_excuses_a_router_only_if_it_is_as_late_as_a_suspension(addresses, step, left):
    """A client with several routers has shorter limits for both."""
    bench = opened(*addresses)
    assert moves(bench.later(4.0, step))[:1] == left


def test_a_router_that_answers_pings_is_not_left():
    bench = opened(A, B)
    for _ in range(60):
        assert not moves(bench.later(0.1))
        bench.hear(Pong())


def test_the_list_is_walked_until_one_accepts():
    bench = Bench(A, B, C, connected=False)
    bench.do(Start(spec()))
    tried = moves(bench.later(1.1))
    assert tried == [B, C, A]
    bench.do(Connected(b"me"))
    assert isinstance(bench.sent[0], Submit)
    assert not moves(bench.later(1.0))


def test_without_any_router_the_request_fails_in_time():
    bench = Bench(A, B, connected=False)
    bench.do(Start(spec()))
    (end,) = [a for a in bench.later(5.2) if isinstance(a, Ended)]
    assert isinstance(end.error, ConnectionLost)
    assert A in str(end.error) and B in str(end.error)


def test_a_long_wait_without_need_does_not_count_against_a_router():
    bench = Bench(A, B, connected=False)
    bench.now += 100
    bench.do(Start(spec()))
    assert not moves(bench.later(0.2))


def test_questions_go_to_the_next_router():
    bench = Bench(A, B)
    bench.do(Ask(1, Status(), 5.0))
    bench.do(Disconnected())
    bench.do(Connected(b"other"))
    assert bench.sent == [Status(nonce=1)]


def test_a_submit_that_was_not_answered_is_said_anew_under_its_own_key():
    bench = Bench(A, B)
    bench.do(Start(spec()))
    bench.do(Disconnected())
    bench.do(Connected(b"other"))
    assert isinstance(bench.sent[0], Submit)
    key = request_key(b"other", "r")
    bench.hear(Submitted(request_id="r", request=key, secret=SECRET))
    bench.hear(Terminal(request=key, status="cancelled", position=3))
    assert bench.ended


# --------------------------------------------------------------------------- refusals


def closing(bench):
    return bench.hear(
        Terminal(
            request=request_key(b"me", "r"),
            request_id="r",
            code=RouterClosing.code,
            message="ending",
            retry_after=1.0,
        )
    )


def test_a_router_that_is_about_to_end_is_left_for_another():
    bench = Bench(A, B)
    bench.do(Start(spec()))
    assert moves(closing(bench)) == [B]
    assert not bench.ended
    bench.do(Connected(b"other"))
    assert isinstance(bench.sent[0], Submit)


def test_requests_turned_away_together_move_once():
    bench = Bench(A, B)
    for name in "rs":
        bench.do(Start(spec(name)))
    assert moves(closing(bench)) == [B]
    bench.hear(Terminal(request=b"?", request_id="s", code=RouterClosing.code))
    assert not moves(bench.actions) and not bench.ended


def test_when_all_routers_are_about_to_end_the_user_hears_it():
    for addresses in ((A,), (A, B)):
        bench = Bench(*addresses)
        bench.do(Start(spec()))
        for _ in addresses:
            bench.do(Connected(b"me"))
            closing(bench)
        (end,) = bench.ended
        assert isinstance(end.error, RouterClosing) and end.error.retry_after == 1.0


@pytest.mark.parametrize(
    "event",
    [
        Malformed(VersionMismatch("5, not 2")),
        Received(Rejected(code="version_mismatch", message="2, not 5")),
    ],
)
def test_a_router_of_another_version_is_passed_over(event):
    bench = Bench(A, B, C)
    bench.do(Start(spec()))
    assert moves(bench.do(event)) == [B]
    bench.do(Connected(b"x"))
    assert moves(bench.do(Disconnected())) == [C]
    assert moves(bench.do(Disconnected())) == [B]  # A is skipped
    assert not bench.ended


def test_when_no_router_speaks_this_version_everything_ends():
    bench = Bench(A, B)
    bench.do(Start(spec()))
    bench.do(Ask(1, Status(), 5.0))
    for _ in range(2):
        bench.do(Malformed(VersionMismatch("5, not 2")))
        bench.do(Connected(b"x"))
    # The second mismatch ended it; the requests after that try again.
    assert not bench.core.active
    bench.do(Start(spec()))
    assert isinstance(bench.sent[0], Submit)


def test_a_version_mismatch_of_all_is_told_to_all():
    bench = Bench(A, B)
    bench.do(Start(spec()))
    bench.do(Ask(1, Status(), 5.0))
    bench.do(Malformed(VersionMismatch("5, not 2")))
    bench.do(Connected(b"x"))
    bench.do(Malformed(VersionMismatch("6, not 2")))
    assert isinstance(bench.ended[0].error, VersionMismatch)
    assert any(isinstance(a, Answered) for a in bench.actions)


# --------------------------------------------------------------------------- coming back


def away():
    """An idle client that had to move from router A to B."""
    bench = opened(A, B)
    bench.do(Disconnected())
    bench.do(Connected(b"other"))
    return bench


def test_an_idle_client_comes_back_when_its_first_router_does():
    bench = away()
    bench.finish(4)
    assert bench.core.tick_s == 1.0
    looks = [a for a in bench.later(10.5, step=1.0) if isinstance(a, Look)]
    assert looks == [Look(A)]
    assert moves(bench.do(Reached(A))) == [A]
    bench.do(Connected(b"home"))
    assert bench.core.tick_s is None
    assert not bench.later(30, step=1.0)


def test_a_stream_is_not_moved_for_the_way_back():
    bench = away()
    for _ in range(120):
        bench.hear(Pong())
        bench.later(0.1)
    bench.do(Reached(A))
    assert not moves(bench.actions)
    bench.finish(4)
    assert moves(bench.do(Tick())) == [A]


def test_a_first_router_that_stays_away_is_looked_for_again():
    bench = away()
    bench.finish(4)
    looks = [a for a in bench.later(31, step=1.0) if isinstance(a, Look)]
    assert len(looks) == 3
    assert not moves(bench.actions)


def test_a_client_at_home_needs_no_ticks():
    bench = Bench(A, B)
    assert bench.core.tick_s is None
    bench.open()
    assert bench.core.tick_s == 0.05
