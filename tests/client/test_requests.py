"""A client's requests: submitted, resumed, ended; positions of their tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.client.events import Connected, Ended, NewTokens, Received, Send, Start, Tick
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.wire.messages import (
    FinalAck,
    Ping,
    Pong,
    Resume,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)

from .bench import KEY, ME, SECRET, Bench, messages, spec

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


def test_media_come_with_the_last_token_of_their_run():
    bench = Bench()
    bench.open()
    runs = [
        TokenRun(KEY, 1, 3, [7, 8], None, b"a"),
        TokenRun(KEY, 1, 4, [8, 9], None, b"b"),  # its second token is new
        TokenRun(KEY, 1, 3, [7, 8], None, b"a"),
        TokenRun(KEY, 1, 7, [11], None, b"c"),  # after a gap
    ]
    actions = [action for run in runs for action in bench.hear(Tokens(runs=[run]))]
    news = [one for one in actions if isinstance(one, NewTokens)]
    assert [(one.position, one.tokens, one.media) for one in news] == [
        (3, [7, 8], b"a"),
        (5, [9], b"b"),
    ]


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
    bench.do(Start(spec()))
    (submit,) = messages(bench.actions, Submit)
    bench.hear(Submitted(request_id="r", request=KEY, secret=SECRET))
    bench.run(3, [1])
    bench.run(5, [3])
    (resume,) = bench.sent
    assert isinstance(resume, Resume)
    assert resume.context is submit.context
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
