"""TCP ports of Ray's processes in every cluster file, fixed so that a firewall can name them.

Without these options Ray takes random ports for half of its processes. A test compares the cluster
files, the manifest for Kubernetes and the firewall rules with this module. Pure.
"""

from __future__ import annotations

GCS = 6379
"""Ray's head, ``ray start --port``."""
NODE_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "metrics-export-port": 6384,
    "dashboard-agent-listen-port": 52365,
}
"""Options of every ``ray start``, head and nodes."""
WORKER_PORTS = {"min-worker-port": 10002, "max-worker-port": 10999}
"""Options of every ``ray start``: one port for each of Ray's worker processes and drivers."""
CLIENT = 10001
"""Ray Client on the head: listens where ``ray[client]`` is installed, as in Ray's images, and
cannot be turned off there. Baton does not use it."""
METRICS = {"autoscaler": 44217, "dashboard": 44227}
"""Ports on the head if ``ray[default]`` is installed; used only by Prometheus."""
START_OPTIONS = {**NODE_PORTS, **WORKER_PORTS}


def between_hosts() -> list[tuple[int, int]]:
    """Ranges of ports (first, last) that Ray on one host of a cluster uses on another."""
    low, high = WORKER_PORTS.values()
    single = sorted({GCS, *NODE_PORTS.values()} - {NODE_PORTS["metrics-export-port"]})
    ranges: list[tuple[int, int]] = []
    for port in single:
        if ranges and port == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], port)
        else:
            ranges.append((port, port))
    return sorted([*ranges, (low, high)])


def metrics() -> list[int]:
    """Return the ports that Prometheus reads on a head; a node has only the first."""
    return [NODE_PORTS["metrics-export-port"], *METRICS.values()]
