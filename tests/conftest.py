"""What holds for every run of the tests: how they are dealt to workers, where the time went."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Generator
from typing import Any

import pytest

from .suite import second_try
from .suite.where_time_went import WhereTimeWent

with contextlib.suppress(ModuleNotFoundError):  # absent on a GPU machine
    from hypothesis import HealthCheck, settings

    # A busy machine must not fail a test, nor an example that another change did not cause.
    every = settings.register_profile
    every("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    every("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("fixed")


IN_SHORT = {
    "cuda": (
        "test_attention_plan", "test_block_refusals", "test_cublas", "test_cupy_device",
        "test_driver", "test_elementwise", "test_graphs", "test_int8_rows",
        "test_planted",
    ),
    "gpu": ("test_frames", "test_visit_plan"),
}  # fmt: skip
"""Of these folders below `tests/` only these files are short, and all tests with planted bugs."""


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which reports."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Let the process that reports take the time and print first tries.

    A shell starts background jobs with SIGINT ignored, which the tests' processes would inherit:
    those that are interrupted would go on.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not is_worker(config):
        config.pluginmanager.register(WhereTimeWent())
        config.pluginmanager.register(second_try.SecondTry())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the objects of ten thousand tests, which live to the end, from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of long files, and the tests that may have a second try."""
    second_try.allow(item)
    is_short = item.path.stem in IN_SHORT.get(item.path.parent.name, (item.path.stem,))
    if not is_short and "planted" not in f"{item.path.stem} {item.name}":
        item.add_marker("long")


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
