"""A bounded memory of what happened lately, with constant cost per entry."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At least the last ``size`` entries, at most twice as many.

    Two generations instead of an order: a full one becomes the older, and what was the older
    is dropped whole.
    """

    __slots__ = ("_new", "_old", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Remember ``value`` under ``key``."""
        self._new[key] = value
        if len(self._new) >= self._size:
            self._old, self._new = self._new, {}

    def get(self, key: K, default: V) -> V:
        """What is remembered, else ``default``."""
        found = self._new.get(key)
        return self._old.get(key, default) if found is None else found

    def __len__(self) -> int:
        return len(self._new) + len(self._old)
