"""One more try for a test of processes that waited in vain.

Such a test depends on the machine: a worker that gets no processor for a minute is late. A test
that read a wrong value gets no second try. The first try is printed, so that a rare fault is seen.
"""

from __future__ import annotations

import pytest

FOLDERS = ("cluster", "deploy", "clients")
"""Folders below `tests/` whose tests start processes."""
IN_VAIN = [r"timed out waiting for", r"TimeoutExpired", r"Timeout \(>"]
"""Errors for an event that did not happen in time."""


def allow(item: pytest.Item) -> None:
    """Mark a test of processes, so that pytest-rerunfailures may try it again."""
    if item.path.parent.name in FOLDERS:
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=IN_VAIN))


class SecondTry:
    """Pytest plugin: prints why the first try of a test failed."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the failures that a second try followed."""
        if again := terminalreporter.stats.get("rerun", []):
            terminalreporter.section("waited in vain at the first try")
            for report in again:
                terminalreporter.write_line(f"{report.nodeid}\n{report.longreprtext}\n")
