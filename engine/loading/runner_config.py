"""The settings of a runner: a model and its memory."""

from __future__ import annotations

import msgspec

from .gguf_folder import local_folder
from .kv_types import AUTO
from .own_family import use_family

DEFAULT_KV_BYTES = 256 << 20


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model to load and its memory.

    ``model``: folder or GGUF file. ``backend``: "auto", "cpu", "numpy" or "cuda". ``ordinal``:
    number of the GPU of "cuda", among those that CUDA_VISIBLE_DEVICES leaves. ``instance``: what
    that variable becomes in the worker, for one instance of a split GPU; empty: it is kept.
    ``block_size``: tokens per KV block.
    ``threads``: compute threads of the CPU's kernels; 0: the cores that this process may use, less
    ``threads_taken`` by other workers, divided among ``thread_sharers`` workers of the host.
    ``share_weights``: whether a supervisor lets its workers share packed weights; "auto": if shared
    memory can have huge pages.
    ``kv_type``: type of keys and values: "auto", "float32", "bfloat16" or "int8". ``kv_types``: of
    all pools of the cluster; keys and values are rounded to the narrowest.
    ``num_blocks`` or ``kv_bytes``: size of the pool (``num_blocks`` takes precedence).
    If both are unset, a GPU's pool gets the worker's share of its memory minus the weights:
    ``gpu_memory_utilization`` of it, divided among ``device_sharers`` workers.
    ``max_length``: longest context served, 0 for the model's own limit; a smaller pool lowers it.
    ``name``: the model's name for clients, by default the folder's name. ``task``: "generate" or
    "embed", by default the folder's own task.
    ``layer_group``: layers between two reports of a streaming chunk, 0 for a quarter of the
    model. ``full_digest``: fingerprint all weight bytes instead of samples. ``vision``: False
    leaves out a model's vision tower, as in a decode worker, which gets encoded images as KV.
    ``picture_bytes``: memory for the arrays of a picture besides weights and state, which limits
    the size of pictures; 0: no limit. ``family``: ``module:Class`` of a user's own model family,
    ``extensions``: folder in which its module is looked for last.
    """

    model: str
    backend: str = "auto"
    ordinal: int = 0
    instance: str = ""
    threads: int = 1
    thread_sharers: int = 1
    threads_taken: int = 0
    share_weights: str = "off"
    block_size: int = 16
    kv_type: str = AUTO
    kv_types: tuple[str, ...] = ()
    num_blocks: int = 0
    kv_bytes: int = DEFAULT_KV_BYTES
    max_length: int = 0
    name: str = ""
    task: str = ""
    layer_group: int = 0
    full_digest: bool = False
    gpu_memory_utilization: float = 0.9
    device_sharers: int = 1
    vision: bool = True
    picture_bytes: int = 0
    family: str = ""
    extensions: str = ""


def with_folder(config: RunnerConfig) -> RunnerConfig:
    """Return the settings with a model folder instead of a GGUF file. Raises CheckpointError.

    From now on this process reads folders with the family of the settings.
    """
    use_family(config.family, config.extensions)
    return msgspec.structs.replace(config, model=local_folder(config.model))
