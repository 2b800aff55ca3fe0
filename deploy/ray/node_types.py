"""Maximum number of members on a cluster's node types, from the autoscaler's configuration.

Ray has no API for these limits, so this module reads the configuration file that the autoscaler on
the head was started with. For nodes that are added manually there are no limits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..controller.backend import DECODE, PREFILL, ROUTER

ROLES = (ROUTER, PREFILL, DECODE)
_FLAG = "--autoscaling-config="
_MOST_BYTES = 4 << 20


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
