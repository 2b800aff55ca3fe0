"""What a part of a GPU verb finds out: lines of a table, and the report made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HELD, MISSED, FAILED, TOLD, SKIPPED = "held", "missed", "FAILED", "", "skipped"
"""Of a line: its bar is held or missed; it is wrong; it has no bar; it could not be tried."""


_IDENTITY = ("sources", "gpu", "processor", "packages")
"""Facts of a machine that results of one report share."""


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


def markdown(title: str, machine: dict[str, Any], results: Sequence[PartResult], note: str) -> str:
    """Return the report as a Markdown page with one table."""
    facts = [str(machine[key]) for key in ("gpu", "processor", "system") if key in machine]
    facts.append(f"commit {machine.get('commit') or 'unknown'}")
    facts += [f"{name} {version}" for name, version in machine.get("packages", {}).items()]
    lines = [f"# {title}", "", "; ".join(facts) + ".", *(["", f"{note}."] if note else []), ""]
    rows: list[Sequence[str]] = [("part", "what", "result", "bar", "state"), ("---",) * 5]
    for result in results:
        rows += [(result.name, x.what, x.result, x.bar, x.state) for x in result.lines]
        if result.error:
            rows.append((result.name, "ended", result.error, "", FAILED))
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


@dataclass
class Report:
    """Results of one verb on one machine, gathered over several calls.

    ``note``: a reservation about the figures, or empty. ``extra``: more entries of the JSON.
    """

    verb: str
    machine: dict[str, Any]
    note: str = ""
    results: dict[str, PartResult] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def read(self, path: Path) -> dict[str, Any]:
        """Take over the results of a report of the same sources, machine and note, if it is one.

        Return its JSON. A report that cannot be read, or is of something else, is ignored and
        returned as empty; :meth:`write` replaces it.
        """
        try:
            found = json.loads(path.read_text())
            kept = [
                PartResult(p["name"], [Line(**x) for x in p["lines"]], p["seconds"], p["error"])
                for p in found["parts"]
            ]
            same = (found["verb"], found["note"]) == (self.verb, self.note)
            commits = [m.get("commit", "").rstrip("+") for m in (found["machine"], self.machine)]
            same = same and commits[0] == commits[1]
            same = same and all(found["machine"].get(k) == self.machine.get(k) for k in _IDENTITY)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        if not same:
            return {}
        self.results = {result.name: result for result in kept}
        return dict(found)

    def write(self, path: Path, order: Sequence[str]) -> None:
        """Write JSON to ``path`` and a table beside it; ``order``: all parts of the verb."""
        results = self.ordered(order)
        report: dict[str, Any] = {
            "verb": self.verb,
            "note": self.note,
            "machine": self.machine,
            **self.extra,
            "failed": [result.name for result in results if result.failed],
            "missing": [name for name in order if name not in self.results],
            "parts": [asdict(result) for result in results],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, default=float) + "\n")
        path.with_suffix(".md").write_text(markdown(self.verb, self.machine, results, self.note))

    def ordered(self, order: Sequence[str]) -> list[PartResult]:
        """Return the results in the order of the parts."""
        return [self.results[name] for name in order if name in self.results]


def to_json(line: Line) -> str:
    """One line of text."""
    return json.dumps(asdict(line), default=float)


def from_json(text: str) -> Line:
    """Inverse of :func:`to_json`."""
    return Line(**json.loads(text))
