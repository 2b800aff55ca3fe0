"""Which controller a verb talks to, and what is said while it works."""

from __future__ import annotations

import argparse
import os

from ..deploy.addresses import admin_address
from ..deploy.admin import Overview, Progress, Request
from ..deploy.admin_client import AdminClient, listens
from ..proto.errors import ConfigError, ConnectionLost
from .cluster import TIMEOUT, add_address, addresses_of, keys_of

ADMIN_VARIABLE = "BATON_ADMIN"


def add_operator(parser: argparse.ArgumentParser, timeout: float = TIMEOUT) -> None:
    """The flags that say which cluster, by its address or its controller's own."""
    add_address(parser, timeout)
    parser.add_argument(
        "--admin",
        metavar="ADDRESS",
        help=f"the controller's address (else {ADMIN_VARIABLE}, else as it follows from --address)",
    )


def admin_of(arguments: argparse.Namespace) -> str:
    """Where the controller would listen."""
    given: str = arguments.admin or os.environ.get(ADMIN_VARIABLE, "")
    return given or admin_address(addresses_of(arguments)[0])


def has_controller(arguments: argparse.Namespace) -> bool:
    """Whether somebody seems to listen there."""
    return listens(admin_of(arguments))


def operator(arguments: argparse.Namespace, timeout: float | None = None) -> AdminClient:
    """A connection to the controller. Raises ConnectionLost when nobody listens.

    ``timeout``: seconds it may take to answer, instead of those of the flag.
    """
    address = admin_of(arguments)
    if not listens(address):
        raise ConnectionLost(
            f"no controller at {address}: start a cluster with baton launch, or give its --address"
        )
    seconds = arguments.timeout if timeout is None else timeout
    return AdminClient(address, keys=keys_of(arguments), timeout=seconds)


def overview(arguments: argparse.Namespace) -> Overview | None:
    """What the controller says; None where there is none that answers."""
    if not has_controller(arguments):
        return None
    try:
        with operator(arguments) as client:
            return client.overview()
    except ConnectionLost:
        return None


def carry_out(client: AdminClient, request: Request, *, wait: bool) -> str:
    """Send an order and show what is said of it, until it is accepted or, to ``wait``, done."""
    text = ""
    for answer in client.ask(request):
        text = answer.text
        if isinstance(answer, Progress):
            if answer.accepted and not wait:
                break
            print(text, flush=True)
    return text


def assignments(words: list[str]) -> dict[str, str]:
    """``["decode=3"]`` as a mapping. ConfigError for other words, and for a name given twice."""
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
