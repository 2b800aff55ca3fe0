"""Addresses of a cluster on Ray: routers at fixed ports of the head, workers at any free port.

The gateways run beside the routers and share one fixed port.

Pure. A worker's address is left empty here: its node sets it (:mod:`.placing`), and the worker
reports it to the routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from baton.proto.errors import ConfigError, InputError
from baton.proto.wire.endpoints import check_endpoint

from ..config import ServeSettings
from ..plan.plan import AddressBook, ClusterPlan, http_port_of, resolve_plan, router_names
from ..plan.prepare import with_workers_on
from .placing import LOOPBACK

CLIENT_PORT = 7070
"""Client port of the first router, unless the setting ``address`` has another port. Each further
router uses the next port."""
WORKER_OFFSET = 100
"""Difference between a router's port for workers and its port for clients."""


def ray_settings(settings: ServeSettings, head: str) -> ServeSettings:
    """Return the settings with the TCP address of the first router.

    ``head``: address of the head's node. Raises ConfigError for an address without tcp or port, or
    if the port is too high for the ports of all routers.
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
            f"address is {address!r}; workers on other Ray nodes must be able to connect: give "
            f"tcp://HOST:PORT with PORT up to {65535 - WORKER_OFFSET - settings.routers}"
        )
    if settings.device_ids:
        raise ConfigError("device_ids has no meaning under Ray, which gives each worker a GPU")
    http_port = http_port_of(settings)
    if settings.gateways and not http_port:
        raise ConfigError("http_port must not be 0 under Ray: clients must know the port")
    return msgspec.structs.replace(settings, address=address, transport="tcp", http_port=http_port)


def with_worker_per_ray_gpu(
    settings: ServeSettings, resources: Mapping[str, float]
) -> ServeSettings:
    """Set the default numbers of workers on a Ray cluster; see :func:`..plan.plan.split_gpus`.

    ``resources``: what the nodes have that are alive now (``ray.cluster_resources()``). Without a
    GPU among them the numbers stay as they are, because Ray's autoscaler may start hosts with GPUs
    for the workers.
    """
    gpus = int(resources.get("GPU", 0.0))
    return with_workers_on(settings, gpus) if gpus else settings


def ray_plan(settings: ServeSettings, cluster_key: str) -> ClusterPlan:
    """Return the cluster plan for the result of :func:`ray_settings`."""
    parts = urlsplit(settings.address)
    host = settings.address.removeprefix("tcp://").rpartition(":")[0]
    first = parts.port or CLIENT_PORT
    names = router_names(settings)
    ports = {name: first + number for number, name in enumerate(names)}
    book = AddressBook(
        {name: f"tcp://{host}:{port}" for name, port in ports.items()},
        {name: f"tcp://{host}:{port + WORKER_OFFSET}" for name, port in ports.items()},
        lambda _stem: "",
        settings.http_port,
    )
    return resolve_plan(settings, book, cluster_key, 0)
