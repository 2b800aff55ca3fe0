"""Which running cluster a verb talks to: the ``--address`` flag and a client for it.

An address may be a list of routers with commas between them.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from ..client import Client
from ..client.routers import router_addresses
from ..deploy.addresses import trusted_default_address
from ..deploy.report import ClusterReport
from .numbers import seconds

ADDRESS_VARIABLE = "BATON_ADDRESS"
KEYS_VARIABLE = "BATON_KEYS"
TIMEOUT = 5.0


def add_address(parser: argparse.ArgumentParser, timeout: float = TIMEOUT) -> None:
    """The flags that say which cluster, and how long to wait for it."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="the cluster's address, or its routers' with commas between them "
        f"(else {ADDRESS_VARIABLE}, else where this user's serve is)",
    )
    parser.add_argument(
        "--keys",
        metavar="FOLDER",
        help=f"key folder, for a cluster that has keys (else {KEYS_VARIABLE})",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=timeout,
        metavar="SECONDS",
        help=f"how long to wait for the cluster [{timeout:g}]",
    )


def addresses_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The checked addresses of the cluster's routers."""
    given: str | None = arguments.address
    return router_addresses(given or os.environ.get(ADDRESS_VARIABLE) or trusted_default_address())


def keys_of(arguments: argparse.Namespace) -> str:
    """The key folder; empty for none."""
    return arguments.keys or os.environ.get(KEYS_VARIABLE, "")


def connect(arguments: argparse.Namespace) -> Client:
    """A client of that cluster, at any of its routers."""
    addresses, keys = addresses_of(arguments), keys_of(arguments)
    return Client(addresses, keys=keys, connect_timeout=arguments.timeout)


def parsed(status: dict[str, object]) -> ClusterReport:
    """A client's ``status()`` as a struct."""
    return msgspec.convert(status, ClusterReport)
