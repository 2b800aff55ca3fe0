"""Makes a plan from settings: checks the model, chooses addresses, divides the memory."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path

import msgspec

from baton.engine.kernels.backend import Gpu
from baton.engine.kernels.cuda.gpus import INSTALL_CUPY, VISIBLE, checked_gpu, cupy_is_installed
from baton.engine.kernels.load import BUILD_KERNELS, compiled_kernels_problem
from baton.engine.kernels.shared_weights import has_huge_pages
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.embedding_config import DRAW, EMBED, GENERATE
from baton.engine.loading.kv_types import AUTO
from baton.engine.loading.runner_config import DEFAULT_KV_BYTES
from baton.engine.loading.tasks import folder_task
from baton.proto.errors import BatonError, CheckpointError, ConfigError
from baton.proto.picture_requests import longest_row
from baton.runtime.keys.allowed import OPERATOR
from baton.runtime.keys.keyring import CONTROLLER, client_keys, load_keys
from baton.runtime.process.cores import default_threads
from baton.runtime.process.memory import free_memory, memory_holder, size_text, total_memory
from baton.runtime.process.otlp import check_installed

from ..config import (
    COLOCATED,
    ServeSettings,
    block_size,
    demo_model_folder,
    device_ids,
    kv_size,
    kv_type,
    parse_size,
    with_colocated_workers,
)
from ..local.run_folder import RunFolder
from ..messages import counted
from ..roles import GATEWAY, POOLS
from ..supervise.core import describe_exit
from ..supervise.process import child_environment
from .addresses import client_addresses, free_ports
from .folders import USUAL_PROMPT_TOKENS, folder_memory
from .instances import instances_of, workers_gpus
from .memory import OTHER_BYTES, PROCESS_BYTES, ModelMemory, kv_share, model_memory, picture_share
from .plan import (
    ClusterPlan,
    GpuBook,
    extension_folder,
    extensions_of,
    http_port_of,
    ipc_addresses,
    key_folder,
    model_folder,
    resolve_plan,
    router_names,
    sized_for,
    split_gpus,
    tcp_addresses,
)
from .sizing import Sizing, measure, sizing

_TOKENIZER_S = 60.0


def check_start(settings: ServeSettings) -> None:
    """Check this machine and the model folder before any process is started.

    Raises ConfigError for a wrong setting, CheckpointError for the folder's files.
    """
    check_extensions(settings)  # first: a model family reads the folder
    check_model(settings)
    check_kernels(settings)
    if settings.otlp_endpoint:
        check_installed("otlp_endpoint")
    check_tokenizer(settings)


def check_model(settings: ServeSettings) -> None:
    """Check the model folder once here, instead of in every worker.

    Raises ConfigError if the folder does not exist, CheckpointError for its files. A tokenizer is
    optional: without it, prompts must be token ids, and clients get an error for text.
    """
    folder = model_folder(settings)
    if not Path(folder).is_dir():
        raise ConfigError(f"no model folder {folder}")
    task = folder_task(folder, settings.task)
    if task == EMBED:
        _check_embeds(settings)
    if task != DRAW:
        load_checkpoint(folder).served_length(settings.max_model_len)  # reads the headers too
        _check_blocks(with_task(settings), 0)
        return
    if settings.mode == COLOCATED:
        raise ConfigError("mode colocated cannot serve a picture model, which needs both pools")
    from baton.engine.pictures.folder import open_folder  # other models need none of its modules

    open_folder(folder)
    _check_blocks(with_task(settings), 0)


def _check_blocks(settings: ServeSettings, kv_default: int) -> None:
    """Raise ConfigError if the KV memory of a pool is less than a block; a picture needs two.

    ``settings``: those of :func:`with_task`. ``kv_default``: default memory in bytes; 0: unknown.
    """
    least = 2 if settings.task == DRAW else 1
    for role in POOLS if settings.task != EMBED else ():
        blocks, memory = kv_size(settings, role)
        memory = memory or kv_default
        if blocks or not memory or not getattr(settings, role):
            continue
        size, kind = block_size(settings, role), kv_kind(settings, role)
        token = folder_memory(model_folder(settings), 1, size, kind).context
        if memory < (need := least * size * token):
            raise ConfigError(
                f"kv_memory {size_text(memory)} is too small for a {role} worker: "
                f"it needs {size_text(need)}, {counted(least, 'block')} of {size} tokens"
            )


def turn_refusal(settings: ServeSettings) -> str:
    """Return why the workers of this cluster cannot change their role, or an empty text."""
    if settings.mode == COLOCATED:
        return f"mode {COLOCATED} has one role only"
    folder = model_folder(settings)
    if folder_task(folder, settings.task) != GENERATE:
        return "only workers of a model that generates text can change their role"
    sees = hasattr(load_checkpoint(folder).config, "vision")
    if sees and settings.mode == "disaggregated":
        return "decode workers of this mode have no vision tower, so they cannot compute prompts"
    return ""


def _check_embeds(settings: ServeSettings) -> None:
    """Raise ConfigError for a setting without effect on the work of an embedding model."""
    for name, usual, why in (
        ("prefill_order", ("auto", "fcfs"), "waiting texts are one batch, by arrival"),
        ("decider", ("",), "a text has one way"),
        ("kv_transport", ("",), "there is no handoff"),
    ):
        if getattr(settings, name) not in usual:
            raise ConfigError(f"{name} has no effect with an embedding model: {why}; leave it out")


def check_tokenizer(settings: ServeSettings) -> None:
    """Load the folder's tokenizer once, in another process. Raises CheckpointError.

    Only clients load the tokenizer. Without this check, a damaged tokenizer would fail in every
    client and in no process of the cluster. Embedded models need no check.
    """
    folder = model_folder(settings)
    if Path(folder).resolve().parent == demo_model_folder().resolve().parent:
        return
    command = [sys.executable, "-P", "-m", "baton.text.check", folder]
    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "model_index.json")):
        return
    try:
        ended = subprocess.run(  # noqa: S603 -- our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TOKENIZER_S,
            env=child_environment(os.environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"{folder}: tokenizer.json did not load within {_TOKENIZER_S:g} s"
        ) from None
    if ended.returncode:
        output = ended.stdout.decode("utf-8", "replace").strip().replace("\n", " ")
        how = f"{folder}: tokenizer.json cannot be loaded ({describe_exit(ended.returncode)})"
        raise CheckpointError(output or how)


_EXTENSIONS_S = 60.0


def check_extensions(settings: ServeSettings) -> None:
    """Load the user's own classes once, in another process. Raises ConfigError."""
    named = extensions_of(settings)
    if not named:
        return
    command = [sys.executable, "-P", "-m", "baton.extend.check", extension_folder(settings)]
    try:
        ended = subprocess.run(  # noqa: S603 -- our own interpreter and module
            [*command, *(f"{point.name}={name}" for point, name in named)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_EXTENSIONS_S,
            env=child_environment(os.environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        names = ", ".join(name for _, name in named)
        raise ConfigError(f"{names} could not be loaded within {_EXTENSIONS_S:g} s") from None
    if ended.returncode:
        text = ended.stdout.decode("utf-8", "replace").strip()
        names = ", ".join(name for _, name in named)
        how = describe_exit(ended.returncode)
        raise ConfigError(text or f"loading {names} ended the process ({how})")


_GPUS_S = 60.0


@cache
def visible_gpus_of_children() -> tuple[Gpu, ...]:
    """Return the GPUs that workers of this machine can have, by ordinal. Raises ConfigError.

    All instances of split GPUs count: each worker gets one (:func:`.instances.workers_gpus`).
    """
    if not cupy_is_installed():
        raise ConfigError(f"device cuda needs CuPy: {INSTALL_CUPY}")
    return tuple(workers_gpus(os.environ.get(VISIBLE), _gpus_of_child))


def _gpus_of_child(shown: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs of a child with this CUDA_VISIBLE_DEVICES. Raises ConfigError.

    Another process asks CUDA, so that none of it stays in a supervisor, which runs for months.
    """
    named = {} if shown is None else {VISIBLE: shown}
    command = [sys.executable, "-P", "-m", "baton.engine.kernels.cuda.gpus"]
    try:
        ended = subprocess.run(  # noqa: S603 -- our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GPUS_S,
            env=child_environment(os.environ) | named,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"CUDA did not list its devices within {_GPUS_S:g} s") from None
    if ended.returncode:
        lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(lines[-1] if lines else describe_exit(ended.returncode))
    return msgspec.json.decode(ended.stdout, type=tuple[Gpu, ...])


def with_worker_per_gpu(settings: ServeSettings, given: Container[str]) -> ServeSettings:
    """Set the default numbers of workers on a machine with GPUs; see :func:`.plan.split_gpus`.

    ``given``: names of the settings that the user has set. One of the two numbers is enough to
    keep both as they are. Raises ConfigError for a GPU that does not exist.
    """
    if not gpus_decide(settings, given):
        return settings
    return with_workers_on(settings, len(_ordinals(settings)))


def gpus_decide(settings: ServeSettings, given: Container[str]) -> bool:
    """Return whether the number of GPUs decides how many workers there are."""
    return settings.device == "cuda" and "prefill" not in given and "decode" not in given


def with_workers_on(settings: ServeSettings, gpus: int) -> ServeSettings:
    """Set the numbers of workers for this many GPUs, within the limits of the pools."""
    if settings.mode == COLOCATED:
        return msgspec.structs.replace(settings, workers=settings.workers or gpus)
    prefill, decode = split_gpus(min(gpus, settings.workers_max or gpus))
    return msgspec.structs.replace(
        settings,
        prefill=_bounded(prefill, settings.prefill_min, settings.prefill_max),
        decode=_bounded(decode, settings.decode_min, settings.decode_max),
    )


def _bounded(count: int, least: int, most: int) -> int:
    return max(least, min(count, most or count))


def _ordinals(settings: ServeSettings) -> tuple[int, ...]:
    """Return the ordinals of the GPUs to use. Raises ConfigError if one does not exist."""
    gpus = visible_gpus_of_children()
    chosen = device_ids(settings)
    for ordinal in chosen:
        checked_gpu(ordinal, gpus)
    return chosen or tuple(gpu.ordinal for gpu in gpus)


def check_kernels(settings: ServeSettings) -> None:
    """Raise ConfigError if the settings choose kernels that this machine cannot load."""
    if settings.device == "cuda":
        _ordinals(settings)
    if settings.kernels.startswith("cpu") and (problem := compiled_kernels_problem()):
        raise ConfigError(f"the compiled kernels are missing ({problem}): {BUILD_KERNELS}")


def with_task(settings: ServeSettings) -> ServeSettings:
    """Adapt settings to the model's task and the mode.

    An embedding model has no decode workers, colocated workers have no prefill workers.
    """
    alone = with_colocated_workers(settings)
    try:
        task = folder_task(model_folder(settings), settings.task)
    except BatonError:
        return alone  # the workers report the error
    if task == EMBED:
        prefill = settings.prefill if alone is settings else alone.decode
        return msgspec.structs.replace(settings, task=task, prefill=prefill, decode=0)
    settings = alone
    return msgspec.structs.replace(settings, task=task) if task == DRAW else settings


def served_context(settings: ServeSettings) -> int:
    """Maximum context length in tokens, by the settings or the model; 0 for a wrong folder."""
    try:
        folder = model_folder(settings)
        if folder_task(folder, settings.task) == DRAW:
            return settings.max_model_len or longest_row(settings.block_size, USUAL_PROMPT_TOKENS)
        return load_checkpoint(folder).served_length(settings.max_model_len)
    except BatonError:
        return 0  # the workers report the error


def kv_kind(settings: ServeSettings, role: str) -> str:
    """Return the type of a pool's keys and values; kernels without quantization have float32."""
    kind = kv_type(settings, role)
    return "float32" if kind == AUTO and settings.kernels == "cpu-floats" else kind


def default_kv_bytes(settings: ServeSettings) -> int:
    """Default KV memory per worker in bytes, from the free memory.

    The free memory is divided among the maximum number of workers. A worker added later gets the
    same size, so that the maximum context length does not change.
    """
    free = free_memory()
    if free is None:
        return DEFAULT_KV_BYTES
    try:
        folder = model_folder(settings)
        length, size = settings.max_model_len, settings.block_size
        needs = [
            folder_memory(folder, length, size, kind)
            for kind in {kv_kind(settings, role) for role in POOLS}
        ]
        model = max(needs, key=lambda need: need.context)
    except BatonError:
        return DEFAULT_KV_BYTES  # the workers report the error
    batch = max(settings.max_num_seqs, settings.prefill_max_num_seqs)
    copies = 1 if shares_weights(settings) else 0
    others = other_processes(settings)
    return kv_share(free, sized_for(settings), batch, model, copies=copies, others=others)


def other_processes(settings: ServeSettings) -> int:
    """Return the number of routers and gateways."""
    return settings.routers + settings.gateways


def shares_weights(settings: ServeSettings) -> bool:
    """Return whether all workers of this machine map one copy of the weights."""
    if settings.device != "cpu" or settings.task == DRAW or settings.kernels == "numpy":
        return False
    if settings.share_weights == "auto":
        return not compiled_kernels_problem() and has_huge_pages()
    return settings.share_weights == "on"


def with_picture_memory(settings: ServeSettings, kv_default: int) -> ServeSettings:
    """Set the default memory for pictures, from the free memory, for a picture model.

    Workers with a GPU choose it themselves, from the memory of the GPU.
    """
    free = None if settings.device == "cuda" else free_memory()
    if settings.task != DRAW or settings.picture_memory or free is None:
        return settings
    try:
        folder = model_folder(settings)
        token = folder_memory(folder, 1, settings.block_size)
    except BatonError:
        return settings  # the workers report the error
    decode = max(settings.decode, settings.decode_max)
    counts = {"prefill": sized_for(settings) - decode, "decode": decode}
    used = sum(n * _worker_bytes(settings, r, kv_default, token) for r, n in counts.items())
    memory = picture_share(free, used, decode, token)
    return msgspec.structs.replace(settings, picture_memory=str(memory))


def sizing_of(settings: ServeSettings) -> Sizing | None:
    """Return what the workers of a text model need here; None for other models and devices.

    Measures the speed, which takes about two seconds.
    """
    settings = with_task(settings)
    if settings.device != "cpu" or settings.task == DRAW:
        return None
    checkpoint = load_checkpoint(model_folder(settings))
    workers = sized_for(settings)
    role = "decode" if settings.decode else "prefill"
    blocks, memory = kv_size(settings, role)
    kind = kv_kind(settings, role)
    token = model_memory(checkpoint, 1, kind).context
    kv_bytes = blocks * block_size(settings, role) * token or memory or default_kv_bytes(settings)
    if settings.task == EMBED:
        kv_bytes = 0
    threads = settings.decode_threads or settings.threads or default_threads(workers).count
    return sizing(
        checkpoint,
        workers,
        kv_bytes,
        shares=shares_weights(settings),
        speed=measure(checkpoint, threads),
        kv_type=kind,
    )


def make_plan(settings: ServeSettings, folder: RunFolder | None, http_port: int = 0) -> ClusterPlan:
    """Choose addresses and resolve the plan. Without a folder (``--dry-run``), use a placeholder.

    ``http_port``: the reserved port of the gateways; 0: that of the settings.
    Raises ConfigError for an unusable address, and for more workers than the memory can hold.
    """
    settings = with_task(settings)
    kv_default = default_kv_bytes(settings)
    _check_blocks(settings, kv_default if settings.device == "cpu" else 0)
    settings = with_picture_memory(settings, kv_default)
    problem = memory_refusal(settings, kv_default, {})
    if problem:
        raise ConfigError(f"{problem}; give fewer workers or a smaller kv_memory")
    clients = client_addresses(
        settings.address,
        router_names(settings),
        claim=folder is not None,
        keyed=bool(settings.keys),
    )
    if settings.transport == "tcp":
        book = tcp_addresses(clients, _port_taker())
    else:
        path = folder.path if folder is not None else Path("RUN_FOLDER")
        book = ipc_addresses(clients, str(path))
    book.http_port = http_port or http_port_of(settings)
    if settings.device == "cuda":
        book.gpus = GpuBook(_ordinals(settings), instances_of(visible_gpus_of_children()))
    return resolve_plan(settings, book, secrets.token_hex(32), kv_default)


def check_keys(plan: ClusterPlan, *roles: str) -> None:
    """Read the keys of all processes once here, instead of in every process. Raises ConfigError.

    ``roles``: the roles on this host; default: all.
    """
    folder = key_folder(plan.settings)
    for spec in plan.processes:
        if roles and spec.role not in roles:
            continue
        if spec.role == GATEWAY:
            client_keys(folder)
        else:
            load_keys(folder, spec.role, spec.name)
    load_keys(folder, OPERATOR, CONTROLLER)


class _port_taker:  # noqa: N801 -- a function with state
    """Returns a free port of 127.0.0.1, at each call another."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def __call__(self) -> int:
        while (port := free_ports(1)[0]) in self._taken:
            pass
        self._taken.add(port)
        return port


def memory_refusal(settings: ServeSettings, kv_default: int, targets: dict[str, int]) -> str:
    """Return why this machine has too little memory for pools of this size, or an empty text.

    All processes together, with full KV memory, may use the total memory of the machine or its
    control group.
    """
    total = total_memory()
    counts = {"prefill": settings.prefill, "decode": settings.decode, **targets}
    if settings.device != "cpu":
        room = sized_for(settings)
        if sum(counts.values()) <= room:
            return ""
        return (
            f"the GPUs' memory is divided among {room} workers; launch with a larger "
            "--prefill-max or --decode-max"
        )
    if total is None:
        return ""
    try:
        folder, size = model_folder(settings), settings.block_size
        needs = {
            role: folder_memory(folder, 1, size, kv_kind(settings, role))
            for role, count in counts.items() if count
        }  # fmt: skip
    except BatonError:
        return ""  # the workers report the error
    need = other_processes(settings) * OTHER_BYTES + sum(
        counts[role] * _worker_bytes(settings, role, kv_default, token)
        for role, token in needs.items()
    )
    if shares_weights(settings):
        need -= (sum(counts.values()) - 1) * max(token.weights for token in needs.values())
    if need <= total:
        return ""
    workers = " and ".join(f"{count} {role}" for role, count in counts.items() if count)
    holder = memory_holder(total)
    return f"{workers} workers need {size_text(need)} of memory, {holder} {size_text(total)}"


def _worker_bytes(settings: ServeSettings, role: str, kv_default: int, token: ModelMemory) -> int:
    """Return the bytes of a worker. ``token``: the model's memory for contexts of one token."""
    weights = token.worker(role)
    if settings.task == EMBED:
        return PROCESS_BYTES + weights
    blocks, memory = kv_size(settings, role)
    kv = blocks * block_size(settings, role) * token.context or memory or kv_default
    pictures = parse_size(settings.picture_memory) if role == "decode" else 0
    return PROCESS_BYTES + weights + kv + pictures
