"""The resolved plan: the processes of a cluster on this machine.

The inputs are settings, addresses and the cluster key; the result is a :class:`ClusterPlan`. A
member keeps its addresses over restarts, so that the other processes can reach it again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from baton.decode_worker.config import DecodeWorkerConfig
from baton.engine.loading.embedding_config import DRAW, EMBED
from baton.engine.loading.gguf_folder import is_gguf, local_folder
from baton.engine.loading.own_family import use_family
from baton.engine.loading.runner_config import DEFAULT_KV_BYTES, RunnerConfig
from baton.extend import DECIDER, FAMILY, METRIC, ORDER, POLICY, TRANSPORT, Point, is_extension
from baton.gateway.config import GatewayConfig
from baton.prefill_worker.config import PrefillWorkerConfig
from baton.router.config import STEP_SHARE, PolicyConfig, RouterConfig
from baton.runtime.keys.api_keys import KEY_VARIABLE, api_key_digests, check_http_access

from ..config import (
    ADAPTIVE,
    ANY_HTTP_PORT,
    DISAGGREGATED,
    HTTP_PORT,
    ServeSettings,
    block_size,
    demo_model_folder,
    given_threads,
    kv_events_of,
    kv_size,
    kv_type,
    labels_of,
    listed,
    parse_size,
    shares_memory,
)
from ..roles import DECODE, GATEWAY, POOLS, PREFILL, ROUTER
from ..supervise.process import ProcessSpec
from .bounds import most_beside

if TYPE_CHECKING:
    from baton.runtime.process.log import Level


class GpuBook:
    """The GPU of each worker, by ordinal. A worker keeps its GPU until :meth:`release`.

    A worker gets a GPU with the fewest workers, the first of several. So no GPU has more than
    :meth:`most` workers, if ``workers`` is the most there ever are at once. ``instances``: by
    ordinal, the CUDA_VISIBLE_DEVICES of the workers of an instance of a split GPU.
    """

    def __init__(
        self, ordinals: Sequence[int] = (0,), instances: Mapping[int, str] | None = None
    ) -> None:
        self._ordinals = tuple(ordinals)
        self._instances = dict(instances or {})
        self._taken: dict[str, int] = {}

    def take(self, name: str) -> int:
        """Return the GPU of a worker, the same one until its release."""
        if name not in self._taken:
            counts = Counter(self._taken.values())
            self._taken[name] = min(self._ordinals, key=lambda one: counts[one])
        return self._taken[name]

    def given(self, runner: RunnerConfig, name: str) -> RunnerConfig:
        """Return the settings of a worker with its GPU; it sees no GPU beside an instance."""
        ordinal = self.take(name)
        instance = self._instances.get(ordinal, "")
        return msgspec.structs.replace(
            runner, ordinal=0 if instance else ordinal, instance=instance
        )

    def release(self, name: str) -> None:
        """Release the GPU of an ended worker."""
        self._taken.pop(name, None)

    def most(self, workers: int) -> int:
        """Return the most workers that share a GPU, if there are ``workers``."""
        return -(-workers // len(self._ordinals))

    def __contains__(self, name: str) -> bool:
        return name in self._taken


def split_gpus(count: int) -> tuple[int, int]:
    """Return the default numbers of prefill and decode workers on ``count`` GPUs.

    A quarter of the GPUs prefills, because one prefill worker feeds several decode workers. One GPU
    has a worker of both kinds.
    """
    prefill = max(1, count // 4)
    return prefill, max(1, count - prefill)


class AddressBook:
    """Addresses of all processes. A worker's addresses are chosen on first use.

    ``clients`` and ``workers``: the two sockets of each router, by the router's name. ``place``:
    makes an address from a stem such as ``decode-3.data``. ``http_port``: the port of all
    gateways. ``gpus``: the GPUs of the workers.
    """

    def __init__(
        self,
        clients: dict[str, str],
        workers: dict[str, str],
        place: Callable[[str], str],
        http_port: int = HTTP_PORT,
    ) -> None:
        self.clients, self.workers = clients, workers
        self.http_port = http_port
        self.gpus = GpuBook()
        self._place = place
        self._known: dict[str, str] = {}

    def control(self, name: str) -> str:
        """Return a worker's control address. It is constant until :meth:`release`."""
        return self._address(name)

    def data(self, name: str) -> str:
        """Return a decode worker's address for KV frames."""
        return self._address(f"{name}.data")

    def release(self, name: str) -> None:
        """Drop an ended worker's addresses and GPU. Its name may get others next time."""
        self.gpus.release(name)
        for stem in (name, f"{name}.data"):
            self._known.pop(stem, None)

    def _address(self, stem: str) -> str:
        if stem not in self._known:
            self._known[stem] = self._place(stem)
        return self._known[stem]


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Processes in start order: the routers, the workers, then the gateways.

    ``address``: client addresses of the routers, separated by commas. ``kv_default``: bytes of KV
    memory per worker if the settings give no size.
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
        return tuple(spec.name for spec in self.processes if spec.role in POOLS)

    @property
    def http_url(self) -> str:
        """Base URL of the gateways for OpenAI's clients; empty without gateways."""
        settings = self.settings
        if not settings.gateways:
            return ""
        host = settings.http_host.strip("[]")
        host = f"[{host}]" if ":" in host else host
        scheme = "https" if settings.ssl_certfile else "http"
        return f"{scheme}://{host}:{self.book.http_port}/v1"


def router_names(settings: ServeSettings) -> list[str]:
    """Return ``router``, or ``router-0``, ``router-1`` ... for several routers."""
    if settings.routers == 1:
        return [ROUTER]
    return [f"{ROUTER}-{index}" for index in range(settings.routers)]


def worker_names(settings: ServeSettings, role: str) -> list[str]:
    """Return the names of a pool's workers: ``prefill-0``, ``prefill-1`` ..."""
    return [f"{role}-{index}" for index in range(getattr(settings, role))]


def all_worker_names(settings: ServeSettings) -> list[str]:
    """Names of both pools' workers."""
    return [*worker_names(settings, "prefill"), *worker_names(settings, "decode")]


def http_port_of(settings: ServeSettings) -> int:
    """The port of the gateways, unless another one is reserved; 0: any."""
    return HTTP_PORT if settings.http_port == ANY_HTTP_PORT else settings.http_port


def gateway_names(settings: ServeSettings) -> list[str]:
    """Return ``gateway-0``, ``gateway-1`` ..."""
    return [f"{GATEWAY}-{index}" for index in range(settings.gateways)]


def model_path(settings: ServeSettings) -> str:
    """Return the absolute path of the model: a folder or a GGUF file.

    Workers get this path, because each host makes its own folder from a file.
    """
    if is_gguf(settings.model):
        return str(Path(settings.model).absolute())  # a link's name is the model's name
    return str(Path(settings.model).resolve() if settings.model else demo_model_folder())


def model_folder(settings: ServeSettings) -> str:
    """Return the absolute path of the model folder; of a GGUF file, of the folder made from it.

    From now on this process reads folders with the settings' model family. Raises CheckpointError
    for a GGUF file that cannot be served, ExtensionError for the family.
    """
    use_family(settings.model_family, extension_folder(settings))
    return local_folder(model_path(settings))


def key_folder(settings: ServeSettings) -> str:
    """Return the absolute key folder, or ''. Absolute, because children run in other folders."""
    return _absolute(settings.keys)


def ipc_addresses(clients: dict[str, str], folder: str) -> AddressBook:
    """Make addresses of socket files in ``folder``. ``clients``: client addresses by router."""

    def place(stem: str) -> str:
        return f"ipc://{folder}/{stem}.sock"

    return AddressBook(clients, {name: place(name) for name in clients}, place)


def tcp_addresses(clients: dict[str, str], take_port: Callable[[], int]) -> AddressBook:
    """Make addresses on 127.0.0.1. ``take_port``: returns a different free port at each call."""

    def place(_stem: str) -> str:
        return f"tcp://127.0.0.1:{take_port()}"

    return AddressBook(clients, {name: place(name) for name in clients}, place)


def resolve_plan(
    settings: ServeSettings,
    book: AddressBook,
    cluster_key: str,
    kv_default: int = DEFAULT_KV_BYTES,
) -> ClusterPlan:
    """Make the plan for checked settings.

    ``cluster_key``: hex text, constant over restarts. ``kv_default``: bytes of KV memory per
    worker if the settings give no size.
    """
    names = [
        *router_names(settings), *all_worker_names(settings), *gateway_names(settings)
    ]  # fmt: skip
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
    name: str,
    settings: ServeSettings,
    book: AddressBook,
    cluster_key: str,
    kv_default: int,
    role: str = "",
) -> ProcessSpec:
    """Make the process specification of a member. The name's prefix is the role.

    ``role``: the present role of a worker that changed it. For a gateway, reads the file of API
    keys. Raises ConfigError.
    """
    role = role or role_of(name)
    if role == ROUTER:
        return _router(settings, book, cluster_key, name)
    if role == GATEWAY:
        return _gateway(settings, book, name)
    runner = _runner(settings, role, kv_default, book.gpus)
    if runner.backend == "cuda":
        runner = book.gpus.given(runner, name)
    return (_prefill if role == PREFILL else _decode)(settings, book, runner, name)


def role_of(name: str) -> str:
    """Return the role in which a member began, which is the prefix of its name."""
    return name.partition("-")[0]


def _router(settings: ServeSettings, book: AddressBook, cluster_key: str, name: str) -> ProcessSpec:
    config = RouterConfig(
        client_address=book.clients[name],
        worker_address=book.workers[name],
        name=name,
        cluster_key=cluster_key,
        model_folder=model_folder(settings),
        policy=PolicyConfig(name=settings.policy),
        decider=settings.decider,
        metrics=listed(settings, "metric"),
        extensions=extension_folder(settings),
        mode=settings.mode,
        enforce_disaggregation=settings.enforce_disaggregation == "on",
        step_time_s=decode_step(settings),
        slo_ttft_s=settings.slo_ttft,
        slo_itl_s=settings.slo_itl,
        trace_requests=settings.trace_requests,
        otlp_endpoint=settings.otlp_endpoint,
        worker_timeout_s=settings.worker_timeout,
        keys=key_folder(settings),
        log_level=cast("Level", settings.log_level),
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port + _number(name) if settings.metrics_port else 0,
        metrics_keys=http_keys(settings) if settings.metrics_port else (),
        allowed_hosts=listed(settings, "allowed_hosts"),
        metrics_compat=settings.metrics_compat,
    )
    return ProcessSpec(name=name, role=ROUTER, module="baton.router", config=config)


def _gateway(settings: ServeSettings, book: AddressBook, name: str) -> ProcessSpec:
    keys = http_keys(settings)
    check_http_access(settings.http_host, keys, "--http-host")  # a gateway's own option is --host
    config = GatewayConfig(
        routers=tuple(book.clients.values()),
        name=name,
        host=settings.http_host,
        port=book.http_port,
        model_names=listed(settings, "served_model_name"),
        model_folder=model_folder(settings),
        api_keys=keys,
        metrics_host=settings.metrics_host,
        metrics_ports=_metrics_ports(settings, name),
        metrics_compat=settings.metrics_compat,
        keys=key_folder(settings),
        ssl_certfile=_absolute(settings.ssl_certfile),
        ssl_keyfile=_absolute(settings.ssl_keyfile),
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        image_hosts=listed(settings, "image_hosts"),
        allowed_hosts=listed(settings, "allowed_hosts"),
        allowed_origins=listed(settings, "allowed_origins"),
        strict_parameters=settings.strict_parameters == "on",
        share_port=True,
        otlp_endpoint=settings.otlp_endpoint,
        grace_s=settings.grace,
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role=GATEWAY, module="baton.gateway", config=config)


def extensions_of(settings: ServeSettings) -> list[tuple[Point, str]]:
    """Return the extensions that the settings name, each with its point."""
    chosen = ((POLICY, settings.policy), (ORDER, settings.prefill_order))
    return [
        *((point, name) for point, name in chosen if is_extension(name)),
        *([(DECIDER, settings.decider)] if settings.decider else []),
        *([(TRANSPORT, settings.kv_transport)] if settings.kv_transport else []),
        *([(FAMILY, settings.model_family)] if settings.model_family else []),
        *((METRIC, name) for name in listed(settings, "metric")),
    ]


def extension_folder(settings: ServeSettings) -> str:
    """Return the absolute folder of extensions; empty if the settings name none."""
    return str(Path(settings.extensions).absolute()) if extensions_of(settings) else ""


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _number(name: str) -> int:
    """The number in a member's name; 0 without one."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _metrics_ports(settings: ServeSettings, name: str) -> tuple[int, ...]:
    """Ports for a gateway's metrics, after the routers'. Empty: none.

    Every gateway may use the ports of all, each in another order. So the gateway that a rollout
    starts with a further name takes the port of the ending process.
    """
    if not settings.metrics_port:
        return ()
    first, count = settings.metrics_port + settings.routers, max(1, settings.gateways)
    return tuple(first + (_number(name) + further) % count for further in range(count))


def http_keys(settings: ServeSettings) -> tuple[str, ...]:
    """Digests of the API keys, for requests over HTTP and for scrapes. Raises ConfigError."""
    return api_key_digests(settings.api_key_file, [os.environ.get(KEY_VARIABLE)])


def _prefill(
    settings: ServeSettings, book: AddressBook, runner: RunnerConfig, name: str
) -> ProcessSpec:
    config = PrefillWorkerConfig(
        worker_id=name,
        endpoint=book.control(name),
        routers=dict(book.workers),
        runner=runner,
        token_budget=settings.max_num_batched_tokens,
        step_seconds=settings.step_time,
        slo_ttft=first_token_limit(settings),
        order=settings.prefill_order if is_extension(settings.prefill_order) else "",
        extensions=extension_folder(settings),
        labels=labels_of(settings, name),
        kv_transport=settings.kv_transport,
        kv_events=kv_events_of(settings, name),
        kv_events_topic=settings.kv_events_topic,
        max_active=settings.prefill_max_num_seqs,
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
        max_batch=settings.max_num_seqs,
        extensions=extension_folder(settings),
        labels=labels_of(settings, name),
        kv_transport=settings.kv_transport,
        kv_events=kv_events_of(settings, name),
        kv_events_topic=settings.kv_events_topic,
        token_budget=decode_budget(settings),
        step_seconds=decode_step(settings),
        slo_ttft=local_limit(settings),
        handoff_timeout_s=settings.handoff_timeout,
        keys=key_folder(settings),
        drain_grace_s=settings.grace,
        worker_timeout_s=settings.worker_timeout,
        log_level=cast("Level", settings.log_level),
    )
    return ProcessSpec(name=name, role="decode", module="baton.decode_worker", config=config)


def decode_budget(settings: ServeSettings) -> int:
    """Return the prompt tokens per step of a decode worker, which may compute whole prompts."""
    if settings.mode == DISAGGREGATED:
        return settings.decode_max_num_batched_tokens
    return settings.max_num_batched_tokens


def decode_step(settings: ServeSettings) -> float:
    """Return the target seconds of a decode worker's step with prompt tokens; 0: none.

    Where decode workers compute prompts, streams keep the ITL limit beside them.
    """
    if settings.mode == DISAGGREGATED:
        return settings.step_time
    if 0 < settings.step_time < settings.slo_itl:
        return settings.step_time
    return STEP_SHARE * settings.slo_itl


def first_token_limit(settings: ServeSettings) -> float:
    """Target TTFT in seconds by which prefill workers order prompts; 0: order of arrival."""
    order = settings.prefill_order
    limited = settings.autoscale == "on" or settings.mode == ADAPTIVE
    automatic = order == "auto" and limited
    by_deadline = order == "edf" or automatic or is_extension(order)
    return settings.slo_ttft if by_deadline else 0.0


def local_limit(settings: ServeSettings) -> float:
    """Target TTFT in seconds by which decode workers order local prompts; 0: order of arrival."""
    ranked = settings.mode != ADAPTIVE or is_extension(settings.prefill_order)
    return 0.0 if ranked else first_token_limit(settings)


def sized_for(settings: ServeSettings) -> int:
    """Number of workers that share the machine's memory: the maximum of both pools.

    A pool without a maximum counts with its size at the start, if ``workers_max`` sets none.
    """
    most = sum(most_workers(settings, role) for role in POOLS)
    return min(most, settings.workers_max or most)


def most_workers(settings: ServeSettings, role: str) -> int:
    """Return the maximum of a pool; its size at the start if it has none."""
    count, most = getattr(settings, role), getattr(settings, f"{role}_max")
    most = most or most_beside(settings.workers_max, embeds=settings.task == EMBED)
    return 0 if role == DECODE and not count else max(count, most)


def thread_sharers(settings: ServeSettings) -> tuple[int, int]:
    """Return how many workers divide the cores, and the threads that the settings give to others.

    A worker counts among the first if the settings give no number of threads for its pool.
    """
    workers = taken = 0
    for role in POOLS:
        given, count = given_threads(settings, role), most_workers(settings, role)
        workers, taken = workers + (0 if given else count), taken + given * count
    return min(workers, settings.workers_max or workers), taken


def runner_of(settings: ServeSettings, role: str) -> RunnerConfig:
    """Return the model and memory of a worker of a pool, on the first GPU if it uses one."""
    return _runner(settings, role, DEFAULT_KV_BYTES, GpuBook())


def _runner(settings: ServeSettings, role: str, kv_default: int, gpus: GpuBook) -> RunnerConfig:
    blocks, memory = kv_size(settings, role)
    on_gpu = settings.device == "cuda"
    sharers, taken = thread_sharers(settings)
    return RunnerConfig(
        model=model_path(settings),
        backend="cuda" if on_gpu else settings.kernels,
        threads=1 if on_gpu else given_threads(settings, role),
        thread_sharers=sharers,
        threads_taken=taken,
        share_weights=settings.share_weights,
        block_size=block_size(settings, role),
        kv_type=kv_type(settings, role),
        kv_types=tuple(sorted({kv_type(settings, pool) for pool in POOLS})),
        num_blocks=blocks,
        # The state of pictures is in host memory on every device.
        kv_bytes=memory or (0 if on_gpu and settings.task != DRAW else kv_default),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        device_sharers=gpus.most(sized_for(settings)),
        max_length=settings.max_model_len,
        task=settings.task,
        # In mode disaggregated a decode worker gets images as KV.
        vision=role == PREFILL or settings.mode != "disaggregated",
        picture_bytes=parse_size(settings.picture_memory) if role == "decode" else 0,
        family=settings.model_family,
        extensions=extension_folder(settings) if settings.model_family else "",
    )


def describe_plan(plan: ClusterPlan) -> dict[str, Any]:
    """Return the plan for the output of ``--dry-run``, without the cluster key."""
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
    for secret in ("cluster_key", "api_keys"):
        if config.get(secret):
            config[secret] = "(secret)"
    return config
