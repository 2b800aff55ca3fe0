"""What users give by keyword, checked before anything is sent.

A value of a wrong type would be refused by the router as a message it cannot read, and nobody
could say which of a connection's requests that was.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from ..proto.errors import ConfigError, InputError
from ..proto.messages import Drain, Status

_TEXTS = {
    "target_endpoint": True, "pool": True, "request_id": True, "pin": False, "cache_salt": False,
}  # fmt: skip
"""Options that are text, and whether None will do."""
_MAX_HANDOFFS = 1 << 31


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """InputError for an option that is unknown or of another type than it must be."""
    unknown = options.keys() - set(known)
    if unknown:
        raise InputError(f"unknown option {min(unknown)!r}; known are {', '.join(sorted(known))}")
    for name, value in options.items():
        if name in _TEXTS and not isinstance(value, str) and not (value is None and _TEXTS[name]):
            raise _wrong(name, "text", value)
    if not isinstance(options.get("fallback", False), bool):
        raise _wrong("fallback", "True or False", options["fallback"])
    count = options.get("log_probabilities", 0)
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise _wrong("log_probabilities", "a whole number", count)
    deadline = options.get("deadline")
    if deadline is not None and not _is_number(deadline):
        raise _wrong("deadline", "a number of seconds", deadline)


def check_timeouts(**seconds: object) -> None:
    """ConfigError for a time that is none."""
    for name, value in seconds.items():
        if not _is_number(value):
            raise ConfigError(str(_wrong(name, "a number of seconds", value)))


def question_timeout(timeout: object, default: float) -> float:
    """Seconds to wait for an answer. Raises InputError for what is no number."""
    if timeout is None:
        return default
    if not isinstance(timeout, Real) or not _is_number(timeout):
        raise _wrong("timeout", "a number of seconds", timeout)
    return float(timeout)


def status_question(handoffs: object) -> Status:
    """How the cluster is, with that many handoffs. Raises InputError for what is no count."""
    if not isinstance(handoffs, Integral) or isinstance(handoffs, bool):
        raise _wrong("handoffs", "a whole number", handoffs)
    count = operator.index(handoffs)
    if not 0 <= count < _MAX_HANDOFFS:
        raise InputError(f"handoffs must be 0 to {_MAX_HANDOFFS - 1}, not {count}")
    return Status(handoffs=count)


def drain_question(worker: object) -> Drain:
    """The order to a worker by its id or endpoint. Raises InputError for what is no name."""
    if not isinstance(worker, str):
        raise _wrong("worker", "text", worker)
    return Drain(worker=worker)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _wrong(name: str, wanted: str, value: object) -> InputError:
    shown = "nan" if isinstance(value, float) else type(value).__name__
    return InputError(f"{name} must be {wanted}, not {shown}")
