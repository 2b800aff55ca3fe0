"""Equality of values with arrays inside: same type, same elements, NaN equal to itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np


def same(one: object, two: object) -> bool:
    """Whether two field values are equal; arrays by element type, shape and content."""
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return _same_arrays(one, two)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        alike = type(one) is type(two) and len(one) == len(two)
        return alike and all(map(same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return bool(one == two)


def same_fields(one: Any, two: Any) -> bool:
    """Whether two dataclass objects have the same class and equal fields with ``compare``."""
    if type(one) is not type(two):
        return False
    return all(
        same(getattr(one, item.name), getattr(two, item.name))
        for item in fields(one)
        if item.compare
    )


def _same_arrays(one: object, two: object) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(two, np.ndarray):
        return False
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return bool(np.array_equal(one, two, equal_nan=one.dtype.kind == "f"))
