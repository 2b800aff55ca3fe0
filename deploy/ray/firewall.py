"""Firewall rules (nftables) that close Ray's ports to every machine outside the cluster.

Any machine with access to one of Ray's ports can end Ray's processes, even without Ray's token.
Baton's own ports stay open, because they accept only listed keys. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from ...proto.errors import ConfigError
from . import ports

TABLE = "baton_ray"


def firewall_rules(hosts: Sequence[str], metrics: Sequence[str] = ()) -> str:
    """Return a file for ``nft -f``; all hosts of the cluster use the same file.

    ``hosts``: addresses of all hosts. ``metrics``: addresses that may read Ray's metrics
    (Prometheus). Raises ConfigError for an invalid IP address.
    """
    accepted = [f"    {rule} accept" for rule in _from(hosts)]
    read = f"tcp dport {{ {', '.join(map(str, sorted(ports.metrics())))} }}"
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
    single = {ports.GCS, ports.CLIENT, *ports.NODE_PORTS.values(), *ports.METRICS.values()}
    low, high = ports.WORKER_PORTS.values()
    return ", ".join([*map(str, sorted(single)), f"{low}-{high}"])
