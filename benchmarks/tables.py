"""The output of benchmarks as tables in Markdown, as docs/benchmarks.md has them.

A benchmark prints aligned columns, at least two blanks apart. Invariant: every printed line is in
the result, either as a row or as a line of text.
"""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Return the checkout's commit, with a remark if its files differ."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    if not name:
        return "without a commit"
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"commit `{name}`{' with changed files' if changed else ''}"


def section(name: str, output: str, machine: str) -> str:
    """Return a benchmark's section: its date, commit and machine, then its tables."""
    date = datetime.now(UTC).date().isoformat()
    return f"## {name}\n\n{date}, {commit()}, {machine}.\n\n{tables(output)}\n"


def tables(output: str) -> str:
    """Return printed lines in Markdown; neighbouring lines of several columns become a table."""
    found: list[str] = []
    rows: list[list[str]] = []
    for line in [*output.splitlines(), ""]:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) > 1:
            rows.append(cells)
            continue
        if rows:
            found += [*_table(rows), ""]
            rows = []
        if line.strip():
            found += [line.strip(), ""]
    return "\n".join(found)


def _table(rows: list[list[str]]) -> list[str]:
    """Return the rows with as many cells as the longest; the first one becomes the heading."""
    width = max(map(len, rows))
    # A heading without a name for its first column is one cell short.
    whole = [[*[""] * (index == 0), *cells] for index, cells in enumerate(rows)]
    if len(rows[0]) == width:
        whole[0] = rows[0]
    lines = ["| " + " | ".join([*cells, *[""] * (width - len(cells))]) + " |" for cells in whole]
    return [lines[0], "|" + "---|" * width, *lines[1:]]
