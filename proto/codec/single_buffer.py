"""The public codec: any declared type as one msgpack message, arrays as maps.

An array is a map (:mod:`..wire.arrays`): its bytes in the message, beside it as a frame, or in
shared memory. A context is the map of its fields (:mod:`..wire.wire_context`) with its class under
``type``, so a subclass keeps its class where its base is declared. The processes of a cluster
exchange contexts in this form.

The decoder also reads a context's map without ``type``, as the declared class, and the earlier form
of a context (:mod:`..compat.earlier_maps`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import is_not
from typing import Any, Generic, TypeVar, Union

import msgspec
import numpy as np

from ..compat.earlier_maps import EARLIER_MAPS
from ..contexts.outputs import LogProbabilities
from ..contexts.pixels import PixelContext
from ..contexts.speech import TTSContext
from ..contexts.text import TextContext
from ..contexts.tokens import TokenBuffer
from ..contexts.vision import TextAndVisionContext
from ..errors import DecodeFailed, LimitExceeded
from ..limits import MAX_ARRAY_BYTES, MAX_ARRAY_FRAMES
from ..sampling import SamplingParams
from ..wire.arrays import Array, ArrayReader, Frame, OpenShared, array_map, read_array
from ..wire.context_maps import Write, from_map, to_map, token_buffer
from ..wire.log_prob_maps import LogProbMaps, build_log_probs
from ..wire.map_bytes import has_one_array, put_arrays, put_tokens
from ..wire.wire_context import (
    WireContext,
    WirePixelContext,
    WireSampling,
    WireSpeechContext,
    WireTokens,
    WireVisionContext,
)
from .decode_structs import Build, DecodeStructs
from .plain_size import (
    FACTOR,
    MARGIN,
    SMALL,
    check_plain_size,
    has_sets,
    has_small_numbers,
    is_plain,
    may_grow,
)
from .shared_memory import SharedArrays

T = TypeVar("T")

_MAPS: dict[type, type[WireContext]] = {
    TextContext: WireContext,
    TextAndVisionContext: WireVisionContext,
    TTSContext: WireSpeechContext,
    PixelContext: WirePixelContext,
}
"""The registry: only these are ever built for a ``type`` that a message names."""

_set = msgspec.structs.force_setattr

_FACTOR, _MARGIN = 24, 1 << 19
"""A message may take so many times its bytes, and so many more, in objects that are counted."""
_LEAVES = {int, float, bool, str, bytes, type(None), np.ndarray}
_SETTERS = (object.__setattr__, _set)
"""Set a field, also a frozen one, of a dataclass and of a struct."""

# --------------------------------------------------------------------------- encoding


def _encode_object(value: object, write: Write) -> object:
    if isinstance(value, np.ndarray):
        return write(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _encode_shared(array: Array, threshold: int, shared: SharedArrays) -> dict[str, object]:
    """The map of an array, large ones in shared memory while there is room."""
    inline = array_map(array)
    name = shared.put(np.ascontiguousarray(array)) if array.nbytes >= threshold else None
    if name is None:
        return inline
    return {"__shm__": True, "name": name, "shape": inline["shape"], "dtype": inline["dtype"]}


def _mapped(value: Any, write: Write) -> Any:
    """The value with maps for the contexts in it, whose token ids are written already.

    msgspec writes the fields of a dataclass without asking, so it is given another one.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in _MAPS or isinstance(value, (TextContext, PixelContext)):
        return to_map(value, write)
    if kind in (list, tuple):
        if _LEAVES.issuperset(map(type, value)):
            return value
        parts = [_mapped(item, write) for item in value]
        return kind(parts) if any(map(is_not, parts, value)) else value
    if kind is dict:
        if _LEAVES.issuperset(map(type, value.values())):
            return value
        pairs = {key: _mapped(item, write) for key, item in value.items()}
        return pairs if any(map(is_not, pairs.values(), value.values())) else value
    names: Iterable[str]
    names = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__dataclass_fields__", ())
    items = {name: getattr(value, name, None) for name in names}
    changed = {
        name: new for name, item in items.items() if (new := _mapped(item, write)) is not item
    }
    if changed:
        value = copy(value)
        for name, new in changed.items():
            _SETTERS[isinstance(value, msgspec.Struct)](value, name, new)
    return value


class NumpyEncoder:
    """Callable that encodes one object; see :func:`msgpack_numpy_encoder`."""

    def __init__(self, use_shared_memory: bool, shared_memory_threshold: int) -> None:
        self._use_shared_memory = use_shared_memory
        self._shared_memory_threshold = shared_memory_threshold
        encode: Write = array_map
        self._shared = SharedArrays()
        if use_shared_memory:
            encode = partial(_encode_shared, threshold=shared_memory_threshold, shared=self._shared)
        self._write = encode
        self._encoder = msgspec.msgpack.Encoder(enc_hook=partial(_encode_object, write=encode))

    def __call__(self, obj: object) -> bytes:
        """Encode ``obj`` as one buffer; TypeError names the type that cannot be encoded."""
        self._shared.begin()
        return self._encoder.encode(_mapped(obj, self._write))

    def frames(self, obj: object) -> list[Frame]:
        """Encode ``obj`` as a message, followed by a view of each large array.

        Leave the arrays unchanged until all is sent.
        """
        frames: list[Frame] = [b""]

        write = partial(array_map, frames=frames)
        hook = partial(_encode_object, write=write)
        frames[0] = msgspec.msgpack.encode(_mapped(obj, write), enc_hook=hook)
        return frames

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._use_shared_memory, self._shared_memory_threshold)


# --------------------------------------------------------------------------- decoding


def _build_context(value: WireContext, reader: ArrayReader) -> Any:
    put_arrays(value, reader)
    return from_map(value)


def _build_tokens(value: WireTokens, reader: ArrayReader) -> TokenBuffer:
    put_tokens(value, reader)
    return token_buffer(value)


_PARAMS_BYTES = 1500
_BIAS_BYTES = 160
"""Memory of decoded sampling parameters, which may be a single byte in a message."""


class _Room(threading.local):
    """Bytes that the objects of the message being decoded may still take."""

    left = 0


_room = _Room()


def _count(nbytes: int) -> None:
    """Take room for an object that will be built; LimitExceeded if no room is left."""
    _room.left -= nbytes
    if _room.left < 0:
        raise LimitExceeded("the objects of a message would be much larger than its bytes")


class _CountedSampling(WireSampling, frozen=True, gc=False):
    """Sampling parameters in a user's own type: counted before they are built."""

    def __post_init__(self) -> None:
        _count(_PARAMS_BYTES + _BIAS_BYTES * len(self.logit_bias or ()))


def _build_params(value: WireSampling, _: ArrayReader) -> SamplingParams:
    return SamplingParams.from_wire(value)


def _build_entry(value: LogProbMaps, _: ArrayReader) -> LogProbabilities:
    return build_log_probs(value)


_KNOWN: dict[type, tuple[Any, Build]] = {
    LogProbabilities: (LogProbMaps, _build_entry),
    TokenBuffer: (WireTokens, _build_tokens),
    SamplingParams: (_CountedSampling, _build_params),
}
_TAGGED: dict[type, tuple[Any, Build]] = {
    kind: (
        Union[tuple(form for other, form in _MAPS.items() if issubclass(other, kind))],  # noqa: UP007
        _build_context,
    )
    for kind in _MAPS
}
_UNTAGGED: dict[type, tuple[Any, Build]] = {
    kind: (form, _build_context) for kind, form in _MAPS.items()
}
_EARLIER: dict[type, tuple[Any, Build]] = {
    kind: (
        Union[tuple(form for other, form in EARLIER_MAPS.items() if issubclass(other, kind))],  # noqa: UP007
        lambda value, reader: value.context(reader),
    )
    for kind in EARLIER_MAPS
}

Form = tuple[Callable[[Frame], Any], Build | None]
"""Decodes a message; builds the value from the decoded one (None: it is the value)."""


class NumpyDecoder(Generic[T]):
    """Callable that decodes one message into a type; see :func:`msgpack_numpy_decoder`."""

    def __init__(self, type_: type[T], copy: bool, use_shared_memory: bool = True) -> None:
        self._type = type_
        self._copy = copy
        self._use_shared_memory = use_shared_memory
        self._shared = SharedArrays(allowed=use_shared_memory)
        self._open: OpenShared = partial(self._shared.open, copy=copy)
        self._form = self._decoder_of(_TAGGED)
        self._others: dict[str, Form] = {}  # made when first needed

    def __call__(self, message: Frame | Sequence[Frame]) -> T:
        """Decode one buffer, or a message and the frames that follow it.

        DecodeFailed or LimitExceeded for anything but a valid message.
        """
        frames: Any = message
        if type(message) is bytes or isinstance(message, (bytes, bytearray, memoryview)):
            frames = (message,)
        try:
            if len(frames) == 1:
                if _size(frames[0]) > MAX_ARRAY_BYTES:
                    raise LimitExceeded(f"a message of more than {MAX_ARRAY_BYTES} bytes")
            else:
                _check_frames(frames)
            result: T = self._decode_either(frames)
            return result
        except (DecodeFailed, LimitExceeded):
            raise
        except (RecursionError, MemoryError):
            raise LimitExceeded("a message is nested too deep or too large") from None
        except Exception as error:
            raise DecodeFailed(f"not a valid message: {str(error)[:200]}") from None

    def _decode_either(self, frames: Sequence[Frame]) -> Any:
        """Contexts by ``type``, as declared where others write none, or in the earlier form."""
        try:
            return self._read(self._form, frames)
        except msgspec.ValidationError as error:
            reason = str(error)
            if "missing required field `type`" in reason:
                return self._read(self._other("untagged", _UNTAGGED), frames)
            if "request_id`" not in reason and "tokens`" not in reason:
                raise
            try:
                return self._read(self._other("earlier", _EARLIER), frames)
            except msgspec.ValidationError:
                raise error from None

    def _read(self, form: Form, frames: Sequence[Frame]) -> Any:
        decode, build = form
        message = frames[0]
        _room.left = _FACTOR * _size(message) + _MARGIN
        value = decode(message)
        if build is None:
            if len(frames) > 1:
                raise _unused(frames, 0)
            return value
        if type(value) is WireContext and has_one_array(value):
            # The usual kind needs no reader of several arrays or of shared memory.
            tokens: Any = value.tokens
            sent = tokens.array
            if sent.frame == len(frames) - 1 and not sent.shm:
                _set(tokens, "array", read_array(sent, frames, 0, self._copy, aligned=False))
                return from_map(value)
        self._shared.begin()
        reader = ArrayReader(frames, copy=self._copy, shared=self._open, aligned=False)
        result = build(value, reader)
        if reader.used() != len(frames) - 1:
            raise _unused(frames, reader.used())
        return result

    def _other(self, form: str, known: Mapping[type, tuple[Any, Build]]) -> Form:
        if form not in self._others:
            self._others[form] = self._decoder_of(known)
        return self._others[form]

    def _decoder_of(self, contexts: Mapping[type, tuple[Any, Build]]) -> Form:
        if is_plain(self._type):
            decode = msgspec.msgpack.Decoder(self._type).decode
            if may_grow(self._type):
                return _counted_first(decode, has_sets(self._type)), None
            return decode, None
        structs = DecodeStructs({**_KNOWN, **contexts}, _count, _plain_builder)
        form, build = structs.of(self._type)
        decode = msgspec.msgpack.Decoder(form).decode
        if structs.uncounted:
            return _counted_first(decode, structs.sets), build
        return _counted_if_small_numbers(decode) if structs.numbers else decode, build

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self._type, self._copy, self._use_shared_memory)


def _counted_first(decode: Callable[[Frame], Any], sets: bool) -> Callable[[Frame], Any]:
    """Decode a message after the memory that its values need is known."""

    def decode_counted(message: Frame) -> Any:
        size = _size(message)
        if size > SMALL:
            check_plain_size(bytes(message), FACTOR * size + MARGIN, sets=sets)
        return decode(message)

    return decode_counted


def _counted_if_small_numbers(decode: Callable[[Frame], Any]) -> Callable[[Frame], Any]:
    """Decode a message; count its values first if flat lists in it may take too much."""

    def decode_counted(message: Frame) -> Any:
        size = _size(message)
        if size > SMALL:
            content, room = bytes(message), FACTOR * size + MARGIN
            if has_small_numbers(content, room):
                check_plain_size(content, room, sets=False)
        return decode(message)

    return decode_counted


def _plain_builder(kind: Any) -> Build:
    """Builder of a plain type from its bytes in the message, after its memory is counted."""
    decode, sets = msgspec.msgpack.Decoder(kind).decode, has_sets(kind)

    def build(value: Any, _: ArrayReader) -> Any:
        if not isinstance(value, msgspec.Raw):
            return value  # the field's default
        content = bytes(value)
        room = _room.left + (FACTOR - _FACTOR) * len(content)
        _room.left = check_plain_size(content, room, sets=sets)
        return decode(value)

    return build


def _size(frame: Frame) -> int:
    return len(frame) if type(frame) is bytes else memoryview(frame).nbytes


def _unused(frames: Sequence[Frame], used: int) -> DecodeFailed:
    return DecodeFailed(f"{len(frames) - 1} array frames, {used} are referred to")


def _check_frames(frames: Sequence[Frame]) -> None:
    if not frames:
        raise DecodeFailed("a message without frames")
    if len(frames) > MAX_ARRAY_FRAMES + 1:
        raise LimitExceeded(f"{len(frames)} frames, at most {MAX_ARRAY_FRAMES + 1} are allowed")
    total = 0
    for frame in frames:
        total += _size(frame)
    if total > MAX_ARRAY_BYTES:
        raise LimitExceeded(f"a message of more than {MAX_ARRAY_BYTES} bytes")


def msgpack_numpy_encoder(
    use_shared_memory: bool = False, shared_memory_threshold: int = 24_000_000
) -> NumpyEncoder:
    """Encoder of any msgspec-encodable object with arrays inside; ``encoder(obj) -> bytes``.

    ``use_shared_memory``: arrays of ``shared_memory_threshold`` bytes and more go to shared
    memory if there is room, to be decoded on this host within the lease.
    """
    return NumpyEncoder(use_shared_memory, shared_memory_threshold)


def msgpack_numpy_decoder(
    type_: type[T], copy: bool = True, use_shared_memory: bool = True
) -> NumpyDecoder[T]:
    """Decoder for ``type_``; arrays are decoded where the type declares them.

    Where the type is ``Any``, an array stays the map it is on the wire. ``copy=False`` gives
    read-only arrays that keep the decoded message, or its shared memory, alive.
    ``use_shared_memory``: False refuses arrays in shared memory, for messages of senders that
    are not trusted to be on this host.
    """
    return NumpyDecoder(type_, copy, use_shared_memory)
