"""The implementation of :class:`.backend.RayApi` with Ray. Calls block while Ray's head is away."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.proto.errors import ConnectionLost

from ..controller.backend import MemberSpec
from ..plan.plan import role_of
from ..roles import DECODE, GATEWAY, POOLS, PREFILL, ROUTER
from .backend import ActorGone
from .connect import NAMESPACE
from .member import MemberReport
from .placing import order_of
from .pool_member import PoolMember

ROLES = (ROUTER, PREFILL, DECODE)
_FLAG = "--autoscaling-config="
_MOST_BYTES = 4 << 20
_ON_HEAD = 0.001
"""Share of the resource ``router`` per router and gateway: the head's node holds all of them."""


_LOOK_THERE = "look there for a full disk (df -h /tmp) or too little memory (free -m)"


def _needs(role: str) -> tuple[str, float]:
    """Ray's resource that a member of this role takes, and how much of it."""
    return (ROUTER, _ON_HEAD) if role in (ROUTER, GATEWAY) else (role, 1)


class Ray:
    """The Ray cluster that this process has joined.

    ``head``: see :class:`.placing.Order`. ``gpus``: GPUs per worker.
    """

    def __init__(self, head: str, *, gpus: float = 0.0) -> None:
        import ray

        self._ray: Any = ray
        self._head, self._gpus = head, gpus
        self._members = ray.remote(PoolMember)

    def create(self, spec: MemberSpec) -> Any:
        """Return the member's actor, and create it if it does not exist.

        A worker's node is one of the pool in which it began, whatever its role is now.
        """
        order = order_of(spec, self._head)
        return self._members.options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            num_gpus=self._gpus if spec.role in POOLS else 0,
            resources=dict([_needs(role_of(spec.name))]),
        ).remote(order)

    # ------------------------------------------------------------- members

    def ask(self, actor: Any) -> Any:
        """Request a report from an actor."""
        return actor.report.remote()

    def answer(self, ticket: Any) -> MemberReport | None:
        """Return the report if it has arrived; see :class:`.backend.RayApi`."""
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
        """Order the actor to stop its child."""
        actor.stop.remote(grace)

    def turn(self, actor: Any, spec: MemberSpec) -> None:
        """Order the actor to let its worker take the role of ``spec``."""
        actor.turn.remote(order_of(spec, self._head))

    def kill_child(self, actor: Any, pid: int) -> None:
        """Order the actor to kill its hanging child."""
        actor.kill_child.remote(pid)

    def kill(self, actor: Any) -> None:
        """Kill the actor permanently. The kernel kills its child too."""
        self._ray.kill(actor, no_restart=True)

    def is_free(self, name: str) -> bool:
        """Whether no actor has this name."""
        try:
            self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return True
        return False

    def why_unplaced(self, actor: Any, role: str) -> str:
        """Return why the actor has no node, or an empty text."""
        from ray._private.state import actors

        entry = actors(actor._actor_id.hex())
        if entry.get("State") not in ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"):
            return ""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        role, needs = _needs(role)
        offer = [node for node in nodes if node["Resources"].get(role, 0) >= needs]
        if not offer:
            return f"none of {len(nodes)} live nodes has the resource '{role}'"
        if self._ray.available_resources().get(role, 0) < needs:
            at = str((entry.get("Address") or {}).get("IPAddress") or "")
            if at:  # the node is reserved, but Ray has not started the actor there
                return f"Ray has not started its actor on {at}: {_LOOK_THERE}"
            return (
                f"all {len(offer)} nodes with the resource '{role}' are taken, or one of them "
                f"cannot start its actor: {_LOOK_THERE}"
            )
        return "Ray has not started its actor yet"

    def request(self, bundles: dict[str, int]) -> None:
        """Request room from Ray's autoscaler. The list replaces all earlier requests."""
        from ray.autoscaler.sdk import request_resources

        pools = [
            role for role in bundles if role != ROUTER
        ]  # routers need no request: they run on the head
        request_resources(bundles=[{role: 1} for role in pools for _ in range(bundles[role])])

    def capacity(self) -> dict[str, int] | None:
        """See RayApi: from the autoscaler's maxima; None if nodes are added manually."""
        config = autoscaling_config(self._ray.get_runtime_context().gcs_address)
        return None if config is None else capacity_of(config)

    def nodes(self) -> dict[str, int]:
        """See RayApi: from the resources of the live nodes."""
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return {role: int(sum(each.get(role, 0) for each in alive)) for role in POOLS}

    # ------------------------------------------------------------- the controller

    def load(self) -> bytes | None:
        """Return the state that the previous controller saved."""
        return get_value(_SAVED)

    def save(self, data: bytes) -> None:
        """Save the state for the next controller."""
        put_value(_SAVED, data)

    def forget(self, last_words: str) -> None:
        """Delete the saved state, because the cluster has ended."""
        put_value(LAST_WORDS, last_words.encode())
        _delete_value(_SAVED)

    def existing(self) -> list[str]:
        """Return the names of all existing actors."""
        return existing()

    def kill_named(self, name: str) -> None:
        """Kill an actor permanently, possibly the actor of this process."""
        self._ray.kill(self._ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


# ---------------------------------------------------------------- the head's store

_SAVED = b"controller"
LAST_WORDS = b"last-words"
"""Key of the reason why the last controller failed; empty after an ordered shutdown."""


def get_value(key: bytes) -> bytes | None:
    """Read a value from the key-value store of Ray's head."""
    from ray.experimental.internal_kv import _internal_kv_get

    value = _internal_kv_get(key, namespace=NAMESPACE.encode())
    return None if value is None else bytes(value)


def put_value(key: bytes, value: bytes) -> None:
    """Write a value to the key-value store of Ray's head."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE.encode())


def _delete_value(key: bytes) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=NAMESPACE.encode())


def existing() -> list[str]:
    """Return the names of Baton's actors."""
    from ray.util import list_named_actors

    found = list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == NAMESPACE]


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines or [type(problem).__name__])[0][:300]


# ------------------------------------------------------------- limits of the node types
# Ray has no API for these limits, so they are read from the configuration file with which the
# autoscaler on the head was started. Nodes that are added manually have no limits.


def autoscaling_config(gcs_address: str, proc: Path = Path("/proc")) -> dict[str, Any] | None:
    """Return the configuration of this head's autoscaler; None without one or if unreadable.

    ``gcs_address``: ``HOST:PORT`` of the head, which is also in the autoscaler's command line.
    """
    import yaml  # type: ignore[import-untyped]  # of Ray

    path = _config_path(gcs_address, proc)
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        with path.open("rb") as file:
            config = yaml.safe_load(file.read(_MOST_BYTES))
        return config if isinstance(config, dict) else None
    return None


def _config_path(gcs_address: str, proc: Path) -> Path | None:
    """Find the path in the command line of the autoscaler's process."""
    port = gcs_address.rpartition(":")[2]
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            paths = [word.removeprefix(_FLAG) for word in words if word.startswith(_FLAG)]
            ours = any(word.endswith(f":{port}") and "gcs" in word for word in words)
            if paths and ours and any("autoscaler" in word for word in words):
                return Path(paths[0])
    return None


def capacity_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the maximum members of each role.

    A node type without ``max_workers`` uses the maximum of the cluster.
    """
    types = config.get("available_node_types") or {}
    overall = int(config.get("max_workers", 2))  # Ray's own default
    return {role: _most(types, config.get("head_node_type"), role, overall) for role in ROLES}


def _most(types: Mapping[str, Any], head: object, role: str, overall: int) -> int:
    total = 0
    for name, kind in types.items():
        each = int((kind.get("resources") or {}).get(role, 0))
        count = min(int(kind.get("max_workers", overall)), overall)
        total += each * (1 if name == head else count)
    return total
