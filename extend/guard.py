"""Calls of an extension's code, which may raise, return nonsense or take long.

Invariant: :meth:`Guard.call` never raises, and an extension takes at most :data:`SHARE` of the
process's time, apart from :data:`BURST_S` and one call. An extension that has used up its time
rests: it is not called, and the caller uses Baton's own choice, until it has time again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .resolve import ExtensionError, Point

SHARE = 0.25
"""Share of the time that calls may take. Every call delays all requests of the process."""
BURST_S = 0.04
"""Seconds that calls may take at once."""
T = TypeVar("T")
Report = Callable[[str, Exception, dict[str, object]], None]
"""Logs an event of an extension, with the traceback of the exception."""


class Guard:
    """Calls one extension.

    ``name``: of its class, as the setting gives it. ``clock``: seconds for the times of calls; None
    in a simulation, where a call takes no time.
    """

    def __init__(
        self, point: Point, name: str, report: Report, clock: Callable[[], float] | None = None
    ) -> None:
        self._point = point
        self._name = name
        self._report = report
        self._clock = clock
        self._left = BURST_S  # as of the end of the last call
        self._ended = float("-inf")  # that end
        self.failures = 0
        """Calls that raised or returned nonsense."""
        self.skipped = 0
        """Calls that were not made, because the extension rested."""

    def call(self, call: Callable[[], T]) -> T | None:
        """Return the result, or None if the extension failed or rests."""
        if self._clock is None:
            return self._tried(call)
        began = self._clock()
        left = min(BURST_S, self._left + SHARE * (began - self._ended))
        if left < 0:
            self.skipped += 1
            return None
        result = self._tried(call)
        self._ended = ended = self._clock()
        self._left = left - (ended - began)
        if self._left < 0:
            self._rest(ended - began)
        return result

    def _tried(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except BaseException as error:  # also SystemExit: an extension must not end the process
            self._note(error)
            return None

    def _note(self, error: BaseException) -> None:
        self.failures += 1
        if not isinstance(error, Exception):
            wrapped = ExtensionError(f"{self._name} raised {type(error).__name__}")
            wrapped.__cause__ = error
            error = wrapped
        self._report(f"{self._point.name}.failed", error, {"extension": self._name})

    def _rest(self, seconds: float) -> None:
        text = (
            f"{self._name} takes more than {SHARE:.0%} of the time, {seconds * 1e3:.1f} ms in the "
            f"last call, and is not called for {-self._left / SHARE:.2f} s"
        )
        event = f"{self._point.name}.slow"
        self._report(event, ExtensionError(text), {"extension": self._name})
