"""Messages between the workers of a simulated cluster: encoded bytes, which faults may damage."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from baton.kv_transfer.checksums import envelope_digest
from baton.proto.errors import ProtocolError
from baton.proto.wire.arrays import Frame
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import Message

from .network import Network

Bytes = npt.NDArray[np.uint8]


class Envelope:
    """One message between workers, encoded with a checksum as in the shells.

    The network's faults may flip one bit.
    """

    digest = staticmethod(envelope_digest)
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
        """Decode the messages; empty if the envelope is damaged."""
        try:
            return decoder.decode(self._frames)
        except ProtocolError:
            if not self._damaged:
                raise
            stats["damaged_control"] += 1
            return []


def sealed_decoder(union: object) -> EnvelopeDecoder[Message]:
    """Return the decoder for one direction."""
    return EnvelopeDecoder(union, digest=envelope_digest)
