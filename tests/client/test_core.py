"""The client's decisions, without sockets and clock."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.client.core import ClientCore
from baton.client.events import (
    Answered,
    Ask,
    Connected,
    Disconnected,
    Ended,
    Malformed,
    NewTokens,
    Received,
    Reconnect,
    RequestSpec,
    Send,
    Start,
    Stop,
    Tick,
)
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import (
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeFailed,
    DuplicateRequest,
    EndpointUnknown,
    InputError,
    RequestFailed,
    VersionMismatch,
)
from baton.proto.ids import request_key
from baton.proto.wire.messages import (
    Cancel,
    Describe,
    Described,
    Drain,
    Drained,
    FinalAck,
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
from baton.proto.wire.wire_context import WireContext, WireTokens

ME = b"me"
KEY = request_key(ME, "r", 1)
SECRET = b"s" * 16


def spec(request_id="r", deadline=None, prompt=3):
    context = WireContext(tokens=WireTokens(np.arange(prompt, dtype=np.int32)), max_length=50)
    return RequestSpec(request_id=request_id, context=context, deadline=deadline)


class Bench:
    """A core with a clock, and its actions so far."""

    def __init__(self, *addresses, connected=True, reconnect_timeout=30.0):
        addresses = addresses or ("ipc:///x",)
        self.core = ClientCore(*addresses, connect_timeout=5.0, reconnect_timeout=reconnect_timeout)
        self.now = 100.0
        if connected:
            self.do(Connected(ME))

    def do(self, event):
        actions = self.core.handle(event, self.now)
        self.sent = [a.message for a in actions if isinstance(a, Send)]
        self.tokens = [t for a in actions if isinstance(a, NewTokens) for t in a.tokens]
        self.ended = [a for a in actions if isinstance(a, Ended)]
        self.actions = actions
        return actions

    def hear(self, message):
        return self.do(Received(message))

    def run(self, position, tokens, attempt=1, logprobs=None):
        return self.hear(Tokens(runs=[TokenRun(KEY, attempt, position, tokens, logprobs)]))

    def later(self, seconds, step=0.05):
        """Tick for so long, and return all actions."""
        done = []
        until = self.now + seconds
        while self.now < until:
            self.now += step
            done += self.do(Tick())
        return done

    def open(self):
        self.do(Start(spec()))
        self.hear(Submitted(request_id="r", request=KEY, secret=SECRET))

    def finish(self, position, **kwargs):
        return self.hear(
            Terminal(request=KEY, status="maximum_length", position=position, **kwargs)
        )


def messages(actions, kind):
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


# --------------------------------------------------------------------------- the plain way


def test_a_request_from_start_to_end():
    bench = Bench()
    bench.do(Start(spec(deadline=10.0)))
    (submit,) = bench.sent
    assert isinstance(submit, Submit) and submit.deadline == 10.0
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    bench.run(3, [7])
    assert bench.tokens == [7]
    bench.run(4, [8, 9])
    bench.finish(6, prefill="p", decode="d", cached_tokens=2)
    (end,) = bench.ended
    assert (end.status, end.position, end.prefill, end.decode) == ("maximum_length", 6, "p", "d")
    assert end.cached_tokens == 2 and end.error is None
    assert bench.sent == [FinalAck(requests=[KEY])]
    assert not bench.core.active


def test_start_waits_for_the_connection():
    bench = Bench(connected=False)
    bench.do(Start(spec()))
    assert not bench.sent
    bench.do(Connected(ME))
    assert isinstance(bench.sent[0], Submit)


def test_an_unanswered_submit_is_repeated_with_back_off():
    bench = Bench()
    bench.do(Start(spec()))
    times = []
    for _ in range(80):
        bench.now += 0.05
        bench.hear(Pong())
        times += [bench.now for _ in messages(bench.do(Tick()), Submit)]
    gaps = np.diff([100.0, *times])
    assert len(times) == 2 and gaps[0] == pytest.approx(1.0, abs=0.06)
    assert gaps[1] == pytest.approx(2.0, abs=0.06)


def test_what_was_lost_is_said_again_when_a_later_ping_is_answered():
    """Retries wait for no back-off while the router answers pings."""
    bench = Bench("ipc:///x", "ipc:///y")
    bench.do(Start(spec()))
    for _ in range(6):
        done = bench.later(0.55)
        (ping,) = messages(done, Ping)
        assert messages(bench.hear(Pong(nonce=ping.nonce)), Submit)
        assert not messages(bench.hear(Pong(nonce=ping.nonce)), Submit), "said after the ping"
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    (ping,) = messages(bench.later(0.55), Ping)
    assert not bench.hear(Pong(nonce=ping.nonce))


def test_requests_are_resumed_when_an_earlier_ping_was_lost():
    """Tokens and the Terminal may be lost as well; the router repeats only the Terminal, late."""
    bench = Bench()
    bench.open()
    bench.run(3, [7, 8])
    (first,) = messages(bench.later(1.05), Ping)
    (second,) = messages(bench.later(1.0), Ping)
    (resume,) = messages(bench.hear(Pong(nonce=second.nonce)), Resume)
    assert resume.position == 5
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    assert not bench.hear(Pong(nonce=first.nonce)), "late or repeated"
    assert not bench.hear(Pong(nonce=second.nonce))
    (third,) = messages(bench.later(1.0), Ping)
    assert not bench.hear(Pong(nonce=third.nonce))
    bench.later(1.0)
    bench.do(Connected(ME))
    (fifth,) = messages(bench.later(1.05), Ping)
    assert not messages(bench.hear(Pong(nonce=fifth.nonce)), Resume), "the connection is new"


def test_tokens_before_submitted_count():
    """The Submitted message may be lost."""
    bench = Bench()
    bench.do(Start(spec()))
    bench.run(3, [7])
    assert bench.tokens == [7]


def test_logprobs_are_cut_with_their_tokens():
    bench = Bench()
    bench.open()
    probs = [TokenLogProbs.of(-float(n), {}) for n in range(3)]
    bench.run(3, [5])
    (news,) = bench.run(3, [5, 6, 7], logprobs=probs)
    assert news.position == 4 and news.tokens == [6, 7] and news.logprobs == probs[1:]


# --------------------------------------------------------------------------- positions


def test_tokens_pass_once_and_in_order():
    bench = Bench()
    bench.open()
    bench.run(3, [1, 2])
    bench.run(3, [1, 2])
    assert not bench.actions
    bench.run(4, [2, 3])
    assert bench.tokens == [3]
    bench.run(3, [])
    assert not bench.actions


def test_a_router_that_counts_attempts_anew_is_heard():
    bench = Bench()
    bench.open()
    bench.run(3, [1], attempt=2)
    bench.run(4, [2], attempt=1)
    assert bench.tokens == [2]
    bench.run(4, [2], attempt=3)  # repeated: the position decides
    assert not bench.actions


def test_a_gap_is_resumed_once():
    bench = Bench()
    bench.open()
    bench.run(3, [1])
    bench.run(5, [3])
    (resume,) = bench.sent
    assert isinstance(resume, Resume)
    assert (resume.position, resume.emitted, resume.secret) == (4, [1], SECRET)
    bench.run(6, [4])
    assert not bench.actions  # asked already
    bench.run(4, [2, 3, 4])
    assert bench.tokens == [2, 3, 4]


def test_a_lost_resume_is_repeated():
    bench = Bench()
    bench.open()
    bench.run(5, [3])
    assert messages(bench.later(1.2), Resume)


def test_a_terminal_ahead_of_its_tokens_waits_for_them():
    bench = Bench()
    bench.open()
    bench.run(3, [1])
    bench.finish(6)
    assert not bench.ended and isinstance(bench.sent[0], Resume)
    bench.run(4, [2, 3])
    assert bench.tokens == [2, 3] and bench.ended[0].position == 6
    assert messages(bench.actions, FinalAck)


def test_an_unknown_terminal_is_acknowledged():
    bench = Bench()
    bench.open()
    bench.finish(3)
    bench.finish(3)
    assert bench.sent == [FinalAck(requests=[KEY])] and not bench.ended


class Network:
    """A router with all tokens, on a network that loses, repeats and reorders messages."""

    def __init__(self, seed):
        self.chaos = random.Random(seed)
        self.mail = []
        self.known = False
        self.terminal = Terminal(request=KEY, status="maximum_length", position=23)

    def post(self, message):
        if not isinstance(message, Submit | Resume) or self.chaos.random() < 0.3:
            return
        start = message.position if isinstance(message, Resume) else 3
        answers = [
            Submitted(request_id="r", request=KEY, secret=SECRET),
            *(Tokens(runs=[TokenRun(KEY, 1, p, [p - 3])]) for p in range(start, 23)),
            self.terminal,
        ]
        self.known = True
        self.mail += [a for a in answers if self.chaos.random() < 0.8]

    def deliver(self):
        if not self.mail or self.chaos.random() < 0.1:
            # Terminals are repeated until acknowledged.
            return self.terminal if self.known and self.chaos.random() < 0.2 else None
        index = self.chaos.randrange(min(3, len(self.mail)))
        return self.mail[index] if self.chaos.random() < 0.1 else self.mail.pop(index)


@pytest.mark.parametrize("block", range(4))
def test_any_loss_repetition_and_reordering_gives_the_same_stream(block):
    """The user sees tokens 0 to 19 once, in order, and then one end."""
    for seed in range(block * 50, block * 50 + 50):
        # A long timeout, because this network loses half of all messages.
        network, bench, seen, ends = Network(seed), Bench(reconnect_timeout=300.0), [], 0
        actions = bench.do(Start(spec()))
        for _ in range(2000):
            for action in actions:
                if isinstance(action, NewTokens):
                    seen += action.tokens
                elif isinstance(action, Ended):
                    ends += 1
                elif isinstance(action, Send):
                    network.post(action.message)
            if ends:
                break
            message = network.deliver()
            bench.now += 0.0 if message else 0.2
            bench.hear(Pong())
            actions = bench.do(Received(message) if message else Tick())
        assert (ends, seen) == (1, list(range(20))), seed


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
    assert not bench.tokens  # the old key is no longer known


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
