"""Models that parts load: random checkpoints, and logits with the tokens given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...engine.kernels.backend import Backend
from ...engine.kernels.cuda.backend import CudaBackend
from ...engine.loading.loader import Runner, RunnerConfig, load_runner
from ...engine.scheduling.plan import Chunk
from ..checkpoints import SHAPES, Shape, write_checkpoint
from .stage import Stage

F32 = npt.NDArray[np.float32]

TINY = Shape("tiny", vocab=128, hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1)
SMALL = SHAPES["m25"]
SHALLOW = Shape("shallow", 32000, hidden=2048, intermediate=5632, layers=2, heads=16, kv_heads=4)
DEEP = Shape("deep", vocab=32000, hidden=2048, intermediate=5632, layers=16, heads=16, kv_heads=4)


def write(stage: Stage, shape: Shape) -> Path:
    """A bf16 checkpoint of ``shape``, or of the tiny one, in the stage's folder."""
    folder = stage.scratch / shape.name
    return write_checkpoint(folder, TINY if stage.tiny else shape, "BF16")


def load(folder: Path, backend: Backend, *, blocks: int, block_size: int = 16) -> Runner:
    """A model on a backend, with a pool of ``blocks``."""
    config = RunnerConfig(
        model=str(folder), backend="auto", block_size=block_size, num_blocks=blocks
    )
    return load_runner(config, backend=backend)


def on_device(stage: Stage, folder: Path, *, blocks: int) -> Runner:
    """A model on the stage's device."""
    return load(folder, CudaBackend(stage.device), blocks=blocks)


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
