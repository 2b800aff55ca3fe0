"""What a part of a GPU verb finds out: lines of a table, and the report made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HELD, MISSED, FAILED, TOLD, SKIPPED = "held", "missed", "FAILED", "", "skipped"
"""Of a line: its bar is held or missed; it is wrong; it has no bar; it could not be tried."""


@dataclass(frozen=True)
class Line:
    """One finding. ``result`` and ``bar`` are for people, ``figures`` for programs."""

    what: str
    result: str
    bar: str = ""
    state: str = TOLD
    figures: dict[str, float] = field(default_factory=dict)


def checked(what: str, right: bool, result: str, bar: str = "", **figures: float) -> Line:
    """A line that is right or wrong."""
    return Line(what, result, bar, HELD if right else FAILED, figures)


def wrong(what: str, result: str) -> Line:
    """A line that is wrong."""
    return Line(what, result, state=FAILED)


def measured(what: str, result: str, bar: str, held: bool, **figures: float) -> Line:
    """A figure with a bar, which it may miss without anything being wrong."""
    return Line(what, result, bar, HELD if held else MISSED, figures)


def skipped(what: str, why: str) -> Line:
    """What this machine cannot try."""
    return Line(what, why, state=SKIPPED)


@dataclass
class PartResult:
    """What became of a part: its lines, how long it took, and why it ended if not by itself."""

    name: str
    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether something was wrong; a missed bar is not."""
        return bool(self.error) or any(line.state == FAILED for line in self.lines)


def table(results: Iterable[PartResult]) -> str:
    """Rows of part, what, result, bar and state, aligned."""
    rows: list[Sequence[str]] = [("part", "what", "result", "bar", "")]
    for result in results:
        rows += [(result.name, x.what, x.result, x.bar, x.state) for x in result.lines]
        if result.error:
            rows.append((result.name, "ended", result.error, "", FAILED))
    widths = [min(max(len(row[i]) for row in rows), 78) for i in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def write_report(
    path: Path, verb: str, machine: dict[str, Any], results: Sequence[PartResult], note: str = ""
) -> None:
    """Write the report as JSON. ``note``: a reservation about the figures, or empty."""
    report: dict[str, Any] = {
        "verb": verb,
        "note": note,
        "machine": machine,
        "failed": [result.name for result in results if result.failed],
        "parts": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=float) + "\n")


def to_json(line: Line) -> str:
    """One line of text."""
    return json.dumps(asdict(line), default=float)


def from_json(text: str) -> Line:
    """Inverse of :func:`to_json`."""
    return Line(**json.loads(text))
