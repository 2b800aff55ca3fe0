"""A test of processes is tried again, unless it read a wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import importlib.util
spec = importlib.util.spec_from_file_location("second_try", {path!r})
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
pytest_itemcollected = plugin.allow
def pytest_configure(config):
    config.pluginmanager.register(plugin.SecondTry())
"""
TESTS = """
tries = []
def test_late():
    tries.append(1)
    assert len(tries) > 1, "timed out waiting for 24 tokens"
def test_noisy():
    tries.append(3)
    assert tries.count(3) > 1, "2 lines in the log"
def test_wrong():
    tries.append(2)
    assert tries.count(2) > 1, "the tokens differ"
def answers(number):
    return [[number] * 300] * 16
def test_wrong_answers_without_the_word():
    tries.append(4)
    assert answers(tries.count(4)) == answers(2)
"""


@pytest.mark.parametrize(("folder", "outcomes"), [
    ("cluster", {"rerun": 2, "passed": 2, "failed": 2}),
    ("engine", {"failed": 4}),
])  # fmt: skip
def test_only_tests_of_processes_are_tried_again(pytester, monkeypatch, folder, outcomes):
    for name in ("CI", "BUILD_NUMBER"):  # with them, the lists' difference takes minutes
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(CONFTEST.format(path=str(Path(__file__).with_name("second_try.py"))))
    inside = pytester.mkdir(folder)
    (inside / "test_it.py").write_text(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", folder)
    assert result.parseoutcomes() == outcomes
    said = "failed at the first try" in result.stdout.str()
    assert said == ("rerun" in outcomes)


CLUSTERS = """
import sys
sys.path.insert(0, {root!r})
from tests.cluster.conftest import STARTED, pytest_runtest_teardown
class Cluster:
    ended = 0
    def end(self):
        self.ended += 1
STARTED.append(Cluster())
def pytest_sessionfinish():
    print("ended", STARTED[0].ended)
"""
LAST = """
from conftest import STARTED
tries = []
def test_last():
    tries.append(1)
    assert len(tries) > 1, "late"
    assert not STARTED[0].ended, "no cluster"
"""


def test_the_last_test_of_a_module_finds_its_cluster_at_the_second_try(pytester):
    """The clusters of a module end with its last test, after all tries."""
    path = Path(__file__)
    second_try = CONFTEST.format(path=str(path.with_name("second_try.py")))
    pytester.makeconftest(second_try + CLUSTERS.format(root=str(path.parents[2])))
    (pytester.mkdir("cluster") / "test_it.py").write_text(LAST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s", "cluster")
    assert result.parseoutcomes() == {"rerun": 1, "passed": 1}
    result.stdout.fnmatch_lines("*ended 1*")


FIXTURES = """
tries = []
@pytest.fixture(scope="session")
def wheel():
    tries.append(1)
    assert len(tries) > 1, "late"
@pytest.fixture(scope="module")
def lab(wheel):
    print("lab begins")
    yield
    print("lab ends")
"""


def test_a_fixture_that_the_second_try_made_ends_with_its_module(pytester):
    second_try = CONFTEST.format(path=str(Path(__file__).with_name("second_try.py")))
    pytester.makeconftest("import pytest\n" + second_try + FIXTURES)
    folder = pytester.mkdir("cluster")
    for name in ("test_one.py", "test_other.py"):
        (folder / name).write_text("def test_first(lab): pass\ndef test_second(lab): pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s", "cluster")
    assert result.parseoutcomes() == {"rerun": 1, "passed": 4}
    said = [line for line in result.outlines if "lab" in line]
    assert [line.split("lab ")[1] for line in said] == ["begins", "ends"] * 2
