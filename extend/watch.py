"""Names the extension whose call does not return.

Such a call stops the thread that serves all requests, so another thread looks. The supervisor ends
the process later, without the reason.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from .guard import Guard

HANG_S = 2.0
"""Seconds after which a call that has not returned is reported, once."""

Say = Callable[[str, dict[str, object]], None]
"""Logs an event; called on the thread that looks."""


class CallWatch:
    """A thread that looks at the calls of ``guards``, which the thread that makes it calls.

    ``say``: gets the event, such as ``policy.hangs``. Without guards there is no thread.
    """

    def __init__(self, guards: Sequence[Guard], say: Say, hang_s: float = HANG_S) -> None:
        self._guards = guards
        self._say = say
        self._hang_s = hang_s
        self._caller = threading.get_ident()
        self._told: dict[str, float | None] = {}  # by class: when the reported call began
        self._end = threading.Event()
        if guards:
            threading.Thread(target=self._look, name="call-watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread soon."""
        self._end.set()

    def _look(self) -> None:
        while not self._end.wait(self._hang_s / 4):
            for guard in self._guards:
                began = guard.began
                if began is None or self._told.get(guard.name) == began:
                    continue
                seconds = guard.now() - began
                if seconds > self._hang_s:
                    self._told[guard.name] = began
                    self._tell(guard, seconds)

    def _tell(self, guard: Guard, seconds: float) -> None:
        frame = sys._current_frames().get(self._caller)
        place = ""
        if frame is not None:
            last = traceback.extract_stack(frame)[-1]
            place = f", at {last.filename}, line {last.lineno}"
        text = (
            f"{guard.name} has not returned for {seconds:.1f} s{place}; no request moves "
            "meanwhile, and the supervisor restarts the process if that lasts"
        )
        self._say(f"{guard.point.name}.hangs", {"extension": guard.name, "error": text})
