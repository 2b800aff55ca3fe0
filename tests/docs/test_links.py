"""Links and paths in Markdown files lead somewhere; each decision has its own number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OUTSIDE = ("http://", "https://", "mailto:")


def pages() -> list[Path]:
    """The Markdown files of the project; folders that were built or installed are left out."""
    made = {"build", "dist", "src"}
    folders = [f for f in ROOT.iterdir() if f.is_dir() and f.name not in made and f.name[0] != "."]
    return [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = CODE_BLOCK.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere():
    broken = []
    for page in pages():
        for link in LINK.findall(CODE_BLOCK.sub("", page.read_text("utf-8"))):
            if link.startswith(OUTSIDE):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_each_decision_has_a_number_of_its_own_in_name_and_title():
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    titles = [(ROOT / "docs/decisions" / name).read_text("utf-8").split(".")[0] for name in names]
    assert titles == [f"# {number}" for number in range(1, len(names) + 1)]
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]


@pytest.mark.parametrize("name", ["architecture.md", "failures.md", "glossary.md"])
def test_every_module_that_a_page_names_exists(name):
    text = CODE_BLOCK.sub("", (ROOT / "docs" / name).read_text("utf-8"))
    named = set(re.findall(r"`((?:\.\./)?[\w./]*/[\w./]*)`", text))
    folders = (ROOT, ROOT / "engine/kernels")  # the table of CUDA files begins there
    assert len(named) > 5
    missing = {path for path in named if not any((folder / path).exists() for folder in folders)}
    assert missing == set()


@pytest.mark.parametrize("name", ["architecture.md", "failures.md"])
def test_every_member_of_a_class_that_a_page_names_exists(name):
    text = CODE_BLOCK.sub("", (ROOT / "docs" / name).read_text("utf-8"))
    named = set(re.findall(r"`([A-Z]\w+\.[a-z]\w*)`", text))
    owners = {name.partition(".")[0] for name in named}
    known: set[str] = set()
    for folder in (ROOT / "src/baton").iterdir():
        for module in folder.rglob("*.py"):
            source = module.read_text("utf-8")
            if owners.isdisjoint(re.findall(r"^class (\w+)", source, re.MULTILINE)):
                continue
            for one in ast.walk(ast.parse(source)):
                if isinstance(one, ast.ClassDef):
                    fields = [
                        ast.unparse(f.target) for f in one.body if isinstance(f, ast.AnnAssign)
                    ]
                    methods = [m.name for m in one.body if isinstance(m, ast.FunctionDef)]
                    known.update(f"{one.name}.{member}" for member in (*fields, *methods))
    assert len(named) > 5
    assert named - known == set()
