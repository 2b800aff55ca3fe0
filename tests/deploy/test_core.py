import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.deploy.core import (
    Begin,
    End,
    Exited,
    Interrupted,
    Kill,
    Phase,
    Reported,
    Say,
    Start,
    SupervisorCore,
    SupervisorLimits,
    Terminate,
    Tick,
)

WORKERS = ("prefill-0", "decode-0", "decode-1")
PIDS = {"router": 10, "prefill-0": 11, "decode-0": 12, "decode-1": 13}
ALIVE = {name: PIDS[name] for name in WORKERS}


def begun() -> SupervisorCore:
    core = SupervisorCore("router", WORKERS)
    starts = core.handle(Begin(), 0.0)
    assert starts == [Start(name) for name in PIDS]
    for name, pid in PIDS.items():
        core.started(name, pid)
    return core


def serving() -> SupervisorCore:
    core = begun()
    assert core.handle(Reported(ALIVE), 1.0) == [Say("ready")]
    return core


def said(actions):
    return [a.what for a in actions if isinstance(a, Say)]


def test_ready_only_when_every_worker_is_there():
    core = begun()
    assert core.handle(Reported({"decode-0": 12}), 0.5) == []
    assert core.phase is Phase.STARTING
    assert core.handle(Reported(ALIVE), 0.6) == [Say("ready")]
    assert core.handle(Reported(ALIVE), 0.7) == []


def test_a_killed_worker_comes_back_after_its_delay():
    core = serving()
    actions = core.handle(Exited("decode-0", -9), 2.0)
    assert said(actions) == ["restarting"]
    assert core.next_wakeup() == 2.5
    assert core.handle(Tick(), 2.4) == []
    assert core.handle(Tick(), 2.5) == [Start("decode-0")]


def test_the_router_comes_back_too():
    core = serving()
    core.handle(Exited("router", -9), 2.0)
    assert core.handle(Tick(), 2.6) == [Start("router")]


def test_too_many_exits_end_the_cluster_with_the_reason():
    core, now = serving(), 2.0
    for _ in range(5):
        core.handle(Exited("decode-0", 1), now)
        now += 8.0
        assert core.handle(Tick(), now) == [Start("decode-0")]
    actions = core.handle(Exited("decode-0", 1, "out of memory"), now)
    assert actions[0] == Say("gave_up", "decode-0", "out of memory")
    assert actions[1:] == [Terminate(n) for n in ("router", "prefill-0", "decode-1")]
    for name in ("router", "prefill-0"):
        assert core.handle(Exited(name, 0), now) == []
    assert core.handle(Exited("decode-1", 0), now) == [End(1)]


def test_bad_settings_are_not_tried_again():
    core = begun()
    actions = core.handle(Exited("prefill-0", 1, "no such folder", refused=True), 0.2)
    assert actions[0] == Say("cannot_run", "prefill-0", "no such folder")
    assert core.phase is Phase.STOPPING


def test_a_refusal_after_the_start_is_tried_again():
    core = serving()
    assert said(core.handle(Exited("decode-0", 1, "address in use", refused=True), 2.0)) == [
        "restarting"
    ]


def test_interrupt_drains_through_the_router_then_stops():
    core = serving()
    assert core.handle(Interrupted(), 2.0) == [Say("draining", seconds=30.0), Terminate("router")]
    assert core.handle(Exited("router", 0), 4.0) == [Terminate(n) for n in WORKERS]
    for name in WORKERS[:-1]:
        core.handle(Exited(name, 0), 4.1)
    assert core.handle(Exited(WORKERS[-1], 0), 4.2) == [End(0)]
    assert core.handle(Tick(), 5.0) == []


def test_the_grace_is_bounded_and_stubborn_children_are_killed():
    core = serving()
    core.handle(Interrupted(), 2.0)
    now = 2.0
    while now < 31.5:  # the router goes on answering while it drains
        assert core.handle(Reported(ALIVE), now) == []
        now += 1.0
    actions = core.handle(Reported(ALIVE), 32.0)
    assert actions == [Say("grace_over"), *(Terminate(n) for n in PIDS)]
    assert core.handle(Tick(), 33.0) == []
    assert core.handle(Tick(), 37.0) == [Kill(n) for n in PIDS]
    assert core.handle(Tick(), 38.0) == []


def test_a_second_interrupt_kills():
    core = serving()
    core.handle(Interrupted(), 2.0)
    assert core.handle(Interrupted(), 2.1) == [Kill(n) for n in PIDS]


def test_interrupt_while_starting_stops_without_draining():
    core = begun()
    assert core.handle(Interrupted(), 0.1) == [Terminate(n) for n in PIDS]


def test_a_stopped_worker_is_killed_once_and_restarted():
    core, now = serving(), 1.0
    lost = {k: v for k, v in ALIVE.items() if k != "decode-0"}
    kills = []
    while now < 6.0:
        now += 0.25
        kills += [a for a in core.handle(Reported(lost), now) if isinstance(a, Kill)]
    assert kills == [Kill("decode-0")]
    assert said(core.handle(Exited("decode-0", -9), now)) == ["restarting"]


def test_workers_get_time_to_register_with_a_new_router():
    core = serving()
    core.handle(Exited("router", -9), 50.0)
    core.handle(Tick(), 50.5)
    core.started("router", 99)
    for now in (51.0, 52.0, 53.0, 53.9):
        assert core.handle(Reported({}), now) == []
    killed = [a.name for a in core.handle(Reported({}), 54.0) if isinstance(a, Kill)]
    assert killed == list(WORKERS)


def test_a_silent_router_is_killed_but_not_after_our_own_pause():
    core, now = serving(), 1.0
    while now < 10.5:
        now += 0.5
        assert core.handle(Tick(), now) == []
    assert core.handle(Tick(), 11.0)[-1] == Kill("router")
    core = serving()
    assert core.handle(Tick(), 500.0) == []


def test_a_drained_worker_is_not_started_again():
    core = serving()
    assert said(core.handle(Exited("decode-1", 0), 2.0)) == ["retired"]
    assert core.next_wakeup() is None


EVENTS = st.one_of(
    st.builds(
        Exited,
        st.sampled_from(list(PIDS)),
        st.sampled_from([0, 1, -9]),
        st.just("why"),
        st.booleans(),
    ),
    st.builds(Reported, st.dictionaries(st.sampled_from(WORKERS), st.integers(11, 13))),
    st.just(Interrupted()),
    st.just(Tick()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 20.0)), max_size=40))
def test_no_child_starts_twice_and_the_end_comes_last(steps):
    core = SupervisorCore("router", WORKERS, SupervisorLimits(grace=5.0))
    running: set[str] = set()
    now, ended = 0.0, False

    def carry_out(actions):
        nonlocal ended
        for action in actions:
            assert not ended
            if isinstance(action, Start):
                assert action.name not in running
                running.add(action.name)
            elif isinstance(action, (Kill, Terminate)):
                assert action.name in running
            elif isinstance(action, End):
                assert not running
                ended = True

    carry_out(core.handle(Begin(), now))
    for event, gap in steps:
        now += gap
        if isinstance(event, Exited):
            if event.name not in running:
                continue
            running.discard(event.name)
        carry_out(core.handle(event, now))
    for event in (Interrupted(), Interrupted()):
        carry_out(core.handle(event, now))
    for name in sorted(running):
        running.discard(name)
        carry_out(core.handle(Exited(name, -9), now))
    assert ended


@pytest.mark.parametrize("code", [1, -11])
def test_exit_during_draining_of_the_router_counts_as_failure(code):
    core = serving()
    core.handle(Interrupted(), 2.0)
    core.handle(Exited("router", code), 2.1)
    for name in WORKERS[:-1]:
        core.handle(Exited(name, 0), 2.2)
    assert core.handle(Exited(WORKERS[-1], 0), 2.3) == [End(1)]
