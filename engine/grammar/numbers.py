"""Number keywords of a schema as the library enforces them. Pure.

The library computes with doubles and 64-bit integers, reads decimals of more than 15 digits with an
error in the last place, and writes numbers without exponent. An excluded bound that is whole would
let itself through beside another bound before the next whole number. So all bounds become included
ones, at the nearest number inside that the library reads and holds exactly; a listed number that it
would write as another one is refused by name.

Invariant: a number that satisfies the new keywords satisfies the old ones, also after a parser
has rounded it to a double, since rounding keeps the order of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, Decimal
from typing import Any

from baton.proto.errors import InputError

_EXACT = 1 << 53
_STEP = 10**10
"""Below 2^63, its multiples are doubles, and their shortest text is all of their digits."""
_MOST = ((1 << 63) // _STEP) * _STEP
_LONG = 10**18
"""From here on a range needs both ends, because the library cannot count the digits."""
_DIGITS = 15
_MOST_PLACES = 22
"""A decimal of so many digits and places is one division of exact doubles."""

Number = int | float
Schema = dict[str, Any]


def check_listed(keyword: str, value: object) -> None:
    """Raise InputError if ``value`` has a number that would be written as another one."""
    for number in _numbers(value):
        if not _is_written(number):
            raise InputError(
                f"json_schema: {keyword} has {number}, which the grammar cannot write exactly: "
                "whole numbers beyond 2**53 and decimals of more than 15 digits must be text"
            )


def check_multiples(values: Iterable[object]) -> None:
    """Raise InputError for values of ``multipleOf`` that apply together and overflow.

    The library multiplies them in 32 bits.
    """
    steps = {Decimal(repr(one)) for one in values if isinstance(one, int | float) and one}
    if len(steps) < 2:
        return
    places = max(0, *(-int(step.as_tuple().exponent) for step in steps))
    if math.prod(abs(step.scaleb(places)) for step in steps) >= 1 << 32:
        shown = " and ".join(map(str, sorted(steps)))
        raise InputError(f"json_schema: multipleOf {shown} cannot be enforced together")


def tighten_bounds(schema: Schema) -> None:
    """Replace the bounds of ``schema`` by included ones. Raises InputError for an empty range.

    Wrong types of keywords are left to the compiler, which names them.
    """
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    given = {name: schema[name] for name in names if name in schema}
    if not given or not all(_fits(name, value) for name, value in given.items()):
        return
    types = schema.get("type")
    whole = types == "integer" or (
        isinstance(types, list) and "integer" in types and "number" not in types
    )
    # An upper bound is the lower bound of the negative numbers.
    low = _least(given.get("minimum"), given.get("exclusiveMinimum"), 1, whole=whole)
    high = _least(given.get("maximum"), given.get("exclusiveMaximum"), -1, whole=whole)
    if (low is not None and low > _MOST) or (high is not None and high > _MOST):
        raise _no_number(given)
    if low is not None and low >= _LONG and high is None:
        high = -_MOST
    if high is not None and high >= _LONG and low is None:
        low = -_MOST
    if low is not None and high is not None and low > -high and _is_large(given):
        raise _no_number(given)
    for name in names:
        schema.pop(name, None)
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = -high


def _least(
    bound: Number | None, excluded: Number | bool | None, sign: int, *, whole: bool
) -> Number | None:
    """Return the included lower bound, None without one; ``sign`` -1: of the negative numbers.

    A bound above what the library holds is returned as infinity.
    """
    found: list[Number] = []
    if bound is not None:
        found.append(_held(sign * bound, after=excluded is True, whole=whole))
    if excluded is not None and not isinstance(excluded, bool):
        found.append(_held(sign * excluded, after=True, whole=whole))
    return max(found, default=None)


def _held(bound: Number, *, after: bool, whole: bool) -> Number:
    """Return the least number from ``bound`` on, or ``after`` it, that the library holds."""
    step = Decimal(1).scaleb(max(Decimal(bound).adjusted() - _DIGITS + 1, -_MOST_PLACES))
    if whole or step >= 1:
        return _held_whole(math.floor(bound) + 1 if after else math.ceil(bound))
    exact = Decimal(repr(bound))
    found = (exact / step).to_integral_value(ROUND_CEILING) * step
    if after and found == exact:
        found += step
    return int(found) if found == int(found) else float(found)


def _held_whole(bound: int) -> Number:
    """Return the least whole number from ``bound`` on that the library holds, or infinity."""
    for number in (bound, math.ceil(math.nextafter(bound, math.inf))):
        if abs(number) <= _EXACT or _is_held(number):
            return number
    number = max(-(-bound // _STEP) * _STEP, -_MOST)
    return number if number <= _MOST else math.inf


def _is_held(number: int) -> bool:
    return abs(number) <= _MOST and float(number) == number == _shortest(float(number))


def _is_written(number: Number) -> bool:
    """Return whether the library writes a listed number as it is."""
    if abs(number) >= 1 << 63:  # it would overflow as a whole number
        return False
    if isinstance(number, int):
        return int(float(number)) == number and abs(float(number)) < 1 << 63
    return _read(number) == _shortest(number) == number


def _read(number: float) -> float:
    """Return what the library reads for the shortest text of a double."""
    _, digits, places = Decimal(repr(number)).as_tuple()
    mantissa = math.copysign(float("".join(map(str, digits))), number)
    power = float(f"1e{abs(int(places))}")
    return mantissa * power if int(places) > 0 else mantissa / power


def _shortest(number: float) -> int | float:
    """Return the value of the shortest text of a double: of a large one, not the double's own."""
    return int(Decimal(repr(number))) if number.is_integer() else number


def _numbers(value: object) -> Iterator[Number]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)


def _fits(name: str, value: object) -> bool:
    if isinstance(value, bool):  # of draft 4
        return name.startswith("exclusive")
    return isinstance(value, int | float)


def _is_large(given: dict[str, Number]) -> bool:
    return any(abs(value) > _EXACT for value in given.values())


def _no_number(given: dict[str, Number]) -> InputError:
    shown = ", ".join(f"{name} {value}" for name, value in given.items())
    return InputError(
        f"json_schema: no number of {shown} can be written exactly: the grammar holds whole "
        "numbers up to 2**53, and some up to 2**63"
    )
