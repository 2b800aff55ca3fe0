"""A bounded map of recent entries, with constant cost per operation."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps at least the last ``size`` entries, and fewer than twice as many.

    Two generations replace an exact order: a full generation becomes the old one, and the
    previous old generation is dropped.
    """

    __slots__ = ("_new", "_old", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Store ``value`` under ``key``."""
        self._new[key] = value
        if len(self._new) >= self._size:
            self._old, self._new = self._new, {}

    def get(self, key: K, default: V) -> V:
        """Return the value of ``key``, else ``default``."""
        found = self._new.get(key)
        return self._old.get(key, default) if found is None else found

    def __len__(self) -> int:
        return len(self._new) + len(self._old)
