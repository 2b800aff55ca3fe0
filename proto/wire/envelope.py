"""Envelopes: many messages in one frame, and their large arrays in separate frames, uncopied.

Frames::

    0      b"BT" | u8 version | msgpack array of tagged structs
    1..n   one large array each, raw bytes, in the order of the messages they belong to

The context of a message is the map that :func:`..codec.single_buffer.msgpack_numpy_encoder` writes.
Its array frames are numbered from 1 for each message. So a router can forward a context unchanged,
and the public decoder can read it from the map and the message's frames alone.

Envelopes between workers are *sealed*, because no later message corrects a wrong value at a decode
worker. Format: ``b"BS" | u8 version | u64 digest | msgpack array``, little-endian. The digest
covers all following bytes, including the array frames. An unsealed envelope may contain only
harmless messages (:data:`.messages.UNSEALED`).

Invariant of the decoders: for any received bytes, they raise only DecodeFailed, EnvelopeDamaged,
LimitExceeded or VersionMismatch, and their memory stays within a small multiple of these bytes.
Sizes and counts are checked first, and every value is decoded into a declared type, so no generic
objects are built. Unknown fields, sent by a newer peer, are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_args
from zlib import crc32

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from ..errors import (
    BatonError,
    DecodeFailed,
    EnvelopeDamaged,
    InputError,
    LimitExceeded,
    ProtocolError,
)
from ..limits import (
    INLINE_ARRAY_BYTES,
    MAX_ARRAY_FRAMES,
    MAX_CONTROL_BYTES,
    MAX_EMBEDDING_SIZE,
    MAX_KV_FRAME_BYTES,
    MAX_KV_HEADER_BYTES,
    MAX_MESSAGES_PER_FRAME,
    MAX_NAME_CHARS,
    MAX_NAMED_BYTES,
    MAX_REQUEST_ID_CHARS,
    PROTOCOL_VERSION,
)
from .arrays import ArrayMap, ArrayReader, Frame, array_bytes, array_map, frame_map
from .map_bytes import MapEncoder, attach_context, put_attached, within
from .messages import UNSEALED, KVFrame, Message
from .versions import check_version
from .wire_context import WireContext

MAGIC = b"BT"
SEALED_MAGIC = b"BS"
KV_MAGIC = b"BK"

_PREFIX = MAGIC + bytes([PROTOCOL_VERSION])
_SEALED_PREFIX = SEALED_MAGIC + bytes([PROTOCOL_VERSION])
_DIGEST_BYTES = 8
_CRC_BYTES = 4
_KV_PREFIX = KV_MAGIC + bytes([PROTOCOL_VERSION])
_MOST_FRAMES = MAX_ARRAY_FRAMES + 1
_ARRAY32 = 0xDD
_HEADS = {
    extra: struct.Struct(f"<3s{extra}xB").unpack_from for extra in (0, _DIGEST_BYTES, _CRC_BYTES)
}
"""Reads the prefix and the body's first byte; key: number of bytes between version and body."""
_NIL = b"\xc0"

_set = msgspec.structs.force_setattr

T = TypeVar("T")
Digest = Callable[[Sequence[Frame]], int]
"""Computes the XXH3-64 of consecutive buffers; passed in, so that proto needs no library for it."""


_CARRIERS = {
    kind: name
    for kind in Message.__subclasses__()
    for name in ("context", "embedding")
    if name in kind.__struct_fields__
}
"""The messages that hold arrays, and the field that holds them."""


class EnvelopeEncoder:
    """Encodes batches of messages; one instance per thread.

    ``max_bytes``: limit of the first frame, equal to the receiver's. ``digest``: seals envelopes.
    """

    def __init__(self, max_bytes: int = MAX_CONTROL_BYTES, digest: Digest | None = None) -> None:
        self._max_bytes = max_bytes
        self._digest = digest
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_object)
        self._maps = MapEncoder()

    def encode(self, messages: Sequence[Message]) -> list[Frame]:
        """Return the frames of one ZeroMQ message.

        Frames after the first are views of the messages' own arrays: do not change these arrays
        until the message is sent. Raises LimitExceeded if a receiver would reject the size.
        """
        frames: list[Frame] = [b""]
        carried = _CARRIERS.get
        body = self._encoder.encode(
            [
                one
                if (name := carried(type(one))) is None or getattr(one, name) is None
                else self._packed(one, name, frames)
                for one in messages
            ]
        )
        prefix = _PREFIX
        if self._digest is not None:
            digest = self._digest([body, *frames[1:]])
            prefix = _SEALED_PREFIX + digest.to_bytes(_DIGEST_BYTES, "little")
        size = len(prefix) + len(body)
        if size > self._max_bytes or len(messages) > MAX_MESSAGES_PER_FRAME:
            raise LimitExceeded(
                f"{len(messages)} messages of {len(body)} bytes in one envelope; limits: "
                f"{MAX_MESSAGES_PER_FRAME} messages, {self._max_bytes} bytes"
            )
        frames[0] = prefix + body
        return frames

    def _packed(self, message: Any, name: str, frames: list[Frame]) -> Any:
        """Return the message with its context or embedding encoded; ``name``: of that field.

        Large arrays are appended to ``frames``. A text context that this process made is left to
        msgspec, which encodes it with its message.
        """
        value = getattr(message, name)
        room = MAX_ARRAY_FRAMES + 1 - len(frames)
        if type(value) is WireContext and room:
            known = value.packed
            if known is None:
                tokens = value.tokens.array
                if tokens.nbytes < INLINE_ARRAY_BYTES:
                    return message
                frames.append(array_bytes(tokens))
                return replace(message, arrays=1)
            if not known[1]:
                return replace(message, context=msgspec.Raw(known[0]))
        body, arrays = self._maps.packed(value)
        if len(arrays) > room:
            body, arrays = self._maps.inline(value), ()
        raw = msgspec.Raw(body)
        if not arrays and name == "context":
            return replace(message, context=raw)
        frames += arrays
        return replace(message, **{name: raw, "arrays": len(arrays)})


def _encode_object(value: object) -> object:
    if isinstance(value, np.ndarray):  # the tokens, the only array of a text context
        return array_map(value) if value.nbytes < INLINE_ARRAY_BYTES else frame_map(value, 1)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


class EnvelopeDecoder(Generic[T]):
    """Decodes envelopes of one direction: ``EnvelopeDecoder[ClientToRouter](ClientToRouter)``.

    ``max_bytes``: limit of the first frame. ``digest``: checks the seals, which are then required.
    ``damaged``: number of envelopes with a wrong digest.
    """

    def __init__(
        self, union: object, max_bytes: int = MAX_CONTROL_BYTES, digest: Digest | None = None
    ) -> None:
        decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[union])  # type: ignore[valid-type]
        self._decode = decoder.decode
        members = get_args(union) or (union,)
        self._carriers = _CARRIERS.keys() & members
        self._max_bytes = max_bytes
        self._digest = digest
        self.damaged = 0

    def decode(self, frames: Sequence[Frame]) -> list[T]:
        """Return the messages of one envelope; arrays are read-only views of the frames.

        Raises only DecodeFailed, EnvelopeDamaged, LimitExceeded or VersionMismatch.
        """
        try:
            body, sealed = self._body(frames)
            messages = self._decode(body)
            used = 0
            if self._carriers:
                attach_of = _ATTACH.get
                for message in messages:
                    attach = attach_of(type(message))
                    if attach is not None:
                        used += attach(message, frames, used)
            if used != len(frames) - 1:  # each frame belongs to one array
                raise DecodeFailed(f"{len(frames) - 1} array frames, but {used} are used")
            if self._digest is not None and not sealed:
                _check_harmless(messages)
        except Exception as error:
            _fail(error)
        return messages

    def _body(self, frames: Sequence[Frame]) -> tuple[Frame, bool]:
        """Return the msgpack array, and whether it was sealed."""
        if not 0 < len(frames) <= _MOST_FRAMES:
            raise _wrong_count(frames)
        frame = frames[0]
        # Copying a short message takes less time than creating a view.
        short = type(frame) is bytes and len(frame) <= INLINE_ARRAY_BYTES
        first = frame if short else memoryview(frame)
        if self._digest is None or first[:2] != SEALED_MAGIC:
            return _checked_body(first, _PREFIX, self._max_bytes), False
        body = _checked_body(first, _SEALED_PREFIX, self._max_bytes, _DIGEST_BYTES)
        self._verify(int.from_bytes(first[3 : 3 + _DIGEST_BYTES], "little"), [body, *frames[1:]])
        return body, True

    def _verify(self, digest: int, parts: Sequence[Frame]) -> None:
        if self._digest is not None and self._digest(parts) != digest:
            self.damaged += 1
            raise EnvelopeDamaged("the envelope is not what its sender sealed")


_decode_array = msgspec.msgpack.Decoder(ArrayMap).decode


def _attach_embedding(message: Any, frames: Sequence[Frame], base: int) -> int:
    """Replace an encoded embedding by its array or None; return the number of frames it used."""
    raw = message.embedding
    if raw is None:
        return 0
    vector, used = None, 0
    if memoryview(raw) != _NIL:
        reader = ArrayReader(frames, base)
        try:
            vector = reader.read(_decode_array(raw))
        except msgspec.ValidationError as error:
            raise within(error, "embedding") from None
        if vector.dtype != np.float32 or vector.ndim != 1 or len(vector) > MAX_EMBEDDING_SIZE:
            raise DecodeFailed(
                f"an embedding of {vector.dtype} and shape {vector.shape}; expected float32 and "
                f"at most {MAX_EMBEDDING_SIZE} values"
            )
        used = reader.used()
    put_attached(message, "embedding", vector, used)
    return used


_ATTACH: dict[type, Callable[[Any, Sequence[Frame], int], int]] = {
    kind: attach_context if name == "context" else _attach_embedding
    for kind, name in _CARRIERS.items()
}


def _check_harmless(messages: list[T]) -> None:
    for message in messages:
        if type(message) not in UNSEALED:
            raise DecodeFailed(f"{type(message).__name__} must be in a sealed envelope")


def _wrong_count(frames: Sequence[Frame]) -> ProtocolError:
    if not frames:
        return DecodeFailed("a message without frames")
    return LimitExceeded(f"{len(frames)} frames, at most {_MOST_FRAMES} are allowed")


def _checked_body(view: Frame, prefix: bytes, max_bytes: int, extra: int = 0) -> Frame:
    """Check magic, version, size and number of messages; return the bytes after the prefix.

    ``extra``: bytes between version and body.
    """
    size = len(view)
    if size > max_bytes:
        raise LimitExceeded(f"a frame of {size} bytes, at most {max_bytes} are allowed")
    if size < 4 + extra:
        raise DecodeFailed("the frame does not start like a message of this protocol")
    start, first = _HEADS[extra](view)
    if start != prefix:
        if start[:2] != prefix[:2]:
            raise DecodeFailed("the frame does not start like a message of this protocol")
        check_version(start[2])
    body = view[3 + extra :]
    if first == _ARRAY32 and int.from_bytes(body[1:5], "big") > MAX_MESSAGES_PER_FRAME:
        raise LimitExceeded(f"more than {MAX_MESSAGES_PER_FRAME} messages in one envelope")
    return body


def _fail(error: Exception) -> NoReturn:
    """Raise ``error`` as a ProtocolError.

    msgspec also raises UnicodeDecodeError, RecursionError and MemoryError.
    """
    if isinstance(error, ProtocolError):
        raise error
    if isinstance(error, (RecursionError, MemoryError)):
        raise LimitExceeded("a message is nested too deep or too large") from None
    raise DecodeFailed(f"not a valid message: {str(error)[:200]}") from None


# --------------------------------------------------------------------------- valid messages
# A peer puts all messages of a turn into one envelope. An invalid message must not invalidate the
# others, and its sender must learn which request failed.

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
                    found.refused[heading.request_id] = _invalid(heading.type, error)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return found if 0 < len(found.refused) <= MAX_REFUSED else None


def _invalid(kind: str, error: ProtocolError) -> InputError:
    detail = str(error).removeprefix("not a valid message: ").replace("$[0]", "$", 1)
    return InputError(f"the {kind[:40]} cannot be read: {detail}")


# --------------------------------------------------------------------------- KV frames

_KV_ENCODER = msgspec.msgpack.Encoder()
_KV_DECODER = msgspec.msgpack.Decoder(KVFrame)


def encode_kv_header(header: KVFrame) -> bytes:
    """Return the first frame of a data message.

    Format: ``b"BK" | u8 version | u32 CRC-32 | msgpack header``. The payload's checksum does not
    protect its destination, so the header has a separate checksum.
    """
    body = _KV_ENCODER.encode(header)
    return _KV_PREFIX + crc32(body).to_bytes(_CRC_BYTES, "little") + body


def decode_kv_header(frame: Frame) -> KVFrame:
    """Decode and check the header of a data message. Raises the same errors as envelopes."""
    try:
        view = memoryview(frame)
        body = _checked_body(view, _KV_PREFIX, MAX_KV_HEADER_BYTES, _CRC_BYTES)
        if crc32(body) != int.from_bytes(view[3 : 3 + _CRC_BYTES], "little"):
            raise EnvelopeDamaged("the header of a KV frame is not what its sender wrote")
        header = _KV_DECODER.decode(body)
        most = MAX_NAMED_BYTES if header.shared else MAX_KV_FRAME_BYTES
        if header.nbytes > most:
            raise LimitExceeded(f"a KV frame of {header.nbytes} bytes, at most {most} are allowed")
    except Exception as error:
        _fail(error)
    return header
