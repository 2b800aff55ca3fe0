"""A Ray cluster of several nodes on one machine: Ray's fake provider under its real autoscaler.

Every "node" is a separate raylet with its own resources; all have the address 127.0.0.1. Use this
only inside the namespaces of ``in_namespaces``: ``ray stop`` ends every Ray process it can see.

The wheel of 2.60.0 lacks the file with defaults for Ray's test cluster. An ``external`` provider
needs no such file, so this module contains the whole configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HEAD_ID = "f" * 51 + "00000"  # the head's id in Ray's fake provider
STORE = 80_000_000  # bytes, Ray's minimum
PORT = 6379
_RAY = str(Path(sys.executable).with_name("ray"))
_EMPTY_LISTS = (
    "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands",
    "setup_commands", "head_setup_commands", "worker_setup_commands", "head_start_ray_commands",
    "worker_start_ray_commands",
)  # fmt: skip


def inside() -> bool:
    """Whether this process runs in the namespaces of ``in_namespaces``."""
    with contextlib.suppress(OSError):
        first = Path("/proc/1/cmdline").read_bytes().split(b"\0")
        return "RAY_TEST_BED" in os.environ and b"bed" in first
    return False


def processes() -> dict[int, str]:
    """Return the command lines of all processes in the namespace, except zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if line:
                    found[int(entry.name)] = line
    return found


def parent(pid: int) -> int:
    """Return the parent's pid of a process; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


class Bed:
    """``maximum``: maximum nodes of each worker type."""

    def __init__(self, folder: Path, maximum: int = 3, **environment: str) -> None:
        self.address = f"127.0.0.1:{PORT}"
        self._config = folder / "bed.json"
        self._config.write_text(json.dumps(configuration(maximum)))
        self._environment = {
            **os.environ,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }

    def start(self) -> None:
        """Start the head; worker nodes start on demand."""
        ray_stop()
        done = subprocess.run(
            [
                *(_RAY, "start", "--head", f"--autoscaling-config={self._config}"),
                *("--num-cpus=0", f"--object-store-memory={STORE}", f"--port={PORT}"),
                *("--include-dashboard=false", "--include-log-monitor=false"),
                *("--disable-usage-stats", "--resources", json.dumps({"router": 1})),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def stop(self) -> None:
        """End all processes of Ray."""
        ray_stop()

    def raylets(self, role: str) -> list[int]:
        """Return the pids of the raylets of a role's nodes."""
        mark = "--static_resource_list="
        return [
            pid
            for pid, line in processes().items()
            if "/raylet/raylet " in line and mark in line and f"{role},1" in line
        ]

    def nodes(self) -> dict[str, int]:
        """Return the number of worker nodes of each role with a live raylet."""
        return {role: len(self.raylets(role)) for role in ("prefill", "decode")}

    def gcs(self) -> int:
        """Return the pid of the head's GCS server."""
        return next(pid for pid, line in processes().items() if "/gcs/gcs_server " in line)

    def logs(self) -> str:
        """Return the last lines of the relevant logs, for a failed test."""
        folder = Path(os.environ["RAY_TMPDIR"]) / "ray/session_latest/logs"
        said = []
        for path in sorted(folder.glob("worker-*.err")) + sorted(folder.glob("monitor*.log")):
            said += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-12:]]
        return "\n".join(line[:240] for line in said)


def configuration(maximum: int) -> dict:
    """Return the autoscaler's configuration: a head and two types of worker nodes."""

    def node_type(role: str) -> dict:
        resources = {"CPU": 0, role: 1, "object_store_memory": STORE}
        return {
            "resources": resources,
            "labels": {"pool": role},
            "node_config": {},
            "min_workers": 0,
            "max_workers": maximum,
        }

    module = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    head = {"resources": {"CPU": 0, "router": 1}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "bed",
        "max_workers": 2 * maximum,
        "upscaling_speed": 100,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "external",
            "module": module,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
        },
        "available_node_types": {
            "ray.head.default": head,
            "prefill": node_type("prefill"),
            "decode": node_type("decode"),
        },
        "head_node_type": "ray.head.default",
        "docker": {},
        "auth": {"ssh_user": "nobody"},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in _EMPTY_LISTS},
    }


def ray_stop() -> None:
    """Run ``ray stop --force``; it sees only processes of this namespace."""
    assert inside()
    subprocess.run([_RAY, "stop", "--force"], capture_output=True, check=False)


def kill(pid: int) -> float:
    """Send SIGKILL; return the time."""
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()
