"""Calls of an extension's code, which may raise, return nonsense or take long.

Invariant: :meth:`Guard.call` never raises, and an extension takes at most :data:`SHARE` of the
process's time, apart from :data:`BURST_S` and one call. An extension that has used up its time
rests: it is not called, and the caller uses Baton's own choice, until it has time again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from baton.proto.wire.messages import ExtensionCounts

from .resolve import ExtensionError, Point

SHARE = 0.25
"""Share of the time that calls may take. Every call delays all requests of the process."""
BURST_S = 0.04
"""Seconds that calls may take at once."""
MAX_ERROR_CHARS = 200
"""Of an error, and of a class's name, in status reports."""
FAILED, SKIPPED = "failed", "was skipped"
"""Why a call has no result."""
T = TypeVar("T")
Report = Callable[[str, Exception, dict[str, object]], None]
"""Logs an event of an extension, with the traceback of the exception."""


class Guard:
    """Calls one extension.

    ``name``: of its class, as the setting gives it. ``clock``: seconds for the times of calls; None
    for an extension without a limit of time: in a simulation, where a call takes no time, and for
    a transport.
    """

    def __init__(
        self, point: Point, name: str, report: Report, clock: Callable[[], float] | None = None
    ) -> None:
        self.point = point
        self.name = name
        self._report = report
        self.now = time.perf_counter if clock is None else clock
        self._limited = clock is not None
        self._left = BURST_S  # as of the end of the last call
        self._ended = float("-inf")  # that end
        self.began: float | None = None
        """When the present call began, by the clock; None between calls."""
        self.calls = 0
        self.seconds = 0.0
        """Seconds that all calls took."""
        self.failures = 0
        """Calls that raised or returned nonsense."""
        self.skipped = 0
        """Calls that were not made, because the extension rested."""
        self.missed = ""
        """Why the last call had no result: :data:`FAILED`, :data:`SKIPPED`, or empty."""
        self._error = ""  # of the last failed call

    def call(self, call: Callable[[], T]) -> T | None:
        """Return the result, or None if the extension failed or rests."""
        began, left = self.now(), BURST_S
        if self._limited:
            left = min(BURST_S, self._left + SHARE * (began - self._ended))
            if left < 0:
                self.skipped += 1
                self.missed = SKIPPED
                return None
        self.began = began
        result = self._tried(call)
        self.began = None
        self._ended = ended = self.now()
        self._left = left - (ended - began)
        self.seconds += ended - began
        if self._limited and self._left < 0:
            self._rest(ended - began)
        return result

    def counts(self) -> ExtensionCounts:
        """Return the numbers of its calls, for status and metrics."""
        return ExtensionCounts(
            point=self.point.name,
            name=self.name[:MAX_ERROR_CHARS],
            calls=self.calls,
            failures=self.failures,
            skipped=self.skipped,
            error=self._error,
        )

    def failed(self, error: Exception) -> None:
        """Count and log a failure: a call that raised, or a result that cannot be used."""
        self.failures += 1
        self.missed = FAILED
        try:
            text = str(error)
        except Exception:  # of the user's own exception
            text = "it has no text"
            error = ExtensionError(f"{self.name} raised {type(error).__name__}; {text}")
        text = " ".join(f"{type(error).__name__}: {text}".split())[:MAX_ERROR_CHARS]
        self._error = "".join(char if char.isprintable() else "?" for char in text)
        self._report(f"{self.point.name}.failed", error, {"extension": self.name})

    def _tried(self, call: Callable[[], T]) -> T | None:
        self.calls += 1
        self.missed = ""
        try:
            return call()
        except Exception as error:
            self.failed(error)
        except BaseException as error:  # also SystemExit: an extension must not end the process
            wrapped = ExtensionError(f"{self.name} raised {type(error).__name__}")
            wrapped.__cause__ = error
            self.failed(wrapped)
        return None

    def _rest(self, seconds: float) -> None:
        text = (
            f"{self.name} takes more than {SHARE:.0%} of the time, {seconds * 1e3:.1f} ms in the "
            f"last call; after such a call it is not called for up to {seconds / SHARE:.2f} s"
        )
        event = f"{self.point.name}.slow"
        self._report(event, ExtensionError(text), {"extension": self.name})
