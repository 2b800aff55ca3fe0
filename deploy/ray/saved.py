"""The state that a controller saves for the next controller, and its restoration.

Pure. The state is in the key-value store of Ray's head, which lives exactly as long as the actors;
a file would outlive them. The existing actors show the actual members. The saved state contains the
targets.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from baton.proto.errors import ConfigError

from ..config import ServeSettings
from ..controller.core import ControllerCore
from ..controller.members import Stage
from ..controller.rollout import Replacement
from ..plan.plan import role_of
from ..roles import GATEWAY, POOLS, ROUTER
from ..supervise.core import Phase


class SavedMember(msgspec.Struct, frozen=True):
    """The state of one member."""

    revision: int
    stage: str = Stage.STARTING.value
    was_ready: bool = False
    role: str = ""
    """Of a worker that changed it; empty: that of its name."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The saved state.

    ``revisions``: settings by revision. ``before``: the revision that a running rollout replaces,
    or None. ``surge``: the pool with the rollout's extra worker. ``in_place``: the rollout stops
    old workers first. ``gateways``: their target number. ``ending``: the cluster was shutting down.
    """

    cluster_key: str
    revisions: dict[int, ServeSettings]
    revision: int
    targets: dict[str, int]
    members: dict[str, SavedMember]
    before: int | None = None
    surge: str = ""
    in_place: bool = False
    gateways: int = 0
    ending: bool = False
    served: bool = False
    """Whether all members have been ready at least once."""


def encode_saved(saved: Saved) -> bytes:
    """Encode the state for the store."""
    return msgspec.json.encode(saved)


def decode_saved(data: bytes) -> Saved:
    """Decode a stored state. Raises ConfigError if it is unreadable or of another version."""
    try:
        return msgspec.json.decode(data, type=Saved)
    except msgspec.DecodeError as problem:
        raise ConfigError(
            f"the controller's saved state in Ray cannot be read ({problem}); end the cluster with "
            "baton down and launch it again"
        ) from problem


def saved_of(core: ControllerCore, cluster_key: str, revisions: dict[int, ServeSettings]) -> Saved:
    """Collect the state of a controller."""
    pools = core.pools
    return Saved(
        cluster_key=cluster_key,
        revisions=revisions,
        revision=pools.revision,
        targets=dict(pools.targets),
        members={
            m.name: SavedMember(
                m.revision, m.stage.value, m.was_ready, m.role if m.role != role_of(m.name) else ""
            )
            for m in pools.members
        },
        before=None if core.rollout is None else core.rollout.before,
        surge=pools.surge,
        in_place=pools.in_place,
        gateways=pools.gateways,
        ending=core.phase not in (Phase.STARTING, Phase.SERVING),
        served=core.phase is not Phase.STARTING,
    )


def restore(core: ControllerCore, saved: Saved, actors: Iterable[str], now: float) -> list[str]:
    """Restore a saved state into a new core. Returns the members taken over.

    ``actors``: names of existing actors. An actor without a saved member was just being started,
    and gets the newest revision. The core replaces members without an actor.
    """
    pools = core.pools
    pools.targets |= {role: saved.targets.get(role, 0) for role in POOLS}
    pools.gateways = saved.gateways
    pools.revision = saved.revision
    pools.change_grace(saved.revisions[saved.revision].grace)
    names = [name for name in actors if role_of(name) in (*POOLS, ROUTER, GATEWAY)]
    for name in names:
        known = saved.members.get(name, SavedMember(saved.revision))
        member = pools.members.add(name, known.role or role_of(name), known.revision, now)
        member.was_ready = known.was_ready
        stage = Stage(known.stage)
        if stage is not Stage.READY:  # readiness must be reported again by the routers
            member.enter(stage, now)
    if saved.served:
        core.phase = Phase.SERVING
    if saved.before is not None:
        core.rollout = Replacement(None, saved.revision, saved.before, saved.in_place)
        core.rollout.grace_before = saved.revisions[saved.before].grace
        pools.surge, pools.in_place = saved.surge, saved.in_place
    return names
