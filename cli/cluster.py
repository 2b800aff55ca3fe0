"""The running cluster that a command uses: the ``--address`` flag, and a client for the address.

An address may be a list of router addresses, separated by commas.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from baton.client import Client
from baton.client.environment import ADDRESS_VARIABLE, KEYS_VARIABLE, find_cluster
from baton.deploy.report import ClusterReport

from .numbers import seconds

TIMEOUT = 5.0


def add_address(parser: argparse.ArgumentParser, timeout: float = TIMEOUT) -> None:
    """Add the flags for the cluster's address, its keys, and the timeout."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="address of the cluster, or the addresses of its routers, separated by commas "
        f"(default: {ADDRESS_VARIABLE}, else the default address of this user's cluster)",
    )
    parser.add_argument(
        "--keys",
        metavar="FOLDER",
        help=f"key folder, for a cluster with keys (default: {KEYS_VARIABLE})",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=timeout,
        metavar="SECONDS",
        help=f"seconds to wait for the cluster [{timeout:g}]",
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the deadline of a request."""
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="seconds until the request fails"
    )


def addresses_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the checked addresses of the cluster's routers. Raises ConfigError."""
    return find_cluster(arguments.address or None, None)[0]


def keys_of(arguments: argparse.Namespace) -> str:
    """Return the key folder, or an empty string for a cluster without keys."""
    return arguments.keys or os.environ.get(KEYS_VARIABLE, "")


def connect(arguments: argparse.Namespace) -> Client:
    """Connect a client to any router of the cluster."""
    addresses, keys = addresses_of(arguments), keys_of(arguments)
    return Client(addresses, keys=keys, connect_timeout=arguments.timeout)


def parsed(status: dict[str, object]) -> ClusterReport:
    """Convert the result of a client's ``status()`` to a struct."""
    return msgspec.convert(status, ClusterReport)
