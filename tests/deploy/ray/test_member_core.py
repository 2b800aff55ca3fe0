"""When a member's supervisor starts its child, and when it stops doing so."""

import pytest

from baton.deploy.ray.member_core import (
    Action,
    Begin,
    Exited,
    MemberCore,
    Served,
    State,
    Stop,
    Tick,
)
from baton.deploy.supervise.restart import RestartLimits

LIMITS = RestartLimits(first_delay=0.5, max_delay=60.0)


def begun(**options) -> MemberCore:
    core = MemberCore(LIMITS, **options)
    assert core.handle(Begin(), 0.0) == [Action.START]
    return core


def test_a_crash_is_followed_by_a_start_after_the_delay():
    core = begun()
    assert core.handle(Exited(-9), 10.0) == []
    assert core.state is State.WAITING
    assert core.handle(Tick(), 10.4) == []
    assert core.handle(Tick(), 10.5) == [Action.START]
    assert (core.state, core.starts, core.code) == (State.RUNNING, 2, -9)


@pytest.mark.parametrize(
    ("serves", "waits"), [(False, [0.5, 1, 2, 4, 8, 16]), (True, [0.5, 1, 2, 4, 5, 5])]
)
def test_crashes_are_followed_by_starts_for_ever_after_growing_waits(serves, waits):
    core, now, seen = begun(), 0.0, []
    for _ in waits:
        if serves:
            core.handle(Served(), now)
        core.handle(Exited(-11, "why"), now + 0.1)
        seen.append(core.wait(now + 0.1))
        now += 0.1 + core.wait(now + 0.1)
        assert core.handle(Tick(), now) == [Action.START]
    assert seen == pytest.approx(waits)
    assert (core.state, core.ends, core.reason) == (State.RUNNING, 6, "why")


@pytest.mark.parametrize("refused", [True, False])
def test_a_wrong_setting_is_not_tried_twice(refused):
    core = begun()
    core.handle(Exited(1, "no such model", refused), 0.1)
    assert (core.state is State.ENDED) == refused


def test_a_refusal_after_a_crash_is_tried_again():
    core = begun()
    core.handle(Exited(-9), 1.0)
    core.handle(Tick(), 2.0)
    core.handle(Exited(1, "its port is taken", refused=True), 3.0)
    assert core.state is State.WAITING


def test_a_worker_that_leaves_has_drained_and_a_router_has_not():
    worker, router = begun(), begun(retires=False)
    worker.handle(Exited(0), 1.0)
    router.handle(Exited(0), 1.0)
    assert (worker.state, router.state) == (State.ENDED, State.WAITING)


def test_a_stop_asks_then_forces():
    core = begun()
    assert core.handle(Stop(5.0), 10.0) == [Action.TERMINATE]
    assert core.handle(Tick(), 14.9) == []
    assert core.handle(Tick(), 15.0) == [Action.KILL]
    assert core.handle(Tick(), 16.0) == []
    core.handle(Exited(-9), 16.1)
    assert core.state is State.ENDED
    assert core.handle(Begin(), 17.0) == []


def test_a_second_stop_sets_its_own_time():
    core = begun()
    core.handle(Stop(100.0), 0.0)
    assert core.handle(Stop(1.0), 5.0) == [Action.TERMINATE]
    assert core.handle(Tick(), 6.0) == [Action.KILL]


def test_a_stop_while_nothing_runs_ends_it():
    core = begun()
    core.handle(Exited(-9), 0.0)
    assert core.handle(Stop(5.0), 0.1) == []
    assert core.handle(Tick(), 10.0) == []
    assert core.state is State.ENDED
