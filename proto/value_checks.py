"""Checks of single values a user gives: type first, then range; each returns the plain value.

A message names the field, what is accepted, and the value with its type. ``bool`` is no
number here, and NumPy's scalars count as the Python numbers they stand for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import numpy as np

from .errors import InputError

Check = Callable[[str, Any], Any]
"""``check(name, value)`` returns the value to use, or raises InputError naming ``name``."""

_SHOWN_CHARS = 40
_LARGEST_FLOAT32 = 3.4028234663852886e38


def shown(value: object) -> str:
    """The value and its type, short enough for a message."""
    try:
        text = repr(value)
    except Exception:  # a foreign object's own bug, or an int of too many digits
        text = "a value"
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    return f"{text} ({type(value).__name__})" if value is not None else text


def whole(low: int, high: int, wanted: str) -> Check:
    """Check for a whole number in ``[low, high]``; ``wanted`` says so in a message."""

    def check(name: str, value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        if isinstance(value, Integral) and not isinstance(value, bool):
            number = operator.index(value)
            if low <= number <= high:
                return number
        hint = ""
        if isinstance(value, Real) and not isinstance(value, Integral):
            hint = _whole_hint(float(value))
        raise InputError(f"{name} must be {wanted}, not {shown(value)}{hint}")

    return check


def _whole_hint(value: float) -> str:
    return f"; write {int(value)}" if value.is_integer() and abs(value) < 1e15 else ""


def real(low: float, high: float, wanted: str, *, above: bool = False) -> Check:
    """Check for a number in ``[low, high]``, or in ``(low, high]`` if ``above``.

    Magnitudes end where float32, in which tokens are drawn, ends.
    """
    low, high = max(low, -_LARGEST_FLOAT32), min(high, _LARGEST_FLOAT32)

    def check(name: str, value: Any) -> float:
        number = math.nan
        if type(value) is float:
            number = value
        elif isinstance(value, Real) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
        if not low <= number <= high or (above and number == low):  # NaN as well
            raise InputError(f"{name} must be {wanted}, not {shown(value)}")
        return number

    return check


def flag(name: str, value: Any) -> bool:
    """Check for True or False."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise InputError(f"{name} must be True or False, not {shown(value)}")


def text(low: int, high: int) -> Check:
    """Check for text of ``low`` to ``high`` characters that can be encoded."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise InputError(f"{name} must be text, not {shown(value)}")
        if not low <= len(value) <= high:
            bounds = f"{low} to {high}" if low else f"at most {high}"
            raise InputError(f"{name} must have {bounds} characters, not {len(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name} must be valid Unicode, not {shown(value)}") from None
        return value

    return check


def choice(*known: str) -> Check:
    """Check for one of a few words."""

    def check(name: str, value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        words = " or ".join(map(repr, known))
        raise InputError(f"{name} must be {words}, not {shown(value)}")

    return check


def many(item: Check, most: int, what: str) -> Check:
    """Check for a list, tuple or 1-D array of at most ``most`` items; returns a new list."""

    def check(name: str, value: Any) -> list[Any]:
        array = isinstance(value, np.ndarray) and value.ndim == 1
        if not array and not isinstance(value, list | tuple):
            raise InputError(f"{name} must be a list of {what}, not {shown(value)}")
        if len(value) > most:
            raise InputError(f"{name} has {len(value)} {what}, at most {most} are allowed")
        return [item(f"{name}[{at}]", one) for at, one in enumerate(value)]

    return check


def unknown_name(owner: str, name: str, known: Iterable[str]) -> InputError:
    """What to say to a keyword argument that ``owner`` does not have."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
    return InputError(f"{owner} has no {name[:80]!r}; {hint}")
