"""Bounds the memory of decoded plain values before any object is built.

An empty list takes 1 byte in a message and 64 bytes as an object; an empty set takes 224. So one
pass over the message estimates the size of its objects. Types that consist of lists, sets, dicts
and scalars alone are decoded only if this size is within a multiple of the message's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

from ..errors import LimitExceeded

SMALL = 4096
"""Messages up to this many bytes need no pass: any objects in them fit into 1 MB."""

# Sizes of CPython's objects in bytes. A list's size includes the slots of its items.
_LIST, _SLOT = 64, 8
_SET, _SET_ENTRY, _LEAST_ENTRIES = 224, 16, 8
_MAP, _SMALL_MAP, _SMALL_MAP_PAIRS, _PAIR = 64, 240, 5, 80
"""``_PAIR``: per pair of a dict that has just grown, including the old table that it replaces."""
_TEXT, _WIDE_TEXT, _DATA = 49, 76, 49
_NUMBER, _NEGATIVE_NUMBER, _SHORT_NUMBER = 11, 21, 10
"""Bytes of objects per byte of numbers in the message. A number's object takes 32 bytes. Most
numbers have 3 bytes or more in the message; numbers in :data:`_NEGATIVE` have 1, and numbers that
begin with :data:`_SHORT` have 2."""

_SCALARS = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]++|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}"
    rb"|[\xcb\xcf\xd3].{8})++",
    re.DOTALL,
).match
"""Matches a run of consecutive numbers, booleans and nils."""
_NEGATIVE = bytes(range(0xE0, 0xFB))
"""One-byte numbers below -5: CPython creates a new object for each of them."""
_SHORT = b"\xd0"
_NUMBERS = frozenset({0xC0, 0xC2, 0xC3, *range(0xCA, 0xD4)})
_EXT_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_TEXT_WIDTH = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_DATA_WIDTH = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT_WIDTH = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_COUNT_WIDTH = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}

FACTOR, MARGIN = 31, 900_000
"""Limit of the objects' bytes: ``FACTOR`` times the message's bytes, plus ``MARGIN``."""

_STEADY = frozenset(
    {float, bool, str, bytes, bytearray, type(None)}
    | {datetime, date, time, timedelta, UUID, Decimal}
)
"""Scalars whose objects stay below :data:`FACTOR` for every value."""
_CONTAINERS = frozenset({list, tuple, dict})


def is_plain(kind: Any) -> bool:
    """Whether a declared type consists only of containers, scalars and ``Any``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return is_plain(arguments[0])
    if origin in (Union, UnionType):
        return all(map(is_plain, arguments))
    if origin is not None and origin is not Literal:
        return _is_container(origin) and all(one is ... or is_plain(one) for one in arguments)
    return kind is Any or kind is int or _is_steady(kind) or _is_container(kind)


def may_grow(kind: Any) -> bool:
    """Whether some values of a plain type exceed :data:`FACTOR`, so that a check is needed."""
    if get_origin(kind) is Annotated:
        return may_grow(get_args(kind)[0])
    arguments = [one for one in get_args(kind) if one is not ...]
    flat = (
        _is_container(get_origin(kind)) and all(map(_is_steady, arguments)) and not has_sets(kind)
    )
    return not (flat or kind is int or _is_steady(kind))


def is_nested(kind: Any) -> bool:
    """Whether a plain type has containers in containers, sets, dicts of numbers, or ``Any``.

    All other types for which :func:`may_grow` is true are flat lists of numbers. In such a list,
    only one-byte numbers below -5 exceed :data:`FACTOR`.
    """
    origin, arguments = get_origin(kind), [one for one in get_args(kind) if one is not ...]
    if origin is Annotated:
        return is_nested(arguments[0])
    if origin in (Union, UnionType):
        return any(map(is_nested, arguments))
    if origin is None or origin is Literal:
        return kind is Any or _is_container(kind)
    flat = all(_is_scalar(one) for one in arguments)
    mapping = origin is dict or issubclass(origin, Mapping)
    return not flat or has_sets(kind) or (mapping and may_grow(kind))


def is_hashable(kind: Any) -> bool:
    """Whether all values of a plain type can be items of sets and keys of dicts."""
    origin, arguments = get_origin(kind), [one for one in get_args(kind) if one is not ...]
    if origin is Annotated:
        return is_hashable(arguments[0])
    fixed = origin in (Union, UnionType, tuple, frozenset) or kind in (tuple, frozenset)
    return all(map(is_hashable, arguments)) if fixed else _is_scalar(kind)


def has_sets(kind: Any) -> bool:
    """Whether the type has sets, so that lists of a message are decoded as sets."""
    origin = get_origin(kind) or kind
    return _is_set(origin) or (origin is not Literal and any(map(has_sets, get_args(kind))))


def has_small_numbers(message: bytes, room: int) -> bool:
    """Return False if the flat lists of a message certainly fit into ``room`` bytes, else True.

    Fast: counts, in C, the bytes that could be one-byte numbers below -5.
    """
    negative = len(message) - len(message.translate(None, _NEGATIVE))
    return _NEGATIVE_NUMBER * negative + (_NUMBER + _SLOT) * len(message) > room


def check_plain_size(message: bytes, room: int, *, sets: bool) -> int:
    """Return how many of ``room`` bytes are left after the objects of a message are built.

    Raises LimitExceeded if the objects need more than ``room``. Structs are counted as dicts.
    ``sets``: count every list as a set. Invalid msgpack is not reported here, but by the decoder.
    """
    at, end = 0, len(message)
    while at < end and room >= 0:
        first = message[at]
        if 0xA0 <= first <= 0xBF:  # a short text: the most frequent value after numbers
            at += 1 + (first & 0x1F)
            room -= _text_bytes(message[at - (first & 0x1F) : at])
        elif first <= 0x7F or first >= 0xE0 or first in _NUMBERS:
            run = _SCALARS(message, at)
            at = end if run is None else run.end()  # truncated: the decoder raises
            room -= 0 if run is None else _number_bytes(run[0])
        else:
            taken, at = _value(message, at, sets)
            room -= taken
    if room < 0:
        raise LimitExceeded("the objects of a message would be much larger than its bytes")
    return room


def _value(message: bytes, at: int, sets: bool) -> tuple[int, int]:
    """Return the object's bytes without its items, and the position after the value's header.

    The value is a text, data, a list or a map. Text and data have no items, so their position is
    the value's end.
    """
    first = message[at]
    if first <= 0x8F:
        return _map_bytes(first & 0x0F), at + 1
    if first <= 0x9F:
        return _list_bytes(first & 0x0F, sets), at + 1
    if first in _COUNT_WIDTH:
        count, at = _number(message, at + 1, _COUNT_WIDTH[first])
        return (_list_bytes(count, sets) if first < 0xDE else _map_bytes(count)), at
    if first in _TEXT_WIDTH:
        length, at = _number(message, at + 1, _TEXT_WIDTH[first])
        return _text_bytes(message[at : at + length]), at + length
    if first in _EXT_FIXED:
        length, at = _EXT_FIXED[first], at + 1
    elif first in _DATA_WIDTH:
        length, at = _number(message, at + 1, _DATA_WIDTH[first])
    elif first in _EXT_WIDTH:
        length, at = _number(message, at + 1, _EXT_WIDTH[first])
    else:
        return 0, at + 1  # not valid msgpack
    at += length + (first not in _DATA_WIDTH)
    return _DATA + length, at


def _number(message: bytes, at: int, width: int) -> tuple[int, int]:
    return int.from_bytes(message[at : at + width], "big"), at + width


def _number_bytes(found: bytes) -> int:
    """Return the bytes of the objects of a run of numbers."""
    negative = len(found) - len(found.translate(None, _NEGATIVE))
    short = found.count(_SHORT)
    return _NUMBER * len(found) + _NEGATIVE_NUMBER * negative + _SHORT_NUMBER * short


def _text_bytes(text: bytes) -> int:
    length = len(text)
    if length < 2:
        return 0  # CPython shares one object per text
    if text.isascii():
        return (_TEXT + length + 15) // 16 * 16
    return (_WIDE_TEXT + 4 * length + 15) // 16 * 16


def _list_bytes(count: int, sets: bool) -> int:
    if not sets:
        return _LIST + _SLOT * count
    # When 3 of 5 entries are used, a set grows to four times its items (large sets: twice).
    entries, old = _LEAST_ENTRIES, 0
    while 5 * count >= 3 * (entries - 1):
        used, old = -(-3 * (entries - 1) // 5), entries
        entries = 1 << (used * (4 if used <= 50_000 else 2)).bit_length()
    return _SET + _SET_ENTRY * (entries + old if old else 0)


def _map_bytes(pairs: int) -> int:
    if not pairs:
        return _MAP
    return _SMALL_MAP if pairs <= _SMALL_MAP_PAIRS else _PAIR * pairs


def _is_steady(kind: Any) -> bool:
    enum = isinstance(kind, type) and issubclass(kind, Enum)
    return enum or get_origin(kind) is Literal or kind in _STEADY


def _is_scalar(kind: Any) -> bool:
    """Whether a plain type is a scalar, without items."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_scalar(arguments[0])
    if origin in (Union, UnionType):
        return all(map(_is_scalar, arguments))
    return kind is int or _is_steady(kind)


def _is_set(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, AbstractSet)


def _is_container(kind: Any) -> bool:
    abstract = getattr(kind, "__module__", "") == "collections.abc"
    return kind in _CONTAINERS or _is_set(kind) or (abstract and issubclass(kind, Collection))
