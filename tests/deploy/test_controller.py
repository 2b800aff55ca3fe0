import pytest

from baton.deploy.controller.backend import MemberDown, MemberEnded, MemberUnplaced
from baton.deploy.controller.events import (
    Answer,
    Down,
    Drain,
    Measured,
    Outcome,
    Rollout,
    Scale,
    Turn,
    TurnMember,
)
from baton.deploy.controller.health import problems
from baton.deploy.controller.members import Stage
from baton.deploy.messages import sentence
from baton.deploy.plan.bounds import Bounds, scale_refusal
from baton.deploy.report import ClusterReport, RequestCounts, RouterReport, WorkerReport
from baton.deploy.supervise.core import Phase, Reported, Tick

from .world import GRACE, World


def serving(**kwargs) -> World:
    world = World(1, **kwargs)
    world.settle(5)
    assert world.core.phase is Phase.SERVING
    return world


def names(world: World, role: str) -> set[str]:
    return {p.name for p in world.processes.values() if p.role == role}


def test_everything_starts_and_is_ready():
    world = serving(prefill=1, decode=2, routers=("router-0", "router-1"))
    assert set(world.processes) == {"router-0", "router-1", "prefill-0", "decode-0", "decode-1"}
    assert world.requested == {"router": 2, "prefill": 1, "decode": 2}
    assert world.said == ["ready"]


def test_scale_up_takes_the_lowest_free_names():
    world = serving()
    ticket = world.ticket()
    world.feed(Scale(ticket, {"decode": 4}))
    assert names(world, "decode") == {"decode-0", "decode-1", "decode-2", "decode-3"}
    assert ticket in world.open
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.DONE
    assert world.requested["decode"] == 4


def test_scale_down_drains_the_highest_and_stops_it_when_it_has_left():
    world = serving(decode=3)
    ticket = world.ticket()
    world.feed(Scale(ticket, {"decode": 1}))
    drained = {n for n, p in world.processes.items() if p.drained_at is not None}
    assert drained == {"decode-1", "decode-2"}
    assert not any(p.stopping for p in world.processes.values())
    world.settle(5)
    assert names(world, "decode") == {"decode-0"}
    assert world.outcomes[ticket] is Outcome.DONE
    assert names(world, "prefill") == {"prefill-0", "prefill-1"}


def test_a_drain_that_does_not_end_is_bounded_by_the_grace():
    world = serving(decode=2)
    world.feed(Scale(world.ticket(), {"decode": 1}))
    world.now += GRACE - 0.1
    world.report("router")
    assert not world.processes["decode-1"].stopping
    world.now += 0.2
    world.report("router")
    assert world.processes["decode-1"].stopping
    assert "drain_over" in world.said


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ({"decode": -1}, "at least 1, not -1"),
        ({"decode": 0}, "at least 1, not 0"),
        ({"decode": 7}, "at most 6 (decode_max), not 7"),
        ({"prefill": 1025}, "at most 1024, not 1025"),
        ({"encode": 1}, "no pool 'encode'; scale prefill, decode or gateway"),
        ({"router": 2}, "no pool 'router'"),
        ({"gateway": 2}, "launched without gateways"),
        ({}, "name a pool"),
    ],
)
def test_a_size_that_cannot_be_is_refused_in_a_sentence_and_nothing_happens(targets, words):
    world = serving()
    before = dict(world.processes)
    answers = world.core.handle(Scale(9, {"prefill": 3, **targets} if targets else {}), world.now)
    assert [a.outcome for a in answers] == [Outcome.FAILED]
    assert words in answers[0].text
    assert world.processes == before
    assert world.core.pools.targets == {"prefill": 2, "decode": 2}


def test_the_autoscaler_is_held_within_the_bounds():
    world = serving()
    world.feed(Measured({"prefill": 0, "decode": 99, "router": 3}))
    assert world.core.pools.targets == {"prefill": 1, "decode": 6}


def test_a_later_scale_replaces_an_earlier_one():
    world = serving()
    first, second = world.ticket(), world.ticket()
    world.feed(Scale(first, {"decode": 4}))
    world.feed(Scale(second, {"decode": 3}))
    world.settle(5)
    assert (world.outcomes[first], world.outcomes[second]) == (Outcome.FAILED, Outcome.DONE)
    assert len(names(world, "decode")) == 3


def test_a_drained_worker_is_not_replaced():
    world = serving()
    ticket = world.ticket()
    world.operator.add("decode-0")
    world.feed(Drain(ticket, "decode-0"))
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.DONE
    assert names(world, "decode") == {"decode-1"}


def test_a_worker_whose_host_leaves_drains_and_another_takes_its_place():
    world = serving()
    ticket = world.ticket()
    world.operator.add("decode-0")
    world.feed(Drain(ticket, "decode-0", replace=True))
    assert world.processes["decode-0"].drained_at is not None
    world.feed(Drain(ticket, "decode-0", replace=True))  # repeated
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.DONE
    assert names(world, "decode") == {"decode-1", "decode-2"}


@pytest.mark.parametrize("force", [False, True])
def test_the_last_worker_that_serves_a_role_is_drained_only_by_force(force):
    world = serving(decode=2)
    world.processes["decode-0"].lost = True
    world.report("router")
    ticket = world.ticket()
    world.operator.add("decode-1")
    world.feed(Drain(ticket, "decode-1", force=force))
    assert (world.processes["decode-1"].drained_at is None) != force
    assert world.outcomes.get(ticket) is (None if force else Outcome.FAILED)
    assert world.core.pools.targets["decode"] == 2 - force


def test_a_worker_drained_through_a_router_is_not_replaced_either():
    world = serving()
    world.processes["decode-0"].drained_at = world.now
    world.settle(5)
    assert names(world, "decode") == {"decode-1"}


@pytest.mark.parametrize("told_first", [True, False])
def test_a_worker_that_finished_is_said_whoever_tells_of_it_first(told_first):
    world = serving()
    worker = world.processes["decode-0"]
    worker.drained_at = world.now
    world.report("router")
    worker.left = True
    if told_first:
        world.report("router")
        assert worker.stopping
    world.go_on(worker)
    assert world.said.count("retired") == 1
    world.settle(5)
    assert names(world, "decode") == {"decode-1"}


def test_a_worker_that_finished_and_had_to_be_killed_has_left_all_the_same():
    world = serving()
    ticket = world.ticket()
    world.operator.add("decode-0")
    world.feed(Drain(ticket, "decode-0"))
    worker = world.processes["decode-0"]
    worker.left = True
    world.report("router")
    assert worker.stopping
    world.end(worker, MemberEnded("decode-0", -9))
    assert world.outcomes[ticket] is Outcome.DONE


def test_a_drain_of_one_too_many_leaves_the_size_that_was_asked_for():
    """The drains of the scale order wait, because the router reports only one worker."""
    world = serving(decode=2)
    world.processes["decode-1"].lost = True
    world.report("router")
    world.feed(Scale(world.ticket(), {"decode": 1}))
    assert all(p.drained_at is None for p in world.processes.values())
    world.operator.add("decode-1")
    world.feed(Drain(world.ticket(), "decode-1"))
    world.settle(10)
    assert world.core.pools.targets["decode"] == 1
    assert len(world.serving("decode")) == 1


def test_a_pool_whose_last_workers_cannot_be_replaced_is_tried_again():
    world = serving(decode=1, replace=True)
    world.bad.add(0)
    world.crash(world.processes["decode-0"], for_good=True)
    world.settle(10)
    assert not names(world, "decode") or not world.serving("decode")
    assert world.core.pools.targets["decode"] == 1
    world.bad.clear()
    world.settle(60)
    assert len(world.serving("decode")) == 1


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (-15, 0), (1, 1), (-9, 1)])
def test_a_router_that_was_starting_again_ends_like_the_others(code, exit_code):
    """SIGTERM ends a process that has no handler yet."""
    world = serving()
    router = world.processes["router"]
    world.feed(Down(None))
    world.end(router, MemberEnded("router", code))
    world.settle(10)
    assert world.ended == exit_code


def test_the_grace_of_a_rollout_that_stopped_is_the_one_before():
    world = serving()
    ticket = world.ticket()
    world.bad.add(1)
    world.feed(Rollout(ticket, 1, grace=77.0))
    assert world.core.limits.grace == 77.0
    world.settle(30)
    assert world.outcomes[ticket] is Outcome.FAILED
    assert world.core.limits.grace == GRACE


def test_a_worker_that_cannot_be_added_leaves_the_pool_as_it_was():
    world = serving()
    ticket = world.ticket()
    world.bad.add(0)
    world.feed(Scale(ticket, {"decode": 3}))
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.FAILED
    assert names(world, "decode") == {"decode-0", "decode-1"}
    assert world.core.phase is Phase.SERVING


def test_a_worker_without_a_host_is_said_once_and_at_last_given_up():
    world = serving()
    ticket = world.ticket()
    world.feed(Scale(ticket, {"decode": 3}))
    for _ in range(3):
        world.feed(MemberUnplaced("decode-2", "all hosts are taken"))
    assert world.said.count("unplaced") == 1
    assert ticket in world.open
    world.feed(MemberUnplaced("decode-2", "only two hosts are allowed", final=True))
    assert world.outcomes[ticket] is Outcome.FAILED
    assert world.processes["decode-2"].stopping
    assert world.core.pools.targets["decode"] == 2


def rolled(world: World, ticket: int, rounds: int = 60) -> list[int]:
    """Roll out revision 1; return the maximum number of workers."""
    world.feed(Rollout(ticket, 1))
    most = []
    for _ in range(rounds):
        world.settle(1)
        most.append(sum(p.role != "router" for p in world.processes.values()))
    return most


@pytest.mark.parametrize("routers", [("router",), ("router-0", "router-1")])
def test_a_rollout_replaces_everybody_with_one_on_top(routers):
    world = serving(prefill=2, decode=3, routers=routers)
    ticket = world.ticket()
    most = rolled(world, ticket)
    assert world.outcomes[ticket] is Outcome.DONE
    assert max(most) == 6
    assert {p.revision for p in world.processes.values()} == {1}
    assert len(world.processes) == 5 + len(routers)
    assert world.core.last_rollout.startswith("finished: ")


def test_a_rollout_in_place_never_has_more_workers_than_wanted_and_one_less_at_most():
    world = serving(prefill=1, decode=3)
    ticket = world.ticket()
    world.feed(Rollout(ticket, 1, in_place=True))
    counts, ready = [], []
    for _ in range(60):
        world.settle(1)
        counts.append(sum(p.role == "decode" for p in world.processes.values()))
        ready.append(world.core.pools.ready("decode"))
    assert world.outcomes[ticket] is Outcome.DONE
    assert {p.revision for p in world.processes.values()} == {1}
    assert (max(counts), min(ready), max(ready)) == (3, 2, 3)
    assert not world.core.pools.in_place


def test_a_rollout_in_place_that_fails_starts_the_missing_worker_as_it_was():
    world = serving(decode=2)
    ticket = world.ticket()
    world.bad.add(("decode", 1))
    world.feed(Rollout(ticket, 1, in_place=True))
    world.settle(60)
    assert world.outcomes[ticket] is Outcome.FAILED
    assert len(world.serving("decode")) == 2
    assert {p.revision for p in world.processes.values() if p.role == "decode"} == {0}


def test_a_rollout_that_cannot_start_its_first_member_leaves_all_as_it_was():
    world = serving()
    ticket = world.ticket()
    world.bad.add(1)
    rolled(world, ticket)
    assert world.outcomes[ticket] is Outcome.FAILED
    assert {p.revision for p in world.processes.values()} == {0}
    assert len(world.serving("prefill")) == len(world.serving("decode")) == 2
    assert "prefill-2 cannot run: bad" in world.core.last_rollout


def test_a_router_that_cannot_be_replaced_comes_back_as_it_was():
    world = serving()
    ticket = world.ticket()
    world.feed(Rollout(ticket, 1))
    world.bad.add(("router", 1))
    world.settle(60)
    assert world.outcomes[ticket] is Outcome.FAILED
    assert world.processes["router"].revision == 0
    assert {p.revision for p in world.processes.values()} == {0, 1}
    assert len(world.serving("decode")) == 2
    again = world.ticket()
    world.feed(Rollout(again, 2))
    world.settle(60)
    assert world.outcomes[again] is Outcome.DONE
    assert {p.revision for p in world.processes.values()} == {2}


def test_a_second_rollout_is_refused_and_a_scale_meanwhile_holds():
    world = serving(decode=2)
    first, second, scale = world.ticket(), world.ticket(), world.ticket()
    world.feed(Rollout(first, 1))
    world.feed(Rollout(second, 2))
    assert world.outcomes[second] is Outcome.FAILED
    world.feed(Scale(scale, {"decode": 4}))
    world.settle(60)
    assert world.outcomes[first] is world.outcomes[scale] is Outcome.DONE
    assert len(world.serving("decode")) == 4
    assert {p.revision for p in world.processes.values()} == {1}


def crash_without_return(world: World, name: str) -> None:
    """Crash the member; its new process never registers."""
    worker = world.processes[name]
    world.crash(worker, for_good=False)
    worker.lost = True


def pass_time(world: World, seconds: int) -> None:
    """Let time pass; members that are not lost continue."""
    for _ in range(seconds):
        world.now += 1.0
        for process in list(world.processes.values()):
            if world.processes.get(process.name) is process and not process.lost:
                world.go_on(process)
        for router in world.routers:
            world.report(router)
        world.feed(Tick())


@pytest.mark.parametrize("order", ["scale", "rollout"])
def test_an_order_ends_when_a_worker_crashed_and_does_not_come_back(order):
    world = serving()
    ticket = world.ticket()
    if order == "scale":
        crash_without_return(world, "prefill-0")
        world.feed(Scale(ticket, {"decode": 3}))
    else:
        world.feed(Rollout(ticket, 1))
        pass_time(world, 4)
        members = world.core.pools.members
        new = next(m.name for m in members if m.revision == 1 and m.was_ready)
        crash_without_return(world, new)
    said = []
    carry_out = world.carry_out
    world.carry_out = lambda action: (said.append(action), carry_out(action))
    pass_time(world, 50)
    assert ticket in world.open
    pass_time(world, 15)
    assert world.outcomes[ticket] is Outcome.FAILED
    (text,) = [a.text for a in said if isinstance(a, Answer) and a.outcome is Outcome.FAILED]
    name = "prefill-0" if order == "scale" else new
    assert f"{name} ended and did not come back within 60 s" in text
    assert f"baton drain {name}" in text
    assert world.core.phase is Phase.SERVING and world.core.rollout is None


def test_a_worker_that_is_out_does_not_hold_what_replaces_it():
    world = serving()
    crash_without_return(world, "decode-1")
    pass_time(world, 100)
    ticket = world.ticket()
    world.feed(Rollout(ticket, 1))
    world.processes["decode-1"].lost = False  # it ends like the others when stopped
    world.processes["decode-1"].stopping = False
    pass_time(world, 100)
    assert world.outcomes[ticket] is Outcome.DONE
    assert {p.revision for p in world.processes.values()} == {1}


def test_down_in_mid_rollout_ends_both():
    world = serving()
    rollout, down = world.ticket(), world.ticket()
    world.feed(Rollout(rollout, 1))
    world.settle(3)
    world.feed(Down(down))
    assert world.outcomes[rollout] is Outcome.FAILED
    assert world.requested == {}
    world.settle(5)
    assert (world.ended, world.outcomes[down]) == (0, Outcome.DONE)
    lines = [sentence(log) for log in world.logs]
    assert [line for line in lines if "baton down" in line] == [
        "going down: ordered by baton down",
        "ended: ordered by baton down",
    ]


def test_a_signal_is_no_order_of_baton_down():
    world = serving()
    world.feed(Down())
    world.settle(5)
    assert world.ended == 0
    assert not any("baton down" in sentence(log) for log in world.logs)


def test_orders_while_going_down_are_refused():
    world = serving()
    world.feed(Down(world.ticket()))
    tickets = [world.ticket() for _ in range(3)]
    for event in (Scale(tickets[0], {"decode": 3}), Drain(tickets[1], "decode-0")):
        world.feed(event)
    world.feed(Rollout(tickets[2], 1))
    assert {world.outcomes[ticket] for ticket in tickets} == {Outcome.FAILED}


def test_the_end_comes_even_when_the_routers_hang():
    world = serving()
    world.feed(Down())
    world.now += GRACE
    world.feed(Tick())
    assert "grace_over" in world.said
    assert all(p.stopping for p in world.processes.values())


@pytest.mark.parametrize("reports", [[0, 0], [0, 3, 2], [1]])
def test_a_shutdown_speaks_of_running_requests_only_if_there_are_any(reports):
    world = serving()
    before = RouterReport(requests=RequestCounts(in_flight=2))  # they end before the shutdown
    world.feed(Reported("router", ClusterReport(router=before)))
    world.feed(Down())
    world.now += GRACE / 4
    for in_flight in reports:
        requests = RouterReport(requests=RequestCounts(in_flight=in_flight))
        world.feed(Reported("router", ClusterReport(router=requests)))
    logs = [log for log in world.logs if log.event == "draining"]
    assert [log.seconds for log in logs] == [GRACE * 3 / 4] * any(reports)


def test_a_second_signal_kills():
    world = serving()
    world.feed(Down())
    world.feed(Down())
    assert all(p.stopping for p in world.processes.values())


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_a_process_that_ends_again_and_again_never_ends_a_cluster_that_served(name):
    world = serving()
    for ends in range(1, 61):
        world.feed(MemberDown(name, "killed by signal 9", 5.0, ends))
        assert world.core.phase is Phase.SERVING
        (problem,) = problems(world.core.pools, world.now + 2.0)
        assert problem == f"{name} is down: killed by signal 9; restart {ends} in 3.0 s"
        world.start_again(world.processes[name])
    assert world.said.count("restarting") == 60
    world.settle(5)
    assert world.said.count("back") == 1
    assert problems(world.core.pools, world.now) == []


def test_before_the_cluster_ever_served_crashes_end_it_with_the_reason():
    world = World(1)
    world.go_on(world.processes["decode-0"])
    for ends in range(1, 6):
        world.feed(MemberDown("decode-0", "no such device", 0.5, ends))
    assert world.core.phase is Phase.STARTING
    world.feed(MemberDown("decode-0", "no such device", 0.5, 6))
    assert world.core.phase is Phase.STOPPING
    assert world.said[-1] == "gave_up"
    world.settle(5)
    assert world.ended == 1


def test_a_worker_that_crashes_again_and_again_is_replaced_where_there_are_other_hosts():
    world = serving(replace=True)
    world.crash(world.processes["decode-0"], for_good=False, ends=6)
    assert world.processes["decode-0"].stopping
    world.settle(5)
    assert len(world.serving("decode")) == 2
    assert "replacing" in world.said


def test_a_worker_that_cannot_start_again_is_replaced():
    world = serving()
    world.crash(world.processes["decode-0"], for_good=True)
    assert world.core.phase is Phase.SERVING
    world.settle(5)
    assert len(world.serving("decode")) == 2


def test_a_router_that_does_not_answer_its_controller_is_named():
    world = serving()
    world.now += 12.0
    assert problems(world.core.pools, world.now) == [
        "router has not answered the controller for 12 s"
    ]


def test_a_cluster_is_ready_after_its_gateways_serve():
    world = World(1, gateways=1)
    for name in ("router", "prefill-0", "prefill-1", "decode-0", "decode-1"):
        for _ in range(2):
            world.go_on(world.processes[name])
    world.report("router")
    assert world.core.phase is Phase.STARTING
    for _ in range(2):
        world.go_on(world.processes["gateway-0"])
    assert world.core.phase is Phase.SERVING
    world.crash(world.processes["gateway-0"], for_good=False, ends=1)
    assert problems(world.core.pools, world.now) == [
        "gateway-0 is restarting: its last process ended (crashed)"
    ]
    world.settle(2)
    assert world.said[-2:] == ["restarting", "back"]


def test_a_rollout_ends_with_the_gateways_and_starts_each_before_another_stops():
    world = serving(gateways=2)
    ticket = world.ticket()
    world.feed(Rollout(ticket, 1))
    started = []
    for _ in range(200):
        world.settle(1)
        new = sorted(n for n in names(world, "gateway") if world.processes[n].revision)
        if new != started:
            assert all(p.revision for p in world.processes.values() if p.role != "gateway")
            started = new
    assert world.outcomes[ticket] is Outcome.DONE
    assert len(started) == len(names(world, "gateway")) == 2


def test_gateways_are_scaled():
    world = serving(gateways=1)
    up, down = world.ticket(), world.ticket()
    world.feed(Scale(up, {"gateway": 3}))
    assert names(world, "gateway") == {"gateway-0", "gateway-1", "gateway-2"}
    assert up in world.open
    world.restart_controller()
    assert world.core.pools.gateways == 3
    world.settle(5)
    assert world.core.pools.sizes() == {"prefill": 2, "decode": 2, "gateway": 3}
    world.open.add(down)
    world.feed(Scale(down, {"gateway": 1, "decode": 3}))
    world.settle(5)
    assert names(world, "gateway") == {"gateway-0"}
    assert len(names(world, "decode")) == 3
    assert world.outcomes[down] is Outcome.DONE
    for wrong, words in ((0, "at least 1, not 0"), (5, "at most 4, not 5")):
        (answer,) = world.core.handle(Scale(9, {"gateway": wrong}), world.now)
        assert words in answer.text


def test_a_gateway_that_cannot_run_is_not_added():
    world = serving(gateways=1)
    world.bad.add(("gateway", 0))
    ticket = world.ticket()
    world.feed(Scale(ticket, {"gateway": 2}))
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.FAILED
    assert names(world, "gateway") == {"gateway-0"}
    assert world.core.pools.gateways == 1


def test_gateways_are_drained_apart_from_the_last():
    world = serving(gateways=2)
    ticket, last, forced = world.ticket(), world.ticket(), world.ticket()
    world.feed(Drain(ticket, "gateway-1"))
    world.settle(3)
    assert world.outcomes[ticket] is Outcome.DONE
    assert names(world, "gateway") == {"gateway-0"}
    world.feed(Drain(last, "gateway-0"))
    assert world.outcomes[last] is Outcome.FAILED
    world.feed(Drain(forced, "gateway-0", force=True))
    world.settle(3)
    assert names(world, "gateway") == set()
    assert world.core.phase is Phase.SERVING


def test_only_what_every_router_sees_is_ready():
    world = serving(routers=("router-0", "router-1"))
    world.feed(Scale(world.ticket(), {"decode": 3}))
    new = world.processes["decode-2"]
    world.go_on(new)
    ready = WorkerReport(id="decode-2", role="decode", pid=new.pid, state="ready")
    world.feed(Reported("router-0", ClusterReport(workers=[ready])))
    assert world.core.pools.members.get("decode-2").stage is Stage.STARTING
    world.feed(Reported("router-1", ClusterReport(workers=[ready])))
    assert world.core.pools.members.get("decode-2").stage is Stage.READY


@pytest.mark.parametrize("routers", [("router",), ("router-0", "router-1")])
@pytest.mark.parametrize("replace", [False, True])
def test_whatever_happens_the_invariants_hold_and_it_ends_when_asked(routers, replace):
    """World checks the invariants after each event; this test checks the final state."""
    for seed in range(700):
        turns = seed % 2 == 0
        live(World(seed, routers=routers, gateways=seed % 3, can_turn=turns, replace=replace), seed)


@pytest.mark.parametrize("routers", [("router",), ("router-0", "router-1")])
def test_a_controller_restarted_at_any_moment_goes_on(routers):
    """The successors keep the same invariants and reach the last targets."""
    for seed in range(500):
        world = World(seed, routers=routers, gateways=seed % 3, replace=True)
        world.restarts = True
        live(world, seed)


def live(world: World, seed: int) -> None:
    """Run eighty events; every other world then settles; finally shut all down."""
    for _ in range(80):
        world.step()
    if seed % 2 and not world.ending:
        settled_as_wanted(world)
    if world.ended is None:
        world.feed(Down())
    world.settle(20)
    assert world.ended is not None, seed
    assert not world.open, seed


def settled_as_wanted(world: World) -> None:
    world.bad = set()
    world.settle(150)
    if world.ending:
        return  # a member could not run at the start
    core = world.core
    for role, count in core.pools.targets.items():
        assert len(world.serving(role)) == len(names(world, role)) == count
    assert core.rollout is None
    gateways = names(world, "gateway")
    assert len(gateways) == core.pools.gateways
    assert all(world.processes[name].ready for name in gateways)


# --------------------------------------------------------------------------- changes of role


def test_a_change_of_role_moves_a_worker_and_both_targets():
    world = serving(prefill=1, decode=2)
    ticket, pid = world.ticket(), world.processes["decode-1"].pid
    world.feed(Turn(ticket, "decode-1", "prefill"))
    assert world.core.pools.targets == {"prefill": 2, "decode": 1}
    assert world.requested == {"router": 1, "prefill": 2, "decode": 1}
    world.report("router")  # its former role drains: it is no ready prefill worker
    assert world.core.pools.members.get("decode-1").stage is Stage.STARTING
    assert problems(world.core.pools, world.now) == [] and ticket in world.open
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.DONE
    assert names(world, "prefill") == {"prefill-0", "decode-1"}
    assert world.processes["decode-1"].pid == pid
    world.feed(Scale(world.ticket(), {"decode": 2}))  # the name is taken
    assert names(world, "decode") == {"decode-0", "decode-2"}
    world.feed(Turn(world.ticket(), "decode-1", "decode"))
    world.settle(5)
    assert names(world, "decode") == {"decode-0", "decode-1", "decode-2"}


def test_a_worker_that_dies_in_its_change_comes_back_in_the_new_role():
    world = serving(prefill=1, decode=2)
    ticket = world.ticket()
    world.feed(Turn(ticket, "decode-1", "prefill"))
    world.crash(world.processes["decode-1"], for_good=False, ends=1)
    assert any("decode-1" in line for line in problems(world.core.pools, world.now))
    world.settle(5)
    assert world.outcomes[ticket] is Outcome.DONE
    assert names(world, "prefill") == {"prefill-0", "decode-1"}


def test_the_core_refuses_impossible_changes_of_role():
    world = serving(prefill=1, decode=2)

    def refused(worker: str, role: str) -> str:
        ticket = world.ticket()
        (answer,) = world.core.handle(Turn(ticket, worker, role), world.now)
        world.open.discard(ticket)
        assert isinstance(answer, Answer) and answer.outcome is Outcome.FAILED
        return answer.text

    last = refused("prefill-0", "decode")
    assert "is the last" in last and "--force" not in last  # baton role has no such option
    assert refused("decode-9", "prefill").startswith("no worker 'decode-9'; workers: decode-0")
    assert refused("router", "prefill").startswith("no worker 'router'")
    assert refused("decode-0", "cook") == "no role 'cook'; roles: prefill, decode"
    assert refused("decode-0", "decode") == "decode-0 is a decode worker already"
    (turn,) = [
        action
        for action in world.core.handle(Turn(world.ticket(), "decode-0", "prefill"), world.now)
        if isinstance(action, TurnMember)
    ]
    assert (turn.name, turn.role) == ("decode-0", "prefill")
    assert "only a ready worker changes its role" in refused("decode-0", "decode")
    world.feed(Down())
    assert refused("decode-1", "prefill") == "the cluster is going down"


def turned(world, targets, why="") -> list[tuple[str, str]]:
    """Return the workers that change their role for these targets; no worker starts for them."""
    before = {name: process.pid for name, process in world.processes.items()}
    order = Measured(targets, why) if why else Scale(world.ticket(), targets)
    world.feed(order)
    for _ in range(3):
        world.settle(5)
    assert {name: process.pid for name, process in world.processes.items()} == before
    assert world.core.pools.targets == targets
    return [(log.name, log.detail) for log in world.logs if log.event == "turns"]


@pytest.mark.parametrize("why", ["", "prefill needs 2 workers"])
def test_pools_that_grow_and_shrink_at_once_exchange_workers(why):
    world = serving(prefill=1, decode=3, can_turn=True)
    moved = turned(world, {"prefill": 3, "decode": 1}, why)
    assert moved == [(f"decode-{n}", f"prefill: {why or 'baton scale'}") for n in (2, 1)]
    assert names(world, "prefill") == {"prefill-0", "decode-1", "decode-2"}


def test_the_worker_with_the_fewest_requests_changes_its_role():
    world = serving(prefill=1, decode=3, can_turn=True)
    world.requests = {"decode-0": 2, "decode-1": 1, "decode-2": 5}
    world.report("router")
    ((worker, _),) = turned(world, {"prefill": 2, "decode": 2})
    assert worker == "decode-1"


def test_without_changes_of_role_a_worker_starts_and_another_drains():
    world = serving(prefill=1, decode=3)
    world.feed(Measured({"prefill": 2, "decode": 2}))
    world.settle(5)
    assert names(world, "prefill") == {"prefill-0", "prefill-1"}
    assert "turns" not in world.said and "retired" in world.said


def test_a_worker_that_is_needed_keeps_its_role_until_another_is_back():
    """Nothing starts in its place: the exchange happens when enough workers serve."""
    world = serving(prefill=1, decode=3, can_turn=True)
    for name in ("decode-1", "decode-2"):
        world.processes[name].lost = True
    world.report("router")
    world.feed(Measured({"prefill": 2, "decode": 2}, "load"))
    world.report("router")
    assert "turns" not in world.said and names(world, "prefill") == {"prefill-0"}
    for name in ("decode-1", "decode-2"):
        world.processes[name].lost = False
    world.settle(5)
    assert world.said.count("turns") == 1 and len(names(world, "prefill")) == 2
    assert set(world.processes) == {"router", "prefill-0", "decode-0", "decode-1", "decode-2"}


def test_a_router_that_restarts_in_a_change_of_role_moves_no_other_worker():
    world = serving(prefill=1, decode=3, can_turn=True)
    world.feed(Measured({"prefill": 2, "decode": 2}, "load"))
    world.crash(world.processes["router"], for_good=False)
    world.settle(8)
    assert world.said.count("turns") == 1
    assert names(world, "prefill") == {"prefill-0", "decode-2"}


def test_during_a_rollout_no_worker_changes_its_role_for_a_scale():
    world = serving(prefill=1, decode=3, can_turn=True)
    world.feed(Rollout(world.ticket(), 1))
    world.feed(Scale(world.ticket(), {"prefill": 2, "decode": 2}))
    world.settle(40)
    assert "turns" not in world.said
    assert (len(names(world, "prefill")), len(names(world, "decode"))) == (2, 2)


def test_both_pools_together_have_a_maximum():
    bounds = Bounds(workers_max=4)
    assert bounds.most("prefill") == bounds.most("decode") == 3
    present = {"prefill": 1, "decode": 3}
    assert "at most 4 workers, not 5" in scale_refusal({"prefill": 2}, bounds, present)
    assert scale_refusal({"prefill": 2, "decode": 2}, bounds, present) == ""


def test_a_change_of_role_waits_for_no_rollout():
    world = serving(prefill=2, decode=2)
    world.feed(Rollout(world.ticket(), 1))
    ticket = world.ticket()
    world.feed(Turn(ticket, "decode-0", "prefill"))
    assert world.outcomes[ticket] is Outcome.FAILED
