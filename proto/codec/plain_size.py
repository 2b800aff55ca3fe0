"""The memory that plain values of a message will take, counted before anything is built.

An empty list takes one byte in a message and 64 as an object, an empty set 224. So a type that is
made of lists, sets, dicts and scalars alone is decoded only after one pass over the message has
shown that its objects stay within a multiple of its bytes.
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
"""Messages up to this many bytes need no pass: their objects fit into 1 MB, whatever they are."""

# What CPython takes, in bytes; an item's slot is counted with its list.
_LIST, _SLOT = 64, 8
_SET, _SET_ENTRY, _LEAST_ENTRIES = 224, 16, 8
_MAP, _SMALL_MAP, _SMALL_MAP_PAIRS, _PAIR = 64, 240, 5, 80
"""``_PAIR``: of a dict that has just grown, with the smaller table it is filled from."""
_TEXT, _WIDE_TEXT, _DATA = 49, 76, 49
_NUMBER, _NEGATIVE_NUMBER, _SHORT_NUMBER = 11, 21, 10
"""For each byte of numbers, as an object of one takes 32: most are of 3 bytes or more, those of
:data:`_NEGATIVE` of one, and those that begin with :data:`_SHORT` of 2."""

_SCALARS = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]++|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}"
    rb"|[\xcb\xcf\xd3].{8})++",
    re.DOTALL,
).match
"""Numbers, booleans and nil, as many as follow each other."""
_NEGATIVE = bytes(range(0xE0, 0xFB))
"""Numbers of one byte that CPython keeps no objects of."""
_SHORT = b"\xd0"
_NUMBERS = frozenset({0xC0, 0xC2, 0xC3, *range(0xCA, 0xD4)})
_EXT_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_TEXT_WIDTH = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_DATA_WIDTH = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT_WIDTH = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_COUNT_WIDTH = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}

FACTOR, MARGIN = 31, 900_000
"""Objects may take so many times the bytes of the message, and so many more."""

_STEADY = frozenset(
    {float, bool, str, bytes, bytearray, type(None)}
    | {datetime, date, time, timedelta, UUID, Decimal}
)
"""Scalars whose objects take less than that, whatever their values."""
_CONTAINERS = frozenset({list, tuple, dict})


def is_plain(kind: Any) -> bool:
    """Whether a declared type consists of containers, scalars and ``Any`` alone."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return is_plain(arguments[0])
    if origin in (Union, UnionType):
        return all(map(is_plain, arguments))
    if origin is not None and origin is not Literal:
        return _is_container(origin) and all(one is ... or is_plain(one) for one in arguments)
    return kind is Any or kind is int or _is_steady(kind) or _is_container(kind)


def may_grow(kind: Any) -> bool:
    """Whether a plain type has values that take more memory than :data:`FACTOR` allows."""
    if get_origin(kind) is Annotated:
        return may_grow(get_args(kind)[0])
    arguments = [one for one in get_args(kind) if one is not ...]
    flat = (
        _is_container(get_origin(kind)) and all(map(_is_steady, arguments)) and not has_sets(kind)
    )
    return not (flat or kind is int or _is_steady(kind))


def is_nested(kind: Any) -> bool:
    """Whether a plain type has containers in containers, sets, dicts of numbers, or ``Any``.

    The other types that :func:`may_grow` are flat lists of numbers: only numbers of one byte below
    -5 take more than :data:`FACTOR` allows there.
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
    """Whether all values of a plain type can be in sets and be keys of dicts."""
    origin, arguments = get_origin(kind), [one for one in get_args(kind) if one is not ...]
    if origin is Annotated:
        return is_hashable(arguments[0])
    fixed = origin in (Union, UnionType, tuple, frozenset) or kind in (tuple, frozenset)
    return all(map(is_hashable, arguments)) if fixed else _is_scalar(kind)


def has_sets(kind: Any) -> bool:
    """Whether lists of a message may become sets."""
    origin = get_origin(kind) or kind
    return _is_set(origin) or (origin is not Literal and any(map(has_sets, get_args(kind))))


def has_small_numbers(message: bytes, room: int) -> bool:
    """Whether flat lists of a message may take more than ``room`` bytes; False if certainly not.

    Counts in C the bytes that could be numbers of one byte below -5.
    """
    negative = len(message) - len(message.translate(None, _NEGATIVE))
    return _NEGATIVE_NUMBER * negative + (_NUMBER + _SLOT) * len(message) > room


def check_plain_size(message: bytes, room: int, *, sets: bool) -> int:
    """Return the rest of ``room`` bytes when the objects of a message are built.

    LimitExceeded if they would take more. Records are counted as dicts.
    ``sets``: count every list as a set. What is no msgpack is left to the decoder.
    """
    at, end = 0, len(message)
    while at < end and room >= 0:
        first = message[at]
        if 0xA0 <= first <= 0xBF:  # a short text, the most frequent value that is no number
            at += 1 + (first & 0x1F)
            room -= _text_bytes(message[at - (first & 0x1F) : at])
        elif first <= 0x7F or first >= 0xE0 or first in _NUMBERS:
            run = _SCALARS(message, at)
            at = end if run is None else run.end()  # cut off: the decoder will say so
            room -= 0 if run is None else _number_bytes(run[0])
        else:
            taken, at = _value(message, at, sets)
            room -= taken
    if room < 0:
        raise LimitExceeded("the objects of a message would be much larger than its bytes")
    return room


def _value(message: bytes, at: int, sets: bool) -> tuple[int, int]:
    """Bytes that a text, data, a list or a map takes without its items, and where it ends."""
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
        return 0, at + 1  # no msgpack
    at += length + (first not in _DATA_WIDTH)
    return _DATA + length, at


def _number(message: bytes, at: int, width: int) -> tuple[int, int]:
    return int.from_bytes(message[at : at + width], "big"), at + width


def _number_bytes(found: bytes) -> int:
    """What a run of numbers takes."""
    negative = len(found) - len(found.translate(None, _NEGATIVE))
    short = found.count(_SHORT)
    return _NUMBER * len(found) + _NEGATIVE_NUMBER * negative + _SHORT_NUMBER * short


def _text_bytes(text: bytes) -> int:
    length = len(text)
    if length < 2:
        return 0  # CPython keeps these
    if text.isascii():
        return (_TEXT + length + 15) // 16 * 16
    return (_WIDE_TEXT + 4 * length + 15) // 16 * 16


def _list_bytes(count: int, sets: bool) -> int:
    if not sets:
        return _LIST + _SLOT * count
    # CPython's sets take four times what they hold, and large ones twice, when 3 of 5 are used.
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
    """Whether the values of a plain type have no items."""
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
