"""The router of a simulated cluster."""

from __future__ import annotations

from ..router.config import RouterConfig
from ..router.core import RouterCore

CLUSTER_KEY = "00" * 16


def make_router_core(incarnation: int, now: float, policy: str = "least_loaded") -> RouterCore:
    """A router core as its process would make it."""
    config = RouterConfig(
        client_address="ipc:///simulated/router",
        worker_address="ipc:///simulated/router-workers",
        name="router",
        cluster_key=CLUSTER_KEY,
    )
    return RouterCore(config, incarnation=incarnation, now=now)
