"""What workers say to each other, as the bytes it is on the wire; some of them get damaged."""

from __future__ import annotations

from collections import Counter

from ..kv_transfer.checksums import envelope_digest
from ..proto.arrays import Frame
from ..proto.codec import EnvelopeDecoder, EnvelopeEncoder
from ..proto.errors import ProtocolError
from ..proto.messages import Message
from .network import Network


class Envelope:
    """One message under way from worker to worker, sealed as the shells do it.

    One bit is flipped if the network's faults will have it.
    """

    _encoder = EnvelopeEncoder(digest=envelope_digest)

    def __init__(self, message: Message, network: Network) -> None:
        self._frames: list[Frame] = self._encoder.encode([message])
        chance, random = network.faults.damage, network.random
        self._damaged = chance > 0 and random.random() < chance
        if self._damaged:
            which = random.randrange(len(self._frames))
            body = bytearray(self._frames[which])
            body[random.randrange(len(body))] ^= 1 << random.randrange(8)
            self._frames[which] = bytes(body)

    def read(self, decoder: EnvelopeDecoder[Message], stats: Counter[str]) -> list[Message]:
        """What the receiver understands: nothing of a damaged one."""
        try:
            return decoder.decode(self._frames)
        except ProtocolError:
            if not self._damaged:
                raise
            stats["damaged_control"] += 1
            return []


def sealed_decoder(union: object) -> EnvelopeDecoder[Message]:
    """The receiving end of one direction."""
    return EnvelopeDecoder(union, digest=envelope_digest)
