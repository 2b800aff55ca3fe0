"""The settings of a cluster, as one frozen struct.

Every field is a flag of ``baton serve``, an environment variable and a key of its file; the module
``cli.settings`` handles these three sources. Zero and the empty text mean "default".
:func:`check` checks the rules that types cannot express.
"""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.engine.loading.embedding_config import TASKS
from baton.extend import is_extension
from baton.gateway.chat_style import REASONING_PARSERS, TOOL_CALL_PARSERS
from baton.kv_transfer.timeout import HANDOFF_TIMEOUT_S
from baton.proto.errors import ConfigError
from baton.proto.layout import KV_CHOICES
from baton.router.config import MAX_TRACE_REQUESTS, MODES, POLICIES
from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S, LEAST_WORKER_TIMEOUT_S
from baton.runtime.metrics.vllm import METRICS_COMPAT
from baton.runtime.process.cores import MAX_THREADS
from baton.worker.kv_publisher import check_address, next_port
from baton.worker.labels import parse_labels

from .roles import POOLS

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
TRANSPORTS = ("ipc", "tcp")
HANDOFFS = ("auto", "zmq")
KERNELS = ("auto", "cpu", "cpu-floats", "numpy")
DEVICES = ("cpu", "cuda")
AUTOSCALE = ("off", "on")
STRICT_PARAMETERS = ("off", "on")
ENFORCE_DISAGGREGATION = ("off", "on")
SHARE_WEIGHTS = ("auto", "on", "off")
PREFILL_ORDERS = ("auto", "fcfs", "edf")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
DISAGGREGATED, COLOCATED, ADAPTIVE = MODES
"""In the second mode decode workers alone serve."""
CHOICES = {
    "task": TASKS,
    "autoscale": AUTOSCALE,
    "transport": TRANSPORTS,
    "handoff": HANDOFFS,
    "mode": MODES,
    "enforce_disaggregation": ENFORCE_DISAGGREGATION,
    "policy": POLICIES,
    "prefill_order": PREFILL_ORDERS,
    "device": DEVICES,
    "kernels": KERNELS,
    "kv_type": KV_CHOICES,
    "prefill_kv_type": KV_CHOICES,
    "decode_kv_type": KV_CHOICES,
    "share_weights": SHARE_WEIGHTS,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "metrics_compat": METRICS_COMPAT[1:],
    "strict_parameters": STRICT_PARAMETERS,
}
"""Settings with a list of allowed values. A default that is the empty text is also allowed."""
OPEN_CHOICES = frozenset({"policy", "prefill_order"})
"""Of these, a user's own class is allowed too: ``module:Class``."""
OWN = "module:Class"
"""The form of a setting that names an extension."""
_EXPECTED = {int: "a whole number", float: "a number", str: "text"}
_MOST = 2**31 - 1
MAX_MEMBERS = 1024
"""Maximum workers of one pool; a larger number is probably a typing error."""
MAX_ROUTERS = 16
MAX_GATEWAYS = 16
MAX_PORT = (1 << 16) - 1
HTTP_PORT = 8000
"""The HTTP port unless the setting ``http_port`` has another."""
ANY_HTTP_PORT = -1
"""``http_port``: :data:`HTTP_PORT`, or a free port if that is in use."""
LEAST_HANDOFF_TIMEOUT = 1.0
"""Seconds: two intervals of 0.5 s at which the two sides of a handoff ping each other."""
_MAY_BE_ZERO = (
    "workers", "gateways", "prefill_min", "prefill_max", "decode_min", "decode_max",
    "workers_max",
    "prefill_block_size", "decode_block_size", "kv_blocks", "prefill_kv_blocks",
    "decode_kv_blocks", "max_num_batched_tokens",
    "decode_max_num_batched_tokens", "step_time", "max_model_len", "grace", "stats_interval",
    "trace_requests", "metrics_port", "threads", "prefill_threads", "decode_threads",
)  # fmt: skip


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``baton serve``: sizes in bytes as text ("512MiB"), durations in seconds."""

    model: str = ""
    task: str = ""
    prefill: int = 1
    decode: int = 1
    workers: int = 0
    mode: str = "disaggregated"
    enforce_disaggregation: str = "off"
    routers: int = 1
    gateways: int = 1
    http_host: str = "127.0.0.1"
    http_port: int = ANY_HTTP_PORT
    served_model_name: str = ""
    api_key_file: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    image_hosts: str = ""
    allowed_hosts: str = ""
    allowed_origins: str = ""
    strict_parameters: str = "off"
    prefill_min: int = 0
    prefill_max: int = 0
    decode_min: int = 0
    decode_max: int = 0
    workers_max: int = 0
    autoscale: str = "off"
    slo_ttft: float = 2.0
    slo_itl: float = 0.1
    stabilization_window: float = 600.0
    address: str = ""
    transport: str = "ipc"
    handoff: str = "auto"
    policy: str = "prefix_aware"
    decider: str = ""
    prefill_order: str = "auto"
    metric: str = ""
    labels: str = ""
    kv_transport: str = ""
    model_family: str = ""
    kv_events: str = ""
    kv_events_topic: str = "kv-events"
    extensions: str = ""
    block_size: int = 16
    kv_type: str = "auto"
    kv_blocks: int = 0
    kv_memory: str = ""
    max_num_batched_tokens: int = 512
    step_time: float = 0.05
    max_num_seqs: int = 32
    prefill_block_size: int = 0
    prefill_kv_type: str = ""
    prefill_kv_blocks: int = 0
    prefill_kv_memory: str = ""
    prefill_max_num_seqs: int = 16
    decode_block_size: int = 0
    decode_kv_type: str = ""
    decode_kv_blocks: int = 0
    decode_kv_memory: str = ""
    picture_memory: str = ""
    gpu_memory_utilization: float = 0.9
    decode_max_num_batched_tokens: int = 256
    max_model_len: int = 0
    device: str = "cpu"
    device_ids: str = ""
    kernels: str = "auto"
    share_weights: str = "auto"
    threads: int = 0
    prefill_threads: int = 0
    decode_threads: int = 0
    grace: float = 30.0
    worker_timeout: float = DEFAULT_WORKER_TIMEOUT_S
    handoff_timeout: float = HANDOFF_TIMEOUT_S
    stats_interval: float = 10.0
    trace_requests: int = 1000
    otlp_endpoint: str = ""
    log_level: str = "warning"
    log_format: str = "text"
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_compat: str = ""
    run_dir: str = ""
    keys: str = ""
    admin: str = ""


_DEFAULTS = ServeSettings()


def convert(values: Mapping[str, Any], spell: Callable[[str], str] = str) -> ServeSettings:
    """Convert names and values to settings, without the checks of :func:`check`.

    Numbers may be given as text. ``spell``: name of a setting in its source, for errors. Raises
    ConfigError for the first unknown setting or wrong type.
    """
    known = ServeSettings.__struct_fields__
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "baton serve --help lists them"
        raise ConfigError(f"{spell(unknown[:40])} is not a setting; {hint}")
    try:
        return msgspec.convert(dict(values), ServeSettings, strict=False)
    except msgspec.ValidationError as problem:
        name = str(problem).partition(" - at `$.")[2].rstrip("`")
        if name not in known:
            raise ConfigError(f"{problem}") from problem
        expected = _EXPECTED[typing.get_type_hints(ServeSettings)[name]]
        shown = str(values[name])[:40]
        raise ConfigError(f"{spell(name)} is {shown!r}, not {expected}") from problem


def check(settings: ServeSettings) -> ServeSettings:
    """Check settings and return them unchanged.

    Raises ConfigError, whose text begins with the name of the first wrong setting.
    """
    positive = ("prefill",) if settings.mode != ADAPTIVE or settings.task == "embed" else ()
    positive = (*positive, "decode", "routers", "block_size")
    for name in (*positive, "max_num_seqs", "prefill_max_num_seqs"):
        _require(getattr(settings, name) >= 1, name, "must be at least 1")
    for name in _MAY_BE_ZERO:
        _require(getattr(settings, name) >= 0, name, "must not be negative")
    for name in ServeSettings.__struct_fields__:
        value = getattr(settings, name)
        text = value if isinstance(value, str) else ""
        # Settings are written to files and sent as JSON, which is UTF-8.
        valid = text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
        _require(valid, name, f"is not valid UTF-8: {text!a}")
        _require(not isinstance(value, int) or value <= _MOST, name, f"must be at most {_MOST}")
    for name in ("step_time", "grace", "stats_interval"):
        _require(math.isfinite(getattr(settings, name)), name, "must be a finite number")
    for name, least in (
        ("worker_timeout", LEAST_WORKER_TIMEOUT_S),
        ("handoff_timeout", LEAST_HANDOFF_TIMEOUT),
    ):
        value = getattr(settings, name)
        _require(math.isfinite(value) and value >= least, name, f"must be at least {least} seconds")
    for name, choices in CHOICES.items():
        _require_choice(settings, name, choices)
    for name in LISTS:
        listed(settings, name)
    _check_mode(settings)
    _check_labels(settings)
    _check_kv_events(settings)
    for name in ("threads", "prefill_threads", "decode_threads"):
        few = getattr(settings, name) <= MAX_THREADS
        _require(few, name, f"must be at most {MAX_THREADS}")
    _check_autoscale(settings)
    on_cpu = settings.device == "cpu"
    device_ids(settings)
    _require(on_cpu or settings.kernels == "auto", "kernels", "chooses kernels of device cpu only")
    _check_kv(settings)
    for prefix in ("", "prefill_", "decode_"):
        blocks, memory = f"{prefix}kv_blocks", f"{prefix}kv_memory"
        parse_size(getattr(settings, memory), memory)
        both = getattr(settings, blocks) and getattr(settings, memory)
        _require(not both, blocks, f"cannot be combined with {memory}")
    parse_size(settings.picture_memory, "picture_memory")
    share = settings.gpu_memory_utilization
    _require(0 < share <= 1, "gpu_memory_utilization", "must be above 0 and at most 1")
    _check_counts(settings)
    _check_http(settings)
    most = MAX_TRACE_REQUESTS
    _require(settings.trace_requests <= most, "trace_requests", f"must be at most {most}")
    endpoint = settings.otlp_endpoint
    is_url = endpoint.startswith(("http://", "https://"))
    _require(not endpoint or is_url, "otlp_endpoint", "must begin with http:// or https://")
    return settings


def _check_kv(settings: ServeSettings) -> None:
    """Refuse types of keys and values that device cuda lacks, and conversions there."""
    if settings.device == "cpu":
        return
    for name in ("kv_type", "prefill_kv_type", "decode_kv_type"):
        known = getattr(settings, name) in ("", "auto", "bfloat16", "int8")
        _require(known, name, "must be auto, bfloat16 or int8 with device cuda")
    kinds = {kv_type(settings, role) for role in POOLS}
    one = len({kind.replace("auto", "bfloat16") for kind in kinds}) == 1
    _require(one, "decode_kv_type", "and prefill_kv_type must be equal with device cuda")
    for name in ("prefill_block_size", "decode_block_size"):
        _require(not getattr(settings, name), name, "needs device cpu; give block_size")


def _check_autoscale(settings: ServeSettings) -> None:
    for name in ("slo_ttft", "slo_itl", "stabilization_window"):
        value = getattr(settings, name)
        _require(math.isfinite(value) and value > 0, name, "must be a positive number of seconds")
    if settings.autoscale == "on":
        _require(settings.mode != COLOCATED, "autoscale", f"cannot be on in mode {COLOCATED}")
        embeds, total = settings.task == "embed", settings.workers_max
        for name in ("prefill_max", *(() if embeds else ("decode_max",))):
            given = getattr(settings, name) > 0 or total > 0
            _require(given, name, "or workers_max must be set for autoscale")
    first = settings.prefill + settings.decode
    enough = not settings.workers_max or settings.workers_max >= first
    _require(enough, "workers_max", f"is below prefill + decode, which is {first}")


def _check_http(settings: ServeSettings) -> None:
    _require(settings.gateways <= MAX_GATEWAYS, "gateways", f"must be at most {MAX_GATEWAYS}")
    ports = ANY_HTTP_PORT <= settings.http_port < 1 << 16
    _require(ports, "http_port", "must be 0 to 65535")
    _require(bool(settings.http_host), "http_host", "must not be empty")
    last = settings.metrics_port + settings.routers + settings.gateways - 1
    no_scrapes = settings.metric and not settings.metrics_port
    _require(not no_scrapes, "metric", "needs metrics_port, where its metrics are served")
    _require(last <= MAX_PORT, "metrics_port", "must be at most 65535, also for the last gateway")
    for name, other in (("ssl_certfile", "ssl_keyfile"), ("ssl_keyfile", "ssl_certfile")):
        complete = getattr(settings, other) or not getattr(settings, name)
        _require(complete, name, f"needs {other} too")


def _check_mode(settings: ServeSettings) -> None:
    alone = settings.mode == COLOCATED
    _require(alone or not settings.workers, "workers", f"needs mode {COLOCATED}")
    _require(settings.workers <= MAX_MEMBERS, "workers", f"must be at most {MAX_MEMBERS}")
    enforced = settings.enforce_disaggregation == "on"
    adaptive = settings.mode == "adaptive"
    _require(adaptive or not settings.decider, "decider", "needs mode adaptive")
    on_gpu = settings.device == "cuda"
    _require(not (on_gpu and settings.model_family), "model_family", "needs device cpu")
    ranked = is_extension(settings.prefill_order)
    for name, given in (("prefill_order", ranked), ("kv_transport", settings.kv_transport)):
        _require(not (alone and given), name, f"needs prefill workers, not mode {COLOCATED}")
    apart = settings.mode == "disaggregated"
    _require(apart or not enforced, "enforce_disaggregation", "needs mode disaggregated")


def with_colocated_workers(settings: ServeSettings) -> ServeSettings:
    """In mode colocated, let decode workers take the place of all workers.

    Their number is ``workers``, else that of both pools together.
    """
    if settings.mode != COLOCATED:
        return settings
    count = settings.workers or settings.prefill + settings.decode
    return msgspec.structs.replace(settings, prefill=0, decode=count)


def labels_of(settings: ServeSettings, name: str) -> str:
    """Return the labels of a worker: those of all workers, then its own. Raises ConfigError."""
    found = []
    for part in settings.labels.split(","):
        label, mark, value = part.partition("=")
        worker, own, rest = label.rpartition(":")
        if not own:
            found.append(part)
        elif worker.strip() == name:
            found.append(f"{rest}{mark}{value}")
    return ",".join(found)


def _check_labels(settings: ServeSettings) -> None:
    names = {part.partition("=")[0].rpartition(":")[0] for part in settings.labels.split(",")}
    for name in names:
        parse_labels(labels_of(settings, name.strip()))


def kv_events_of(settings: ServeSettings, name: str) -> str:
    """Return a worker's address for the events of its cache; the next port is for replays.

    Prefill workers use ports 0 and 1, 4 and 5 ... after the first, decode workers 2 and 3, 6 and 7.
    """
    role, _, number = name.rpartition("-")
    further = 4 * int(number) + (2 if role == "decode" else 0) if number.isdecimal() else 0
    return next_port(settings.kv_events, further) if settings.kv_events else ""


def _check_kv_events(settings: ServeSettings) -> None:
    if not settings.kv_events:
        return
    check_address(settings.kv_events)
    for role in ("prefill", "decode"):
        count = max(1, getattr(settings, role), getattr(settings, f"{role}_max"))
        last = int(kv_events_of(settings, f"{role}-{count - 1}").rpartition(":")[2]) + 1
        _require(last <= MAX_PORT, "kv_events", f"needs port {last} for the last {role} worker")


def _check_counts(settings: ServeSettings) -> None:
    _require(settings.routers <= MAX_ROUTERS, "routers", f"must be at most {MAX_ROUTERS}")
    for role in ("prefill", "decode"):
        for name in (role, f"{role}_max"):
            most = f"must be at most {MAX_MEMBERS}"
            _require(getattr(settings, name) <= MAX_MEMBERS, name, most)
        count, least = getattr(settings, role), getattr(settings, f"{role}_min")
        most = getattr(settings, f"{role}_max")
        _require(count >= least, role, f"must be at least {role}_min, {least}")
        _require(not most or count <= most, role, f"must be at most {role}_max, {most}")


def kv_size(settings: ServeSettings, role: str) -> tuple[int, int]:
    """KV blocks and bytes per worker of a pool: its own settings, else those of both pools.

    0: not set.
    """
    for prefix in (f"{role}_", ""):
        blocks: int = getattr(settings, f"{prefix}kv_blocks")
        memory = parse_size(getattr(settings, f"{prefix}kv_memory"))
        if blocks or memory:
            return blocks, memory
    return 0, 0


def block_size(settings: ServeSettings, role: str) -> int:
    """Tokens per KV block of a pool: its own setting, else that of both pools."""
    own: int = getattr(settings, f"{role}_block_size")
    return own or settings.block_size


def kv_type(settings: ServeSettings, role: str) -> str:
    """Type of keys and values of a pool: its own setting, else that of both pools."""
    own: str = getattr(settings, f"{role}_kv_type")
    return own or settings.kv_type


def given_threads(settings: ServeSettings, role: str) -> int:
    """Compute threads per worker of a pool: its own setting, else that of both pools.

    0: not set.
    """
    own: int = getattr(settings, f"{role}_threads")
    return own or settings.threads


def device_ids(settings: ServeSettings) -> tuple[int, ...]:
    """Return the ordinals of the GPUs to use; empty: all. Raises ConfigError."""
    parts = [part.strip() for part in settings.device_ids.split(",")] if settings.device_ids else []
    _require(not parts or settings.device == "cuda", "device_ids", "needs device cuda")
    rule = f"is {settings.device_ids[:40]!r}, not different numbers of GPUs such as 0,2"
    right = all(part.isdecimal() and len(part) <= 4 for part in parts)
    found = tuple(int(part) for part in parts) if right else ()
    _require(right and len({*found}) == len(found), "device_ids", rule)
    return found


LISTS = ("served_model_name", "image_hosts", "allowed_hosts", "allowed_origins", "metric")
"""Settings of several names with commas between them."""


def listed(settings: ServeSettings, name: str) -> tuple[str, ...]:
    """Return the names in a setting. Raises ConfigError for an empty or repeated name."""
    text: str = getattr(settings, name)
    names = [part.strip() for part in text.split(",")] if text else []
    _require(all(names), name, f"has an empty name: '{text[:40]}'")
    again = next((one for one in names if names.count(one) > 1), "")
    _require(not again, name, f"has '{again[:40]}' twice")
    return tuple(names)


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {rule}")


def _require_choice(settings: ServeSettings, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(settings, name)
    if name in OPEN_CHOICES:
        choices = (*choices, OWN)
    own = name in OPEN_CHOICES and is_extension(value)
    known = own or value in choices or value == getattr(_DEFAULTS, name)
    _require(known, name, f"must be one of {', '.join(choices)}, not '{value[:40]}'")


def parse_size(text: str, name: str = "kv_memory") -> int:
    """Parse "4096", "512MiB" or "2G" (powers of 1024) to bytes. Returns 0 for the empty text."""
    if not text.strip():
        return 0
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name} is '{text[:40]}', not a size such as 512MiB or 2GiB")
    number, unit = match.groups()
    return int(float(number) * 1024 ** _POWERS[unit[:1].upper()])


def demo_model_folder() -> Path:
    """Return the folder of the embedded model, the default of MODEL."""
    return Path(__file__).parent / "demo_model"


def demo_flux_folder() -> Path:
    """Return the folder of the embedded Flux model, which draws coloured shapes."""
    return Path(__file__).parent / "demo_flux"


def demo_vision_model_folder() -> Path:
    """Return the folder of the embedded model that sees (``baton demo --images``)."""
    return Path(__file__).parent / "demo_vision_model"


def demo_speech_folder() -> Path:
    """Return the folder of the embedded model that speaks (``baton demo --speech``)."""
    return Path(__file__).parent / "demo_speech"


def shares_memory(settings: ServeSettings) -> bool:
    """Whether decode workers should read KV blocks from the prefill workers' memory.

    Not with tcp sockets, because then the workers may run on different hosts.
    """
    ours = settings.handoff == "auto" and not settings.kv_transport
    return ours and settings.transport == "ipc"
