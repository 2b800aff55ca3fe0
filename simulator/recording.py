"""Recorded traces: what every core got and returned, as one digest per run.

Two versions of the code that give the same digest for a seed had the same events and actions, in
the same order, at the same times. Names of modules and of fields do not count; the names of
classes and the values of their fields do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

DIGEST_BYTES = 12


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
