"""The table after a run, by itself and as a run with two workers prints it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .where_time_went import folder_of, table

TESTS = Path(__file__).parents[1]
FILES = {
    "cluster": ("a", "b"),
    "cuda": ("x", "y"),
    "router/deep": ("m", "n"),
}
BODY = """\
import os

import pytest


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize("number", range(3))
def test_one(number, folder):
    with open({log!r}, "a") as log:
        log.write(os.environ["PYTEST_XDIST_WORKER"] + " {name}\\n")
    assert number < {below}
"""


def test_a_folder_is_the_one_right_below_tests():
    assert folder_of("tests/engine/kernels/test_linear.py::test_a[x/y::z]") == "tests/engine"
    assert folder_of("tests/cli/test_main.py::test_b") == "tests/cli"
    assert folder_of("test_c.py::test_d") == "test_c.py"


def test_seconds_and_shares_by_folder_and_the_slowest():
    seconds = {
        "tests/a/test_1.py::x": 1.0,
        "tests/a/deep/test_2.py::y": 5.0,
        "tests/b/test_3.py::z": 2.0,
    }
    assert table(seconds, slowest=2) == [
        "  seconds   share   tests  folder",
        "      6.0   75.0%       2  tests/a",
        "      2.0   25.0%       1  tests/b",
        "      8.0  100.0%       3  all",
        "",
        "  seconds  slowest tests",
        "      5.0  tests/a/deep/test_2.py::y",
        "      2.0  tests/b/test_3.py::z",
    ]


def test_one_folder_needs_no_table():
    assert table({}) == []
    assert table({"tests/a/test_1.py::x": 1.0, "tests/a/test_2.py::y": 0.5}) == []


def test_tests_that_take_no_time_have_no_share():
    assert table({"tests/a/test_1.py::x": 0.0, "tests/b/test_2.py::y": 0.0})[1] == (
        "      0.0    0.0%       1  tests/a"
    )


@pytest.fixture
def project(tmp_path):
    """Six files of tests in three folders, under the conftest of this project."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    shutil.copytree(TESTS / "suite", tmp_path / "tests/suite", ignore=lambda *_: {"__pycache__"})
    for test in (tmp_path / "tests/suite").glob("test_*.py"):
        test.unlink()
    for folder, names in FILES.items():
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for name in names:
            body = BODY.format(log=str(tmp_path / "log"), name=name, below=2 if name == "n" else 3)
            (tmp_path / "tests" / folder / f"test_{name}.py").write_text(body)
    return tmp_path


def test_two_workers_take_whole_files_from_both_ends_and_one_table_tells_of_all(project):
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    dealt = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    run = subprocess.run([*command, *dealt], cwd=project, capture_output=True, text=True)
    assert "1 failed, 17 passed" in run.stdout, run.stdout + run.stderr
    rows = re.findall(r"% +(\d+)  (\S+)$", run.stdout, re.MULTILINE)
    counts = {"all": "18", **{f"tests/{folder.split('/')[0]}": "6" for folder in FILES}}
    assert {name: count for count, name in rows} == counts
    assert len(rows) == len(counts)
    ran: dict[str, list[str]] = {"gw0": [], "gw1": []}
    for line in (project / "log").read_text().splitlines():
        worker, name = line.split()
        ran[worker].append(name)
    for names in ran.values():
        assert names == sorted(names, key=names.index)  # a file's tests follow each other
        assert all(names.count(name) == 3 for name in names)
    assert (ran["gw0"][0], ran["gw1"][0]) == ("a", "y")
