"""Envelopes: many messages in one frame, large arrays beside them without a copy.

Frames::

    0      b"BT" | u8 version | msgpack array of tagged structs
    1..n   one large array each, raw bytes (:mod:`.arrays` describes them inside frame 0)

Between workers envelopes are *sealed*, because what a decode worker believes nobody asks
again: ``b"BS" | u8 version | u64 digest | msgpack array``, little-endian, with the digest of
all that follows, array frames included. Without a seal only messages are heard that cannot
do harm (:data:`.messages.UNSEALED`).

Invariant of the decoders: whatever bytes come in, only DecodeFailed, EnvelopeDamaged,
LimitExceeded or VersionMismatch comes out, and memory stays within a small multiple of the
bytes received: sizes and counts are checked first, and every value is decoded into a declared
type, so nothing generic is ever built. Unknown fields, of a newer peer, are skipped unbuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar, get_args
from zlib import crc32

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from .arrays import EXT_ARRAY, Array, Frame, array_header, plain, read_array
from .errors import (
    DecodeFailed,
    EnvelopeDamaged,
    LimitExceeded,
    ProtocolError,
)
from .limits import (
    INLINE_ARRAY_BYTES,
    MAX_ARRAY_FRAMES,
    MAX_CONTROL_BYTES,
    MAX_EMBEDDING_SIZE,
    MAX_KV_FRAME_BYTES,
    MAX_KV_HEADER_BYTES,
    MAX_MESSAGES_PER_FRAME,
    PROTOCOL_VERSION,
)
from .messages import UNSEALED, KVFrame, Message
from .versions import check_version
from .wire import (
    WireContext,
    WireImage,
    WirePixelContext,
    WireSpeechContext,
    WireVisionContext,
)

MAGIC = b"BT"
SEALED_MAGIC = b"BS"
KV_MAGIC = b"BK"

_PREFIX = MAGIC + bytes([PROTOCOL_VERSION])
_SEALED_PREFIX = SEALED_MAGIC + bytes([PROTOCOL_VERSION])
_DIGEST_BYTES = 8
_CRC_BYTES = 4
_KV_PREFIX = KV_MAGIC + bytes([PROTOCOL_VERSION])
_ARRAY32 = 0xDD

_set = msgspec.structs.force_setattr

T = TypeVar("T")
Digest = Callable[[Sequence[Frame]], int]
"""XXH3-64 of buffers one after the other; handed in, so proto needs no library for it."""


class EnvelopeEncoder:
    """Encodes batches of messages; one instance per thread.

    ``max_bytes``: limit of the first frame, as the receiver's. ``digest``: seals them.
    """

    def __init__(self, max_bytes: int = MAX_CONTROL_BYTES, digest: Digest | None = None) -> None:
        self._max_bytes = max_bytes
        self._digest = digest
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
        prefix = _PREFIX
        if self._digest is not None:
            digest = self._digest([body, *frames[1:]])
            prefix = _SEALED_PREFIX + digest.to_bytes(_DIGEST_BYTES, "little")
        size = len(prefix) + len(body)
        if size > self._max_bytes or len(messages) > MAX_MESSAGES_PER_FRAME:
            raise LimitExceeded(f"{len(messages)} messages of {len(body)} bytes in one envelope")
        frames[0] = prefix + body
        self._frames = []  # keeps no array alive
        return frames

    def _encode_object(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be part of a message")

    def _encode_array(self, array: np.ndarray) -> Ext:
        array = plain(array)
        frames = self._frames
        if array.nbytes < INLINE_ARRAY_BYTES or len(frames) > MAX_ARRAY_FRAMES:
            return Ext(EXT_ARRAY, array_header(array, 0) + array.tobytes())
        header = array_header(array, len(frames))
        frames.append(array.data.cast("B"))
        return Ext(EXT_ARRAY, header)


class EnvelopeDecoder(Generic[T]):
    """Decodes envelopes of one direction: ``EnvelopeDecoder[ClientToRouter](ClientToRouter)``.

    ``max_bytes``: limit of the first frame. ``digest``: envelopes must be sealed with it;
    ``damaged`` counts those that were not what their sender had sealed.
    """

    def __init__(
        self, union: object, max_bytes: int = MAX_CONTROL_BYTES, digest: Digest | None = None
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[union])  # type: ignore[valid-type]
        members = get_args(union) or (union,)
        fields = {cls: getattr(cls, "__struct_fields__", ()) for cls in members}
        self._carriers = frozenset(cls for cls in members if "context" in fields[cls])
        self._vectors = frozenset(cls for cls in members if "embedding" in fields[cls])
        self._max_bytes = max_bytes
        self._digest = digest
        self.damaged = 0

    def decode(self, frames: Sequence[Frame]) -> list[T]:
        """Messages of one envelope; arrays are read-only views of the frames.

        Raises DecodeFailed, EnvelopeDamaged, LimitExceeded or VersionMismatch, nothing else.
        """
        try:
            body, sealed = self._body(frames)
            messages = self._decoder.decode(body)
            self._attach_arrays(messages, frames)
            if self._digest is not None and not sealed:
                _check_harmless(messages)
        except Exception as error:
            _fail(error)
        return messages

    def _body(self, frames: Sequence[Frame]) -> tuple[memoryview, bool]:
        """The msgpack array, and whether it was sealed."""
        if not frames:
            raise DecodeFailed("a message without frames")
        if len(frames) > MAX_ARRAY_FRAMES + 1:
            raise LimitExceeded(f"{len(frames)} frames, at most {MAX_ARRAY_FRAMES + 1} are allowed")
        first = memoryview(frames[0])
        if self._digest is None or first[:2] != SEALED_MAGIC:
            return _checked_body(first, MAGIC, self._max_bytes), False
        body = _checked_body(first, SEALED_MAGIC, self._max_bytes, _DIGEST_BYTES)
        self._verify(int.from_bytes(first[3 : 3 + _DIGEST_BYTES], "little"), [body, *frames[1:]])
        return body, True

    def _verify(self, digest: int, parts: Sequence[Frame]) -> None:
        if self._digest is not None and self._digest(parts) != digest:
            self.damaged += 1
            raise EnvelopeDamaged("the envelope is not what its sender sealed")

    def _attach_arrays(self, messages: list[T], frames: Sequence[Frame]) -> None:
        """Replace the ext in each context by its array; each frame belongs to one array."""
        carriers, vectors = self._carriers, self._vectors
        used = 0
        if carriers or vectors:
            for message in messages:
                if type(message) in vectors:
                    used += _attach_vector(message, frames)
                elif type(message) in carriers:
                    used += attach_arrays(message.context, frames)  # type: ignore[attr-defined]
        self._check_used(used, frames)

    def _check_used(self, used: int, frames: Sequence[Frame]) -> None:
        if used != len(frames) - 1:
            raise DecodeFailed(f"{len(frames) - 1} array frames, but {used} are referred to")


def attach_arrays(context: WireContext, frames: Sequence[Frame]) -> int:
    """Put the arrays in place of their exts; how many frames they took."""
    array, used = _array_of(context.tokens, frames)
    _set(context, "tokens", array)
    kind = type(context)
    if kind is not WireContext:
        for name in _ARRAY_FIELDS[kind]:
            if value := getattr(context, name):
                value, more = with_arrays(value, frames)
                _set(context, name, value)
                used += more
    return used


def _array_of(ext: Any, frames: Sequence[Frame]) -> tuple[Array, int]:
    if ext.code != EXT_ARRAY:
        raise DecodeFailed(f"ext code {ext.code} is unknown")
    array, frame = read_array(ext.data, frames)
    return array, 1 if frame else 0


def with_arrays(value: Any, frames: Sequence[Frame]) -> tuple[Any, int]:
    """The value with arrays for exts, and the number of frames they took."""
    kind = type(value)
    if kind is Ext:
        return _array_of(value, frames)
    used = 0
    if kind is dict:
        for name, ext in value.items():  # only values change, so the dict can stay
            value[name], more = _array_of(ext, frames)
            used += more
    elif kind is list:
        for index, item in enumerate(value):
            value[index], more = with_arrays(item, frames)
            used += more
    else:
        name = "pixels" if kind is WireImage else "ids"
        array, used = _array_of(getattr(value, name), frames)
        _set(value, name, array)
    return value, used


_ARRAY_FIELDS: dict[type[WireContext], tuple[str, ...]] = {
    WireVisionContext: ("images", "pixel_values", "extra_model_args"),
    WireSpeechContext: (
        "audio_prompt_tokens",
        "buffer_speech_tokens",
        "audio_buffer",
        "speech_tokens",
    ),
    WirePixelContext: (
        "mask",
        "tokens_2",
        "negative_tokens",
        "negative_tokens_2",
        "extra_params",
        "timesteps",
        "sigmas",
        "latents",
        "latent_image_ids",
        "guidance",
    ),
}
"""Where the other kinds hold arrays, besides ``tokens``."""


def _attach_vector(message: object, frames: Sequence[Frame]) -> int:
    """Put the vector in place of its ext; it must be what it says it is."""
    ext = message.embedding  # type: ignore[attr-defined]
    if ext is None:
        return 0
    array, used = _array_of(ext, frames)
    if array.dtype != np.float32 or array.ndim != 1 or len(array) > MAX_EMBEDDING_SIZE:
        raise DecodeFailed(f"a vector is {array.dtype} of shape {array.shape}")
    _set(message, "embedding", array)  # type: ignore[arg-type]
    return used


def _check_harmless(messages: list[T]) -> None:
    for message in messages:
        if type(message) not in UNSEALED:
            raise DecodeFailed(f"{type(message).__name__} came without the digest it needs")


def _checked_body(view: memoryview, magic: bytes, max_bytes: int, extra: int = 0) -> memoryview:
    """What follows the prefix, once magic, version, size and count of messages are right.

    ``extra``: bytes between version and body.
    """
    if len(view) > max_bytes:
        raise LimitExceeded(f"a frame of {len(view)} bytes, at most {max_bytes} are allowed")
    if len(view) < 4 + extra or view[0] != magic[0] or view[1] != magic[1]:
        raise DecodeFailed("the frame does not start like a message of this protocol")
    if view[2] != PROTOCOL_VERSION:
        check_version(view[2])
    body = view[3 + extra :]
    if body[0] == _ARRAY32 and int.from_bytes(body[1:5], "big") > MAX_MESSAGES_PER_FRAME:
        raise LimitExceeded(f"more than {MAX_MESSAGES_PER_FRAME} messages in one envelope")
    return body


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
    """First frame of a data message: ``b"BK" | u8 version | u32 CRC-32 | msgpack header``.

    The payload's checksum says nothing about where the payload belongs, so the header has
    its own.
    """
    body = _KV_ENCODER.encode(header)
    return _KV_PREFIX + crc32(body).to_bytes(_CRC_BYTES, "little") + body


def decode_kv_header(frame: Frame) -> KVFrame:
    """Header of a data message, with payload size within the limit; errors as for envelopes."""
    try:
        view = memoryview(frame)
        body = _checked_body(view, KV_MAGIC, MAX_KV_HEADER_BYTES, _CRC_BYTES)
        if crc32(body) != int.from_bytes(view[3 : 3 + _CRC_BYTES], "little"):
            raise EnvelopeDamaged("the header of a KV frame is not what its sender wrote")
        header = _KV_DECODER.decode(body)
        if header.nbytes > MAX_KV_FRAME_BYTES:
            raise LimitExceeded(
                f"a KV frame of {header.nbytes} bytes, at most {MAX_KV_FRAME_BYTES} are allowed"
            )
    except Exception as error:
        _fail(error)
    return header
