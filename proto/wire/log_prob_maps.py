"""Log-probabilities as lists and maps, the form of contexts in one buffer.

Their size in memory is computed before they are built, because a list of one-byte maps grows to 72
times its size, and a list of small numbers to 32 times. The two lists are decoded as raw bytes.
They are built only if the memory, computed from their headers, is at most a fixed multiple of
their bytes. Lists as Baton writes them, with 9 bytes per number, need a third of this limit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..contexts.outputs import LogProbabilities
from ..errors import DecodeFailed, LimitExceeded

_FACTOR = 28
_ROOM = 512
"""Additional bytes allowed per entry, in return for the bytes of its field names."""

# Memory of objects in CPython and msgspec, in bytes, including an item's slot in its list.
_FLOAT = 33
_RAW = 72
_EMPTY_MAP = 72
_SMALL_MAP = 232
_SMALL_MAP_PAIRS = 5
_PAIR = 28 + 24
_LARGE_MAP_PAIR = 88
"""Of a table that has just grown, together with the smaller table that it is filled from."""

_NIL = b"\xc0"
_LIST, _MAP = 0x90, 0x80
_WIDE = {_LIST: 0xDC, _MAP: 0xDE}
"""First byte of a short list or map; first byte with a count of 16 bits; plus 1: of 32 bits."""

_decode_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_floats = msgspec.msgpack.Decoder(list[float]).decode
_decode_maps = msgspec.msgpack.Decoder(list[dict[int, float]]).decode


class LogProbMaps(msgspec.Struct, gc=False):
    """One :class:`.LogProbabilities` with undecoded lists."""

    token_log_probabilities: msgspec.Raw
    top_log_probabilities: msgspec.Raw


_decode_queued = msgspec.msgpack.Decoder(dict[int, LogProbMaps]).decode


def build_log_probs(value: LogProbMaps) -> LogProbabilities:
    """Build the entry; raises LimitExceeded if it would be much larger than its bytes."""
    chosen: Any = value.token_log_probabilities
    top: Any = value.top_log_probabilities
    left = _ROOM + _FACTOR * (len(memoryview(chosen)) + len(memoryview(top)))
    left -= _FLOAT * _items(chosen, _LIST)
    _check(left - _RAW * _items(top, _LIST))
    for pairs in _decode_raws(top):
        left -= _table(_items(pairs, _MAP))
        _check(left)
    return LogProbabilities(_decode_floats(chosen), _decode_maps(top))


def read_queued(raw: Any) -> dict[int, LogProbabilities] | None:
    """Build the entries by position, or None; raises errors as :func:`build_log_probs`."""
    if bytes(raw) == _NIL:
        return None
    return {at: build_log_probs(entry) for at, entry in _decode_queued(raw).items()}


def _items(raw: Any, kind: int) -> int:
    """Return the number of items of a list or map, from its header."""
    view = memoryview(raw)
    first = view[0]
    if first & 0xF0 == kind:
        return first & 0x0F
    wide = _WIDE[kind]
    if first not in (wide, wide + 1):
        raise DecodeFailed("log-probabilities must be a list of numbers and a list of maps")
    return int.from_bytes(view[1 : 3 if first == wide else 5], "big")


def _table(pairs: int) -> int:
    if not pairs:
        return _EMPTY_MAP
    if pairs <= _SMALL_MAP_PAIRS:
        return _SMALL_MAP + _PAIR * pairs
    return (_LARGE_MAP_PAIR + _PAIR) * pairs


def _check(left: int) -> None:
    if left < 0:
        raise LimitExceeded("log-probabilities would be much larger than their bytes")
