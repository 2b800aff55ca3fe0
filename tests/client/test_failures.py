"""What a client does where messages, routers or connections fail."""

from __future__ import annotations

import os

import pytest

from baton.client.events import (
    Answered,
    Ask,
    Connected,
    Disconnected,
    Ended,
    Malformed,
    Received,
    Reconnect,
    Start,
    Tick,
)
from baton.proto.errors import (
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeFailed,
    DuplicateRequest,
    InputError,
    RequestFailed,
    VersionMismatch,
)
from baton.proto.ids import request_key
from baton.proto.wire.messages import (
    Cancel,
    Describe,
    Described,
    Moved,
    Ping,
    Pong,
    Rejected,
    Resume,
    Status,
    StatusReport,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)

from .bench import KEY, ME, SECRET, Bench, messages, spec
from .conftest import CARD

# --------------------------------------------------------------------------- failures


def test_a_refusal_is_a_typed_error():
    bench = Bench()
    bench.do(Start(spec()))
    bench.hear(
        Terminal(request=KEY, code="overloaded", message="full", retry_after=0.5, request_id="r")
    )
    error = bench.ended[0].error
    assert isinstance(error, CapacityError) and error.retry_after == 0.5


def test_a_refusal_without_a_key_is_found_by_its_id():
    bench = Bench()
    bench.do(Start(spec()))
    bench.hear(Terminal(request=b"", code="duplicate_request", message="x", request_id="r"))
    assert isinstance(bench.ended[0].error, DuplicateRequest) and not bench.sent


def test_an_unknown_code_is_still_a_failure():
    bench = Bench()
    bench.open()
    bench.hear(Terminal(request=KEY, code="from_the_future", message="x"))
    assert isinstance(bench.ended[0].error, RequestFailed)


def test_the_same_id_twice():
    bench = Bench()
    bench.open()
    bench.do(Start(spec()))
    assert isinstance(bench.ended[0].error, DuplicateRequest)
    bench.run(3, [1])
    assert bench.tokens == [1]


def test_a_rejected_message_ends_its_request():
    bench = Bench()
    bench.do(Start(spec()))
    bench.hear(Rejected(code="input", message="no", request_id="r"))
    assert isinstance(bench.ended[0].error, InputError)


def test_a_rejection_without_a_name_ends_what_has_no_answer_and_nothing_else():
    bench = Bench()
    bench.open()
    bench.do(Start(spec("resumed")))
    key = request_key(ME, "resumed", 2)
    bench.hear(Submitted(request_id="resumed", request=key, secret=SECRET))
    bench.hear(Tokens(runs=[TokenRun(key, 1, 5, [3])]))  # after a gap
    assert messages(bench.actions, Resume)
    bench.do(Start(spec("new")))
    bench.do(Ask(1, Status(), 5.0))
    bench.hear(Rejected(code="decode_failed", message="not a valid message"))
    assert {end.request_id: type(end.error) for end in bench.ended} == {
        "resumed": DecodeFailed,
        "new": DecodeFailed,
    }
    assert not any(isinstance(action, Answered) for action in bench.actions)
    bench.run(3, [7])
    assert bench.tokens == [7], "the open one goes on"


def answering_pings(bench, seconds):
    """Return the Ended and Cancel actions while the router answers only pings."""
    ends, cancels = [], []
    for _ in range(int(seconds * 2)):
        bench.hear(Pong())
        done = bench.later(0.5, step=0.25)
        ends += [action for action in done if isinstance(action, Ended)]
        cancels += messages(done, Cancel)
    return ends, cancels


@pytest.mark.parametrize("asked", ["submit", "resume"])
def test_a_request_that_is_never_answered_ends_although_the_router_is_there(asked):
    bench = Bench()
    if asked == "submit":
        bench.do(Start(spec()))
    else:
        bench.open()
        bench.run(5, [3])  # after a gap: Resume
    assert answering_pings(bench, 29) == ([], [])
    (end,), cancels = answering_pings(bench, 2)
    assert isinstance(end.error, ConnectionLost) and len(cancels) == 1
    assert "neither accepted nor refused the request within 30 s (reconnect_timeout)" in str(
        end.error
    )
    assert not bench.core.active


def test_a_request_without_a_deadline_ends_after_the_longest_one():
    bench = Bench()
    bench.open()
    for _ in range(86_400 // 20):
        bench.now += 20.0
        bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
        bench.do(Tick())
        assert not bench.ended
    bench.now += 3.0
    bench.do(Tick())
    (end,) = bench.ended
    assert isinstance(end.error, DeadlineExceeded) and "86400 s" in str(end.error)


def test_a_version_mismatch_ends_everything():
    for event in (
        Received(Rejected(code="version_mismatch", message="2, not 1")),
        Malformed(VersionMismatch("2, not 1")),
    ):
        bench = Bench()
        bench.do(Start(spec()))
        bench.do(Ask(1, Status(), 5.0))
        bench.do(event)
        assert isinstance(bench.ended[0].error, VersionMismatch)
        assert any(isinstance(a, Answered) for a in bench.actions)


def test_a_late_second_answer_settles_no_other_query():
    bench = Bench()
    bench.open()
    bench.do(Ask(1, Status(requests=50), 5.0))
    bench.later(1.2)  # the router is busy, so the query is repeated
    first, again = (StatusReport(report=b"requests", nonce=1) for _ in range(2))
    assert bench.hear(first) == [Answered(1, first)]
    bench.do(Ask(2, Status(metrics=True), 5.0))
    assert bench.hear(again) == []
    mine = StatusReport(report=b"metrics", nonce=2)
    assert bench.hear(mine) == [Answered(2, mine)]
    bench.do(Ask(3, Status(), 5.0))
    old = StatusReport(report=b"of a router that repeats no nonce")
    assert bench.hear(old) == [Answered(3, old)]


def test_noise_is_ignored():
    bench = Bench()
    bench.open()
    assert not bench.do(Malformed(DecodeFailed("noise")))


def test_what_another_router_took_up_is_asked_back():
    bench = Bench()
    bench.open()
    bench.run(3, [7])
    bench.hear(Moved(request=KEY, router="b"))
    (resume,) = bench.sent  # another router took it over because of an older message of this client
    assert isinstance(resume, Resume) and resume.position == 4
    assert not bench.ended


def test_the_deadline_is_enforced_here_too():
    bench = Bench()
    bench.do(Start(spec(deadline=1.0)))
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    ends, cancels = [], []
    for _ in range(80):
        bench.hear(Pong())
        done = bench.later(0.05)
        ends += [(bench.now, a) for a in done if isinstance(a, Ended)]
        cancels += messages(done, Cancel)
    ((at, end),) = ends
    assert 102.9 < at < 103.2  # two seconds later than the router, whose clock decides
    assert isinstance(end.error, DeadlineExceeded) and cancels


# --------------------------------------------------------------------------- connection


def test_without_a_router_a_request_fails_after_the_connect_timeout():
    bench = Bench(connected=False)
    bench.do(Start(spec()))
    done = bench.later(4.9)
    assert not any(isinstance(a, Ended) for a in done)
    (end,) = [a for a in bench.later(0.3) if isinstance(a, Ended)]
    assert isinstance(end.error, ConnectionLost) and "ipc:///x" in str(end.error)
    assert "baton serve" in str(end.error)


def test_a_running_request_outlasts_a_router_restart():
    bench = Bench()
    bench.open()
    bench.run(3, [1])
    bench.do(Disconnected())
    assert not any(isinstance(a, Ended) for a in bench.later(25))
    bench.do(Connected(b"other"))
    (resume,) = bench.sent
    assert isinstance(resume, Resume) and resume.request == KEY and resume.emitted == [1]
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET, attempt=2))
    bench.run(4, [2], attempt=2)
    assert bench.tokens == [2]


def test_a_running_request_gives_up_at_last():
    bench = Bench()
    bench.open()
    bench.do(Disconnected())
    ends = [a for a in bench.later(31) if isinstance(a, Ended)]
    assert isinstance(ends[0].error, ConnectionLost)


def test_an_unanswered_request_is_submitted_again_under_the_new_identity():
    bench = Bench()
    bench.do(Start(spec()))
    bench.do(Disconnected())
    bench.do(Connected(b"other"))
    assert isinstance(bench.sent[0], Submit)
    key = request_key(b"other", "r")
    bench.hear(Submitted(request_id="r", request=key, secret=SECRET))
    bench.hear(Tokens(runs=[TokenRun(key, 1, 3, [1])]))
    assert bench.tokens == [1]
    bench.run(4, [2])
    assert not bench.tokens  # the old key is unknown now


def test_pings_while_something_is_open_only():
    bench = Bench()
    assert not bench.later(3)
    bench.open()
    done = []
    for _ in range(50):
        bench.hear(Pong())
        done += bench.later(0.1)
    assert len(messages(done, Ping)) in (4, 5)


def test_a_silent_router_is_left_and_resumed():
    bench = Bench()
    bench.open()
    done = bench.later(3.2)
    assert sum(isinstance(a, Reconnect) for a in done) == 1
    bench.do(Connected(b"fresh"))
    assert isinstance(bench.sent[0], Resume)


def test_time_this_process_was_stopped_is_nobodys_silence():
    bench = Bench()
    bench.open()
    bench.now += 60
    assert not any(isinstance(a, Ended | Reconnect) for a in bench.do(Tick()))


def test_a_long_idle_client_does_not_count_old_silence():
    bench = Bench()
    bench.now += 1000
    bench.do(Start(spec()))
    assert isinstance(bench.sent[0], Submit)
    assert not any(isinstance(a, Ended | Reconnect) for a in bench.later(0.5))


def test_the_router_may_ping_too():
    bench = Bench()
    bench.hear(Ping(nonce=4))
    assert bench.sent == [Pong(nonce=4)]


def reconnecting(bench, seconds):
    """Return the ends and answers while the router accepts connections, but sends nothing."""
    found = []
    for _ in range(round(seconds / 0.05)):
        done = bench.later(0.05)
        found += [action for action in done if isinstance(action, Ended | Answered)]
        if any(isinstance(action, Reconnect) for action in done):
            bench.now += 0.4
            bench.do(Connected(os.urandom(4)))
    return found


def test_a_router_that_runs_and_is_slow_is_waited_for():
    """On a busy machine it may take longer than the connect timeout to answer."""
    bench = Bench()
    bench.do(Start(spec()))
    assert reconnecting(bench, 20) == []
    bench.hear(Submitted(request_id="r", request=request_key(b"client", "r", 1), secret=SECRET))
    bench = Bench()
    bench.do(Start(spec()))
    (end,) = reconnecting(bench, 32)
    assert "neither accepted nor refused the request within 30 s" in str(end.error)


def test_a_router_that_runs_is_also_waited_for_with_the_query_for_the_model():
    bench = Bench()
    bench.do(Ask(1, Describe(), 5.0))
    assert reconnecting(bench, 20) == []
    answer = Described(model=CARD)
    assert [a.answer for a in bench.hear(answer) if isinstance(a, Answered)] == [answer]
    bench.do(Ask(2, Describe(), 5.0))
    (failed,) = reconnecting(bench, 32)
    assert "runs, but has not answered the query for the model within 30 s" in str(failed.answer)
    bench.do(Ask(3, Status(), 5.0))
    (failed,) = reconnecting(bench, 5.2)
    assert "the query for the status within 5 s (timeout)" in str(failed.answer)
    assert "is a cluster running" not in str(failed.answer)


@pytest.mark.parametrize("timeout", [3.99997, 4.0])
def test_a_router_that_never_was_there_does_not_run(timeout):
    bench = Bench(connected=False, reconnect_timeout=timeout)
    bench.do(Ask(1, Status(), timeout))
    bench.now += 61.0  # past both limits at once, as after a busy moment
    (failed,) = [one for one in bench.do(Tick()) if isinstance(one, Answered)]
    assert "no answer from ipc:///x to the query for the status within 4 s" in str(failed.answer)
    assert "is a cluster running there? start one with: baton serve" in str(failed.answer)


def test_a_router_that_hangs_is_not_taken_for_none():
    bench = Bench()
    bench.do(Start(spec()))
    (end,) = [one for one in bench.later(30.0) if isinstance(one, Ended)]
    assert "is a cluster running" not in str(end.error)
    assert "has accepted connections, but has sent nothing for 5 s" in str(end.error)
