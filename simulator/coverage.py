"""Records which steps of the declared transition tables a simulation takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ..kv_transfer import grants, sender_handoff
from ..router import requests, workers

K = TypeVar("K")
V = TypeVar("V")


class _Noting(dict[K, V], Generic[K, V]):
    """A table that records which of its entries are used."""

    def __init__(self, table: dict[K, V]) -> None:
        super().__init__(table)
        self.used: set[K] = set()

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        self.used.add(key)
        return value

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        """As ``dict.get``."""
        value = super().get(key, default)
        if value is not None:
            self.used.add(key)
        return value

    def report(self, name: str) -> tuple[set[str], set[str]]:
        """Return the names of the taken steps and of all steps."""
        return {_label(name, key) for key in self.used}, {_label(name, key) for key in self}


class _NotingSet(frozenset[workers.WorkerState]):
    """A set that records which of its members are looked up."""

    used: set[workers.WorkerState]

    def __contains__(self, member: object) -> bool:
        found = super().__contains__(member)
        if found and isinstance(member, workers.WorkerState):
            self.used.add(member)
        return found


class Coverage:
    """Steps taken since :func:`observed` was entered."""

    def __init__(self) -> None:
        self._tables: dict[str, _Noting[Any, Any]] = {
            "receiver": _Noting(grants.TRANSITIONS),
            "sender": _Noting(sender_handoff.TRANSITIONS),
            "request": _Noting(requests.TRANSITIONS),
        }
        self._workers: dict[workers.WorkerState, _NotingSet] = {}
        for state, targets in workers.WORKER_TRANSITIONS.items():
            self._workers[state] = _NotingSet(targets)
            self._workers[state].used = set()

    def install(self) -> None:
        """Replace the tables of the state machines by the recording tables."""
        grants.TRANSITIONS = self._tables["receiver"]
        sender_handoff.TRANSITIONS = self._tables["sender"]
        requests.TRANSITIONS = self._tables["request"]
        workers.WORKER_TRANSITIONS = dict(self._workers)

    def report(self) -> tuple[set[str], set[str]]:
        """Return the names of the taken steps and of the missing steps."""
        taken: set[str] = set()
        declared: set[str] = set()
        for name, table in self._tables.items():
            used, known = table.report(name)
            taken |= used
            declared |= known
        for state, targets in self._workers.items():
            taken |= {f"worker: {state.value} to {target.value}" for target in targets.used}
            declared |= {f"worker: {state.value} to {target.value}" for target in targets}
        return taken, declared - taken


@contextmanager
def observed() -> Iterator[Coverage]:
    """Record the steps of all state machines inside the ``with`` block."""
    before = (
        grants.TRANSITIONS,
        sender_handoff.TRANSITIONS,
        requests.TRANSITIONS,
        workers.WORKER_TRANSITIONS,
    )
    coverage = Coverage()
    coverage.install()
    try:
        yield coverage
    finally:
        grants.TRANSITIONS, sender_handoff.TRANSITIONS = before[0], before[1]
        requests.TRANSITIONS, workers.WORKER_TRANSITIONS = before[2], before[3]


def _label(name: str, key: object) -> str:
    state, step = key if isinstance(key, tuple) else (key, "")
    return f"{name}: {_text(state)} {_text(step)}".rstrip()


def _text(part: object) -> str:
    return str(getattr(part, "value", part))
