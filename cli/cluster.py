"""Which running cluster a verb talks to: the ``--address`` flag and a client for it."""

from __future__ import annotations

import argparse
import os

import msgspec

from ..client import Client
from ..deploy.addresses import trusted_default_address
from ..deploy.report import ClusterReport
from ..proto.endpoints import check_endpoint
from ..proto.errors import ConfigError, InputError
from .numbers import seconds

ADDRESS_VARIABLE = "BATON_ADDRESS"
KEYS_VARIABLE = "BATON_KEYS"
TIMEOUT = 5.0


def add_address(parser: argparse.ArgumentParser, timeout: float = TIMEOUT) -> None:
    """The flags that say which cluster, and how long to wait for it."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help=f"the cluster's address (else {ADDRESS_VARIABLE}, else where this user's serve is)",
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


def address_of(arguments: argparse.Namespace) -> str:
    """The checked address."""
    given: str | None = arguments.address
    address = given or os.environ.get(ADDRESS_VARIABLE) or trusted_default_address()
    try:
        return check_endpoint(address)
    except InputError as problem:
        raise ConfigError(str(problem)) from problem


def keys_of(arguments: argparse.Namespace) -> str:
    """The key folder; empty for none."""
    return arguments.keys or os.environ.get(KEYS_VARIABLE, "")


def connect(arguments: argparse.Namespace) -> Client:
    """A client of that cluster."""
    address, keys = address_of(arguments), keys_of(arguments)
    return Client(address, keys=keys, connect_timeout=arguments.timeout)


def parsed(status: dict[str, object]) -> ClusterReport:
    """A client's ``status()`` as a struct."""
    return msgspec.convert(status, ClusterReport)
