"""Models that parts load: random checkpoints, and logits with the tokens given."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.backend import Backend
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk

from ..checkpoints import SHAPES, Shape, Sizes, write_checkpoint, write_config, write_tensors
from .stage import Stage

F32 = npt.NDArray[np.float32]

TINY = Shape("tiny", vocab=128, hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1)
SMALL = SHAPES["m25"]
SHALLOW = Shape("shallow", 32000, hidden=2048, intermediate=5632, layers=2, heads=16, kv_heads=4)
DEEP = Shape("deep", vocab=32000, hidden=2048, intermediate=5632, layers=16, heads=16, kv_heads=4)
LLAMA_8B = Shape(
    "llama-8b", 128256, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8,
    positions=131072,
)  # fmt: skip
GIVEN = "BATON_GPU_CHECKPOINT"
"""Environment variable: a folder that :func:`write_random` has filled with :data:`LLAMA_8B`."""
SHARDS = 8
_POOL = (1 << 22) + 37
"""Random values. Odd, so that repeats do not align with rows; few, so that they stay in a cache."""
_ONE = 0x3F80
"""1.0 in bfloat16."""


def write(stage: Stage, shape: Shape) -> Path:
    """A bf16 checkpoint of ``shape``, or of the tiny one, in the stage's folder."""
    folder = stage.scratch / shape.name
    return write_checkpoint(folder, TINY if stage.tiny else shape, "BF16")


def checkpoint(stage: Stage) -> Path:
    """The model of Llama-3.1-8B's shapes, or the tiny one, written once for all parts of a call.

    The folder that :data:`GIVEN` names is taken instead.
    """
    shape, given = TINY if stage.tiny else LLAMA_8B, os.environ.get(GIVEN)
    if given and not stage.tiny:
        return Path(given)
    began = time.monotonic()
    folder = stage.kept(shape.name, lambda folder: write_random(folder, shape))
    print(f"{folder}: written in {time.monotonic() - began:.1f} s", flush=True)
    return folder


def write_random(folder: Path, shape: Shape) -> None:
    """A checkpoint whose tensors repeat a few million random values, in files written at once.

    As fast as memory or a disk takes it: one file would be one thread's, for the system locks it.
    """
    normal = np.random.default_rng(0).standard_normal(_POOL, np.float32)
    tensors = shape.tensors()
    pools = {size[1]: _scaled(normal, size[1]) for size in tensors.values() if len(size) == 2}

    def values(name: str, size: tuple[int, ...]) -> Iterator[bytes | memoryview]:
        left = 2 * math.prod(size)
        if len(size) == 1:
            yield np.full(size, _ONE, np.uint16).tobytes()
            return
        pool = pools[size[1]]
        start = 2 * (zlib.crc32(name.encode()) % _POOL)
        while left:
            piece = pool[start : start + left]
            yield piece
            left, start = left - len(piece), 0

    write_config(folder, shape, "BF16")
    shards = _shards(tensors)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    write = partial(write_tensors, dtype="BF16", values=values)
    with ThreadPoolExecutor(len(shards)) as threads:
        list(threads.map(write, [folder / name for name in names], shards))
    index = {
        "metadata": {"total_size": 2 * sum(map(math.prod, tensors.values()))},
        "weight_map": {t: name for name, shard in zip(names, shards, strict=True) for t in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _scaled(normal: F32, columns: int) -> memoryview:
    bits = (normal * np.float32(columns**-0.5)).view(np.uint32) >> 16
    return memoryview(bits.astype(np.uint16).tobytes())


def _shards(tensors: Sizes) -> list[Sizes]:
    """The tensors in at most :data:`SHARDS` groups of about as many bytes each."""
    total, done = sum(map(math.prod, tensors.values())), 0
    groups: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, size in tensors.items():
        groups.setdefault(SHARDS * done // total, {})[name] = size
        done += math.prod(size)
    return list(groups.values())


def load(
    folder: Path, backend: Backend, *, blocks: int, block_size: int = 16, kv_type: str = "auto"
) -> Runner:
    """A model on a backend, with a pool of ``blocks``."""
    config = RunnerConfig(
        model=str(folder), backend="auto", block_size=block_size, num_blocks=blocks, kv_type=kv_type
    )
    return load_runner(config, backend=backend)


def on_device(stage: Stage, folder: Path, *, blocks: int, kv_type: str = "auto") -> Runner:
    """A model on the stage's device."""
    return load(folder, CudaBackend(stage.device), blocks=blocks, kv_type=kv_type)


def forced_logits(runner: Runner, tokens: Sequence[int], prefilled: int) -> F32:
    """Logits ``[T, vocab]`` after each of ``tokens``, whatever the model would have drawn.

    The first ``prefilled`` go through prefill at once, the others one by one through decode.
    """
    model, size = runner.pipeline.model, runner.card.layout.block_size
    ids = np.array(tokens, np.int32)
    table = np.arange(-(-len(ids) // size), dtype=np.int32)
    rows = []
    ends = range(prefilled, len(ids) + 1)
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        if start == end:
            continue
        chunk = Chunk(b"forced", start, ids[start:end], table)
        inputs = model.prepare_initial_token_inputs([chunk])
        wanted = np.arange(end - start, dtype=np.int32)
        logits = model.execute(replace(inputs, logit_rows=wanted)).next_token_logits
        rows.append(_on_host(runner, logits).copy())
    return np.concatenate(rows)


def _on_host(runner: Runner, logits: Any) -> F32:
    backend = runner.backend
    found: F32 = backend.device.download(logits) if isinstance(backend, CudaBackend) else logits
    return found[:, : runner.card.vocab_size]
