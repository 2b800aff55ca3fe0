"""A table after a run of the tests: seconds by folder, and the slowest of them.

The seconds of a test are those of its call, its fixtures included where it was the first to need
them. With several workers they add up to more than the clock shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

SLOWEST = 10


def folder_of(test: str) -> str:
    """The folder right below ``tests/`` that a test (a pytest node id) lies in."""
    path = test.partition("::")[0]
    return "/".join(path.split("/")[:-1][:2]) or path


def table(seconds: Mapping[str, float], slowest: int = SLOWEST) -> list[str]:
    """Lines of the table of ``seconds`` by test; none when they are all of one folder."""
    folders, counts = Counter[str](), Counter[str]()
    for test, spent in seconds.items():
        folders[folder_of(test)] += spent
        counts[folder_of(test)] += 1
    if len(folders) < 2:
        return []
    total = sum(folders.values())
    lines = [f"{'seconds':>9}  {'share':>6}  {'tests':>6}  folder"]
    for folder, spent in folders.most_common():
        share = spent / total if total else 0.0
        lines.append(f"{spent:9.1f}  {share:6.1%}  {counts[folder]:6,}  {folder}")
    lines.append(f"{total:9.1f}  {1:6.1%}  {len(seconds):6,}  all")
    lines += ["", f"{'seconds':>9}  slowest tests"]
    longest = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:slowest]
    lines += [f"{spent:9.1f}  {test}" for test, spent in longest]
    return lines


class WhereTimeWent:
    """Pytest plugin: adds up the reports, of the workers of pytest-xdist too."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of one phase: set-up, call or tear-down."""
        self.seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        if lines := table(self.seconds):
            terminalreporter.section("where the time went")
            for line in lines:
                terminalreporter.write_line(line)
