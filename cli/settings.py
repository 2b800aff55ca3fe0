"""From flags, environment and a TOML file to one settings struct.

Precedence, highest first: flag, ``BATON_*`` environment variable, file, default. Each layer
is a mapping from field name to value; a layer that says nothing of a field lets the next one
speak. Pure but for reading the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..deploy.config import ServeSettings, check, convert
from ..proto.errors import ConfigError

ENV_PREFIX = "BATON_"

HELP = {
    "model": "folder of the checkpoint (empty: the embedded demo model)",
    "task": "generate or embed (empty: what the model is made for); embed needs no decode workers",
    "prefill": "number of prefill workers",
    "decode": "number of decode workers",
    "routers": "number of routers; clients take the list of their addresses",
    "prefill_min": "fewest prefill workers (0: no bound)",
    "prefill_max": "most prefill workers (0: no bound); memory is shared out for so many",
    "decode_min": "fewest decode workers (0: no bound)",
    "decode_max": "most decode workers (0: no bound); memory is shared out for so many",
    "autoscale": "on: pools grow and shrink between their min and max by load; or off",
    "slo_ttft": "seconds within which a first token should come, for autoscale and prefill_order",
    "slo_itl": "seconds that tokens should be apart at most, for autoscale",
    "scale_calm": "seconds that fewer workers must have sufficed before a pool shrinks",
    "address": "where clients connect, ipc://PATH or tcp://HOST:PORT (empty: a path of this user)",
    "transport": "sockets between router and workers: ipc or tcp (on 127.0.0.1)",
    "handoff": "how KV blocks travel: auto (memory that ipc workers share, a GPU's too) or zmq",
    "policy": "how the router chooses workers: round_robin, least_loaded or prefix_aware",
    "prefill_order": "which waiting prompt begins first: arrival, in_time (those that can still "
    "keep slo_ttft before those that are late), or auto (in_time with autoscale)",
    "block_size": "tokens per KV block",
    "kv_blocks": "KV blocks per worker (0: from kv_memory)",
    "kv_memory": "memory for KV blocks per worker, such as 512MiB (empty: by what is free)",
    "chunk_budget": "most prompt tokens a prefill worker computes per step (0: no bound)",
    "step_time": "seconds a step with prompt tokens should take; chunks are cut to that, never "
    "below 32 tokens (0: chunk budgets alone decide)",
    "max_batch": "most requests decoded together by one decode worker",
    "prefill_kv_blocks": "kv_blocks of prefill workers (0: as all)",
    "prefill_kv_memory": "kv_memory of prefill workers (empty: as all)",
    "prefill_max_batch": "most requests a prefill worker has in work at a time",
    "decode_kv_blocks": "kv_blocks of decode workers (0: as all)",
    "decode_kv_memory": "kv_memory of decode workers (empty: as all)",
    "decode_chunk_budget": "most tokens a decode worker recomputes per step after a preemption "
    "(0: no bound)",
    "max_length": "longest context served in tokens (0: the model's own limit)",
    "device": "where models run: cpu, or cuda (an NVIDIA GPU that all workers share)",
    "backend": "kernels of device cpu: auto, cpu (C) or numpy",
    "grace": "seconds running requests may take to finish after an interrupt",
    "silence": "seconds without a word or a step of a worker before its requests go on elsewhere",
    "stats_interval": "seconds between lines of figures (0: none)",
    "log_level": "least severe log lines shown: info, warning or error",
    "run_dir": "parent of the private folder of sockets (empty: the system's temporary folder)",
    "admin": "where scale, rollout and down connect (empty: a socket file of this user)",
    "keys": "key folder made by baton keygen, for sockets that other hosts reach (empty: none)",
}
"""One line for each field of :class:`ServeSettings`, shown by ``baton serve --help``."""


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None
) -> ServeSettings:
    """Merge the layers and check the result; ConfigError says which value is wrong and where."""
    merged: dict[str, Any] = {}
    for source, layer in (
        (f"file {file}", read_file(file) if file else {}),
        ("environment", from_environment(environment)),
        ("flags", {key: value for key, value in flags.items() if value is not None}),
    ):
        convert(layer, source)  # so that a wrong value is blamed on its own layer
        merged.update(layer)
    return check(convert(merged, "settings"))


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The fields set by ``BATON_<FIELD>``."""
    names = {ENV_PREFIX + field.upper(): field for field in ServeSettings.__struct_fields__}
    return {names[key]: value for key, value in environment.items() if key in names}


def read_file(path: str) -> dict[str, Any]:
    """Keys of a TOML file; dashes count as underscores."""
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not valid TOML: {problem}") from problem
    return {key.replace("-", "_"): value for key, value in content.items()}
