"""Every commit that a page cites with a result is in the history, so the result can be repeated."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/benchmarks.md", "docs/results/*.md", "docs/results/*.json")


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )


def cited(page: Path) -> set[str]:
    """Return the commits that a page names: between backticks, or after the word."""
    return set(re.findall(r'(?:`|\bcommit"?:? "?)([0-9a-f]{7,40})\b', page.read_text()))


def test_every_cited_commit_is_in_the_history():
    if git("rev-parse", "--is-inside-work-tree").returncode:
        pytest.skip("these sources have no git history")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        pytest.skip("this clone is shallow")
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    found = {(str(page.relative_to(ROOT)), one) for page in pages for one in cited(page)}
    assert len(found) > 10  # the patterns find them
    lost = {
        (page, one)
        for page, one in found
        if git("merge-base", "--is-ancestor", one, "HEAD").returncode
    }
    assert not lost
