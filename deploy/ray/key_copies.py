"""Selection of the keys that are copied to a node.

Ray's ``file_mounts`` are the same for all nodes. :class:`SharesKeys` wraps Ray's command runner
and replaces a key folder by a folder with only the keys of the node's processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.runtime.keys.allowed import DECODE, OPERATOR, PREFILL, ROUTER
from baton.runtime.keys.keyring import ALLOWED_FILE, KEY_SUFFIX
from baton.runtime.keys.shares import write_share

HEAD_ROLES = (ROUTER, OPERATOR, PREFILL, DECODE)
"""Roles of the keys on the head: for its routers and controller, and to copy to workers' hosts."""


TURN = "turn"
"""Resource of a node type whose hosts get the keys of both pools, so that workers change roles."""


def roles_by_type(node_types: Mapping[str, Any], head_type: str) -> dict[str, list[str]]:
    """Return the roles whose keys each node type needs, from the resources of the node type."""
    found = {}
    for name, kind in node_types.items():
        resources = kind.get("resources") or {}
        has = {role for role in (ROUTER, PREFILL, DECODE) if resources.get(role, 0) > 0}
        if resources.get(TURN, 0) > 0 and has & {PREFILL, DECODE}:
            has |= {PREFILL, DECODE}
        found[name] = [role for role in (ROUTER, PREFILL, DECODE) if role in has]
    return {**found, head_type: list(HEAD_ROLES)}


class SharesKeys:
    """Ray's command runner of one node, which copies only the node's share of a key folder.

    ``host()``: the node's own name; None for the head, which needs the keys of all hosts.
    """

    def __init__(
        self, runner: Any, roles: list[str], host: Callable[[], str | None] = lambda: None
    ) -> None:
        self._runner = runner
        self._roles = roles
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copy to the node. Raises ConfigError for an unusable key folder."""
        folder = Path(source).expanduser()
        if not (folder / ALLOWED_FILE).exists():
            self._runner.run_rsync_up(source, target, options)
            return
        with tempfile.TemporaryDirectory(prefix="baton-keys-") as draft:
            share = Path(draft) / "keys"
            of_hosts = any("@" in path.stem for path in folder.glob(f"*{KEY_SUFFIX}"))
            write_share(folder, share, self._roles, self._host() if of_hosts else "")
            self._runner.run_rsync_up(f"{share}/", target, options)
