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

    def turn(self, actor, spec):
        self.calls.append(("turn", actor, spec.role))

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


def report(state=State.RUNNING, pid=11, supervisor=1, role="decode", **more):
    return MemberReport(
        name="decode-0", role=role, revision=0, host="h", supervisor=supervisor,
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


# --------------------------------------------------------------------------- changes of role


def test_a_change_of_role_is_ordered_until_the_actor_has_it_and_after_its_restart(world):
    ray, watching, cycle = world
    ray.reports["decode-0"] = report()
    cycle()
    watching.put(lambda: watching.turn(spec(role="prefill")))
    cycle()
    assert ray.calls == [("turn", "decode-0", "prefill")]
    cycle()
    assert len(ray.calls) == 1  # its report may be under way
    cycle(backend.ASK_AGAIN)
    assert len(ray.calls) == 2
    ray.reports["decode-0"] = report(role="prefill")
    assert cycle(backend.ASK_AGAIN) == [] and len(ray.calls) == 2
    ray.reports["decode-0"] = report(pid=13, supervisor=2)  # Ray restarted it as it began
    assert cycle(backend.ASK_AGAIN) == [MemberStarted("decode-0", "h", 13)]
    assert len(ray.calls) == 3
    ray.reports["decode-0"] = report(state=State.ENDED, pid=0)
    cycle(backend.ASK_AGAIN)
    assert [call[0] for call in ray.calls].count("turn") == 3


def test_a_worker_that_changed_its_role_keeps_its_node(world):
    ray, watching, cycle = world
    watching.put(lambda: watching.start(spec("prefill-0", "prefill")))
    watching.put(lambda: watching.request({"router": 1, "prefill": 1, "decode": 1}))
    cycle()
    cycle()
    assert ray.calls == [("request", {"router": 1, "prefill": 1, "decode": 1})]
    watching.put(lambda: watching.turn(spec(role="prefill")))
    watching.put(lambda: watching.request({"router": 1, "prefill": 2, "decode": 0}))
    cycle()
    assert ray.calls[1:] == [("request", {"router": 1, "prefill": 1, "decode": 1})]
    watching.put(lambda: watching.turn(spec(role="decode")))
    cycle()
    assert ray.calls[2:] == [("request", {"router": 1, "prefill": 2, "decode": 0})]


HERE = {"router": "router", "prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}


@pytest.mark.parametrize(
    ("prefill", "decode", "roles", "nodes"),
    [
        (2, 1, {}, (2, 1)),
        (1, 2, {}, (2, 1)),  # one of the spare prefill workers will turn
        (1, 3, {}, (2, 2)),  # and one more starts
        (3, 1, {}, (3, 1)),  # no decode worker is spare
        (1, 2, {"prefill-1": "decode"}, (2, 1)),  # it has turned
        (2, 1, {"prefill-1": "decode"}, (2, 1)),  # and will turn back
        (0, 3, {"prefill-0": "decode", "prefill-1": "decode"}, (2, 1)),
    ],
)
def test_sizes_are_counted_by_the_nodes_of_the_workers(prefill, decode, roles, nodes):
    sizes = {"prefill": prefill, "decode": decode}
    found = backend.by_node(sizes, HERE | roles, may_turn=True)
    assert (found["prefill"], found["decode"]) == nodes
    assert sum(found.values()) == prefill + decode


def test_without_changes_of_role_sizes_are_those_of_the_nodes():
    assert backend.by_node({"prefill": 1, "decode": 2}, HERE) == {"prefill": 1, "decode": 2}
    assert backend.by_node({"decode": 2}, HERE, may_turn=True) == {"decode": 2}


def made(roles, keyless=None, capacity=None, can_turn=True):
    one = object.__new__(backend.RayBackend)
    one._watch = MemberWatch(FakeRay(), lambda _: None)
    one._watch.keyless = keyless or {}
    one._watch.capacity, one._watch.nodes = capacity, {"prefill": 2, "decode": 1}
    one._roles, one._can_turn = roles, lambda: can_turn
    return one


def test_pools_beyond_their_nodes_are_possible_by_changes_of_role_alone():
    capacity = {"router": 1, "prefill": 2, "decode": 1}
    one = made(HERE, capacity=capacity)
    assert one.refusal({"prefill": 1, "decode": 2}) == ""
    assert "hold 1 decode workers" in one.refusal({"prefill": 2, "decode": 2})
    assert "hold 1 decode" in made(HERE, capacity=capacity, can_turn=False).refusal(
        {"prefill": 1, "decode": 2}
    )
    assert made(HERE).full({"prefill": 1, "decode": 2}) == ""
    assert "1 live nodes for decode" in made(HERE).full({"prefill": 2, "decode": 2})


def test_a_host_without_the_keys_of_both_roles_refuses_changes():
    assert made(HERE, {"prefill-0": "", "decode-0": ""}).turn_refusal() == ""
    refusal = made(HERE, {"prefill-0": "decode"}).turn_refusal()
    assert "prefill-0 cannot be a decode worker: its host has no decode key" in refusal
    assert "ray-config --turn" in refusal


def test_what_a_host_lacks_is_read_from_reports(world):
    ray, watching, cycle = world
    ray.reports["decode-0"] = report(keyless="prefill")
    cycle()
    assert watching.keyless == {"decode-0": "prefill"}
    ray.reports["decode-0"] = report(state=State.ENDED, pid=0)
    cycle()
    ray.taken.clear()
    cycle()
    assert watching.keyless == {}
