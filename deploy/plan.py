"""The resolved plan: which processes a cluster on this machine consists of.

Settings, addresses and the cluster key come in, :class:`ClusterPlan` comes out. A member's
addresses stay the same over its restarts, so one that comes back is found where its predecessor
was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..decode_worker.config import DecodeWorkerConfig
from ..engine.runner import DEFAULT_KV_BYTES, RunnerConfig
from ..prefill_worker.config import PrefillWorkerConfig
from ..router.config import PolicyConfig, RouterConfig
from .config import ServeSettings, demo_model_folder, kv_size, shares_memory
from .launcher import PREFILL, ROUTER
from .processes import ProcessSpec

if TYPE_CHECKING:
    from ..runtime.log import Level


class AddressBook:
    """Where everybody listens. A worker's addresses are chosen when it is first asked for.

    ``clients`` and ``workers``: the two sockets of each router, by its name. ``place``: makes an
    address of a stem such as ``decode-3.data``.
    """

    def __init__(
        self, clients: dict[str, str], workers: dict[str, str], place: Callable[[str], str]
    ) -> None:
        self.clients, self.workers = clients, workers
        self._place = place
        self._known: dict[str, str] = {}

    def control(self, name: str) -> str:
        """A worker's control address; the same until it is released."""
        return self._address(name)

    def data(self, name: str) -> str:
        """A decode worker's address for KV frames."""
        return self._address(f"{name}.data")

    def release(self, name: str) -> None:
        """The worker has ended; another of its name may listen elsewhere."""
        for stem in (name, f"{name}.data"):
            self._known.pop(stem, None)

    def _address(self, stem: str) -> str:
        if stem not in self._known:
            self._known[stem] = self._place(stem)
        return self._known[stem]


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Processes in start order: the routers, then the workers.

    ``address``: where clients connect, comma-separated with several routers. ``kv_default``:
    bytes of KV memory of a worker for which the settings name none.
    """

    settings: ServeSettings
    model: str
    address: str
    processes: list[ProcessSpec]
    book: AddressBook
    cluster_key: str
    kv_default: int = DEFAULT_KV_BYTES

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of all workers."""
        return tuple(spec.name for spec in self.processes if spec.role != ROUTER)


def router_names(settings: ServeSettings) -> list[str]:
    """``router``, or ``router-0``, ``router-1`` ... of several."""
    if settings.routers == 1:
        return [ROUTER]
    return [f"{ROUTER}-{index}" for index in range(settings.routers)]


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


def ipc_addresses(clients: dict[str, str], folder: str) -> AddressBook:
    """Sockets as files of ``folder``; ``clients``: the routers' client sockets by name."""

    def place(stem: str) -> str:
        return f"ipc://{folder}/{stem}.sock"

    return AddressBook(clients, {name: place(name) for name in clients}, place)


def tcp_addresses(clients: dict[str, str], take_port: Callable[[], int]) -> AddressBook:
    """Sockets on 127.0.0.1; ``take_port``: gives a port that is free, another each time."""

    def place(_stem: str) -> str:
        return f"tcp://127.0.0.1:{take_port()}"

    return AddressBook(clients, {name: place(name) for name in clients}, place)


def resolve_plan(
    settings: ServeSettings,
    book: AddressBook,
    cluster_key: str,
    kv_default: int = DEFAULT_KV_BYTES,
) -> ClusterPlan:
    """The plan for checked settings.

    ``cluster_key``: hex text, the same over restarts. ``kv_default``: KV memory of a worker
    for which the settings name none, in bytes.
    """
    names = [*router_names(settings), *all_worker_names(settings)]
    return ClusterPlan(
        settings=settings,
        model=model_folder(settings),
        address=",".join(book.clients.values()),
        processes=[process_of(name, settings, book, cluster_key, kv_default) for name in names],
        book=book,
        cluster_key=cluster_key,
        kv_default=kv_default,
    )


def process_of(
    name: str, settings: ServeSettings, book: AddressBook, cluster_key: str, kv_default: int
) -> ProcessSpec:
    """The process of a member's name: its role is what stands before the number."""
    role = role_of(name)
    if role == ROUTER:
        return _router(settings, book, cluster_key, name)
    runner = _runner(settings, role, kv_default)
    return (_prefill if role == PREFILL else _decode)(settings, book, runner, name)


def role_of(name: str) -> str:
    """Role of the member called ``name``."""
    return name.partition("-")[0]


def _router(settings: ServeSettings, book: AddressBook, cluster_key: str, name: str) -> ProcessSpec:
    config = RouterConfig(
        client_address=book.clients[name],
        worker_address=book.workers[name],
        name=name,
        cluster_key=cluster_key,
        model_folder=model_folder(settings),
        policy=PolicyConfig(name=settings.policy),
        worker_timeout_s=settings.worker_timeout,
        keys=key_folder(settings),
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role=ROUTER, module="baton.router", config=config)


def _prefill(
    settings: ServeSettings, book: AddressBook, runner: RunnerConfig, name: str
) -> ProcessSpec:
    config = PrefillWorkerConfig(
        worker_id=name,
        endpoint=book.control(name),
        routers=dict(book.workers),
        runner=runner,
        token_budget=settings.chunk_budget,
        step_seconds=settings.step_time,
        slo_ttft=first_token_limit(settings),
        max_active=settings.prefill_max_batch,
        share_pool=shares_memory(settings),
        handoff_timeout_s=settings.handoff_timeout,
        keys=key_folder(settings),
        drain_grace_s=settings.grace,
        worker_timeout_s=settings.worker_timeout,
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role="prefill", module="baton.prefill_worker", config=config)


def _decode(
    settings: ServeSettings, book: AddressBook, runner: RunnerConfig, name: str
) -> ProcessSpec:
    config = DecodeWorkerConfig(
        worker_id=name,
        endpoint=book.control(name),
        data_endpoint=book.data(name),
        routers=dict(book.workers),
        runner=runner,
        max_batch=settings.max_batch,
        token_budget=settings.decode_chunk_budget,
        step_seconds=settings.step_time,
        handoff_timeout_s=settings.handoff_timeout,
        keys=key_folder(settings),
        drain_grace_s=settings.grace,
        worker_timeout_s=settings.worker_timeout,
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role="decode", module="baton.decode_worker", config=config)


def first_token_limit(settings: ServeSettings) -> float:
    """Seconds that first tokens should keep, by which prefill workers order prompts; 0: none."""
    order = settings.prefill_order
    in_time = order == "in_time" or (order == "auto" and settings.autoscale == "on")
    return settings.slo_ttft if in_time else 0.0


def sized_for(settings: ServeSettings) -> int:
    """How many workers the machine's memory is shared out among: the most there may be.

    Where no maximum is set, as many as there are at the start.
    """
    prefill = max(settings.prefill, settings.prefill_max)
    return prefill + (max(settings.decode, settings.decode_max) if settings.decode else 0)


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
        device_share=_DEVICE_SHARE / sized_for(settings),
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
