"""One envelope per peer and turn."""

from __future__ import annotations

import numpy as np
import pytest

from baton.proto.contexts.pixels import png_bytes
from baton.proto.errors import LimitExceeded
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import (
    Cancel,
    ClientToRouter,
    Ping,
    RouterToClient,
    Submit,
    Terminal,
)
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.runtime.net.channel import SendResult
from baton.runtime.net.outbox import CONTEXTS_PER_ENVELOPE, Outbox

DECODER = EnvelopeDecoder(ClientToRouter)


class Wire:
    def __init__(self, result=SendResult.SENT, decoder=DECODER):
        self.result, self.decoder = result, decoder
        self.sent = []

    def send(self, peer, frames):
        self.sent.append((peer, self.decoder.decode(frames)))
        return self.result


def submit(n, size=2000):
    context = WireContext(tokens=WireTokens(np.arange(size, dtype=np.int32)), max_length=size + 10)
    return Submit(request_id=f"r{n}", context=context)


def test_a_turn_is_one_envelope_per_peer_in_order():
    wire = Wire()
    outbox = Outbox(wire.send)
    for n in range(20):
        outbox.put(b"ab"[n % 2 : n % 2 + 1], Ping(nonce=n))
    outbox.flush()
    outbox.flush()
    assert [(peer, [m.nonce for m in ms]) for peer, ms in wire.sent] == [
        (b"a", list(range(0, 20, 2))),
        (b"b", list(range(1, 20, 2))),
    ]
    assert outbox.envelopes == 2


def test_what_nobody_waits_for_goes_with_the_next_that_presses():
    wire = Wire()
    outbox = Outbox(wire.send)
    outbox.put_patient(b"a", Ping(nonce=1))
    assert outbox.waiting and not outbox.pressing
    outbox.put(b"a", Ping(nonce=2))
    assert outbox.pressing
    outbox.flush()
    assert not outbox.waiting and not outbox.pressing
    assert [[m.nonce for m in ms] for _, ms in wire.sent] == [[1, 2]]


def test_contexts_are_spread_over_envelopes():
    wire = Wire()
    outbox = Outbox(wire.send)
    messages = [m for n in range(20) for m in (submit(n), Ping(nonce=n))]
    for message in messages:
        outbox.put(b"a", message)
    outbox.flush()
    got = [m for _, ms in wire.sent for m in ms]
    assert [type(m) for m in got] == [type(m) for m in messages]
    assert [m.request_id for m in got if isinstance(m, Submit)] == [f"r{n}" for n in range(20)]
    counts = [sum(isinstance(m, Submit) for m in ms) for _, ms in wire.sent]
    assert max(counts) == CONTEXTS_PER_ENVELOPE and len(counts) == 3


def test_large_results_share_no_envelope():
    """The largest pictures of one turn to one client; together they are over the limit."""
    wire = Wire(decoder=EnvelopeDecoder(RouterToClient))
    outbox = Outbox(wire.send)
    pictures = [Terminal(request=bytes([n]), media=bytes(png_bytes(2048, 2048))) for n in range(3)]
    for one in (Ping(nonce=1), *pictures, Ping(nonce=2)):
        outbox.put(b"a", one)
    outbox.flush()
    got = [m for _, ms in wire.sent for m in ms]
    assert got == [Ping(nonce=1), *pictures, Ping(nonce=2)]
    assert outbox.unsent == 0


def test_what_was_not_taken_is_reported():
    wire = Wire(SendResult.FULL)
    unsent = []
    outbox = Outbox(wire.send, lambda *args: unsent.append(args))
    outbox.put(b"a", Ping())
    outbox.flush()
    assert unsent == [(b"a", [Ping()], SendResult.FULL)] and outbox.unsent == 1


class FullOnce(Wire):
    """A peer whose queue is full at one send and has room at the next send."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.tries = 0

    def send(self, peer, frames):
        self.tries += 1
        if self.tries == self.at:
            return SendResult.FULL
        return super().send(peer, frames)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("limit", [1 << 20, 9000])  # one envelope holds 4096 messages, or fewer
def test_nothing_overtakes_what_was_not_taken(at, limit):
    wire = FullOnce(at)
    unsent = []
    outbox = Outbox(wire.send, lambda *args: unsent.append(args), max_bytes=limit)
    for n in range(10_000):
        outbox.put(b"a", Ping(nonce=n))
    outbox.flush()
    ((peer, messages, result),) = unsent
    assert (peer, result) == (b"a", SendResult.FULL)
    sent = [m.nonce for _, ms in wire.sent for m in ms]
    assert sent + [m.nonce for m in messages] == list(range(10_000))
    assert len(wire.sent) == at - 1
    assert outbox.unsent == len(messages)


def test_a_dropped_peer_gets_nothing():
    wire = Wire()
    outbox = Outbox(wire.send)
    outbox.put(b"a", Ping())
    outbox.drop(b"a")
    outbox.drop(b"b")
    outbox.flush()
    assert not wire.sent


def test_a_message_over_a_limit_spares_its_neighbours(monkeypatch, capsys):
    wire = Wire()
    outbox = Outbox(wire.send)
    encode = outbox._encoder.encode

    def strict(messages):
        if any(m.nonce == 2 for m in messages):
            raise LimitExceeded("too large")
        return encode(messages)

    monkeypatch.setattr(outbox._encoder, "encode", strict)
    for n in range(4):
        outbox.put(b"a", Ping(nonce=n))
    outbox.flush()
    assert [m.nonce for _, ms in wire.sent for m in ms] == [0, 1, 3]
    assert outbox.unsent == 1
    assert "not_encodable" in capsys.readouterr().err


def test_what_no_envelope_can_carry_is_told_and_something_else_may_take_its_place():
    wire, refused = Wire(), []
    small = Cancel(request_id="instead")

    def on_refused(peer, message, reason):
        refused.append((peer, message.request_id, reason))
        outbox.put(peer, small)

    outbox = Outbox(wire.send, max_bytes=1000, on_refused=on_refused)
    for peer in (b"a", b"b"):
        outbox.put(peer, Cancel(request_id="x" * (2000 if peer == b"a" else 10)))
        outbox.put(peer, Ping(nonce=7))
    outbox.flush()
    ((peer, _, reason),) = refused
    assert peer == b"a" and "Cancel cannot be sent" in reason
    sent = [(peer, message) for peer, messages in wire.sent for message in messages]
    assert (b"a", small) in sent and (b"a", Ping(nonce=7)) in sent
    assert [m for p, m in sent if p == b"b"] == [Cancel(request_id="x" * 10), Ping(nonce=7)]


def test_a_number_that_cannot_be_encoded_spares_other_messages_and_peers(capsys):
    wire = Wire()
    outbox = Outbox(wire.send)
    for peer in (b"a", b"b"):
        for nonce in (1, 1 << 64, 2):
            outbox.put(peer, Ping(nonce=nonce))
    outbox.flush()
    assert [(p, m.nonce) for p, ms in wire.sent for m in ms] == [
        (b"a", 1), (b"a", 2), (b"b", 1), (b"b", 2),
    ]  # fmt: skip
    assert outbox.unsent == 2
    assert "not_encodable" in capsys.readouterr().err


def test_the_latest_of_a_kind_takes_the_place_of_what_still_waits():
    wire = Wire()
    outbox = Outbox(wire.send)
    for turn in range(2):
        for nonce in range(3):
            outbox.put(b"a", Cancel(request_id=str(nonce)))
            outbox.put_latest(b"a", Ping(nonce=nonce), lambda old, new: Ping(nonce=old.nonce + 10))
        outbox.put_latest(b"b", Ping(nonce=7), lambda old, new: new)
        outbox.flush()
        sent = dict(wire.sent[2 * turn :])
        assert [m.nonce for m in sent[b"a"] if isinstance(m, Ping)] == [20]
        assert sent[b"b"] == [Ping(nonce=7)]


def test_what_waited_for_a_dropped_peer_is_no_place_for_the_latest():
    wire = Wire()
    outbox = Outbox(wire.send)
    outbox.put_latest(b"a", Ping(nonce=1), lambda old, new: new)
    outbox.drop(b"a")
    outbox.put(b"a", Cancel())
    outbox.put_latest(b"a", Ping(nonce=2), lambda old, new: old)
    outbox.flush()
    assert wire.sent == [(b"a", [Cancel(), Ping(nonce=2)])]
