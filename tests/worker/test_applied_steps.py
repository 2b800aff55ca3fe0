"""The compute thread's wait for the core."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.engine.scheduling.plan import StepPlan, StepResult
from baton.proto.errors import InternalError
from baton.worker.host import AppliedSteps, TextHost


def test_a_step_that_is_applied_is_not_waited_for() -> None:
    steps = AppliedSteps()
    steps.wait(-1)
    steps.set(4)
    steps.wait(3)
    steps.wait(4)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_wait_ends_with_its_step_or_with_the_worker(stopped: bool) -> None:
    steps, begun = AppliedSteps(), threading.Event()

    def wait() -> None:
        begun.set()
        steps.wait(5)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert begun.wait(60)
        steps.set(4)
        assert not waiting.done()
        if stopped:
            steps.stop()
            with pytest.raises(InternalError, match="stops"):
                waiting.result(60)
        else:
            steps.set(5)
            waiting.result(60)


class FailingHost(TextHost):
    """A host whose core raises; nothing else of it is there."""

    def __init__(self) -> None:
        self._unwanted, self._applied = set(), AppliedSteps()
        self._backend = cast("Any", SimpleNamespace(lost=""))

    def feed(self, event: object) -> None:
        raise RuntimeError("the core failed")


def test_a_core_that_fails_does_not_keep_the_compute_thread_waiting() -> None:
    """The loop logs the error and continues."""
    host = FailingHost()
    with pytest.raises(RuntimeError, match="the core failed"):
        host._computed(StepPlan(5, ()), StepResult(5, (), 0.1, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host._applied.wait, 5)
        try:
            waiting.result(10)
        finally:
            host._applied.stop()
