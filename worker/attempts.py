"""A dict by (request, attempt) with an index of each request's attempts."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, ValuesView
from typing import TypeVar

V = TypeVar("V")
Key = tuple[bytes, int]
"""(request, attempt)."""


class Attempts(MutableMapping[Key, V]):
    """Values by (request, attempt), in insertion order."""

    def __init__(self) -> None:
        self._values: dict[Key, V] = {}
        self._attempts: dict[bytes, set[int]] = {}

    def of(self, request: bytes, last: int | None = None) -> list[V]:
        """Return the values of a request's attempts up to ``last`` (default: all), ascending."""
        attempts = sorted(self._attempts.get(request, ()))
        return [self._values[request, a] for a in attempts if last is None or a <= last]

    def forget(self, request: bytes, last: int) -> None:
        """Remove a request's attempts up to ``last``."""
        for key in self.keys_of(request, last):
            del self[key]

    def keys_of(self, request: bytes, last: int) -> list[Key]:
        """Return the keys of a request's attempts up to ``last``."""
        return [(request, a) for a in self._attempts.get(request, ()) if a <= last]

    def newest(self, request: bytes) -> V | None:
        """Return the value of a request's highest attempt, or None."""
        attempts = self._attempts.get(request)
        return self._values[request, max(attempts)] if attempts else None

    def __getitem__(self, key: Key) -> V:
        return self._values[key]

    def __setitem__(self, key: Key, value: V) -> None:
        self._values[key] = value
        self._attempts.setdefault(key[0], set()).add(key[1])

    def __delitem__(self, key: Key) -> None:
        del self._values[key]
        attempts = self._attempts[key[0]]
        attempts.discard(key[1])
        if not attempts:
            del self._attempts[key[0]]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def values(self) -> ValuesView[V]:
        """As ``dict.values``; the mix-in's looks up each key."""
        return self._values.values()

    def __len__(self) -> int:
        return len(self._values)
