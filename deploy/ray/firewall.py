"""Firewall rules (nftables) that close Ray's ports to every machine outside the cluster.

A stranger who reaches one of Ray's ports can end its processes even without Ray's token. Baton's
own ports are left open: they let listed keys in and nobody else. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from ...proto.errors import ConfigError
from . import ports

TABLE = "baton_ray"


def firewall_rules(hosts: Sequence[str], metrics: Sequence[str] = ()) -> str:
    """Return a file for ``nft -f``, the same for every host of the cluster.

    ``hosts``: addresses of all of them. ``metrics``: addresses that may read Ray's numbers
    (Prometheus). Raises ConfigError for what is no IP address.
    """
    accepted = [f"    {rule} accept" for rule in _from(hosts)]
    read = f"tcp dport {{ {', '.join(map(str, sorted(ports.metrics())))} }}"
    accepted += [f"    {rule} {read} accept" for rule in _from(metrics)]
    return "\n".join(
        [
            "# Closes Ray's ports to machines outside this Baton cluster; touches nothing else.",
            "# On every host: nft -f FILE, again whenever the hosts change, and at every boot.",
            f"table inet {TABLE}",  # there must be a table for the next line, the first time too
            f"delete table inet {TABLE}",
            f"table inet {TABLE} {{",
            "  chain input {",
            "    type filter hook input priority filter; policy accept;",
            # some of Ray's ports are in the range from which the kernel takes ports for replies
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
    """Matches of these source addresses, one for each family there is."""
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
