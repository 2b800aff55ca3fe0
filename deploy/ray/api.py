"""Ray, as :class:`.watch.RayApi` wants it. Blocks while Ray's head is away."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import msgspec

from ...proto.errors import ConnectionLost
from ..launcher import DECODE, PREFILL, ROUTER, MemberSpec
from .actors import PoolMember
from .connect import NAMESPACE
from .member import MemberReport
from .placing import order_of
from .watch import ActorGone

ROLES = (ROUTER, PREFILL, DECODE)


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
            resources={spec.role: 1},
        ).remote(order)

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
        offer = [node for node in nodes if node["Resources"].get(role, 0) >= 1]
        if not offer:
            return f"no live node of {len(nodes)} has the resource '{role}'"
        if self._ray.available_resources().get(role, 0) < 1:
            return f"all {len(offer)} nodes with the resource '{role}' are taken"
        return "Ray has not started its actor yet"

    def request(self, bundles: dict[str, int]) -> None:
        """Ask the autoscaler for room; the whole list, nobody else's is kept."""
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{r: 1} for r, count in bundles.items() for _ in range(count)])

    def capacity(self) -> dict[str, int] | None:
        """By the autoscaler's maxima; None where nodes are joined by hand."""
        from ray._private.state import state

        config = state.get_cluster_config()
        if config is None or not config.node_group_configs:
            return None
        return {role: _most(config, role) for role in ROLES}


def _most(config: Any, role: str) -> int:
    """Most members of a role on all nodes of all types; a type without a maximum has many."""
    total = 0
    for group in config.node_group_configs:
        each = group.resources.get(role, 0)
        total += each * (10_000 if group.max_count < 0 else group.max_count)
    return int(total)


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines or [type(problem).__name__])[0][:300]
