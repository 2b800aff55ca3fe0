"""``baton ray-config``: write a cluster file for `ray up` on your hosts, or check such a file.

With ``--firewall``, write firewall rules for the same hosts instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.deploy.ray.certificates import check_certificates
from baton.deploy.ray.cluster_file import (
    FixedCluster,
    check_cluster,
    read_cluster_file,
    write_cluster_file,
)
from baton.deploy.ray.connect import INSTALL_RAY
from baton.deploy.ray.firewall import firewall_rules
from baton.deploy.ray.key_copies import HEAD_ROLES
from baton.proto.errors import ConfigError
from baton.runtime.keys.shares import check_share

from .numbers import count, number

_EPILOG = """\
With --head, --prefill, --decode and --wheel, write a cluster file to standard output. With --check
FILE, check a cluster file (needs Ray). With --firewall in place of --wheel, write rules for
`nft -f` that close Ray's ports to other machines. No host is contacted.
"""
_DEFAULTS = FixedCluster(head="", prefill=(), decode=(), wheel="")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "ray-config", help="write or check a cluster file for `ray up`", epilog=_EPILOG
    )
    parser.add_argument("--check", metavar="FILE", type=Path, help="check a cluster file")
    parser.add_argument("--head", metavar="IP", help="host of Ray's head and the router")
    for pool in ("prefill", "decode"):
        parser.add_argument(f"--{pool}", metavar="IP,IP", type=_hosts, help=f"hosts for {pool}")
        parser.add_argument(
            f"--{pool}-min",
            metavar="N",
            type=count,
            help=f"minimum {pool} hosts in use; the others are added on demand [1]",
        )
    parser.add_argument(
        "--firewall", action="store_true", help="write firewall rules for the hosts (nftables)"
    )
    parser.add_argument(
        "--metrics",
        metavar="IP,IP",
        type=_hosts,
        default=(),
        help="with --firewall: machines that may read Ray's metrics [none]",
    )
    parser.add_argument("--wheel", metavar="FILE", help="Baton's wheel, installed on every host")
    for field, meaning in (
        ("name", "the cluster's name"),
        ("user", "user name for SSH login on the hosts"),
        ("ssh_key", "private SSH key of that user; it is copied to the head"),
        ("token", "file of Ray's token (`ray get-auth-token --generate`)"),
        ("keys", "folder of keys (`baton keygen`)"),
        ("tls", "folder of certificates for Ray's TLS (`baton ray-certs`); empty: no TLS"),
        ("launch", "more arguments for `baton launch` on the head, such as the model's folder"),
        ("python", "Python command on the hosts that creates the virtual environment"),
    ):
        flag = f"--{field.replace('_', '-')}"
        parser.add_argument(flag, metavar="TEXT", help=f"{meaning} [{getattr(_DEFAULTS, field)}]")
    parser.add_argument(
        "--turn",
        action="store_true",
        help="give workers' hosts the keys of both pools, so that workers can change their role",
    )
    parser.add_argument(
        "--idle-minutes",
        metavar="N",
        type=number,
        help="minutes before an unused host is removed [1]",
    )
    parser.add_argument(
        "--reconnect",
        metavar="SECONDS",
        type=count,
        help="seconds that the cluster keeps serving without Ray's head before it stops [3600]",
    )
    parser.set_defaults(run=run)


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def run(arguments: argparse.Namespace) -> int:
    """Write a cluster file or firewall rules to standard output, or check a file."""
    if arguments.check is not None:
        try:
            prepared = check_cluster(read_cluster_file(arguments.check))
        except ImportError:
            raise ConfigError(f"checking needs Ray: {INSTALL_RAY}") from None
        pools = prepared["available_node_types"].items()
        shown = ", ".join(
            f"{name} {pool['min_workers']} to {pool['max_workers']}"
            for name, pool in pools
            if name != prepared["head_node_type"]
        )
        print(f"{arguments.check}: {prepared['cluster_name']}, {shown}")
        return 0
    given = {
        field: getattr(arguments, field)
        for field in FixedCluster.__struct_fields__
        if getattr(arguments, field) is not None
    }
    needed = ["head", "prefill", "decode", *(["wheel"] if not arguments.firewall else [])]
    needed = [name for name in needed if name not in given]
    if needed:
        raise ConfigError(f"missing {', '.join(f'--{name}' for name in needed)}")
    if arguments.firewall:
        hosts = [given["head"], *given["prefill"], *given["decode"]]
        print(firewall_rules(hosts, arguments.metrics), end="")
        return 0
    wheel = Path(given["wheel"]).expanduser()
    if not wheel.is_file():
        raise ConfigError(f"no wheel at {given['wheel']}; make one with `pip wheel --no-deps .`")
    given["wheel"] = str(wheel.absolute())  # `ray up` may be called in another folder
    cluster = FixedCluster(**given)
    text = write_cluster_file(cluster)
    if cluster.tls:
        hosts = [cluster.head, *cluster.prefill, *cluster.decode]
        check_certificates(Path(cluster.tls).expanduser(), hosts)
    check_share(Path(cluster.keys).expanduser(), HEAD_ROLES, None)  # of all hosts
    print(text, end="")
    return 0
