"""What a worker's core asks its shell to do, and what the shell tells the core.

Pure data: no socket, clock or thread. The simulator interprets the same actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.messages import Message


@dataclass(slots=True, frozen=True)
class ToRouter:
    """Send to the router of this name; dropped when it is not connected (all is repeated)."""

    router: str
    message: Message


@dataclass(slots=True, frozen=True)
class FromRouter:
    """A router said something."""

    router: str
    message: Message


@dataclass(slots=True, frozen=True)
class RouterUp:
    """The connection to a router stands (again)."""

    router: str


@dataclass(slots=True, frozen=True)
class RouterDown:
    """The connection to a router was lost."""

    router: str


@dataclass(slots=True, frozen=True)
class Tick:
    """Time passed; the core evaluates its timers.

    ``layers``: layers the engine has computed since its start, the finest progress there is.
    """

    layers: int = 0


@dataclass(slots=True, frozen=True)
class DrainRequested:
    """Take no new work and say so; sent by the operator or on SIGTERM."""


@dataclass(slots=True, frozen=True)
class Note:
    """An event worth a log line: dotted name and keys."""

    event: str
    fields: dict[str, object]


@dataclass(slots=True, frozen=True)
class Fault:
    """A bug of ours that ended one request and nothing else: to be logged with its traceback."""

    event: str
    error: Exception
    fields: dict[str, object]


def blocks_freed(request: bytes, attempt: int, heard: float, now: float) -> Note:
    """An aborted attempt holds no KV blocks here any more.

    ``at`` and, when the Abort was read, ``heard``: monotonic seconds, one clock for all
    processes of a host, so the lines tell how long the abort took from the router's
    ``request.cancelled`` on, and how much of that a running step.
    """
    fields = {"request": request.hex(), "attempt": attempt, "heard": heard, "at": now}
    return Note("request.freed", fields)


@dataclass(slots=True, frozen=True)
class Exit:
    """The incarnation is over: end the process; a supervisor may start a new one.

    ``restart``: whether another start can help (a zombie), or not (another model).
    """

    reason: str
    restart: bool
