"""Actions of a worker's core for its shell, and events from the shell for the core.

Pure data: no socket, clock or thread. The simulator interprets the same actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.scheduling.plan import StepPlan, StepResult
from baton.proto.vision_requests import check_hashes
from baton.proto.wire.messages import Message
from baton.proto.wire.wire_context import WireContext

from .attempts import Key


@dataclass(slots=True, frozen=True)
class ToRouter:
    """Send ``message`` to a router; dropped if not connected, since cores repeat messages."""

    router: str
    message: Message


@dataclass(slots=True, frozen=True)
class FromRouter:
    """A router sent a message."""

    router: str
    message: Message


@dataclass(slots=True, frozen=True)
class RouterUp:
    """The connection to a router was made, or made again."""

    router: str


@dataclass(slots=True, frozen=True)
class RouterDown:
    """The connection to a router was lost."""

    router: str


@dataclass(slots=True, frozen=True)
class Tick:
    """Time passed; the core evaluates its timers.

    ``layers``: layers computed since the engine's start, the finest measure of progress.
    """

    layers: int = 0


@dataclass(slots=True, frozen=True)
class CheckImages:
    """Compare the images of a request with their hashes, then report :class:`ImagesChecked`."""

    key: Key
    context: WireContext

    def run(self) -> None:
        """Raise InputError if a hash is wrong; for another thread than the core's."""
        check_hashes(self.context)


@dataclass(slots=True, frozen=True)
class ImagesChecked:
    """The images of a request were checked. ``result``: None, or why they cannot be used."""

    key: Key
    result: object


@dataclass(slots=True, frozen=True)
class DrainRequested:
    """Drain: accept no new requests. Caused by an operator or SIGTERM."""


@dataclass(slots=True, frozen=True)
class StepDone:
    """The compute thread has finished a step."""

    result: StepResult


@dataclass(slots=True, frozen=True)
class RunStep:
    """Run the plan on the compute thread."""

    plan: StepPlan


@dataclass(slots=True, frozen=True)
class AbandonStep:
    """End a step whose sequences were all aborted: report :class:`StepDone` early if possible."""

    step: int


@dataclass(slots=True, frozen=True)
class Log:
    """A log line: dotted event name and fields."""

    event: str
    fields: dict[str, object]


@dataclass(slots=True, frozen=True)
class Fault:
    """A bug in Baton that ended one request; logged with its traceback."""

    event: str
    error: Exception
    fields: dict[str, object]


def blocks_freed(request: bytes, attempt: int, heard: float, now: float) -> Log:
    """Return the log line that all KV blocks of an aborted attempt are free.

    ``heard`` (when the Abort was read) and ``at`` are monotonic seconds. All processes of a host
    share this clock, so the difference to the router's ``request.cancelled`` is the duration of
    the abort, and ``at - heard`` is the wait for a running step.
    """
    fields = {"request": request.hex(), "attempt": attempt, "heard": heard, "at": now}
    return Log("request.freed", fields)


@dataclass(slots=True, frozen=True)
class Exit:
    """End this incarnation and its process; a supervisor may start a new one.

    ``restart``: true if a restart can help (declared dead), false if not (wrong model).
    ``own_error``: because of an exception of the worker's own code.
    """

    reason: str
    restart: bool
    own_error: bool = False
