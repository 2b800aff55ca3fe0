"""Conversion between the maps of contexts and bytes, and the digest of a map.

Arrays of a few KiB or more can be separate frames, which the map numbers from 1 (:mod:`.arrays`),
so they are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from ..errors import DecodeFailed
from ..ids import KEY_BYTES
from .arrays import Array, ArrayReader, Frame, array_map, read_array
from .log_prob_maps import read_queued
from .wire_context import (
    AnyWireContext,
    WireContext,
    WireImage,
    WirePixelContext,
    WireSpeechContext,
    WireTokens,
    WireVisionContext,
)

_set = msgspec.structs.force_setattr


class MapEncoder:
    """Encodes maps and arrays; one instance per thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_object)
        self._frames: list[Frame] | None = None

    def packed(self, value: WireContext | Array) -> tuple[Frame, Sequence[Frame]]:
        """Return the encoded map and views of its large arrays, which must not change until sent.

        The bytes are cached in the map, so a forwarded map is not encoded again.
        """
        known = value.packed if isinstance(value, WireContext) else None
        if known is None:
            frames: list[Frame] = [b""]
            self._frames = frames
            try:
                body = self._encoder.encode(value)
            finally:
                self._frames = None  # keeps no array alive
            known = body, frames[1:]
            if isinstance(value, WireContext):
                _set(value, "packed", known)
        return known

    def inline(self, wire: WireContext | Array) -> bytes:
        """Return the encoded map with all arrays inside."""
        return self._encoder.encode(wire)

    def _encode_object(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return array_map(value, self._frames)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be part of a message")


_decode_map = msgspec.msgpack.Decoder(AnyWireContext).decode


def attach_context(message: Any, frames: Sequence[Frame], base: int) -> int:
    """Decode a message's context from the map's bytes, and read its arrays from the frames.

    Returns the number of frames after ``base`` that belong to it. The bytes are copied, so that
    they keep no envelope alive, and cached for forwarding; frames are not copied. Shared memory is
    refused. Raises ProtocolError or an error of msgspec.
    """
    body = bytes(message.context)
    try:
        wire = _decode_map(body)
        tokens = wire.tokens
        sent: Any = tokens.array
        used: int = sent.frame
        if used <= 1 and has_one_array(wire):
            _set(tokens, "array", read_array(sent, frames, base))
            taken: Sequence[Frame] = (frames[base + 1],) if used else ()
        else:
            reader = ArrayReader(frames, base)
            put_arrays(wire, reader)
            used = reader.used()
            taken = frames[base + 1 : base + 1 + used]
    except msgspec.ValidationError as error:
        raise within(error, "context") from None
    _set(wire, "packed", (body, taken))
    put_attached(message, "context", wire, used)
    return used


def has_one_array(wire: WireContext) -> bool:
    """Return True if the tokens, without spare room, are the only array of a decoded map."""
    return (
        type(wire) is WireContext
        and wire._log_probabilities_data is None
        and wire.tokens._current_length is UNSET
    )


def within(error: msgspec.ValidationError, name: str) -> msgspec.ValidationError:
    """Return the error of a message's part as an error of the message."""
    return msgspec.ValidationError(str(error).replace("`$", f"`$.{name}", 1))


def put_attached(message: Any, name: str, value: object, used: int) -> None:
    """Replace a message's bytes by their value. Raises DecodeFailed for unused array frames."""
    if used != message.arrays:
        raise DecodeFailed(f"a message with {message.arrays} array frames refers to {used}")
    _set(message, name, value)
    if used:
        _set(message, "arrays", 0)  # counts frames of the envelope only


def put_arrays(wire: WireContext, reader: ArrayReader) -> None:
    """Replace the array maps and queued log-probabilities of a decoded map by their values."""
    put_tokens(wire.tokens, reader)
    if wire._log_probabilities_data is not None:
        _set(wire, "_log_probabilities_data", read_queued(wire._log_probabilities_data))
    kind = type(wire)
    if kind is not WireContext:
        for name in _ARRAY_FIELDS[kind]:
            if (value := getattr(wire, name)) is not None:
                _set(wire, name, _with_arrays(value, reader))


def put_tokens(tokens: WireTokens, reader: ArrayReader) -> None:
    """Read the array of a decoded token buffer, without the spare room after the tokens."""
    array: Any = tokens.array
    array = reader.read(array)
    length = tokens._current_length
    if length is not UNSET:
        if length > len(array):
            raise DecodeFailed(f"{length} tokens, but {len(array)} came")
        array = array[:length]  # other encoders also send the spare room
        _set(tokens, "_current_length", UNSET)
    _set(tokens, "array", array)


def _with_arrays(value: Any, reader: ArrayReader) -> Any:
    kind = type(value)
    if kind is dict:
        for name, item in value.items():  # only values change, so the dict can stay
            value[name] = reader.read(item)
    elif kind is list:
        value[:] = [_with_arrays(item, reader) for item in value]
    elif kind is WireImage:
        _set(value, "pixel_values", reader.read(value.pixel_values))
    elif kind is WireTokens:
        put_tokens(value, reader)
    else:
        return reader.read(value)
    return value


_ARRAY_FIELDS: dict[type[WireContext], tuple[str, ...]] = {
    WireVisionContext: ("images", "pixel_values", "extra_model_args"),
    WireSpeechContext: (
        "audio_prompt_tokens",
        "buffer_speech_tokens",
        "audio_buffer",
        "_speech_tokens",
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
"""The fields of the other kinds that hold arrays, besides ``tokens``."""


# --------------------------------------------------------------------------- digest


def _array_content(obj: object) -> object:
    if isinstance(obj, np.ndarray):
        flat = np.ascontiguousarray(obj)
        return [flat.dtype.str, list(flat.shape), flat.data.cast("B") if flat.size else b""]
    raise TypeError(f"{type(obj).__name__} has no place in a context digest")


_CONTENT = msgspec.msgpack.Encoder(enc_hook=_array_content)


def context_digest(wire: WireContext, *options: str | bool | None) -> bytes:
    """Return a 16-byte digest of everything that determines a request's continuation.

    ``options``: the request's fields beside the context (pool, pin, fallback). Two submissions of
    one id with equal digests are the same request.
    """
    content = _CONTENT.encode((wire, options))
    return blake2b(content, digest_size=KEY_BYTES, person=b"baton-context").digest()
