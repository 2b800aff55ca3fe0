"""The clock of a process: its periodic work, and the sign of life that proves that it turns.

Invariant: the next turn is scheduled whatever a turn raises. Only a completed turn sends a sign of
life, so the supervisor replaces a process whose clock stands still or fails, even if its sockets
are served. After :data:`MAX_FAILED` failed turns in a row the clock reports that it is broken, and
its owner ends the process with the exit code for a restart.
"""

from __future__ import annotations

from collections.abc import Callable

from ..net.loop import Loop, Timer
from .log import get_logger
from .main import SIGN_EVERY_S, say_alive

MAX_FAILED = 20
"""Failed turns in a row after which the process must be replaced.

With turns of 50 ms that is one second: shorter than the worker timeout, and longer than any single
message or request can disturb. Errors of a single request, which ended that request alone, are no
failed turn: a client that finds such an input must not be able to restart a process."""
PAUSE_S = 0.05
"""Seconds until the turn after a failed one."""

_log = get_logger()


class Clock:
    """Calls ``turn`` again and again.

    ``turn``: returns the time of the next turn, or None to stop. ``failures``: number of errors so
    far that have no single request as owner; a turn after which it has grown counts as failed.
    ``on_broken``: called once, with the reason.
    """

    def __init__(
        self,
        loop: Loop,
        turn: Callable[[], float | None],
        failures: Callable[[], int],
        on_broken: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._turn = turn
        self._failures = failures
        self._on_broken = on_broken
        self._timer: Timer | None = None
        self._known = 0
        self._sign_at = 0.0
        self._broken = False
        self.turns = 0
        """Completed turns; the sign of life carries this number."""
        self.failed = 0
        """Failed turns since the last completed one."""

    def start(self) -> None:
        """Run the first turn now."""
        self._known = self._failures()
        self._fire()

    def stop(self) -> None:
        """Run no further turn."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        when: float | None = self._loop.now() + PAUSE_S
        completed = False
        try:
            when = self._turn()
            completed = True
        except Exception:
            _log.exception("clock.turn_failed", in_a_row=self.failed + 1)
        finally:
            if when is not None:
                self._timer = self._loop.call_at(when, self._fire)
        known, self._known = self._known, self._failures()
        if completed and known == self._known:
            self._completed()
        else:
            self._failed()

    def _completed(self) -> None:
        self.turns += 1
        self.failed = 0
        now = self._loop.now()
        if now >= self._sign_at:
            self._sign_at = now + SIGN_EVERY_S
            say_alive(self.turns)

    def _failed(self) -> None:
        self.failed += 1
        if self.failed >= MAX_FAILED and not self._broken:
            self._broken = True
            self._on_broken(f"its clock failed {self.failed} times in a row; see its log")
