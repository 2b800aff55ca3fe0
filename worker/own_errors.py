"""Exceptions of a worker's own code: what the core does after one.

Invariant: an exception in the handling of one attempt ends that attempt alone, with one terminal
(:class:`.InternalError`). What the handler had returned for other attempts is kept. After the
event, the core compares all its books (``check_integrity``). If they do not agree, or if the engine
itself failed, this incarnation ends: the routers replay its requests elsewhere, and a new
incarnation starts with empty books on the loaded model. The actions of a handler that raised are
lost with it, as if their messages were lost on the network: the protocol repeats each of them.
The error's text stays in the log. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .attempts import Key
from .events import Exit, Fault

METRIC = "internal_error"
"""The reason under which heartbeats report these errors."""
BROKEN = "its state could not be repaired after an internal error; see its log"


def failure_text(worker: str) -> str:
    """Return everything that a client learns about such an error."""
    return f"worker {worker} failed to handle this request; its log has the cause"


class OwnErrors:
    """The errors of one core. ``unowned``: those that no single attempt has caused."""

    def __init__(self, dropped: Counter[str]) -> None:
        self._dropped = dropped
        self.unowned = 0
        self.fresh = False
        """Whether an error was noted since the books were compared."""

    def of(self, key: Key | None, error: Exception, where: str) -> Fault:
        """Note an error in the handling of an attempt, or of nothing in particular."""
        self.fresh = True
        self._dropped[METRIC] += 1
        fields: dict[str, object] = {"where": where}
        if key is None:
            self.unowned += 1
        else:
            fields |= {"request": key[0].hex(), "attempt": key[1]}
        return Fault("worker.internal_error", error, fields)

    def fatal(self, error: Exception, where: str) -> list[Any]:
        """Note an error after which this incarnation cannot go on."""
        return [self.of(None, error, where), Exit(BROKEN, restart=True, own_error=True)]

    def apart(self, actions: list[Any], **parts: Callable[[], list[Any]]) -> None:
        """Add the actions of each part of a timer's work; an error affects its part alone."""
        for name, part in parts.items():
            try:
                actions += part()
            except Exception as error:
                actions.append(self.of(None, error, name))

    def compare(self, check: Callable[[], None]) -> list[Any]:
        """Compare the books after errors; end the incarnation if they do not agree."""
        self.fresh = False
        try:
            check()
        except Exception as error:
            return self.fatal(error, "comparing the books")
        return []


def key_of(event: object) -> Key | None:
    """Return the attempt that an event, a message or an output is about, or None."""
    for part in ("message", "commit", "send"):
        inner = getattr(event, part, None)
        if inner is not None and not isinstance(inner, str):
            return key_of(inner)
    key = getattr(event, "key", None)
    if isinstance(key, tuple):
        return key
    request, attempt = getattr(event, "request", None), getattr(event, "attempt", None)
    return (request, attempt) if isinstance(request, bytes) and attempt is not None else None
