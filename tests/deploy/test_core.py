import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.deploy.controller.backend import MemberDown, MemberEnded, MemberServes
from baton.deploy.messages import sentence
from baton.deploy.plan.plan import role_of
from baton.deploy.report import DEAD, ClusterReport, WorkerReport
from baton.deploy.supervise.core import (
    Add,
    Alive,
    Exited,
    Kill,
    Log,
    Raised,
    Remove,
    Reported,
    Start,
    Started,
    SupervisorCore,
    Terminate,
    Tick,
)

WORKERS = ("prefill-0", "decode-0", "decode-1")
PIDS = {"router": 10, "prefill-0": 11, "decode-0": 12, "decode-1": 13}
ALIVE = {name: PIDS[name] for name in WORKERS}


def begun(routers=("router",)) -> SupervisorCore:
    core = SupervisorCore()
    for name in (*routers, *WORKERS):
        assert core.handle(Add(name, role_of(name)), 0.0) == [Start(name)]
        assert core.handle(Started(name, PIDS.get(name, 20)), 0.0) == []
    return core


def reported(router, alive, lost="", reason="no heartbeat for 5.0 s") -> Reported:
    """A router's report: pid of each live worker by name; ``lost``: a worker declared dead."""
    workers = [WorkerReport(id=w, role="", pid=pid, state="ready") for w, pid in alive.items()]
    if lost:
        dead = WorkerReport(id=lost, role="", pid=PIDS[lost], state=DEAD, reason=reason)
        workers.append(dead)
    return Reported(router, ClusterReport(workers=workers))


def serving(routers=("router",)) -> SupervisorCore:
    core = begun(routers)
    for router in routers:
        assert core.handle(reported(router, ALIVE), 1.0) == []
    return core


def test_a_killed_worker_comes_back_after_its_delay():
    core = serving()
    actions = core.handle(Exited("decode-0", -9), 2.0)
    assert actions == [MemberDown("decode-0", "killed by signal 9", 0.5, 1)]
    assert core.handle(Tick(), 2.4) == []
    assert core.handle(Tick(), 2.5) == [Start("decode-0")]


def test_the_router_comes_back_too_whatever_its_exit_code():
    core = serving()
    core.handle(Exited("router", 0), 2.0)
    assert core.handle(Tick(), 2.6) == [Start("router")]


def test_a_worker_that_ends_again_and_again_is_restarted_for_ever_after_growing_waits():
    core, now, waits = serving(), 2.0, []
    for _ in range(10):
        (restarting,) = core.handle(Exited("decode-0", 1, "no such device"), now)
        waits.append(restarting.seconds)
        now += restarting.seconds
        assert core.handle(Tick(), now) == [Start("decode-0")]
        core.handle(Started("decode-0", 12), now)
    assert waits == [0.5, 0.5, 1, 2, 4, 8, 16, 32, 60, 60], "the first process served"
    assert (restarting.ends, restarting.why) == (10, "no such device")


def test_after_a_life_that_served_the_wait_is_short_and_after_a_long_one_the_first():
    core, now = serving(), 2.0
    for _ in range(8):
        (restarting,) = core.handle(Exited("decode-0", -9), now)
        now += restarting.seconds
        core.handle(Tick(), now)
        core.handle(Started("decode-0", 12), now)
        core.handle(reported("router", ALIVE), now)
    assert restarting.seconds == 5.0
    assert core.handle(Exited("decode-0", -9), now + 60.0)[0].seconds == 0.5


def test_a_heartbeat_shows_that_a_child_served():
    core, now, waits = begun(), 0.0, []
    for turns in range(6):
        core.handle(Alive("decode-0", turns), now)
        (restarting,) = core.handle(Exited("decode-0", -11, "why"), now + 0.1)
        waits.append(restarting.seconds)
        now += 0.1 + restarting.seconds
        core.handle(Tick(), now)
        core.handle(Started("decode-0", 12), now)
    assert waits == [0.5, 1, 2, 4, 5, 5]


def alone() -> SupervisorCore:
    """Supervise one child without router reports, as an actor of Ray does."""
    core = SupervisorCore(reports=False)
    core.handle(Add("decode-0", "decode"), 0.0)
    core.handle(Started("decode-0", 12), 0.0)
    return core


def test_without_reports_a_worker_that_served_and_leaves_has_drained():
    core = alone()
    assert isinstance(core.handle(Exited("decode-0", 0), 1.0)[0], MemberDown)
    core = alone()
    core.handle(Alive("decode-0", 1), 0.5)
    assert core.handle(Exited("decode-0", 0), 1.0) == [MemberEnded("decode-0", 0)]


def test_without_reports_a_refusal_of_one_that_served_is_tried_again():
    core = alone()
    core.handle(Alive("decode-0", 1), 0.5)
    (restarting,) = core.handle(Exited("decode-0", 1, "its port is taken", refused=True), 1.0)
    assert restarting == MemberDown("decode-0", "its port is taken", 0.5, 1)
    (ended,) = alone().handle(Exited("decode-0", 1, "no such model", refused=True), 1.0)
    assert ended == MemberEnded("decode-0", 1, "no such model", refused=True)


def test_bad_settings_are_not_tried_again():
    core = begun()
    actions = core.handle(Exited("prefill-0", 1, "no such folder", refused=True), 0.2)
    assert actions == [MemberEnded("prefill-0", 1, "no such folder", refused=True)]


def test_a_refusal_of_one_that_could_run_is_tried_again():
    core = serving()
    (restarting,) = core.handle(Exited("decode-0", 1, "address in use", refused=True), 2.0)
    assert restarting == MemberDown("decode-0", "address in use", 0.5, 1)


def test_one_that_ends_before_it_was_ever_seen_is_tried_again():
    core = begun()
    assert isinstance(core.handle(Exited("decode-0", 0), 0.3)[0], MemberDown)


def test_a_drained_worker_is_not_started_again():
    core = serving()
    assert core.handle(Exited("decode-1", 0), 2.0) == [MemberEnded("decode-1", 0)]
    assert core.handle(Tick(), 100.0) == []


def test_a_removed_child_is_asked_then_killed_and_never_started():
    core = serving()
    assert core.handle(Remove("decode-1", 5.0), 2.0) == [Terminate("decode-1")]
    assert core.handle(reported("router", ALIVE), 3.5) == []
    assert core.handle(reported("router", ALIVE), 5.0) == []
    assert core.handle(Tick(), 6.9) == []
    assert core.handle(Tick(), 7.0) == [Kill("decode-1")]
    assert core.handle(Tick(), 8.0) == []
    assert core.handle(Exited("decode-1", -9), 8.1) == [MemberEnded("decode-1", -9)]


def test_a_second_removal_asks_again_with_its_own_grace():
    core = serving()
    core.handle(Remove("router", 30.0), 2.0)
    assert core.handle(Remove("router", 1.0), 3.0) == [Terminate("router")]
    assert core.handle(Tick(), 4.0) == [Kill("router")]


def test_without_grace_it_is_killed_at_once():
    core = serving()
    assert core.handle(Remove("router"), 2.0) == [Kill("router")]


def test_one_that_waits_for_its_restart_is_removed_at_once():
    core = serving()
    core.handle(Exited("decode-0", -9), 2.0)
    assert core.handle(Remove("decode-0", 5.0), 2.1) == [MemberEnded("decode-0", 0)]
    assert core.handle(Tick(), 3.0) == []


def test_a_stopped_worker_is_killed_once_and_restarted():
    core, now = serving(), 1.0
    lost = {k: v for k, v in ALIVE.items() if k != "decode-0"}
    kills = []
    while now < 15.0:
        now += 0.25
        actions = core.handle(reported("router", lost, "decode-0"), now)
        kills += [a for a in actions if isinstance(a, Kill)]
    assert kills == [Kill("decode-0")]
    (restarting,) = core.handle(Exited("decode-0", -9), now)
    assert "no heartbeat for 5.0 s; no heartbeat for 10." in restarting.why


def test_a_worker_that_one_router_of_two_hears_is_not_killed():
    core, now = serving(("router-0", "router-1")), 1.0
    while now < 8.0:
        now += 0.25
        assert core.handle(reported("router-0", {}), now) == []
        assert core.handle(reported("router-1", ALIVE), now) == []


def test_a_silent_router_is_killed_but_not_after_our_own_pause():
    core, now = serving(), 1.0
    while now < 10.5:
        now += 0.5
        assert core.handle(Tick(), now) == []
    assert core.handle(Tick(), 11.0)[-1] == Kill("router")
    core = serving()
    assert core.handle(Tick(), 500.0) == []


def test_a_router_that_shows_life_is_not_killed_however_long_its_answers_are_missing():
    core, now = serving(), 1.0
    while now < 300.0:
        now += 0.5
        assert core.handle(Alive("router", int(2 * now)), now) == []


def test_a_kill_is_explained_by_what_the_system_says_of_it():
    core = serving()
    exited = Exited("decode-0", -9, "a last error", evidence="(out of memory: ...)")
    (restarting,) = core.handle(exited, 6.2)
    assert restarting.why == (
        "killed by signal 9 (out of memory: ...); its last error was: a last error"
    )


def test_a_worker_declared_dead_says_so_when_it_ends():
    core = serving()
    said = [Log("declared_dead", "decode-0", "no heartbeat for 5.0 s", 5.0)]
    assert core.handle(reported("router", {}, "decode-0"), 6.0) == said
    assert sentence(said[0]) == (
        "decode-0 was declared dead: no heartbeat for 5.0 s (--worker-timeout 5)"
    )
    assert core.handle(reported("router", {}, "decode-0"), 6.1) == []  # reported once
    (restarting,) = core.handle(Exited("decode-0", 4, "declared dead by every router"), 6.2)
    assert restarting.why == (
        "declared dead: no heartbeat for 5.0 s; declared dead by every router"
    )


NAMES = st.sampled_from(list(PIDS))
EVENTS = st.one_of(
    st.builds(Exited, NAMES, st.sampled_from([0, 1, -9]), st.just("why"), st.booleans()),
    st.builds(
        reported,
        st.just("router"),
        st.dictionaries(st.sampled_from(WORKERS), st.integers(11, 13)),
    ),
    st.builds(Remove, NAMES, st.sampled_from([0.0, 5.0])),
    st.builds(Add, NAMES, st.booleans()),
    st.just(Tick()),
)


@settings(max_examples=200)
@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 20.0)), max_size=40))
def test_no_child_starts_twice_and_each_ends_once(steps):
    core = SupervisorCore()
    known: set[str] = set()
    running: set[str] = set()
    removed: set[str] = set()
    now = 0.0

    def carry_out(actions):
        for action in actions:
            if isinstance(action, (Log, MemberDown)):
                continue
            assert action.name in known
            if isinstance(action, Start):
                assert action.name not in running | removed
                running.add(action.name)
            elif isinstance(action, MemberEnded):
                assert action.name not in running
                known.discard(action.name)
                removed.discard(action.name)
            else:
                assert action.name in running

    for event, gap in steps:
        now += gap
        if isinstance(event, Exited):
            if event.name not in running:
                continue
            running.discard(event.name)
        if isinstance(event, Add):
            if event.name in known:
                continue
            known.add(event.name)
        if isinstance(event, Remove) and event.name in known:
            removed.add(event.name)
        carry_out(core.handle(event, now))
    for name in sorted(known):
        carry_out(core.handle(Remove(name), now))
    for name in sorted(running):
        running.discard(name)
        carry_out(core.handle(Exited(name, -9), now))
    assert not known


@pytest.mark.parametrize("reports", [True, False])
def test_a_gateway_serves_from_its_first_heartbeat_and_always_returns(reports):
    core = SupervisorCore(reports=reports)
    core.handle(Add("gateway-0", "gateway"), 0.0)
    core.handle(Started("gateway-0", 12), 0.0)
    assert core.handle(Alive("gateway-0", 1), 1.0) == [MemberServes("gateway-0")]
    assert core.handle(Alive("gateway-0", 2), 2.0) == []
    (down,) = core.handle(Exited("gateway-0", 0), 3.0)
    assert isinstance(down, MemberDown)
    assert core.handle(Tick(), 4.0) == [Start("gateway-0")]
    core.handle(Started("gateway-0", 13), 4.0)
    assert core.handle(Alive("gateway-0", 1), 5.0) == [MemberServes("gateway-0")]


@pytest.mark.parametrize("reports", [True, False])
def test_a_gateway_without_heartbeats_is_killed(reports):
    core = SupervisorCore(reports=reports)
    core.handle(Add("gateway-0", "gateway"), 0.0)
    core.handle(Started("gateway-0", 12), 0.0)
    for now in range(60):  # until its first heartbeat it loads
        assert core.handle(Tick(), float(now)) == []
    core.handle(Alive("gateway-0", 1), 60.0)
    done = [action for now in range(61, 75) for action in core.handle(Tick(), float(now))]
    assert done == [Log("hung", "gateway-0", "no heartbeat for 10.0 s"), Kill("gateway-0")]
    (down,) = core.handle(Exited("gateway-0", -9), 75.0)
    assert down.why == "it did not answer: no heartbeat for 10.0 s"


def test_a_gateway_that_is_refused_before_it_served_ends():
    core = SupervisorCore()
    core.handle(Add("gateway-0", "gateway"), 0.0)
    core.handle(Started("gateway-0", 12), 0.0)
    ended = core.handle(Exited("gateway-0", 1, "port 80", refused=True), 1.0)
    assert ended == [MemberEnded("gateway-0", 1, "port 80", refused=True)]


def test_an_error_of_one_child_leaves_the_others_of_that_tick(monkeypatch):
    core = serving()
    for name in ("decode-0", "decode-1"):
        core.handle(Exited(name, -9), 2.0)
    real = SupervisorCore._start

    def planted(self, name):
        if name == "decode-0":
            raise KeyError("planted")
        return real(self, name)

    monkeypatch.setattr(SupervisorCore, "_start", planted)
    raised, started = core.handle(Tick(), 2.5)
    assert isinstance(raised, Raised) and raised.name == "decode-0"
    assert started == Start("decode-1")
    monkeypatch.undo()
    assert core.handle(Tick(), 2.6) == [Start("decode-0")]
