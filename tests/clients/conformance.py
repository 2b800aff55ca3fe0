"""The tables of ``docs/http.md`` that name the fields of bodies."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"
_SECTIONS = {  # the sections that name the fields of a route's body
    "/v1/chat/completions": ("Parameters",),
    "/v1/completions": ("Parameters",),
    "/v1/responses": ("Responses", "Parameters"),
    "/v1/audio/speech": ("Speech",),
    "/v1/images/generations": ("Pictures", "Parameters"),
}
_KINDS = {"field": "used", "refused": "refused", "ignored": "ignored"}
_KINDS |= {"for the sender's records": "ignored"}


@dataclass(slots=True)
class Row:
    """What the page says of a field. ``neutral``: values that are accepted without a warning."""

    kind: str
    neutral: list[Any] = field(default_factory=list)


def rows_of(route: str) -> dict[str, Row] | None:
    """Return the rows by field, or None for a route without a table."""
    if route not in _SECTIONS:
        return None
    found: dict[str, Row] = {}
    for section in _SECTIONS[route]:
        for name, row in _rows(section).items():
            found.setdefault(name, row)
    if route == "/v1/audio/speech":
        found["model"] = Row("used")
    return found


def _rows(section: str) -> dict[str, Row]:
    text = re.split(rf"^##+ {section}\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    found: dict[str, Row] = {}
    kind = ""
    for line in re.split(r"^##+ ", text, flags=re.MULTILINE)[0].splitlines():
        if not line.startswith("|"):
            kind = ""
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        kind = kind or _KINDS.get(cells[0], "other")
        if kind == "other" or " in chats" in cells[0]:
            continue
        values = re.findall(r"`([^`]+)`", cells[2]) if len(cells) > 2 else ()
        neutral = [None, *map(json.loads, values)]
        for name in re.findall(r"`(\w+)`", cells[0]):
            found[name] = Row(kind, neutral)
    return found


def ignored_in(route: str, body: dict[str, Any]) -> set[str]:
    """Return the fields of a body, also unknown ones, that the answer's warnings must name.

    Raises AssertionError if the page says that the request is refused.
    """
    rows = rows_of(route)
    assert rows, route
    found = set()
    for name, value in body.items():
        row = rows.get(name, Row("ignored", [None]))
        if row.kind == "used" or value in row.neutral:
            continue
        assert row.kind == "ignored", f"{name} = {value!r} is refused by docs/http.md"
        found.add(name)
    return found
