"""Records of a run: the events and actions of every core, and the steps of the state machines.

:class:`Recording` makes one digest of all events and actions. Two versions of the code that give
the same digest for a seed had the same events and actions, in the same order, at the same times.
Names of modules and of fields do not count; the names of classes and the values of their fields
do. :class:`Coverage` records which steps of the declared transition tables a run takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from baton.kv_transfer import grants, sender_handoff
from baton.router import states

DIGEST_BYTES = 12
K = TypeVar("K")
V = TypeVar("V")


class Recording:
    """Digest of all events and actions of one run, in order."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines = lines  # the whole text as well, to find the first difference
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, name: str, now: float, event: object, actions: Iterable[object]) -> None:
        """Record one call of the core of process ``name`` at time ``now`` (seconds)."""
        line = f"{now!r} {name} {text_of(event)} -> {text_of(list(actions))}\n"
        self._hash.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def digest(self) -> str:
        """The digest so far, in hexadecimal."""
        return self._hash.hexdigest()


def text_of(value: Any) -> str:
    """Return the names of classes and the values in ``value``; no addresses, no field names."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.ndarray):
        content = hashlib.blake2b(value.tobytes(), digest_size=DIGEST_BYTES).hexdigest()
        return f"array({value.dtype} {value.shape} {content})"
    if isinstance(value, (bytearray, memoryview, np.generic)):
        return repr(bytes(value)) if not isinstance(value, np.generic) else repr(value.item())
    if isinstance(value, msgspec.Struct):
        return _record(value, value.__struct_fields__)
    if is_dataclass(value):
        return _record(value, [field.name for field in fields(value)])
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_of(k)}: {text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    if isinstance(value, Iterable):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return type(value).__name__


def _record(value: object, names: Iterable[str]) -> str:
    inner = ", ".join(text_of(getattr(value, name, None)) for name in names)
    return f"{type(value).__name__}({inner})"


# --------------------------------------------------------------------------- coverage


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


class _NotingSet(frozenset[states.WorkerState]):
    """A set that records which of its members are looked up."""

    used: set[states.WorkerState]

    def __contains__(self, member: object) -> bool:
        found = super().__contains__(member)
        if found and isinstance(member, states.WorkerState):
            self.used.add(member)
        return found


class Coverage:
    """Steps taken since :func:`observed` was entered."""

    def __init__(self) -> None:
        self._tables: dict[str, _Noting[Any, Any]] = {
            "receiver": _Noting(grants.TRANSITIONS),
            "sender": _Noting(sender_handoff.TRANSITIONS),
        }
        self._requests = {state: _Noting(steps) for state, steps in states.NEXT.items()}
        self._workers: dict[states.WorkerState, _NotingSet] = {}
        for state, targets in states.WORKER_TRANSITIONS.items():
            self._workers[state] = _NotingSet(targets)
            self._workers[state].used = set()

    def install(self) -> None:
        """Replace the tables of the state machines by the recording tables."""
        grants.TRANSITIONS = self._tables["receiver"]
        sender_handoff.TRANSITIONS = self._tables["sender"]
        states.NEXT = dict(self._requests)
        states.WORKER_TRANSITIONS = dict(self._workers)

    def report(self) -> tuple[set[str], set[str]]:
        """Return the names of the taken steps and of the missing steps."""
        taken: set[str] = set()
        declared: set[str] = set()
        for name, table in self._tables.items():
            used, known = table.report(name)
            taken |= used
            declared |= known
        for begin, steps in self._requests.items():
            taken |= {_label("request", (begin, step)) for step in steps.used}
            declared |= {_label("request", (begin, step)) for step in steps}
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
        states.NEXT,
        states.WORKER_TRANSITIONS,
    )
    coverage = Coverage()
    coverage.install()
    try:
        yield coverage
    finally:
        grants.TRANSITIONS, sender_handoff.TRANSITIONS = before[0], before[1]
        states.NEXT, states.WORKER_TRANSITIONS = before[2], before[3]


def _label(name: str, key: object) -> str:
    state, step = key if isinstance(key, tuple) else (key, "")
    return f"{name}: {_text(state)} {_text(step)}".rstrip()


def _text(part: object) -> str:
    return str(getattr(part, "value", part))
