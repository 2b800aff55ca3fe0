"""Where a cluster on Ray listens: routers at fixed ports of the head, workers anywhere.

Pure. A worker's address is left empty here: its node fills it in (:mod:`.placing`) and the worker
tells the routers, so nobody needs to know it before.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from ...proto.endpoints import check_endpoint
from ...proto.errors import ConfigError, InputError
from ..config import ServeSettings
from ..plan import AddressBook, ClusterPlan, resolve_plan, router_names
from .placing import LOOPBACK

CLIENT_PORT = 7070
"""Of the first router, unless the setting ``address`` says another; further ones follow it."""
WORKER_OFFSET = 100
"""From a router's port for clients to its port for workers."""


def ray_settings(settings: ServeSettings, head: str) -> ServeSettings:
    """The settings as Ray needs them.

    ``head``: address of the head's node. ConfigError for an address that others than its own
    machine cannot reach although there are keys, or that it has no ports to follow.
    """
    host = head if settings.keys else LOOPBACK
    address = settings.address or f"tcp://{host}:{CLIENT_PORT}"
    try:
        check_endpoint(address)
    except InputError as problem:
        raise ConfigError(f"address: {problem}") from problem
    port = urlsplit(address).port or 0
    last = port + settings.routers - 1 + WORKER_OFFSET
    if not address.startswith("tcp://") or not port or last > 65535:
        raise ConfigError(
            f"address is {address!r}; under Ray workers on other hosts connect too, so give "
            f"tcp://HOST:PORT with PORT up to {65535 - WORKER_OFFSET - settings.routers}"
        )
    return msgspec.structs.replace(settings, address=address, transport="tcp")


def ray_plan(settings: ServeSettings, cluster_key: str) -> ClusterPlan:
    """The plan for :func:`ray_settings`."""
    parts = urlsplit(settings.address)
    host = settings.address.removeprefix("tcp://").rpartition(":")[0]
    first = parts.port or CLIENT_PORT
    names = router_names(settings)
    ports = {name: first + number for number, name in enumerate(names)}
    book = AddressBook(
        {name: f"tcp://{host}:{port}" for name, port in ports.items()},
        {name: f"tcp://{host}:{port + WORKER_OFFSET}" for name, port in ports.items()},
        lambda _stem: "",
    )
    return resolve_plan(settings, book, cluster_key, 0)
