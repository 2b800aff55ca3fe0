"""Runs the parts of a command, each in a separate process with a time limit.

Invariants: whatever a part does, the others run and its lines are kept; nothing a part started
outlives it; a call ends within its budget, and leaves parts that may not fit for the next. What
parts keep for each other is gone after the call.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .lines import FAILED, Line, PartResult, from_json

_POLL_S = 0.05
_GRACE_S = 5.0
_TAIL = 400
_IN_MEMORY = Path("/dev/shm")
_ROOM = 4 << 34
"""Bytes: four times what a model with 8 billion parameters takes."""


@dataclass(frozen=True)
class Part:
    """A part of a verb: its code as "module:function", and the most seconds it may take.

    ``together``: runs beside its neighbours with the same flag; others have the GPU to themselves.
    """

    name: str
    code: str
    limit_s: float
    together: bool = False


class _Running:
    """A part's process, and its output."""

    def __init__(self, part: Part, stage: str, folder: Path, shared: Path) -> None:
        self.part = part
        self._out, self._log = folder / f"{part.name}.lines", folder / f"{part.name}.log"
        self._began = time.monotonic()
        self._until = self._began + part.limit_s
        self._late = False
        command = [sys.executable, "-P", "-m", "baton.benchmarks.gpu.child", part.code]
        command += ["--stage", stage, "--out", str(self._out), "--shared", str(shared)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def poll(self) -> bool:
        """Whether it has ended; it is ended when its time is over."""
        if self._process.poll() is None and time.monotonic() > self._until:
            self._late = True
            self.end()
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process and all it started, first politely."""
        for number, wait in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait)

    def result(self) -> PartResult:
        """Return the part's results."""
        with contextlib.suppress(ProcessLookupError):  # remaining processes of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        seconds = time.monotonic() - self._began
        lines = lines_of(self._out)
        error = ""
        if self._late:
            error = f"not done after {self.part.limit_s:.0f} s"
        elif self._process.returncode:
            error = f"exit code {self._process.returncode}: {self._last_words()}"
        elif not lines:
            error = "found nothing out"
        return PartResult(self.part.name, lines, seconds, error)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-_TAIL:] if lines else "no word"


def lines_of(path: Path) -> list[Line]:
    """Whole lines that a part has written, also one that was ended."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError, TypeError):  # cut off
            lines.append(from_json(text))
    return lines


Choose = Callable[[Sequence[Part], float], Part | None]
"""The part to begin next, of those that wait, in the seconds that are left; None for no more."""


def first_if_it_fits(waiting: Sequence[Part], left_s: float) -> Part | None:
    """Keep the order: a part whose limit exceeds what is left ends the call."""
    return waiting[0] if waiting[0].limit_s <= left_s else None


def run_parts(
    parts: Sequence[Part],
    stage: str,
    folder: Path,
    budget_s: float,
    at_once: int = 4,
    choose: Choose = first_if_it_fits,
    begins: Callable[[Part], object] | None = None,
) -> Iterator[PartResult]:
    """Run parts, at most ``at_once`` together, and call ``begins`` before each.

    ``stage``: "module:function" that makes one. Logs and lines go to ``folder``. Once ``choose``
    finds none for what is left of ``budget_s``, no further part is begun; those have no result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + budget_s
    waiting, running = list(parts), list[_Running]()
    with _shared_folder() as shared, _all_ended(running):
        while waiting or running:
            while waiting:
                part = choose(waiting, until - time.monotonic())
                if part is None:
                    waiting.clear()
                    break
                if not _may_start(part, [r.part for r in running], at_once):
                    break
                waiting.remove(part)
                if begins is not None:
                    begins(part)
                running.append(_Running(part, stage, folder, shared))
            done = [r for r in running if r.poll()]
            for each in done:
                running.remove(each)
                yield each.result()
            if not done and running:
                time.sleep(_POLL_S)


def _may_start(part: Part, running: Sequence[Part], at_once: int) -> bool:
    if not running:
        return True
    return part.together and len(running) < at_once and all(other.together for other in running)


@contextmanager
def _all_ended(running: list[_Running]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in running:
            each.end()


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder for all parts: in memory where there is plenty, unless TMPDIR names a place."""
    place = None
    if "TMPDIR" not in os.environ and _IN_MEMORY.is_dir():
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if min(free, shutil.disk_usage(_IN_MEMORY).free) >= _ROOM:
            place = str(_IN_MEMORY)
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=place) as name:
        yield Path(name)


def narrate(result: PartResult) -> str:
    """One line about a part that has ended."""
    wrong = [line.what for line in result.lines if line.state == FAILED]
    how = result.error or ("FAILED: " + ", ".join(wrong) if wrong else "done")
    return f"{result.name}: {len(result.lines)} lines in {result.seconds:.1f} s, {how}"
