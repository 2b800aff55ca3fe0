"""Requests that the client stops, and questions to a router."""

from __future__ import annotations

import pytest

from baton.client.events import Answered, Ask, Connected, Disconnected, Start, Stop
from baton.proto.errors import CapacityError, ConnectionLost, EndpointUnknown, InputError
from baton.proto.ids import request_key
from baton.proto.wire.messages import (
    Cancel,
    Describe,
    Described,
    Drain,
    Drained,
    FinalAck,
    Ping,
    Pong,
    Rejected,
    Resume,
    Status,
    StatusReport,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)

from .bench import KEY, ME, SECRET, Bench, messages, spec

# --------------------------------------------------------------------------- stop


def test_a_stopped_request_says_nothing_more():
    bench = Bench()
    bench.open()
    bench.do(Stop("r"))
    assert bench.sent == [Cancel(request_id="r", request=KEY, serial=1, secret=SECRET)]
    bench.run(3, [1])
    assert not bench.actions
    bench.hear(Terminal(request=KEY, status="cancelled"))
    assert not bench.ended and bench.sent == [FinalAck(requests=[KEY])]
    assert not bench.core.active


def test_a_lost_cancel_is_repeated_and_then_given_up():
    bench = Bench()
    bench.open()
    bench.do(Stop("r"))
    assert messages(bench.later(1.5), Cancel)
    bench.later(1)
    assert not bench.core.active


def test_a_cancel_does_not_inherit_how_long_the_request_was_left_alone():
    bench = Bench()
    bench.do(Start(spec()))
    for _ in range(4):
        bench.later(1)
        bench.hear(Pong())
    bench.do(Stop("r", report=True))
    assert len(messages(bench.later(1.2), Cancel)) == 2


def test_a_cancel_that_waits_is_not_said_because_of_a_pong():
    bench = Bench()
    bench.open()
    (ping,) = messages(bench.later(1.0), Ping)
    bench.do(Stop("r", report=True))
    assert not bench.hear(Pong(nonce=ping.nonce))
    assert messages(bench.later(0.1), Cancel)


def test_a_stop_that_wants_to_know():
    bench = Bench()
    bench.open()
    bench.run(3, [1])
    bench.do(Stop("r", report=True))
    assert not bench.sent  # the request may end by itself
    assert messages(bench.later(0.1), Cancel)
    bench.hear(Terminal(request=KEY, status="cancelled", decode="d"))
    assert bench.ended[0].status == "cancelled" and bench.ended[0].decode == "d"
    for report in (True, False):
        bench = Bench()
        bench.open()
        bench.do(Disconnected())
        bench.do(Stop("r", report=report))
        assert len(bench.ended) == report and not bench.core.active


def test_a_name_used_again_is_another_request():
    """A late Terminal of the cancelled request does not end the new one."""
    bench = Bench()
    bench.open()
    bench.do(Stop("r", report=True))
    old = Terminal(request=KEY, request_id="r", status="cancelled")
    bench.later(0.1)
    bench.hear(old)
    assert bench.ended
    bench.do(Start(spec()))
    (submit,) = bench.sent
    key = request_key(ME, "r", submit.serial)
    assert key != KEY
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    bench.hear(old)
    assert not bench.ended and bench.sent == [FinalAck(requests=[KEY])]
    bench.hear(Tokens(runs=[TokenRun(KEY, 1, 3, [5])]))
    assert not bench.tokens
    bench.hear(Terminal(request=key, request_id="r", status="cancelled"))
    assert bench.ended


@pytest.mark.parametrize("key", [b"", request_key(ME, "r")])
def test_a_router_that_knows_no_serials_is_understood(key):
    bench = Bench()
    bench.do(Start(spec()))
    if key:
        bench.hear(Submitted(request_id="r", request=key, secret=SECRET))
        bench.hear(Tokens(runs=[TokenRun(key, 1, 3, [5])]))
        assert bench.tokens == [5]
    bench.hear(Terminal(request=key, request_id="r", code="overloaded"))
    assert bench.ended


def test_stop_of_something_unknown():
    assert not Bench().do(Stop("nothing"))


# --------------------------------------------------------------------------- questions


def test_questions_are_matched_by_kind_and_content(card):
    def described(files=(), available=()):
        contents = dict.fromkeys(files, b"")
        return Described(model=card, files=contents, available=list(available))

    bench = Bench()
    bench.do(Ask(1, Status(), 5.0))
    bench.do(Ask(2, Describe(files=["a", "b"]), 5.0))
    bench.do(Ask(3, Describe(), 5.0))
    bench.do(Ask(4, Drain(worker="w"), 5.0))
    assert bench.hear(described((), ["a", "c"]))[0].ticket == 3
    assert bench.hear(described(["a"], ["a", "c"]))[0].ticket == 2
    assert not bench.hear(Drained(worker="other"))
    (refused,) = bench.hear(Drained(worker="w", code="endpoint_unknown", message="no"))
    assert isinstance(refused.answer, EndpointUnknown)
    assert bench.hear(StatusReport(report=b"{}"))[0].ticket == 1
    assert not bench.hear(StatusReport(report=b"{}"))
    assert not bench.core.active


def test_questions_are_repeated_and_expire():
    bench = Bench()
    bench.do(Ask(1, Status(), 2.5))
    assert len(messages(bench.later(2.2), Status)) == 2
    bench.do(Connected(ME))
    assert isinstance(bench.sent[0], Status)
    (answered,) = [a for a in bench.later(0.5) if isinstance(a, Answered)]
    assert isinstance(answered.answer, ConnectionLost)
    assert "the query for the status within 2.5 s (timeout)" in str(answered.answer)


def test_a_router_without_workers_is_asked_again():
    bench = Bench()
    bench.do(Ask(1, Describe(), 2.0))
    bench.hear(Described())
    assert not bench.actions
    assert messages(bench.later(0.2), Describe)
    bench.hear(Described())
    (answered,) = [a for a in bench.later(2) if isinstance(a, Answered)]
    assert isinstance(answered.answer, CapacityError)


def test_a_rejection_settles_the_oldest_question():
    bench = Bench()
    bench.do(Ask(1, Status(), 5.0))
    (answered,) = bench.hear(Rejected(code="input", message="no"))
    assert isinstance(answered.answer, InputError)
    assert not bench.hear(Rejected(code="input", message="no"))


def test_an_end_without_its_tokens_does_not_make_a_storm():
    """Repeated Terminals cause one Resume per retry delay, not one each."""
    bench = Bench()
    bench.open()
    asked = []
    for _ in range(50):
        asked += messages(bench.finish(9), Resume)
        bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    assert [m.position for m in asked] == [3]


def test_a_stream_open_on_our_side_alone_is_asked_for_again():
    """The router dropped it with the old connection; a late Submitted opened it in the client."""
    bench = Bench()
    bench.open()
    bench.run(3, [7])

    def silence(seconds):
        """Return the Resumes sent while the router answers only pings."""
        said = []
        for _ in range(seconds):
            said += messages(bench.later(1.0), Resume)
            bench.hear(Pong())
        return said

    assert not silence(9)
    resume, *_again = silence(2)
    assert (resume.position, resume.secret) == (4, SECRET)
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    assert not silence(17), "each time it is asked for more seldom"
    assert silence(3)
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    bench.run(4, [8])
    assert not silence(9)
    assert silence(2)
