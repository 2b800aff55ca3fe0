"""Writes docs/modules.md, the index of all modules, from their docstrings, so it cannot drift.

``python docs/make_modules.py`` rewrites the page. With ``--check`` the exit code is 1, with one
line about the remedy, if that would change the page.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("modules.md")
REMEDY = "run: python docs/make_modules.py"
HEAD = """# Modules

Every module with the first sentence of its docstring, from the highest floor to the lowest
([architecture](architecture.md#floors)). `python docs/make_modules.py` writes this page.
"""


def packages() -> Iterator[str]:
    """Yield the folders at the root, from the highest floor to the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (floors,) = (
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "containers" not in contract
    )
    for floor in floors:
        for name in floor.split("|"):
            yield name.strip().removeprefix("baton.")


def summary(module: Path) -> str:
    """Return the first sentence of a module's docstring, or an empty text."""
    paragraph = (ast.get_docstring(ast.parse(module.read_text("utf-8"))) or "").split("\n\n")[0]
    first, dot, _ = " ".join(paragraph.split()).partition(". ")
    return (first + dot.strip()).replace("|", "\\|")


def section(package: str) -> str:
    """Return the table of one folder: a row per module."""
    folder = ROOT / package
    purpose = summary(folder / "__init__.py")
    rows = [
        f"| `{module.relative_to(ROOT)}` | {summary(module)} |"
        for module in sorted(folder.rglob("*.py"))
        if module.name != "__init__.py"
    ]
    return "\n".join([f"\n## `{package}/`\n", f"{purpose}\n", "| module | |", "|---|---|", *rows])


def render() -> str:
    """Return the page."""
    return HEAD + "\n".join(section(package) for package in packages()) + "\n"


def main() -> int:
    """Rewrite or check the page."""
    fresh = render()
    if "--check" in sys.argv:
        stale = not PAGE.exists() or PAGE.read_text("utf-8") != fresh
        if stale:
            print(f"docs/modules.md is not current; {REMEDY}", file=sys.stderr)  # noqa: T201
        return int(stale)
    PAGE.write_text(fresh, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
