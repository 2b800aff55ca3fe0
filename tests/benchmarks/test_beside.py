"""The hot paths beside those of another checkout."""

import subprocess
from pathlib import Path

import pytest

from baton.benchmarks import beside

ROOT = Path(beside.HERE)
OLDER = """
import sys
from ..proto import nothing_that_newer_benchmarks_need
print("requests/CPU-s        19,283   proxy      100,106   bar    25,000")
print("lone request, µs     p50     p10     p90")
"""


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a checkout without the modules that this checkout's benchmarks import."""
    package = tmp_path / "older" / "src" / "baton"
    for folder in ("", "benchmarks", "proto"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").touch()
    (package / "proto" / "nothing_that_newer_benchmarks_need.py").touch()
    (package / "benchmarks" / "router.py").write_text(OLDER)
    return tmp_path / "older"


@pytest.mark.parametrize(("limit", "code"), [("0.0001", 0), ("10000", 1)])
def test_a_row_has_both_sides_and_a_low_ratio_is_the_exit_code(limit, code, capsys):
    words = [str(ROOT), "handoff", "--rounds", "1", "--seconds", "0.05", "--limit", limit]
    assert beside.main(words) == code
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("handoff: ")]
    assert [row.partition("  ")[0] for row in rows] == [
        "handoff: MB/s over zmq",
        "handoff: MB/s over shm",
    ]


def test_the_other_checkout_s_code_runs_under_these_benchmarks(tmp_path):
    other = tmp_path / "other" / "src" / "baton"
    other.mkdir(parents=True)
    for one in (ROOT / "src" / "baton").iterdir():
        if one.name not in ("proto", "__pycache__"):
            (other / one.name).symlink_to(one.resolve())
    (other / "proto").mkdir()
    (other / "proto" / "__init__.py").write_text("raise SystemExit('the code of the other one')")
    side = beside.Side(tmp_path / "other", beside.overlay(tmp_path / "other", tmp_path / "over"))
    with pytest.raises(RuntimeError, match="the code of the other one"):
        side.figures("handoff", 0.05)


def test_a_checkout_that_is_too_old_runs_its_own_benchmark(older, tmp_path):
    side = beside.Side(older, beside.overlay(older, tmp_path / "over"))
    for _ in range(2):
        assert side.figures("router", 0.05) == {"requests/CPU-s": 19283.0}
    assert side.old == {"router"}


def test_a_commit_gets_a_worktree_that_does_not_stay():
    if not (ROOT / ".git").exists():
        pytest.skip("these sources have no git history")
    with beside.checkout_of("HEAD") as tree:
        assert (tree / "src" / "baton" / "router").is_dir()
    assert not tree.exists()
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert str(tree) not in listed.stdout


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        beside.main([str(ROOT), "rooter"])
    assert "unknown hot path 'rooter'" in capsys.readouterr().err
