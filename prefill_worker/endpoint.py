"""The endpoint of a prefill worker: answers Probe and Ping, rejects everything else.

A prefill worker grants no blocks. A peer that tries to reserve here has taken this worker for a
decode worker, so the rejection names the mistake.
"""

from __future__ import annotations

from baton.kv_transfer.checksums import envelope_digest
from baton.proto.errors import ProtocolError
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import (
    Message,
    Ping,
    Pong,
    PrefillToDecode,
    Probe,
    ProbeReply,
    Rejected,
)
from baton.runtime.net.channel import Frames
from baton.runtime.net.loop import Loop
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.process.log_limit import LimitedLog
from baton.worker.membership import Membership, WorkerIdentity


def answer(me: WorkerIdentity, message: Message) -> Message | None:
    """Return the reply to a message; None for a Pong, which needs no reply."""
    match message:
        case Probe(nonce=nonce):
            return ProbeReply(
                nonce=nonce,
                version=PROTOCOL_VERSION,
                worker=me.worker,
                role=me.role,
                incarnation=me.incarnation,
            )
        case Ping(nonce=nonce):
            return Pong(nonce=nonce)
        case Pong():
            return None
        case _:
            text = f"{type(message).__name__}: {me.worker} is not a decode worker"
            return Rejected(code="protocol", message=text)


class Endpoint:
    """The listening side of a prefill worker, for text and embedding models."""

    def __init__(self, member: Membership, channel: RouterChannel, loop: Loop) -> None:
        self._member = member
        self._log = LimitedLog(loop)
        self._outbox: Outbox[bytes] = Outbox(channel.send, digest=envelope_digest)
        self._decoder: EnvelopeDecoder[PrefillToDecode] = EnvelopeDecoder(
            PrefillToDecode, digest=envelope_digest
        )

    def hear(self, peer: bytes, frames: Frames) -> None:
        """Answer an envelope. A malformed envelope is counted and rejected."""
        try:
            messages = self._decoder.decode(frames)
            replies = [answer(self._member.identity, message) for message in messages]
        except ProtocolError as error:
            self._member.dropped[f"peer_{error.code}"] += 1
            self._log.warning("endpoint.malformed", error=str(error))
            replies = [Rejected(code=error.code, message=str(error))]
        for reply in replies:
            if reply is not None:
                self._outbox.put(peer, reply)
        self._outbox.flush()
