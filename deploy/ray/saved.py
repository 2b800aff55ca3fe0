"""What a controller leaves for its successor, and how the successor goes on from it.

Pure. It lies in the key-value store of Ray's head, which lives exactly as long as the actors that
it speaks of: a file would outlive them. The actors themselves say which members there are; this
says what was wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...proto.errors import ConfigError
from ..config import ServeSettings
from ..controller import ControllerCore
from ..core import Phase
from ..launcher import POOLS, ROUTER
from ..members import Stage
from ..plan import role_of
from ..rollout import Replacement


class SavedMember(msgspec.Struct, frozen=True):
    """One member: where it stood."""

    revision: int
    stage: str = Stage.STARTING.value
    was_ready: bool = False


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a new controller needs.

    ``revisions``: settings by revision. ``before``: the revision that a rollout was to replace, or
    None; ``surge``: the pool that had one more for it; ``in_place``: it had no room for one more.
    ``ending``: the cluster was going down.
    """

    cluster_key: str
    revisions: dict[int, ServeSettings]
    revision: int
    targets: dict[str, int]
    members: dict[str, SavedMember]
    before: int | None = None
    surge: str = ""
    in_place: bool = False
    ending: bool = False
    served: bool = False
    """Whether all members were ready once."""


def encode_saved(saved: Saved) -> bytes:
    """As it is stored."""
    return msgspec.json.encode(saved)


def decode_saved(data: bytes) -> Saved:
    """The other way; ConfigError for what no controller of this version has written."""
    try:
        return msgspec.json.decode(data, type=Saved)
    except msgspec.DecodeError as problem:
        raise ConfigError(
            f"the controller's record in Ray cannot be read ({problem}); end the cluster with "
            "baton down and launch it anew"
        ) from problem


def saved_of(core: ControllerCore, cluster_key: str, revisions: dict[int, ServeSettings]) -> Saved:
    """What is to be known of this controller."""
    pools = core.pools
    return Saved(
        cluster_key=cluster_key,
        revisions=revisions,
        revision=pools.revision,
        targets=dict(pools.targets),
        members={
            m.name: SavedMember(m.revision, m.stage.value, m.was_ready) for m in pools.members
        },
        before=None if core.rollout is None else core.rollout.before,
        surge=pools.surge,
        in_place=pools.in_place,
        ending=core.phase not in (Phase.STARTING, Phase.SERVING),
        served=core.phase is not Phase.STARTING,
    )


def restore(core: ControllerCore, saved: Saved, actors: Iterable[str], now: float) -> list[str]:
    """Put a new core where the old one was; returns the members taken over.

    ``actors``: the members that Ray knows. One that was just being started and is not in the
    record is taken for one of the newest revision; one that is gone is the core's to replace.
    """
    pools = core.pools
    pools.targets |= {role: saved.targets.get(role, 0) for role in POOLS}
    pools.revision = saved.revision
    pools.change_grace(saved.revisions[saved.revision].grace)
    names = [name for name in actors if role_of(name) in (*POOLS, ROUTER)]
    for name in names:
        known = saved.members.get(name, SavedMember(saved.revision))
        member = pools.members.add(name, role_of(name), known.revision, now)
        member.was_ready = known.was_ready
        stage = Stage(known.stage)
        if stage is not Stage.READY:  # that has to be seen anew
            member.enter(stage, now)
    if saved.served:
        core.phase = Phase.SERVING
    if saved.before is not None:
        core.rollout = Replacement(None, saved.revision, saved.before, saved.in_place)
        core.rollout.grace_before = saved.revisions[saved.before].grace
        pools.surge, pools.in_place = saved.surge, saved.in_place
    return names
