"""Ray, as :class:`.watch.RayApi` wants it. Blocks while Ray's head is away."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import msgspec

from ...proto.errors import ConnectionLost
from ..launcher import POOLS, ROUTER, MemberSpec
from .actors import PoolMember
from .connect import NAMESPACE
from .member import MemberReport
from .node_types import autoscaling_config, capacity_of
from .placing import order_of
from .watch import ActorGone

_ON_HEAD = 0.001
"""Of the resource ``router``: however many routers there are, they are all on the head's node."""


_LOOK_THERE = "look there for a full disk (df -h /tmp) or too little memory (free -m)"


class Ray:
    """The cluster this process has joined.

    ``head``: see :class:`.placing.Order`. ``gpus``: of each worker.
    """

    def __init__(self, head: str, *, gpus: float = 0.0) -> None:
        import ray

        self._ray: Any = ray
        self._head, self._gpus = head, gpus
        self._members = ray.remote(PoolMember)

    def create(self, spec: MemberSpec) -> Any:
        """The actor of this name, made if there is none."""
        order = order_of(spec, self._head)
        return self._members.options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            num_gpus=0 if spec.role == ROUTER else self._gpus,
            resources={spec.role: _ON_HEAD if spec.role == ROUTER else 1},
        ).remote(order)

    # ------------------------------------------------------------- members

    def ask(self, actor: Any) -> Any:
        """Ask for a report."""
        return actor.report.remote()

    def answer(self, ticket: Any) -> MemberReport | None:
        """The report if it is there; see :class:`.watch.RayApi`."""
        from ray.exceptions import ActorDiedError, RayError

        done, _ = self._ray.wait([ticket], timeout=0)
        if not done:
            return None
        try:
            return msgspec.json.decode(self._ray.get(ticket), type=MemberReport)
        except ActorDiedError as problem:
            raise ActorGone(_first_line(problem)) from problem
        except RayError as problem:
            raise ConnectionLost(_first_line(problem)) from problem

    def stop(self, actor: Any, grace: float) -> None:
        """Have it end its child."""
        actor.stop.remote(grace)

    def kill_child(self, actor: Any, pid: int) -> None:
        """Have it end its hung child."""
        actor.kill_child.remote(pid)

    def kill(self, actor: Any) -> None:
        """End the actor for good; the kernel ends its child with it."""
        self._ray.kill(actor, no_restart=True)

    def is_free(self, name: str) -> bool:
        """Whether no actor has this name."""
        try:
            self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return True
        return False

    def why_unplaced(self, actor: Any, role: str) -> str:
        """Why it has no node; empty if it has one."""
        from ray._private.state import actors

        entry = actors(actor._actor_id.hex())
        if entry.get("State") not in ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"):
            return ""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        needs = _ON_HEAD if role == ROUTER else 1
        offer = [node for node in nodes if node["Resources"].get(role, 0) >= needs]
        if not offer:
            return f"no live node of {len(nodes)} has the resource '{role}'"
        if self._ray.available_resources().get(role, 0) < needs:
            at = str((entry.get("Address") or {}).get("IPAddress") or "")
            if at:  # it holds its node, and is not started there
                return f"Ray has not started its actor on {at}: {_LOOK_THERE}"
            return (
                f"all {len(offer)} nodes with the resource '{role}' are taken, or one of them "
                f"cannot start its actor: {_LOOK_THERE}"
            )
        return "Ray has not started its actor yet"

    def request(self, bundles: dict[str, int]) -> None:
        """Ask the autoscaler for room; the whole list, nobody else's is kept."""
        from ray.autoscaler.sdk import request_resources

        pools = [
            role for role in bundles if role != ROUTER
        ]  # routers are on the head, which is there
        request_resources(bundles=[{role: 1} for role in pools for _ in range(bundles[role])])

    def capacity(self) -> dict[str, int] | None:
        """By the autoscaler's maxima; None where nodes are joined by hand."""
        config = autoscaling_config(self._ray.get_runtime_context().gcs_address)
        return None if config is None else capacity_of(config)

    def nodes(self) -> dict[str, int]:
        """By the resources of the live nodes."""
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return {role: int(sum(each.get(role, 0) for each in alive)) for role in POOLS}

    # ------------------------------------------------------------- the controller

    def load(self) -> bytes | None:
        """What a predecessor saved."""
        return get_value(_SAVED)

    def save(self, data: bytes) -> None:
        """Keep this for a successor."""
        put_value(_SAVED, data)

    def forget(self, last_words: str) -> None:
        """The cluster has ended."""
        put_value(LAST_WORDS, last_words.encode())
        _delete_value(_SAVED)

    def existing(self) -> list[str]:
        """Names of the actors there are."""
        return existing()

    def kill_named(self, name: str) -> None:
        """End an actor for good, also the one this runs in."""
        self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


# ---------------------------------------------------------------- the head's store

_SAVED = b"controller"
LAST_WORDS = b"last-words"
"""Why the last controller ended, empty if it was told to."""


def get_value(key: bytes) -> bytes | None:
    """A value of the key-value store of Ray's head."""
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(key, namespace=NAMESPACE.encode())
    return None if value is None else bytes(value)


def put_value(key: bytes, value: bytes) -> None:
    """Store a value there."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE.encode())


def _delete_value(key: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=NAMESPACE.encode())


def existing() -> list[str]:
    """Names of Baton's actors."""
    from ray.util import list_named_actors

    found = list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == NAMESPACE]


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines or [type(problem).__name__])[0][:300]
