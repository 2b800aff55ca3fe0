"""What a prefill worker answers at its own endpoint: who it is, and nothing else.

Nobody reserves blocks here; who tries has taken it for a decode worker and is told so.
"""

from __future__ import annotations

from ..proto.limits import PROTOCOL_VERSION
from ..proto.messages import Message, Ping, Pong, Probe, ProbeReply, Rejected
from ..runtime.membership import WorkerIdentity


def answer(me: WorkerIdentity, message: Message) -> Message | None:
    """The reply to a message; None for a Pong, which needs none."""
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
            text = f"{type(message).__name__} is for a decode worker, {me.worker} is none"
            return Rejected(code="protocol", message=text)
