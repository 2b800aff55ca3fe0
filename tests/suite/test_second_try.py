"""A test that waits in vain is tried again; a test that reads a wrong value is not."""

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
    assert len(tries) > 1, "timed out waiting for a worker"
def test_wrong():
    tries.append(2)
    assert tries.count(2) > 1, "the tokens differ"
"""


@pytest.mark.parametrize(("folder", "outcomes"), [
    ("cluster", {"rerun": 1, "passed": 1, "failed": 1}),
    ("engine", {"failed": 2}),
])  # fmt: skip
def test_only_waits_of_processes_are_tried_again(pytester, folder, outcomes):
    pytester.makeconftest(CONFTEST.format(path=str(Path(__file__).with_name("second_try.py"))))
    inside = pytester.mkdir(folder)
    (inside / "test_it.py").write_text(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", folder)
    assert result.parseoutcomes() == outcomes
    said = "waited in vain at the first try" in result.stdout.str()
    assert said == ("rerun" in outcomes)
