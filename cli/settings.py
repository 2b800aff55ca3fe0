"""Merge flags, environment variables and a TOML file into one settings struct.

Precedence, highest first: flag, ``BATON_*`` environment variable, file, default. Each layer is a
mapping from field name to value. If a layer lacks a field, the next lower layer sets the field.
Reading the file is the only I/O in this module.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from baton.deploy.config import (
    ANY_HTTP_PORT,
    HTTP_PORT,
    ServeSettings,
    check,
    convert,
)
from baton.proto.codec.shared_memory import KEY_VARIABLE, SWITCH_VARIABLE
from baton.proto.errors import ConfigError
from baton.runtime.keys.api_keys import KEY_VARIABLE as API_KEY_VARIABLE
from baton.runtime.process.otlp import EXTRA, is_installed
from baton.runtime.small_files import read_small

from .parser import did_you_mean

ENV_PREFIX = "BATON_"
OTEL_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OTHER_VARIABLES = frozenset({"BATON_RAY_SESSION", SWITCH_VARIABLE, KEY_VARIABLE})
_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
_SERVICE = re.compile(r"_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)$")
"""Suffixes of the variables that Kubernetes sets in every pod for a service named ``baton...``."""

HELP = {
    "model": "folder of the checkpoint, a GGUF file, or org/name on the Hugging Face hub (default: "
    "the embedded demo model)",
    "task": "generate text, embed or draw (default: from the model); embed needs no decode workers",
    "prefill": "number of prefill workers (default with device cuda: a quarter of the GPUs, at "
    "least one, if decode is not given either)",
    "decode": "number of decode workers (default with device cuda: the other GPUs, at least one)",
    "workers": "number of workers in mode colocated (0: as many as prefill and decode together; "
    "with device cuda one per GPU)",
    "mode": "disaggregated: prefill workers compute prompts, decode workers the tokens after them; "
    "colocated: each worker computes prompts and tokens of its requests; adaptive: per request, a "
    "prefill worker or the decode worker computes its prompt",
    "enforce_disaggregation": "let requests wait while no prefill worker is ready, instead of "
    "serving them by decode workers alone",
    "routers": "number of routers; give clients all their addresses, separated by commas",
    "gateways": "number of gateways, which serve HTTP at one port (0: none, as --no-http)",
    "http_host": "address of the gateways; an address that other hosts reach requires an API key",
    "http_port": f"port of the gateways (0: any free port; {ANY_HTTP_PORT}: {HTTP_PORT}, or a free "
    f"port if {HTTP_PORT} is in use)",
    "served_model_name": "name of the model over HTTP, or several separated by commas (default: "
    "the name of its folder)",
    "api_key_file": f"file with one API key per line (# begins a comment), which requests over "
    f"HTTP must have; the variable {API_KEY_VARIABLE} adds one",
    "ssl_certfile": "certificate for HTTPS",
    "ssl_keyfile": "private key of the certificate",
    "tool_call_parser": "how answers write tool calls (auto: as the chat template says)",
    "reasoning_parser": "split reasoning between <think> tags from the content (auto: if the chat "
    "template has such tags)",
    "image_hosts": "hosts from which the gateways may fetch images of requests: names, or "
    "addresses and networks, which allow private addresses, separated by commas (default: none)",
    "allowed_hosts": "names of this machine that requests without an API key may use besides "
    "localhost, such as host.docker.internal, separated by commas (default: none)",
    "allowed_origins": "origins of web pages that may send requests and read the answers (CORS), "
    "such as https://chat.example, separated by commas; *: all, with an API key (default: none)",
    "strict_parameters": "refuse fields of requests over HTTP that have no effect, and unknown "
    "ones, instead of naming them among the warnings of the response",
    "prefill_min": "minimum number of prefill workers (0: no minimum)",
    "prefill_max": "maximum number of prefill workers (0: no maximum); KV memory is divided among "
    "this many",
    "decode_min": "minimum number of decode workers (0: no minimum)",
    "decode_max": "maximum number of decode workers (0: no maximum); KV memory is divided among "
    "this many",
    "workers_max": "maximum number of workers of both pools together, such as the number of hosts "
    "or GPUs (0: no maximum); with autoscale, workers then change their role",
    "autoscale": "on: scale each pool with its load, between its minimum and maximum",
    "slo_ttft": "target time to first token (TTFT) in seconds, for autoscale, "
    "prefill_order and mode adaptive",
    "slo_itl": "target inter-token latency (ITL) in seconds, for autoscale and mode adaptive",
    "stabilization_window": "scale-down stabilization window in seconds: a pool shrinks after "
    "fewer workers were enough for this long",
    "address": "client address: ipc://PATH or tcp://HOST:PORT (default: a socket file of this "
    "user)",
    "transport": "sockets between router and workers; tcp uses 127.0.0.1",
    "handoff": "transport of KV blocks; auto: shared memory between workers on one host",
    "policy": "how the router chooses workers; module:Class: as your own class does "
    "(docs/extend.md)",
    "decider": "your own class that decides in mode adaptive which worker computes a prompt "
    "(docs/extend.md) "
    "(default: the way with the earlier predicted first token)",
    "prefill_order": "order of waiting prompts; fcfs: by arrival; edf: prompts that can still meet "
    "slo_ttft run before late prompts; auto: edf with autoscale and in mode adaptive, else "
    "fcfs; module:Class: as your own class ranks them",
    "metric": "your own classes for /metrics of the routers, separated by commas; needs "
    "metrics_port (docs/extend.md) (default: none)",
    "labels": "labels of workers for your own policy, such as rack=r1,zone=a; with a worker's name "
    "before it, decode-1:rack=r2, of that worker alone (default: BATON_LABELS on each host)",
    "kv_transport": "your own class that moves KV blocks from prefill to decode workers (default: "
    "as handoff says)",
    "model_family": "your own class for model folders of an architecture that Baton does not have "
    "(docs/extend.md) (default: none)",
    "kv_events": "address at which workers publish the events of their prefix caches in vLLM's "
    "schema, such as tcp://127.0.0.1:5557; each further worker uses the next ports (port 0: any, "
    "see baton status --json; default: none)",
    "kv_events_topic": "topic of these events; {worker} and {model} stand for names",
    "extensions": "folder of the modules of your own classes, searched last (default: the working "
    "directory)",
    "block_size": "tokens per KV block",
    "kv_type": "type of keys and values in KV memory; auto: bfloat16 for models with bfloat16 or "
    "quantized weights, else float32; int8: half of bfloat16's memory, slightly less exact; device "
    "cuda: bfloat16 or int8",
    "kv_blocks": "KV blocks per worker (0: from kv_memory)",
    "kv_memory": "memory for KV blocks per worker, such as 512MiB (default: from free memory)",
    "max_num_batched_tokens": "maximum prompt tokens per step of a prefill worker, outside mode "
    "disaggregated also of a decode worker (0: no maximum)",
    "step_time": "target duration in seconds of a step with prompt tokens; prompts are split into "
    "chunks of at least 32 tokens (0: no target); decode workers outside mode disaggregated: "
    "within slo_itl",
    "max_num_seqs": "maximum requests per step of a decode worker",
    "prefill_block_size": "tokens per KV block of prefill workers (0: block_size)",
    "prefill_kv_type": "type of keys and values of prefill workers (default: kv_type)",
    "prefill_kv_blocks": "KV blocks per prefill worker (0: kv_blocks)",
    "prefill_kv_memory": "memory for KV blocks per prefill worker (default: kv_memory)",
    "prefill_max_num_seqs": "maximum running requests of a prefill worker",
    "decode_block_size": "tokens per KV block of decode workers (0: block_size)",
    "decode_kv_type": "type of keys and values of decode workers (default: kv_type)",
    "decode_kv_blocks": "KV blocks per decode worker (0: kv_blocks)",
    "decode_kv_memory": "memory for KV blocks per decode worker (default: kv_memory)",
    "picture_memory": "memory of a decode worker for the arrays of a picture, which limits its "
    "size (default: from free memory)",
    "gpu_memory_utilization": "share of each GPU's memory that the workers of this cluster may "
    "use; two clusters on one GPU need less than half each",
    "decode_max_num_batched_tokens": "maximum prompt tokens per step of a decode worker in mode "
    "disaggregated, which computes prompts after a preemption (0: no maximum)",
    "max_model_len": "maximum context length in tokens (0: the model's maximum)",
    "device": "where models run; cuda: NVIDIA GPUs, one per worker as far as there are enough",
    "device_ids": "numbers of the GPUs to use, such as 0,2, among those that CUDA_VISIBLE_DEVICES "
    "leaves (default: all)",
    "kernels": "kernels of device cpu; cpu: compiled C; auto: cpu if built, else numpy; "
    "cpu-floats: cpu with quantized weights as float32",
    "share_weights": "workers of one model with device cpu map one copy of the packed weights; "
    "auto: if shared memory can have huge pages, without which decoding is slower",
    "threads": "compute threads per worker with device cpu (0: the cores that Baton may use, "
    "divided among the workers)",
    "prefill_threads": "compute threads per prefill worker (0: threads)",
    "decode_threads": "compute threads per decode worker (0: threads)",
    "grace": "seconds for running requests to finish after an interrupt",
    "worker_timeout": "seconds without heartbeat or progress before a worker is declared dead",
    "handoff_timeout": "seconds without an answer before a live prefill worker and a live decode "
    "worker count as unreachable for each other",
    "stats_interval": "seconds between log lines with metrics, while there are requests (0: no "
    "such lines)",
    "trace_requests": "number of ended requests whose stories each router keeps for baton trace "
    "(0: none)",
    "otlp_endpoint": "URL of an OpenTelemetry collector (OTLP over HTTP) that gets the spans of "
    "requests; needs the extra otel (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)",
    "metrics_port": "port of the first router's /metrics for Prometheus; further routers, then "
    "gateways use the next ports (0: none)",
    "metrics_host": "address of /metrics; an address that other hosts can reach needs an API key",
    "metrics_compat": "also export the metric names of vLLM",
    "log_level": "lowest severity of log lines shown",
    "log_format": "format of all lines on standard output; json: one object per line",
    "run_dir": "parent of the private folder of sockets (default: the system's temporary folder)",
    "admin": "controller address for scale, drain, rollout and down (default: a socket file of "
    "this user)",
    "keys": "key folder made by baton keygen; required for sockets that other hosts can reach "
    "(default: no keys)",
}
"""One line for each field of :class:`ServeSettings`, shown by ``baton serve --help``."""

GROUPS = {
    "model": ("task", "device", "device_ids", "kernels", "share_weights", "max_model_len"),
    "processes": (
        "mode", "prefill", "decode", "workers", "routers", "threads", "prefill_threads",
        "decode_threads",
    ),
    "HTTP": (
        "gateways", "http_host", "http_port", "served_model_name", "api_key_file", "ssl_certfile",
        "ssl_keyfile", "tool_call_parser", "reasoning_parser", "image_hosts",
        "allowed_hosts", "allowed_origins",
        "strict_parameters",
    ),
    "addresses and keys": ("address", "admin", "keys", "transport", "handoff", "run_dir"),
    "KV memory": (
        "kv_type", "block_size", "kv_memory", "kv_blocks", "prefill_kv_type", "prefill_block_size",
        "prefill_kv_memory", "prefill_kv_blocks", "decode_kv_type", "decode_block_size",
        "decode_kv_memory", "decode_kv_blocks",
        "picture_memory", "gpu_memory_utilization",
    ),
    "routing and batching": (
        "policy", "enforce_disaggregation", "prefill_order", "max_num_seqs", "prefill_max_num_seqs",
        "max_num_batched_tokens", "decode_max_num_batched_tokens", "step_time",
    ),
    "extensions": (
        "decider", "metric", "kv_transport", "model_family", "labels", "extensions", "kv_events",
        "kv_events_topic",
    ),
    "autoscaling": (
        "autoscale", "prefill_min", "prefill_max", "decode_min", "decode_max",
        "workers_max", "slo_ttft",
        "slo_itl", "stabilization_window",
    ),
    "metrics": ("metrics_port", "metrics_host", "metrics_compat"),
    "failures, stopping and log": (
        "worker_timeout", "handoff_timeout", "grace", "stats_interval", "trace_requests",
        "otlp_endpoint", "log_level", "log_format",
    ),
}  # fmt: skip
"""Headings of ``baton serve --help`` and their fields. ``model`` is a positional argument."""


def flag(field: str) -> str:
    """Name of the option that sets a field."""
    return f"--{field.replace('_', '-')}"


def variable(field: str) -> str:
    """Name of the environment variable that sets a field."""
    return ENV_PREFIX + field.upper()


class Layer(NamedTuple):
    """Settings from one source. ``spell`` turns a field into its name in that source."""

    values: Mapping[str, Any]
    spell: Callable[[str], str]


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str | None,
    spell: Callable[[str], str] = flag,
    warn: Callable[[str], None] = lambda _: None,
    fill: Callable[[ServeSettings, Container[str]], ServeSettings] = lambda settings, _: settings,
) -> ServeSettings:
    """Merge the layers and check the result.

    ``fill``: sets defaults that depend on the machine, given the names of the fields that are set.
    ``spell``: the flag of a field. ``warn`` receives a sentence for each variable without effect.
    Raises ConfigError for a wrong setting, with the setting's name in the source that set it.
    """
    layers = [
        Layer(collector_of(environment, warn), lambda _: OTEL_VARIABLE),
        Layer(read_file(file) if file else {}, lambda name: f"{file}: {name}"),
        Layer(from_environment(environment), variable),
        Layer({key: value for key, value in flags.items() if value is not None}, spell),
    ]
    merged: dict[str, Any] = {}
    for layer in layers:
        convert(layer.values, layer.spell)
        merged.update(layer.values)
    settings = convert(merged)
    try:
        check(settings)
    except ConfigError as problem:
        raise ConfigError(_blamed(str(problem), layers)) from None
    return check(fill(settings, merged))


def _blamed(message: str, layers: Sequence[Layer]) -> str:
    """Spell the settings in a message of :func:`check` as the layers that set them.

    The message begins with the wrong setting. A setting that no layer sets is spelled as that one.
    """

    def spell(name: str, otherwise: Callable[[str], str]) -> Callable[[str], str]:
        return next((one.spell for one in reversed(layers) if name in one.values), otherwise)

    def named(word: re.Match[str]) -> str:
        name = word[0]
        return spell(name, own)(name) if name in ServeSettings.__struct_fields__ else name

    first, space, rule = message.partition(" ")
    own = spell(first, str)
    return own(first) + space + _NAME.sub(named, rule)


def collector_of(
    environment: Mapping[str, str], warn: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Return the setting that OpenTelemetry's own variable makes, if its packages are installed.

    Other programs may need the variable, so that without the packages it is only warned of.
    """
    endpoint = environment.get(OTEL_VARIABLE, "")
    if not endpoint:
        return {}
    if not is_installed():
        warn(f"{OTEL_VARIABLE} has no effect: pip install 'baton-serve[{EXTRA}]' exports spans")
        return {}
    return {"otlp_endpoint": endpoint}


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that ``BATON_<FIELD>`` variables set.

    Kubernetes sets BATON_HTTP_PORT=tcp://... in every pod for a service named ``baton-http``.
    """
    names = {variable(field): field for field in ServeSettings.__struct_fields__}
    return {
        names[key]: value
        for key, value in environment.items()
        if key in names and not (_SERVICE.search(key) and value.startswith("tcp://"))
    }


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Warnings about ``BATON_`` variables that set nothing, each with the closest known name."""
    known = {variable(field) for field in ServeSettings.__struct_fields__} | _OTHER_VARIABLES
    return [
        f"{name} has no effect{did_you_mean(name, known, ENV_PREFIX)}"
        for name in sorted(environment.keys() - known)
        if name.startswith(ENV_PREFIX) and not _SERVICE.search(name)
    ]


def read_file(path: str) -> dict[str, Any]:
    """Read a TOML file. Dashes in keys become underscores. Raises ConfigError."""
    try:
        content = tomllib.loads(read_small(path).decode())
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not valid TOML: {problem}") from problem
    return {key.replace("-", "_"): value for key, value in content.items()}
