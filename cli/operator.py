"""The controller that a command uses, and the progress printed while the controller works."""

from __future__ import annotations

import argparse
import os

from baton.deploy.controller.admin import Overview, Progress, Request
from baton.deploy.controller.admin_client import AdminClient, listens
from baton.deploy.plan.addresses import admin_address
from baton.proto.errors import ConfigError, ConnectionLost

from .cluster import TIMEOUT, add_address, addresses_of, keys_of
from .output import say

ADMIN_VARIABLE = "BATON_ADMIN"


def add_operator(parser: argparse.ArgumentParser, timeout: float = TIMEOUT) -> None:
    """Add the flags for the addresses of the cluster and its controller."""
    add_address(parser, timeout)
    parser.add_argument(
        "--admin",
        metavar="ADDRESS",
        help=f"address of the controller (default: {ADMIN_VARIABLE}, else from --address)",
    )


def admin_of(arguments: argparse.Namespace) -> str:
    """Return the controller's address, whether or not a controller listens there."""
    given: str = arguments.admin or os.environ.get(ADMIN_VARIABLE, "")
    return given or admin_address(addresses_of(arguments)[0])


def admin_is_given(arguments: argparse.Namespace) -> bool:
    """Whether the user named the controller's address, instead of leaving it to be derived."""
    return bool(arguments.admin or os.environ.get(ADMIN_VARIABLE))


def has_controller(arguments: argparse.Namespace) -> bool:
    """Whether a controller appears to listen. Over TCP, this is assumed."""
    return listens(admin_of(arguments))


def operator(arguments: argparse.Namespace, timeout: float | None = None) -> AdminClient:
    """Connect to the controller. Raises ConnectionLost if no controller listens.

    ``timeout``: seconds to wait for an answer; default: the value of ``--timeout``.
    """
    address = admin_of(arguments)
    if not listens(address):
        raise ConnectionLost(
            f"no controller at {address}: start a cluster with baton launch, or give its --address"
        )
    seconds = arguments.timeout if timeout is None else timeout
    return AdminClient(address, keys=keys_of(arguments), timeout=seconds)


def overview(arguments: argparse.Namespace) -> Overview | None:
    """Return the controller's overview, or None if no controller answers."""
    if not has_controller(arguments):
        return None
    try:
        with operator(arguments) as client:
            return client.overview()
    except ConnectionLost:
        return None


def carry_out(client: AdminClient, request: Request, *, wait: bool) -> str:
    """Send an order and print its progress until it is accepted, or with ``wait`` until done.

    Returns the text of the last answer.
    """
    text = ""
    for answer in client.ask(request):
        text = answer.text
        if isinstance(answer, Progress):
            if answer.accepted and not wait:
                break
            say(text)
    return text


def assignments(words: list[str]) -> dict[str, str]:
    """Parse ``["decode=3"]`` to a mapping. Raises ConfigError for a wrong or repeated word."""
    found: dict[str, str] = {}
    for word in words:
        name, mark, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not mark or not name:
            raise ConfigError(f"{word!r} is not NAME=VALUE, such as decode=3")
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = value.strip()
    return found
