"""The events of MemberWatch, with a fake Ray."""

from dataclasses import dataclass, field

import pytest

from baton.deploy.controller.backend import (
    MemberDown,
    MemberEnded,
    MemberServes,
    MemberSpec,
    MemberStarted,
    MemberUnplaced,
)
from baton.deploy.ray import backend
from baton.deploy.ray.backend import ActorGone, MemberAlive, MemberWatch
from baton.deploy.ray.member import MemberReport, State
from baton.deploy.supervise.process import ProcessSpec
from baton.proto.errors import ConnectionLost
from baton.router.config import RouterConfig


@dataclass
class FakeRay:
    """``reports``: the members' reports; an exception in it is raised."""

    reports: dict[str, MemberReport | Exception | None] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    calls: list[tuple] = field(default_factory=list)
    why: str = ""
    made: int = 0

    def create(self, spec):
        self.taken.add(spec.name)
        self.made += 1
        return spec.name

    def ask(self, actor):
        return actor

    def answer(self, ticket):
        report = self.reports.get(ticket)
        if isinstance(report, Exception):
            raise report
        return report

    def stop(self, actor, grace):
        self.calls.append(("stop", actor, round(grace, 1)))

    def kill_child(self, actor, pid):
        self.calls.append(("kill_child", actor, pid))

    def kill(self, actor):
        self.calls.append(("kill", actor))

    def is_free(self, name):
        return name not in self.taken

    def why_unplaced(self, actor, role):
        return self.why

    def request(self, bundles):
        self.calls.append(("request", bundles))

    def capacity(self):
        return None

    def nodes(self):
        return {"prefill": 1, "decode": 2}


def spec(name="decode-0", role="decode"):
    config = RouterConfig(client_address="ipc:///a", worker_address="ipc:///b")
    process = ProcessSpec(name=name, role=role, module="m", config=config)
    return MemberSpec(name=name, role=role, revision=0, process=process)


def report(state=State.RUNNING, pid=11, supervisor=1, **more):
    return MemberReport(
        name="decode-0", role="decode", revision=0, host="h", supervisor=supervisor,
        state=state, pid=pid, **more,
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(backend.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def world(clock):
    ray, said = FakeRay(), []
    watching = MemberWatch(ray, said.append)

    def cycle(seconds=0.2):
        clock[0] += seconds
        watching.cycle(clock[0])
        new, said[:] = list(said), []
        return new

    watching.put(lambda: watching.start(spec()))
    return ray, watching, cycle


def test_a_start_is_said_once_and_again_for_another_process(world):
    ray, _, cycle = world
    assert cycle() == []
    ray.reports["decode-0"] = report()
    assert cycle() == [MemberStarted("decode-0", "h", 11)]
    assert cycle() == []
    ray.reports["decode-0"] = report(pid=12)
    assert cycle() == [MemberStarted("decode-0", "h", 12)]
    ray.reports["decode-0"] = report(pid=12, supervisor=2)  # the same pid on another host
    assert cycle() == [MemberStarted("decode-0", "h", 12)]
    assert ray.made == 1


def test_a_crash_is_said_once_with_its_cause_and_the_wait(world):
    ray, _, cycle = world
    ray.reports["decode-0"] = report(pid=11, quiet=0.3)
    assert cycle() == [MemberStarted("decode-0", "h", 11), MemberAlive("decode-0", 0.3)]
    down = report(State.WAITING, pid=0, starts=3, why="killed by signal 9", wait=1.8, ends=3)
    ray.reports["decode-0"] = down
    assert cycle() == [MemberDown("decode-0", "killed by signal 9", 1.8, 3)]
    assert cycle() == []


def test_a_gateway_serves_from_the_first_heartbeat_of_each_process(world):
    ray, watching, cycle = world
    watching.put(lambda: watching.start(spec("gateway-0", "gateway")))
    ray.reports["decode-0"] = report(quiet=0.1)
    ray.reports["gateway-0"] = report(pid=21)
    said = [event for event in cycle() if event.name == "gateway-0"]
    assert said == [MemberStarted("gateway-0", "h", 21)]
    for pid in (21, 22):
        ray.reports["gateway-0"] = report(pid=pid, quiet=0.1)
        assert cycle().count(MemberServes("gateway-0")) == 1
        assert MemberServes("gateway-0") not in cycle()


def test_an_actor_that_is_being_restarted_is_asked_again(world):
    ray, _, cycle = world
    ray.reports["decode-0"] = ConnectionLost("it restarts")
    assert cycle() == []
    ray.reports["decode-0"] = report()
    assert cycle() == [MemberStarted("decode-0", "h", 11)]


def test_an_end_is_said_once_the_name_is_free(world):
    ray, _, cycle = world
    ray.reports["decode-0"] = report(State.ENDED, pid=0, code=1, reason="no model", refused=True)
    assert cycle() == []
    assert cycle() == []
    assert ("kill", "decode-0") in ray.calls
    ray.taken.clear()
    assert cycle() == [MemberEnded("decode-0", 1, "no model", refused=True)]
    assert cycle() == []


def test_an_actor_that_somebody_killed_has_ended(world):
    ray, _, cycle = world
    ray.reports["decode-0"] = ActorGone("killed by ray.kill")
    cycle()
    ray.taken.clear()
    (ended,) = cycle()
    assert isinstance(ended, MemberEnded)
    assert "killed by ray.kill" in ended.reason


def test_a_stop_is_repeated_until_the_member_heeds_it(world):
    ray, watching, cycle = world
    ray.reports["decode-0"] = report()
    cycle()
    watching.put(lambda: watching.stop("decode-0", 30.0))
    cycle()
    cycle()
    assert ray.calls == [("stop", "decode-0", 30.0)]
    cycle(1.0)  # its actor has lost the order
    assert len(ray.calls) == 2
    ray.reports["decode-0"] = report(State.STOPPING)
    cycle()
    cycle(5.0)
    assert len(ray.calls) == 2


def test_a_member_that_stays_silent_is_killed_after_its_grace(world):
    ray, watching, cycle = world
    ray.reports["decode-0"] = report()
    cycle()
    ray.reports["decode-0"] = None
    watching.put(lambda: watching.stop("decode-0", 10.0))
    cycle()
    cycle(10.0 + backend.MARGIN + 1)
    cycle()
    assert ("kill", "decode-0") in ray.calls
    ray.taken.clear()
    assert [type(event) for event in cycle()] == [MemberEnded]


def test_a_member_without_a_host_is_said_to_wait(world):
    ray, _, cycle = world
    ray.why = "no live node has the resource 'decode'"
    assert [event for _ in range(10) for event in cycle()] == []
    said = [event for _ in range(20) for event in cycle()]
    assert said == [MemberUnplaced("decode-0", ray.why)]


def test_a_member_without_a_host_is_ended_at_once(world):
    ray, watching, cycle = world
    ray.why = "no live node has the resource 'decode'"
    cycle()
    watching.put(lambda: watching.stop("decode-0", 30.0))
    cycle()
    ray.taken.clear()
    assert [type(event) for event in cycle()] == [MemberEnded]
    assert ray.calls == [("kill", "decode-0")]


def test_a_call_that_fails_does_not_end_the_watch(world):
    ray, watching, cycle = world
    watching.put(lambda: ray.no_such_thing())
    ray.reports["decode-0"] = report()
    assert cycle() == [MemberStarted("decode-0", "h", 11)]


def test_a_change_of_role_is_refused_with_the_command_to_use_instead():
    one = object.__new__(backend.RayBackend)
    assert "cannot change its role" in one.turn_refusal()
    assert "baton scale" in one.turn_refusal()
