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
"""


@pytest.mark.parametrize(("folder", "outcomes"), [
    ("cluster", {"rerun": 2, "passed": 2, "failed": 1}),
    ("engine", {"failed": 3}),
])  # fmt: skip
def test_only_tests_of_processes_are_tried_again(pytester, folder, outcomes):
    pytester.makeconftest(CONFTEST.format(path=str(Path(__file__).with_name("second_try.py"))))
    inside = pytester.mkdir(folder)
    (inside / "test_it.py").write_text(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", folder)
    assert result.parseoutcomes() == outcomes
    said = "failed at the first try" in result.stdout.str()
    assert said == ("rerun" in outcomes)
