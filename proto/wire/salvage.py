"""Read the valid messages of an envelope that also has invalid messages.

A peer puts all messages of a turn into one envelope. A message with a value of a wrong type must
not invalidate the other messages, and its sender must learn which request failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from ..errors import BatonError, InputError, ProtocolError
from ..limits import MAX_ARRAY_FRAMES, MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS
from .arrays import Frame
from .envelope import MAGIC, EnvelopeDecoder

T = TypeVar("T")
MAX_REFUSED = 4096
"""Maximum messages of one envelope that are refused one by one."""
_PREFIX_BYTES = 3
_ARRAY_OF_ONE = b"\x91"


@dataclass(slots=True)
class Salvaged(Generic[T]):
    """The valid messages, and by request id the errors of the others."""

    messages: list[T] = field(default_factory=list)
    refused: dict[str, BatonError] = field(default_factory=dict)


class _Heading(msgspec.Struct):
    """The part of an invalid message that identifies its request."""

    type: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]


class _Arrays(msgspec.Struct):
    """The part of a message that gives the number of its array frames."""

    arrays: Annotated[int, Meta(ge=0, le=MAX_ARRAY_FRAMES)] = 0


class SalvagingDecoder(EnvelopeDecoder[T]):
    """Decodes envelopes, and the valid part of envelopes that :meth:`decode` refuses."""

    def __init__(self, union: object) -> None:
        super().__init__(union)
        self._one: EnvelopeDecoder[T] = EnvelopeDecoder(union)
        self._raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._arrays = msgspec.msgpack.Decoder(_Arrays)
        self._heading = msgspec.msgpack.Decoder(_Heading)

    def salvage(self, frames: Sequence[Frame]) -> Salvaged[T] | None:
        """Return the valid messages of an unsealed envelope, and the errors of the others.

        Returns None if an invalid message does not identify its request. Takes time and memory in
        proportion to the envelope.
        """
        head = memoryview(frames[0]) if frames else memoryview(b"")
        if head[: len(MAGIC)] != MAGIC:
            return None
        prefix = bytes(head[:_PREFIX_BYTES]) + _ARRAY_OF_ONE
        found: Salvaged[T] = Salvaged()
        frame = 1
        try:
            for raw in self._raws.decode(head[_PREFIX_BYTES:]):
                own = frames[frame : frame + self._arrays.decode(raw).arrays]
                frame += len(own)
                try:
                    found.messages += self._one.decode([prefix + bytes(raw), *own])
                except ProtocolError as error:
                    heading = self._heading.decode(raw)
                    found.refused[heading.request_id] = _readable(heading.type, error)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return found if 0 < len(found.refused) <= MAX_REFUSED else None


def _readable(kind: str, error: ProtocolError) -> InputError:
    detail = str(error).removeprefix("not a valid message: ").replace("$[0]", "$", 1)
    return InputError(f"the {kind[:40]} cannot be read: {detail}")
