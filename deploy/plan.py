"""The resolved plan: which processes a cluster on this machine consists of.

Pure: settings, addresses and the cluster key come in, :class:`ClusterPlan` comes out. The
addresses are chosen before anything starts and stay the same over restarts, so a worker that
comes back is found where its predecessor was.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..decode_worker.config import DecodeWorkerConfig
from ..engine.runner import DEFAULT_KV_BYTES, RunnerConfig
from ..prefill_worker.config import PrefillWorkerConfig
from ..router.config import PolicyConfig, RouterConfig
from .config import ServeSettings, demo_model_folder, kv_size, shares_memory
from .processes import ProcessSpec

if TYPE_CHECKING:
    from ..runtime.log import Level

ROUTER = "router"


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where everybody listens; ``control`` and ``data`` by worker name."""

    client: str
    workers: str
    control: dict[str, str]
    data: dict[str, str]


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Processes in start order: the router, then the workers.

    ``kv_default``: bytes of KV memory of a worker for which the settings name none.
    """

    settings: ServeSettings
    model: str
    address: str
    processes: list[ProcessSpec]
    kv_default: int = DEFAULT_KV_BYTES

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of all workers."""
        return tuple(spec.name for spec in self.processes if spec.name != ROUTER)


def worker_names(settings: ServeSettings, role: str) -> list[str]:
    """Names of a pool's workers: ``prefill-0``, ``prefill-1`` ..."""
    return [f"{role}-{index}" for index in range(getattr(settings, role))]


def all_worker_names(settings: ServeSettings) -> list[str]:
    """Names of both pools' workers."""
    return [*worker_names(settings, "prefill"), *worker_names(settings, "decode")]


def model_folder(settings: ServeSettings) -> str:
    """Absolute folder of the checkpoint."""
    return str(Path(settings.model).resolve() if settings.model else demo_model_folder())


def key_folder(settings: ServeSettings) -> str:
    """Absolute key folder, empty without one; children run in other folders."""
    return str(Path(settings.keys).absolute()) if settings.keys else ""


def ipc_addresses(settings: ServeSettings, client: str, folder: str) -> Addresses:
    """Sockets as files of ``folder``, the client socket at ``client``."""
    return Addresses(
        client=client,
        workers=f"ipc://{folder}/router.sock",
        control={name: f"ipc://{folder}/{name}.sock" for name in all_worker_names(settings)},
        data={
            name: f"ipc://{folder}/{name}.data.sock" for name in worker_names(settings, "decode")
        },
    )


def ports_needed(settings: ServeSettings) -> int:
    """How many TCP ports :func:`tcp_addresses` takes."""
    return 1 + settings.prefill + 2 * settings.decode


def tcp_addresses(settings: ServeSettings, client: str, ports: list[int]) -> Addresses:
    """Sockets on 127.0.0.1; ``ports``: at least :func:`ports_needed` free ones."""
    free = iter(f"tcp://127.0.0.1:{port}" for port in ports)
    return Addresses(
        client=client,
        workers=next(free),
        control={name: next(free) for name in all_worker_names(settings)},
        data={name: next(free) for name in worker_names(settings, "decode")},
    )


def resolve_plan(
    settings: ServeSettings,
    addresses: Addresses,
    cluster_key: str,
    kv_default: int = DEFAULT_KV_BYTES,
) -> ClusterPlan:
    """The plan for checked settings.

    ``cluster_key``: hex text, the same over restarts. ``kv_default``: KV memory of a worker
    for which the settings name none, in bytes.
    """
    runners = {role: _runner(settings, role, kv_default) for role in ("prefill", "decode")}
    prefills = [
        _prefill(settings, addresses, runners["prefill"], name)
        for name in worker_names(settings, "prefill")
    ]
    decodes = [
        _decode(settings, addresses, runners["decode"], name)
        for name in worker_names(settings, "decode")
    ]
    return ClusterPlan(
        settings=settings,
        model=model_folder(settings),
        address=addresses.client,
        processes=[_router(settings, addresses, cluster_key), *prefills, *decodes],
        kv_default=kv_default,
    )


def _router(settings: ServeSettings, addresses: Addresses, cluster_key: str) -> ProcessSpec:
    config = RouterConfig(
        client_address=addresses.client,
        worker_address=addresses.workers,
        name=ROUTER,
        cluster_key=cluster_key,
        model_folder=model_folder(settings),
        policy=PolicyConfig(name=settings.policy),
        keys=key_folder(settings),
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=ROUTER, role=ROUTER, module="baton.router", config=config)


def _prefill(
    settings: ServeSettings, addresses: Addresses, runner: RunnerConfig, name: str
) -> ProcessSpec:
    config = PrefillWorkerConfig(
        worker_id=name,
        endpoint=addresses.control[name],
        routers={ROUTER: addresses.workers},
        runner=runner,
        token_budget=settings.chunk_budget,
        step_seconds=settings.step_time,
        max_active=settings.prefill_max_batch,
        share_pool=shares_memory(settings),
        keys=key_folder(settings),
        drain_grace_s=settings.grace,
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role="prefill", module="baton.prefill_worker", config=config)


def _decode(
    settings: ServeSettings, addresses: Addresses, runner: RunnerConfig, name: str
) -> ProcessSpec:
    config = DecodeWorkerConfig(
        worker_id=name,
        endpoint=addresses.control[name],
        data_endpoint=addresses.data[name],
        routers={ROUTER: addresses.workers},
        runner=runner,
        max_batch=settings.max_batch,
        token_budget=settings.decode_chunk_budget,
        step_seconds=settings.step_time,
        keys=key_folder(settings),
        drain_grace_s=settings.grace,
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role="decode", module="baton.decode_worker", config=config)


_DEVICE_SHARE = 0.9
"""Of a GPU's memory: the rest is for its driver's contexts and for what kernels take."""


def _runner(settings: ServeSettings, role: str, kv_default: int) -> RunnerConfig:
    blocks, memory = kv_size(settings, role)
    on_gpu = settings.device == "cuda"
    return RunnerConfig(
        model=model_folder(settings),
        backend="cuda" if on_gpu else settings.backend,
        block_size=settings.block_size,
        num_blocks=blocks,
        kv_bytes=memory or (0 if on_gpu else kv_default),
        device_share=_DEVICE_SHARE / (settings.prefill + settings.decode),
        max_length=settings.max_length,
        task=settings.task,
    )


def describe_plan(plan: ClusterPlan) -> dict[str, Any]:
    """The plan as ``--dry-run`` prints it, without the cluster key."""
    processes = [
        {"name": spec.name, "role": spec.role, "module": spec.module, "config": _shown(spec)}
        for spec in plan.processes
    ]
    return {
        "model": plan.model,
        "address": plan.address,
        "settings": msgspec.to_builtins(plan.settings),
        "processes": processes,
    }


def _shown(spec: ProcessSpec) -> dict[str, Any]:
    config: dict[str, Any] = msgspec.to_builtins(spec.config)
    if config.get("cluster_key"):
        config["cluster_key"] = "(secret)"
    return config
