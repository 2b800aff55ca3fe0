"""A small model on the CUDA kernels: how tests load it, its steps, its logits and its blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.benchmarks.checkpoints import Shape
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk, SampleSpec
from baton.proto.sampling import SamplingParams

Bytes = npt.NDArray[np.uint8]
SHAPE = Shape("tiny", vocab=128, hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1)
BLOCK, BLOCKS = 8, 48
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


def load(folder: Path, backend: CudaBackend | None = None, **more: object) -> Runner:
    """Load the model; ``more``: settings of the engine. Without a backend, on NumPy's kernels."""
    config = RunnerConfig(model=str(folder), backend="numpy", block_size=BLOCK, num_blocks=BLOCKS)
    return load_runner(msgspec.structs.replace(config, **more), backend=backend)


def chunks_of(lengths: list[int], rng: np.random.Generator) -> list[Chunk]:
    """Prompts with room for a block more each, their blocks scattered over the pool."""
    blocks = rng.permutation(BLOCKS).astype(np.int32)
    chunks, used = [], 0
    for index, count in enumerate(lengths):
        need = -(-count // BLOCK) + 1
        table, used = blocks[used : used + need], used + need
        spec = SampleSpec(GREEDY, count, np.empty(0, np.int32), 0)
        chunks.append(Chunk(bytes([index]), 0, tokens_of(count, rng), table, spec))
    return chunks


def tokens_of(count: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    return rng.integers(0, SHAPE.vocab, count).astype(np.int32)


def steps_of(rng: np.random.Generator) -> list[list[Chunk]]:
    """Prompts, next tokens, a chunk of six tokens, and rows of both kinds in one step."""
    first = chunks_of([37, 5, 1, 16], rng)
    then = [
        replace(chunk, start=len(chunk.tokens), tokens=tokens_of(count, rng))
        for chunk, count in zip(first, (1, 1, 6, 1), strict=True)
    ]
    return [first, then[:2], then[2:], [then[2]]]


def logits_of(runner: Runner, chunks: list[Chunk]) -> np.ndarray:
    model = runner.pipeline.model
    logits = model.execute(model.prepare_initial_token_inputs(chunks)).next_token_logits
    assert logits is not None
    return logits


def check_logits(reference: Runner, runner: Runner, steps: list[list[Chunk]], most: float) -> None:
    """``most``: norm of a row's errors over that of the row in the CPU's engine."""
    for step in steps:
        exact = logits_of(reference, step).astype(np.float64)
        got = runner.backend.download(logits_of(runner, step))
        error = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert error.max() < most, error


def check_blocks_travel(
    folder: Path,
    device: Device,
    rng: np.random.Generator,
    **more: object,
) -> tuple[Runner, Chunk, Bytes, int]:
    """By the host and from pool to pool; damage shows.

    Returns the sender, the chunk in its pool, the payload of its blocks, and their digest.
    """
    sender, receiver, direct = (load(folder, CudaBackend(device), **more) for _ in range(3))
    (chunk,) = chunks_of([37], rng)
    logits_of(sender, [chunk])
    layers, blocks = SHAPE.layers, chunk.block_table
    theirs = rng.permutation(BLOCKS)[: len(blocks)].astype(np.int32)
    payload = np.empty(layers * len(blocks) * sender.card.layout.block_bytes, np.uint8)
    digest = sender.backend.gather_blocks(sender.pool, 0, layers, blocks, payload)
    assert digest == sender.backend.checksum(payload)
    assert digest == sender.backend.sum_blocks(sender.pool, 0, layers, blocks)
    damaged = payload.copy()
    damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
    assert receiver.backend.scatter_blocks(receiver.pool, 0, layers, theirs, damaged) != digest
    assert receiver.backend.scatter_blocks(receiver.pool, 0, layers, theirs, payload) == digest
    assert direct.backend.copy_blocks(sender.pool, direct.pool, 0, layers, blocks, theirs) == digest
    mine = sender.backend.download(sender.pool)[:, blocks].tobytes()
    for runner in (receiver, direct):
        assert runner.backend.download(runner.pool)[:, theirs].tobytes() == mine
    return sender, chunk, payload, digest
