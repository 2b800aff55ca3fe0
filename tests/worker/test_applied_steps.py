"""The compute thread's wait for the core."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.proto.errors import InternalError
from baton.worker.host import AppliedSteps


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
