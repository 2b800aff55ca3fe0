"""Ray's node provider for fixed hosts, with a list of hosts for each node type.

Ray's ``local`` provider has one list for all node types. A cluster file selects this provider with
``provider: {type: external, module: baton.deploy.ray.provider.FixedHosts, ...}``. It runs in two
places: in `ray up` and `ray down` on the launching machine, where it manages the head, and in the
autoscaler on the head, where it manages the workers. Invariant: a host becomes a node only after it
answered and has the right Python and Ray. A node counts as ended only after its processes are gone,
or if its host cannot be reached.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click  # pyright: ignore[reportMissingImports]
import msgspec
from ray import __version__ as RAY_VERSION  # noqa: N812  # pyright: ignore
from ray.autoscaler.node_launch_exception import (  # pyright: ignore[reportMissingImports]
    NodeLaunchException,
)
from ray.autoscaler.node_provider import NodeProvider  # pyright: ignore[reportMissingImports]
from ray.autoscaler.tags import (  # pyright: ignore[reportMissingImports]
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from baton.proto.errors import ConfigError

from .hosts import (
    HostBook,
    check_mounts,
    check_node_types,
    host_of,
    node_id,
    provider_settings,
)
from .key_copies import SharesKeys, roles_by_type
from .remote import HostProblem, Login, Unreachable, check_host, for_all, host_name, stop_host

log = logging.getLogger(__name__)

HEAD_KEY = "~/ray_bootstrap_key.pem"
"""Path of the ssh key on the head, set by `ray up`."""
HEAD_CONFIG = "~/ray_bootstrap_config.yaml"
"""Path of the configuration on the head, set by `ray up`; JSON despite its name."""
NODE_VARIABLE = "RAY_CLOUD_INSTANCE_ID"
"""Ray's variable: id of the node of a process, set by the command that starts Ray."""
SESSION_VARIABLE = "BATON_RAY_SESSION"
"""Set by the cluster file at each start of a head; distinguishes its workers from earlier ones."""
_LAUNCH = "_launch"  # values for `ray up` only; Ray ignores keys with an underscore
_ROLES = "_roles"  # roles of each node type's keys; also used on the head, for workers' nodes
REST_SECONDS = 30.0
"""Seconds before an unusable host is tried again."""


class FixedHosts(NodeProvider):  # type: ignore[misc]  # Ray is not there when types are checked
    """Nodes on listed hosts. Implements Ray's NodeProvider; safe for several threads."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._settings = provider_settings(provider_config)
        self._login = Login(self._settings.ssh_user, self._settings.ssh_private_key)
        self._book = HostBook(Path(self._settings.state).expanduser() / f"{cluster_name}.json")
        self._creating = threading.Lock()
        self._resting: dict[str, float] = {}
        self._looked = False
        self._ended: set[str] = set()  # hosts
        self._on_head = self._record_own_head()

    def _record_own_head(self) -> bool:
        """On the head: record it, and drop workers of an earlier start. True on the head."""
        me, session = os.environ.get(NODE_VARIABLE, ""), os.environ.get(SESSION_VARIABLE, "")
        pool = next((p for p, hosts in self._settings.pools.items() if host_of(me) in hosts), None)
        if pool is None:
            return False
        with self._book.open() as state:
            if state.session != session:
                state.session = session
                heads = state.matching({TAG_RAY_NODE_KIND: NODE_KIND_HEAD})
                state.nodes = {node: state.nodes[node] for node in heads}
            state.nodes.setdefault(
                me,
                {
                    TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                    TAG_RAY_NODE_NAME: f"ray-{self.cluster_name}-head",
                    TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
                    TAG_RAY_USER_NODE_TYPE: pool,
                },
            )
        return True

    def _hosts(self, pool: str) -> tuple[str, ...]:
        """Return the pool's hosts. On the head, `ray up --no-restart` may have changed them."""
        if self._on_head:
            try:
                config = msgspec.json.decode(Path(HEAD_CONFIG).expanduser().read_bytes())
                self._settings = provider_settings(config["provider"])
            except (OSError, msgspec.DecodeError, KeyError, TypeError, ConfigError) as problem:
                log.warning("%s: %r; the hosts known before go on", HEAD_CONFIG, problem)
        return self._settings.pools.get(pool, ())

    # ------------------------------------------------------------- state

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Return the ids of the nodes with these tags."""
        with self._book.open() as state:
            return state.matching(tag_filters)

    def nodes_for_teardown(self, tag_filters: dict[str, str]) -> list[str]:
        """Return all hosts for `ray down`, because only the head has the list of used hosts."""
        with self._book.open() as state:
            known = state.matching(tag_filters)
            used = state.used_hosts()
        if tag_filters.get(TAG_RAY_NODE_KIND) != NODE_KIND_WORKER:
            return known
        hosts = [host for pool in self._settings.pools.values() for host in pool]
        return [*known, *(node_id(h, 0) for h in hosts if h not in used | self._ended)]

    def is_running(self, node_id: str) -> bool:
        """Whether the node exists."""
        with self._book.open() as state:
            return node_id in state.nodes

    def is_terminated(self, node_id: str) -> bool:
        """Whether the node has ended."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """The node's tags."""
        with self._book.open() as state:
            return state.nodes.get(node_id, {})

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Set some of the node's tags. Ignored for an ended node."""
        with self._book.open() as state:
            if node_id in state.nodes:
                state.nodes[node_id].update(tags)

    def external_ip(self, node_id: str) -> str:
        """The host's address."""
        return host_of(node_id)

    def internal_ip(self, node_id: str) -> str:
        """The host's address."""
        return host_of(node_id)

    # ------------------------------------------------------------- start

    def create_node(
        self, node_config: dict[str, Any], tags: dict[str, str], count: int
    ) -> dict[str, Any]:
        """Use the first ``count`` free and usable hosts of the node type.

        If there are too few, use those and raise NodeLaunchException.
        """
        pool, is_head = tags[TAG_RAY_USER_NODE_TYPE], tags.get(TAG_RAY_NODE_KIND) == NODE_KIND_HEAD
        if is_head:
            self._require_all()
        with self._creating:
            with self._book.open() as state:
                used = state.used_hosts()
            listed = self._hosts(pool)
            free = [host for host in listed if host not in used]
            usable, problems = self._look_at(free)
            with self._book.open() as state:
                made = [state.launch(host, tags) for host in usable[:count]]
        for problem in problems:
            log.warning("%s", problem)
        if len(made) < count:
            why = "; ".join(problems) or f"all {len(listed)} are in use"
            text = f"{pool}: {count - len(made)} of {count} hosts missing: {why}"
            if is_head:
                raise click.ClickException(text)
            raise NodeLaunchException("NoHost", text, None)
        return {node: {} for node in made}

    def _look_at(self, hosts: list[str]) -> tuple[list[str], list[str]]:
        """Return the usable hosts, and one sentence about each other host."""
        now = time.monotonic()
        rested = [host for host in hosts if self._resting.get(host, 0.0) <= now]
        found = for_all(rested, self._check)
        for host, problem in found.items():
            if problem is not None:
                self._resting[host] = now + REST_SECONDS
        problems = [
            f"host {_sentence(host, problem)}" for host, problem in found.items() if problem
        ]
        problems += [f"host {h}: could not be used a moment ago" for h in hosts if h not in found]
        return [host for host, problem in found.items() if problem is None], problems

    def _check(self, host: str) -> None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        python, venv = self._settings.python, self._settings.venv
        check_host(self._login, host, python, version, RAY_VERSION, venv)

    def get_command_runner(
        self, log_prefix: str, node_id: str, *arguments: Any, **more: Any
    ) -> SharesKeys:
        """Like Ray's, but from a key folder copy only the keys of this node's roles."""
        runner = super().get_command_runner(log_prefix, node_id, *arguments, **more)
        tags = self.node_tags(node_id)
        roles = self.provider_config.get(_ROLES, {}).get(tags.get(TAG_RAY_USER_NODE_TYPE), [])
        if tags.get(TAG_RAY_NODE_KIND) == NODE_KIND_HEAD:
            return SharesKeys(runner, roles)
        return SharesKeys(runner, roles, lambda: host_name(self._login, host_of(node_id)))

    # ------------------------------------------------------------- end

    def terminate_node(self, node_id: str) -> None:
        """Stop the host's Ray and Baton processes."""
        self.terminate_nodes([node_id])

    def terminate_nodes(self, node_ids: list[str]) -> None:
        """Stop the processes of these hosts in parallel.

        If processes do not end, their host stays a node, and HostProblem is raised. An unreachable
        host counts as ended, because every host is checked before it is used again.
        """
        nodes = {host_of(node): node for node in node_ids}
        found = for_all(nodes, lambda h: stop_host(self._login, h, self._settings.grace))
        left = []
        with self._book.open() as state:
            for host, problem in found.items():
                if isinstance(problem, HostProblem):
                    left.append(f"host {_sentence(host, problem)}")
                    continue
                if isinstance(problem, Unreachable):
                    log.warning("host %s; what ran there was not ended", _sentence(host, problem))
                state.nodes.pop(nodes[host], None)
                self._ended.add(host)
        if left:
            raise HostProblem("; ".join(left))

    # ------------------------------------------------------------- Ray's configuration

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Check the keys that Ray's schema does not cover, and add the login for the provider."""
        config = copy.deepcopy(cluster_config)
        auth = config.get("auth", {})
        config["provider"].setdefault("ssh_user", auth.get("ssh_user", ""))
        config["provider"].setdefault("ssh_private_key", auth.get("ssh_private_key", ""))
        try:
            settings = provider_settings(config["provider"])
            check_node_types(
                settings.pools, config["available_node_types"], config["head_node_type"]
            )
        except ConfigError as problem:
            raise click.ClickException(str(problem)) from None
        config["provider"][_ROLES] = roles_by_type(
            config["available_node_types"], config["head_node_type"]
        )
        needed = {
            name: int(kind.get("min_workers", 0))
            for name, kind in config["available_node_types"].items()
        }
        config["provider"][_LAUNCH] = {
            "mounts": list(config.get("file_mounts", {}).values()),
            "needed": {**needed, config["head_node_type"]: 1},
        }
        return config

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration for the head, where the ssh key has another path.

        Before `ray up` changes a running cluster, this is the last check. A new cluster has had
        its own check.
        """
        self._require_all()
        cluster_config["provider"].pop(_LAUNCH, None)
        if self._settings.ssh_private_key:
            cluster_config["provider"]["ssh_private_key"] = HEAD_KEY
        return cluster_config

    def _require_all(self) -> None:
        """Check once per `ray up` that all files exist and every pool has enough hosts."""
        launch = self.provider_config.get(_LAUNCH, {})
        if self._looked:
            return
        try:
            check_mounts(launch.get("mounts", []))
        except ConfigError as problem:
            raise click.ClickException(f"nothing was started: {problem}") from None
        missing = self._missing(launch.get("needed", {}))
        if missing:
            raise click.ClickException(f"nothing was started: {'; '.join(missing)}")
        self._looked = True

    def _missing(self, needed: dict[str, int]) -> list[str]:
        """Return the pools with too few usable hosts, and print the problems of hosts."""
        pools = self._settings.pools
        found = for_all([host for hosts in pools.values() for host in hosts], self._check)
        for host, problem in found.items():
            if problem is not None:
                line = f"baton: host {_sentence(host, problem)}"
                print(line, file=sys.stderr)  # noqa: T201 -- beside Ray's own output
        usable = {pool: sum(found[h] is None for h in hosts) for pool, hosts in pools.items()}
        return [
            f"{pool} needs {count} host{'s' * (count != 1)}, {usable[pool]} can be used"
            for pool, count in needed.items()
            if usable[pool] < count
        ]


def _sentence(host: str, problem: Unreachable | HostProblem) -> str:
    how = "cannot be reached" if isinstance(problem, Unreachable) else "cannot be a node"
    return f"{host} {how}: {problem}"
