"""Envelopes: many messages in one frame, large arrays beside them without a copy.

Frames::

    0      b"BT" | u8 version | msgpack array of tagged structs
    1..n   one large array each, raw bytes (:mod:`.arrays` describes them inside frame 0)

Invariant of the decoders: whatever bytes come in, only DecodeFailed, LimitExceeded or
VersionMismatch comes out, and memory stays within a small multiple of the bytes received:
sizes and counts are checked first, and every value is decoded into a declared type, so
nothing generic is ever built. Unknown fields, of a newer peer, are skipped unbuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NoReturn, TypeVar, get_args

import msgspec
import numpy as np

from .arrays import EXT_ARRAY, Frame, array_header, plain, read_array
from .errors import DecodeFailed, LimitExceeded, ProtocolError, VersionMismatch
from .limits import (
    INLINE_ARRAY_BYTES,
    MAX_ARRAY_FRAMES,
    MAX_CONTROL_BYTES,
    MAX_KV_FRAME_BYTES,
    MAX_KV_HEADER_BYTES,
    MAX_MESSAGES_PER_FRAME,
    PROTOCOL_VERSION,
)
from .messages import KVFrame, Message

MAGIC = b"BT"
KV_MAGIC = b"BK"

_PREFIX = MAGIC + bytes([PROTOCOL_VERSION])
_KV_PREFIX = KV_MAGIC + bytes([PROTOCOL_VERSION])
_ARRAY32 = 0xDD

T = TypeVar("T")


class EnvelopeEncoder:
    """Encodes batches of messages; one instance per thread.

    ``max_bytes``: limit of the first frame, as the receiver's.
    """

    def __init__(self, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_object)
        self._frames: list[Frame] = []

    def encode(self, messages: Sequence[Message]) -> list[Frame]:
        """Frames of one ZeroMQ message.

        Frames after the first are views of the messages' own arrays: leave those unchanged
        until the message is sent. LimitExceeded if a receiver would refuse the size.
        """
        frames: list[Frame] = [b""]
        self._frames = frames
        body = self._encoder.encode(messages)
        if len(body) + 3 > self._max_bytes or len(messages) > MAX_MESSAGES_PER_FRAME:
            raise LimitExceeded(f"{len(messages)} messages of {len(body)} bytes in one envelope")
        frames[0] = _PREFIX + body
        self._frames = []  # keeps no array alive
        return frames

    def _encode_object(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be part of a message")

    def _encode_array(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        array = plain(array)
        frames = self._frames
        if array.nbytes < INLINE_ARRAY_BYTES or len(frames) > MAX_ARRAY_FRAMES:
            return msgspec.msgpack.Ext(EXT_ARRAY, array_header(array, 0) + array.tobytes())
        header = array_header(array, len(frames))
        frames.append(array.data.cast("B"))
        return msgspec.msgpack.Ext(EXT_ARRAY, header)


class EnvelopeDecoder(Generic[T]):
    """Decodes envelopes of one direction: ``EnvelopeDecoder[ClientToRouter](ClientToRouter)``.

    ``max_bytes``: limit of the first frame.
    """

    def __init__(self, union: object, max_bytes: int = MAX_CONTROL_BYTES):
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[union])  # type: ignore[valid-type]
        members = get_args(union) or (union,)
        self._carriers = frozenset(
            cls for cls in members if "context" in getattr(cls, "__struct_fields__", ())
        )
        self._max_bytes = max_bytes

    def decode(self, frames: Sequence[Frame]) -> list[T]:
        """Messages of one envelope; arrays are read-only views of the frames.

        Raises DecodeFailed, LimitExceeded or VersionMismatch and nothing else.
        """
        try:
            messages = self._decoder.decode(self._body(frames))
            self._attach_arrays(messages, frames)
        except Exception as error:
            _fail(error)
        return messages

    def _body(self, frames: Sequence[Frame]) -> memoryview:
        if not frames:
            raise DecodeFailed("a message without frames")
        if len(frames) > MAX_ARRAY_FRAMES + 1:
            raise LimitExceeded(f"{len(frames)} frames, at most {MAX_ARRAY_FRAMES + 1} are allowed")
        return _checked_body(memoryview(frames[0]), MAGIC, self._max_bytes)

    def _attach_arrays(self, messages: list[T], frames: Sequence[Frame]) -> None:
        """Replace the ext in each context by its array; each frame belongs to one array."""
        carriers = self._carriers
        used = 0
        if carriers:
            for message in messages:
                if type(message) in carriers:
                    used += _attach(message.context, frames)  # type: ignore[attr-defined]
        if used != len(frames) - 1:
            raise DecodeFailed(f"{len(frames) - 1} array frames, but {used} are referred to")


def _attach(context: object, frames: Sequence[Frame]) -> int:
    ext = context.tokens  # type: ignore[attr-defined]
    if ext.code != EXT_ARRAY:
        raise DecodeFailed(f"ext code {ext.code} is unknown")
    array, frame = read_array(ext.data, frames)
    msgspec.structs.force_setattr(context, "tokens", array)  # type: ignore[arg-type]
    return 1 if frame else 0


def _checked_body(view: memoryview, magic: bytes, max_bytes: int) -> memoryview:
    """What follows the prefix, once magic, version, size and count of messages are right."""
    if len(view) > max_bytes:
        raise LimitExceeded(f"a frame of {len(view)} bytes, at most {max_bytes} are allowed")
    if len(view) < 4 or view[0] != magic[0] or view[1] != magic[1]:
        raise DecodeFailed("the frame does not start like a message of this protocol")
    if view[2] != PROTOCOL_VERSION:
        raise VersionMismatch(f"the peer speaks version {view[2]}, this is {PROTOCOL_VERSION}")
    if view[3] == _ARRAY32 and int.from_bytes(view[4:8], "big") > MAX_MESSAGES_PER_FRAME:
        raise LimitExceeded(f"more than {MAX_MESSAGES_PER_FRAME} messages in one envelope")
    return view[3:]


def _fail(error: Exception) -> NoReturn:
    """The one wrapper: msgspec lets UnicodeDecodeError and RecursionError out as well."""
    if isinstance(error, ProtocolError):
        raise error
    if isinstance(error, (RecursionError, MemoryError)):
        raise LimitExceeded("a message is nested too deep or too large") from None
    raise DecodeFailed(f"not a valid message: {str(error)[:200]}") from None


_KV_ENCODER = msgspec.msgpack.Encoder()
_KV_DECODER = msgspec.msgpack.Decoder(KVFrame)


def encode_kv_header(header: KVFrame) -> bytes:
    """First frame of a data message."""
    return _KV_PREFIX + _KV_ENCODER.encode(header)


def decode_kv_header(frame: Frame) -> KVFrame:
    """Header of a data message, with payload size within the limit; errors as for envelopes."""
    try:
        header = _KV_DECODER.decode(_checked_body(memoryview(frame), KV_MAGIC, MAX_KV_HEADER_BYTES))
        if header.nbytes > MAX_KV_FRAME_BYTES:
            raise LimitExceeded(
                f"a KV frame of {header.nbytes} bytes, at most {MAX_KV_FRAME_BYTES} are allowed"
            )
    except Exception as error:
        _fail(error)
    return header
