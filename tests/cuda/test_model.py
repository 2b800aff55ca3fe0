"""A whole model on the CUDA kernels: its logits, its captured steps and its blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.llm import LLMEngine
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.plan import Chunk, SampleSpec
from baton.engine.runner import Runner, RunnerConfig, load_runner
from baton.proto.sampling import SamplingParams

SHAPE = Shape("tiny", vocab=128, hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1)
BLOCK, BLOCKS = 8, 48
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "BF16")


def load(folder: Path, backend: CudaBackend | None = None) -> Runner:
    config = RunnerConfig(model=str(folder), backend="numpy", block_size=BLOCK, num_blocks=BLOCKS)
    return load_runner(config, backend=backend)


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


def test_logits_are_the_reference_s_but_for_bfloat16(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    reference, runner = load(folder), load(folder, CudaBackend(device))
    first = chunks_of([37, 5, 1, 16], rng)
    then = [
        replace(chunk, start=len(chunk.tokens), tokens=tokens_of(count, rng))
        for chunk, count in zip(first, (1, 1, 6, 1), strict=True)
    ]
    for step in (first, then[:2], then[2:], [then[2]]):
        exact = logits_of(reference, step).astype(np.float64)
        got = device.download(logits_of(runner, step))
        error = np.linalg.norm(got - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert error.max() < 2e-2, error


def logits_of(runner: Runner, chunks: list[Chunk]) -> np.ndarray:
    model = runner.pipeline.model
    logits = model.execute(model.prepare_initial_token_inputs(chunks)).next_token_logits
    assert logits is not None
    return logits


def test_captured_steps_give_the_tokens_of_single_launches(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    prompts = [rng.integers(0, SHAPE.vocab, n).tolist() for n in (19, 3, 8)]
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.1, top_k=20, seed=3, max_new_tokens=4, ignore_eos=True),
    ]
    outcomes = []
    for buckets in ((), (2, 4)):
        runner = load(folder, CudaBackend(device))
        steps = runner.pipeline._computer
        assert isinstance(steps, DeviceSteps)
        steps._buckets = buckets
        contexts = LLMEngine(runner).generate(prompts, params)
        outcomes.append([c.tokens.generated.tolist() for c in contexts])
        assert bool(steps.replays) == bool(buckets)
    assert outcomes[0] == outcomes[1]


def test_blocks_go_from_one_pool_to_another_and_their_digest_shows_damage(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    sender, receiver = load(folder, CudaBackend(device)), load(folder, CudaBackend(device))
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
    direct = load(folder, CudaBackend(device))
    copied = direct.backend.copy_blocks(sender.pool, direct.pool, 0, layers, blocks, theirs)
    assert copied == digest
    pools = [device.download(runner.pool)[:, theirs] for runner in (receiver, direct)]
    assert pools[0].tobytes() == pools[1].tobytes()
    assert pools[0].tobytes() == device.download(sender.pool)[:, blocks].tobytes()
