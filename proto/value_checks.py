"""Checks of single values from users: first the type, then the range. Each returns the value.

An error names the field, the accepted values, and the given value with its type. ``bool`` does not
count as a number. NumPy scalars are converted to Python numbers.
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
"""``check(name, value)`` returns the value to use, or raises InputError with the name."""

_SHOWN_CHARS = 40
_LARGEST_FLOAT32 = 3.4028234663852886e38


def shown(value: object) -> str:
    """Return the value and its type, shortened for a message."""
    try:
        text = repr(value)
    except Exception:  # a bug of a foreign class, or an int with too many digits
        text = "a value"
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 3] + "..."
    return f"{text} ({type(value).__name__})" if value is not None else text


def whole(low: int, high: int, wanted: str) -> Check:
    """Check for a whole number in ``[low, high]``; ``wanted`` describes it in the error."""

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


def real(low: float, high: float, wanted: str) -> Check:
    """Check for a number in ``[low, high]``.

    The bounds are limited to float32, the type that sampling computes in.
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
        if not low <= number <= high:  # NaN as well
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
    """Check for one of the ``known`` words."""

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
    """Return the error for a keyword argument that ``owner`` does not have."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
    return InputError(f"{owner} has no {name[:80]!r}; {hint}")
