"""The identity with which a worker registers, from its settings and its loaded model."""

from __future__ import annotations

import os
from typing import Protocol

from baton.engine.kernels.backend import Backend
from baton.engine.loading.loader import device_title
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.ids import new_nonce, worker_incarnation
from baton.proto.layout import ModelCard
from baton.runtime.keys.zap import Doorkeeper
from baton.runtime.process.main import process_seal

from .kv_publisher import KvPublisher
from .labels import worker_labels
from .membership import Membership, WorkerIdentity


class WorkerSettings(Protocol):
    """The settings that workers of both roles have."""

    @property
    def role(self) -> str:
        """``prefill`` or ``decode``."""
        ...

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        ...

    @property
    def pool(self) -> str:
        """The pool that clients may name."""
        ...

    @property
    def labels(self) -> str:
        """Labels in the form that :mod:`.labels` parses."""
        ...

    @property
    def routers(self) -> dict[str, str]:
        """Router name to worker-side address."""
        ...

    @property
    def runner(self) -> RunnerConfig:
        """The engine's settings."""
        ...


def new_member(
    config: WorkerSettings,
    card: ModelCard,
    backend: Backend,
    endpoint: str,
    most: int,
    doors: Doorkeeper | None,
    publisher: KvPublisher | None,
) -> Membership:
    """Return the membership of a new incarnation.

    ``endpoint``: address of its control socket. ``most``: maximum number of running requests.
    ``doors``: checks the keys of its peers; None without keys.
    """
    nonce = new_nonce()
    identity = WorkerIdentity(
        worker=config.worker_id,
        role=config.role,
        incarnation=worker_incarnation(b"" if doors is None else doors.ring.public, nonce),
        nonce=nonce,
        pid=os.getpid(),
        endpoint=endpoint,
        pool=config.pool,
        model=card,
        max_batch=most,
        device=device_title(config.runner, backend),
        seal=process_seal(),
        shared_weights=backend.shared_bytes,
        labels=worker_labels(config.labels),
        kv_events=() if publisher is None else tuple(publisher.addresses),
    )
    return Membership(identity, tuple(config.routers))
