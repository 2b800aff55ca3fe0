"""Messages for operators: the sentence of each :class:`Log`, JSON lines, progress of loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.runtime.process.log import timestamp
from baton.runtime.process.memory import size_text

from .supervise.core import Log

SUPERVISOR = "supervisor"

_SENTENCES = {
    "ready": "ready: all workers have registered",
    "restarting": "{name} ended ({detail}); restarting in {seconds:.1f} s",
    "back": "{name} serves again",
    "turns": "{name} changes its role to {detail}",
    "retired": "{name} finished its requests and was not restarted",
    "declared_dead": "{name} was declared dead: {detail} (--worker-timeout {seconds:g})",
    "hung": "{name} hangs ({detail}); killing it",
    "cannot_run": "{name} cannot run: {detail}",
    "broken": "stopped by an internal error: {detail}",
    "gave_up": "{name} ended repeatedly before the cluster was ready; stopping. "
    "Last message: {detail}",
    "replacing": "{name} cannot run ({detail}); a replacement starts in {seconds:.1f} s",
    "not_added": "{name} cannot run and was not added: {detail}",
    "unplaced": "{name} waits for a host: {detail}",
    "drain_over": "{name} has not finished within the grace period; its requests move elsewhere",
    "rolled_out": "rollout finished: {detail}",
    "rollout_stopped": "rollout {detail}",
    "draining": "draining: running requests have {seconds:.0f} s to finish "
    "(interrupt again to stop at once)",
    "going_down": "going down: ordered by baton down",
    "ended": "ended: ordered by baton down",
    "grace_over": "the grace period is over; stopping with requests unfinished",
}

FAILURES = frozenset({"cannot_run", "gave_up", "broken"})
"""Messages about the end of the cluster. They are printed last, on standard error."""


def sentence(log: Log) -> str:
    """Return the line for a :class:`Log` of the core."""
    return _SENTENCES[log.event].format(
        name=log.name, detail=log.detail or "no message", seconds=log.seconds
    )


def json_line(process: str, event: str, **fields: Any) -> str:
    """Return a log line as JSON: time in UTC, severity, process, event and ``fields``."""
    line = {"timestamp": timestamp(), "level": "info", "process": process, "event": event}
    return msgspec.json.encode(line | fields, enc_hook=str).decode()


def load_progress(progress: Sequence[tuple[str, int, int]]) -> str:
    """Return one progress bar for all ``(process, bytes done, bytes total)``."""
    done, total = (sum(sizes) for sizes in ([p[1] for p in progress], [p[2] for p in progress]))
    return f"loading  {_bar(done, total)}  {', '.join(name for name, _, _ in progress)}"


def _bar(done: int, total: int, width: int = 12) -> str:
    filled = min(width, width * done // total) if total else 0
    return f"[{'#' * filled}{'.' * (width - filled)}] {size_text(done)}/{size_text(total)}"


def duration(seconds: float) -> str:
    """Format seconds with at most two units, such as "2 h 5 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def counted(number: int, what: str) -> str:
    """Format a count: "1 block", "2 blocks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
