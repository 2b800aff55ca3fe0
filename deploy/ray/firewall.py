"""TCP ports of Ray's processes, and firewall rules (nftables) that close them.

The ports are fixed in every cluster file, so that a firewall can name them; without these options
Ray takes random ports for half of its processes. A test compares the cluster files, the manifest
for Kubernetes and the firewall rules with this module.

Any machine with access to one of Ray's ports can end Ray's processes, even without Ray's token. So
the rules close these ports to every machine outside the cluster. Baton's own ports stay open,
because they accept only listed keys. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from baton.proto.errors import ConfigError

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
TABLE = "baton_ray"


def metrics_ports() -> list[int]:
    """Return the ports that Prometheus reads on a head; a node has only the first."""
    return [NODE_PORTS["metrics-export-port"], *METRICS.values()]


def firewall_rules(hosts: Sequence[str], metrics: Sequence[str] = ()) -> str:
    """Return a file for ``nft -f``; all hosts of the cluster use the same file.

    ``hosts``: addresses of all hosts. ``metrics``: addresses that may read Ray's metrics
    (Prometheus). Raises ConfigError for an invalid IP address.
    """
    accepted = [f"    {rule} accept" for rule in _from(hosts)]
    read = f"tcp dport {{ {', '.join(map(str, sorted(metrics_ports())))} }}"
    accepted += [f"    {rule} {read} accept" for rule in _from(metrics)]
    return "\n".join(
        [
            "# Closes Ray's ports to machines outside this Baton cluster; changes nothing else.",
            "# Run `nft -f FILE` on every host: now, after every change of hosts, at every boot.",
            f"table inet {TABLE}",  # create the table if missing, so that the next line succeeds
            f"delete table inet {TABLE}",
            f"table inet {TABLE} {{",
            "  chain input {",
            "    type filter hook input priority filter; policy accept;",
            # Some of Ray's ports are in the kernel's range of ephemeral ports, so replies to
            # outgoing connections may arrive at them.
            "    ct state established,related accept",
            '    iifname "lo" accept',
            *accepted,
            f"    tcp dport {{ {_closed()} }} drop",
            "  }",
            "}",
            "",
        ]
    )


def _from(addresses: Sequence[str]) -> list[str]:
    """Return nft matches of these source addresses, one per address family."""
    families: dict[int, list[str]] = {4: [], 6: []}
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise ConfigError(f"{text!r} is not an IP address") from None
        families[address.version].append(str(address))
    return [
        f"{name} saddr {{ {', '.join(families[version])} }}"
        for version, name in ((4, "ip"), (6, "ip6"))
        if families[version]
    ]


def _closed() -> str:
    single = {GCS, CLIENT, *NODE_PORTS.values(), *METRICS.values()}
    low, high = WORKER_PORTS.values()
    return ", ".join([*map(str, sorted(single)), f"{low}-{high}"])
