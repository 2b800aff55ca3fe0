"""A controller that continues from its predecessor's saved state."""

import pytest

from baton.deploy.config import ServeSettings
from baton.deploy.controller.backend import MemberEnded, MemberServes, MemberStarted
from baton.deploy.controller.core import ControllerCore
from baton.deploy.controller.events import (
    Begin,
    DrainMember,
    Rollout,
    Scale,
    StartMember,
    StopMember,
    Turn,
)
from baton.deploy.controller.members import Stage
from baton.deploy.ray.saved import decode_saved, encode_saved, restore, saved_of
from baton.deploy.report import ClusterReport, WorkerReport
from baton.deploy.supervise.core import Phase, Reported, Tick
from baton.proto.errors import ConfigError

ALL = ["router", "prefill-0", "decode-0"]


def serving(targets=None) -> ControllerCore:
    """A core whose members are all ready."""
    core = ControllerCore(targets or {"prefill": 1, "decode": 1})
    core.handle(Begin(), 0.0)
    workers = []
    for number, member in enumerate(core.pools.members):
        core.handle(MemberStarted(member.name, "h", 100 + number), 0.1)
        if member.role != "router":
            state = {"pid": 100 + number, "state": "ready"}
            workers.append(WorkerReport(id=member.name, role=member.role, **state))
    core.handle(Reported("router", ClusterReport(workers=workers)), 0.2)
    core.handle(Tick(), 0.3)
    assert core.phase is Phase.SERVING
    return core


def successor(core: ControllerCore, actors=ALL) -> ControllerCore:
    saved = decode_saved(encode_saved(saved_of(core, "ab", {0: ServeSettings()})))
    new = ControllerCore({"prefill": 1, "decode": 1})
    restore(new, saved, actors, 50.0)
    return new


def names(actions, kind) -> list[str]:
    return [action.name for action in actions if isinstance(action, kind)]


def test_members_that_are_there_are_not_started_again():
    new = successor(serving())
    assert names(new.handle(Begin(), 50.0), (StartMember, StopMember, DrainMember)) == []
    assert new.phase is Phase.SERVING
    assert {m.name: m.stage for m in new.pools.members} == dict.fromkeys(ALL, Stage.STARTING)


def test_a_worker_that_changed_its_role_keeps_it():
    core = serving({"prefill": 2, "decode": 1})
    core.can_turn = True
    core.handle(Turn("ticket", "prefill-1", "decode"), 1.0)
    assert core.pools.targets == {"prefill": 1, "decode": 2}
    new = successor(core, [*ALL, "prefill-1"])
    roles = {member.name: member.role for member in new.pools.members.workers()}
    assert roles == {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode"}
    assert new.pools.targets == {"prefill": 1, "decode": 2}
    saved = saved_of(core, "ab", {0: ServeSettings()}).members
    assert (saved["prefill-1"].role, saved["prefill-0"].role) == ("decode", "")


def test_targets_are_those_of_the_last_scale():
    core = serving()
    core.handle(Scale("t", {"decode": 3}), 1.0)
    new = successor(core, [*ALL, "decode-1"])
    assert names(new.handle(Begin(), 50.0), StartMember) == ["decode-2"]


def test_a_member_that_is_gone_is_replaced():
    new = successor(serving(), ["router", "decode-0"])
    assert names(new.handle(Begin(), 50.0), StartMember) == ["prefill-0"]


def test_a_drain_goes_on_and_the_pool_stays_as_small_as_it_was_to_be():
    core = serving({"prefill": 1, "decode": 2})
    core.handle(Scale("t", {"decode": 1}), 1.0)
    new = successor(core, [*ALL, "decode-1"])
    assert names(new.handle(Tick(), 52.0), DrainMember) == ["decode-1"]
    new.handle(MemberEnded("decode-1"), 53.0)
    assert new.pools.targets == {"prefill": 1, "decode": 1}
    assert names(new.handle(Tick(), 54.0), StartMember) == []


def test_an_actor_that_was_not_recorded_yet_counts():
    core = serving()
    core.pools.targets["decode"] = 2  # the target is saved, the member is not
    new = successor(core, [*ALL, "decode-1"])
    assert names(new.handle(Begin(), 50.0), StartMember) == []


def test_strangers_are_left_alone():
    new = successor(serving(), [*ALL, "controller", "somebody"])
    assert sorted(m.name for m in new.pools.members) == sorted(ALL)


def test_a_record_keeps_the_settings_of_all_revisions():
    settings = {0: ServeSettings(max_num_seqs=7, prefill_order="edf"), 3: ServeSettings()}
    assert decode_saved(encode_saved(saved_of(serving(), "ab", settings))).revisions == settings


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="baton down"):
        decode_saved(b'{"revision": "x"}')


def test_a_rollouts_extra_worker_and_grace_outlive_its_controller():
    core = serving()
    core.handle(Rollout("t", 1, grace=5.0), 1.0)
    assert core.pools.surge == "prefill"
    revisions = {0: ServeSettings(), 1: ServeSettings(grace=5.0)}
    saved = decode_saved(encode_saved(saved_of(core, "ab", revisions)))
    new = ControllerCore({"prefill": 1, "decode": 1})
    restore(new, saved, [*ALL, "prefill-1"], 50.0)
    assert names(new.handle(Begin(), 50.0), (StartMember, StopMember, DrainMember)) == []
    assert (new.pools.surge, new.limits.grace) == ("prefill", 5.0)
    assert new.rollout.grace_before == ServeSettings().grace


def test_workers_not_seen_yet_are_not_stopped_by_a_scale_but_drained_once_they_are():
    new = successor(serving({"prefill": 1, "decode": 2}), [*ALL, "decode-1"])
    scaled = new.handle(Scale("t", {"decode": 1}), 50.0)
    assert names(scaled, (StopMember, DrainMember)) == []
    for number, member in enumerate(new.pools.members):
        new.handle(MemberStarted(member.name, "h", 200 + number), 50.1)
    workers = [
        WorkerReport(id=m.name, role=m.role, pid=m.pid, state="ready")
        for m in new.pools.members.workers()
    ]
    actions = new.handle(Reported("router", ClusterReport(workers=workers)), 50.2)
    assert names(actions, (StopMember, DrainMember)) == ["decode-1"]
    assert names(actions, DrainMember) == ["decode-1"]


def test_gateways_are_taken_over_and_serve_when_their_actor_says_so():
    core = ControllerCore({"prefill": 1, "decode": 1}, gateways=2)
    core.handle(Begin(), 0.0)
    core.handle(MemberStarted("gateway-1", "h", 7), 0.1)
    core.handle(MemberServes("gateway-1"), 0.2)
    new = ControllerCore({"prefill": 1, "decode": 1}, gateways=0)
    saved = decode_saved(encode_saved(saved_of(core, "ab", {0: ServeSettings()})))
    assert restore(new, saved, [*ALL, "gateway-1"], 50.0) == [*ALL, "gateway-1"]
    assert new.pools.gateways == 2
    assert StartMember("gateway-0", "gateway", 0) in new.handle(Begin(), 50.0)
    new.handle(MemberStarted("gateway-1", "h", 7), 50.1)
    new.handle(MemberServes("gateway-1"), 50.2)
    assert new.pools.members.get("gateway-1").stage is Stage.READY
