"""One more try for a test of processes, unless it read a wrong value.

Such a test depends on the machine: a worker that gets no processor for a minute is late, and a
line that a slow process wrote may come between two others. A test whose error speaks of tokens,
blocks, audio or pixels gets no second try, unless it waited in vain. The first try is printed, so
that a rare fault is seen.
"""

from __future__ import annotations

import pytest
from pytest_rerunfailures import suspended_finalizers

FOLDERS = ("clients", "cluster", "deploy", "deploy_hosts", "deploy_ray")
"""Folders below `tests/` whose tests start processes."""
IN_VAIN = r"timed out waiting for|TimeoutExpired|Timeout \(>"
"""Errors for an event that did not happen in time."""
NO_VALUE = (
    r"(?is)\A(?!.*(token|block|leak|sample|audio|pixel|image|log_prob"
    r"|at index \d+ diff|contains .* more item))"
)
"""Errors that are about no value computed for a request, and about no memory held.

Pytest cuts the text of two long lists before it names what returned them: such lists may be tokens.
"""


def allow(item: pytest.Item) -> None:
    """Mark a test of processes, so that pytest-rerunfailures may try it again."""
    if item.path.parent.name in FOLDERS:
        item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=[IN_VAIN, NO_VALUE]))


class SecondTry:
    """Pytest plugin: prints why the first try of a test failed."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the failures that a second try followed."""
        if again := terminalreporter.stats.get("rerun", []):
            terminalreporter.section("failed at the first try")
            for report in again:
                terminalreporter.write_line(f"{report.nodeid}\n{report.longreprtext}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Keep the ends of fixtures that the second try made, for a module or the session.

        pytest-rerunfailures (16.7) puts those that the first try had made in their place, so a
        fixture that failed at first would never end, and would serve the next module too.
        """
        stack = item.session._setupstate.stack
        for node, (ends, error) in suspended_finalizers.items():
            made = stack[node][0] if node in stack else []
            suspended_finalizers[node] = ([*ends, *(end for end in made if end not in ends)], error)
