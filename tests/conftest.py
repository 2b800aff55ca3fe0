"""What holds for every run of the tests: how they are dealt to workers, where the time went."""

from __future__ import annotations

from typing import Any

import pytest

from .suite.where_time_went import WhereTimeWent


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which reports."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Let the process that reports take the time."""
    if not is_worker(config):
        config.pluginmanager.register(WhereTimeWent())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files for :mod:`.suite.from_both_ends`."""
    if is_worker(config):
        from .suite.from_both_ends import in_ranks

        items[:] = in_ranks(items)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent, as on a GPU machine
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal files from both ends where `--dist loadfile` asks for whole files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from .suite.from_both_ends import FromBothEnds

    return FromBothEnds(config, log)
