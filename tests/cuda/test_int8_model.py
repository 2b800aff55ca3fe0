"""A whole model over an int8 pool: logits, captured steps, blocks that travel, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.engine.kernels import kv_rows
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.reference_int8 import rows_of
from baton.engine.kernels.memory import widened_bytes
from baton.engine.llm import LLMEngine
from baton.engine.loading.warm_up import warm_up
from baton.engine.pipeline import device_steps
from baton.engine.scheduling.scheduler import SchedulerConfig
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.shared_pool import MappedPools
from baton.proto.errors import ConfigError
from baton.proto.sampling import SamplingParams

from . import small_model
from .small_model import (
    GREEDY,
    SHAPE,
    check_blocks_travel,
    check_logits,
    chunks_of,
    logits_of,
    steps_of,
)

load = partial(small_model.load, kv_type="int8")
NEAR = 6e-2
"""Of the CPU's engine over an int8 pool, within bfloat16.

Twice the largest error of 335 random prompts; a window of one token more or less differs by 0.2.
"""


@pytest.mark.parametrize("heads", [2, 4])
def test_logits_are_those_of_the_cpu_s_int8(
    tmp_path: Path, device: Device, rng: np.random.Generator, heads: int
) -> None:
    """Heads of 64 and of 32 channels."""
    folder = write_checkpoint(tmp_path, replace(SHAPE, heads=heads, kv_heads=heads // 2), "BF16")
    reference, runner = load(folder), load(folder, CudaBackend(device))
    assert runner.pool.dtype == np.int8 and runner.card.layout == reference.card.layout
    check_logits(reference, runner, steps_of(rng), NEAR)


def test_the_pool_has_the_rows_of_the_cpu_s(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    """Of the first layer, which no attention comes before, but for the rounding of bfloat16."""
    reference, runner = load(folder), load(folder, CudaBackend(device))
    (chunk,) = chunks_of([37], rng)
    for each in (reference, runner):
        logits_of(each, [chunk])
    exact = kv_rows.opened(np.asarray(reference.pool)[0, chunk.block_table])
    found = kv_rows.opened(rows_of(device.download(runner.pool)[0])[chunk.block_table])
    assert np.linalg.norm(found - exact) < 2e-2 * np.linalg.norm(exact)


def test_windows(tmp_path: Path, device: Device, rng: np.random.Generator) -> None:
    folder = write_checkpoint(tmp_path, SHAPE, "BF16")
    path = folder / "config.json"
    keys = json.loads(path.read_text())
    keys |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 11}
    path.write_text(json.dumps(keys))
    reference, runner = load(folder), load(folder, CudaBackend(device))
    assert runner.pipeline.model.config.windows == (11,) * SHAPE.layers
    check_logits(reference, runner, steps_of(rng), NEAR)


def test_prompts_are_widened_in_pieces_without_another_bit(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    backend = CudaBackend(device)
    runner = load(folder, backend)
    steps = chunks_of([37, 5, 20, 16], rng)
    expected = backend.download(logits_of(runner, steps))
    backend.reserve_widened(runner.card.layout, 40)
    np.testing.assert_array_equal(backend.download(logits_of(runner, steps)), expected)
    backend.reserve_widened(runner.card.layout, 32)
    with pytest.raises(ValueError, match="a sequence has 5 blocks, of which 4 can be widened"):
        logits_of(runner, steps)


def test_captured_steps_give_the_tokens_of_single_launches(
    folder: Path, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with chunks of eight tokens, and a prompt whose beginning is in the pool."""
    start = rng.integers(0, SHAPE.vocab, 16).tolist()
    prompts = [start + rng.integers(0, SHAPE.vocab, n).tolist() for n in (3, 8)]
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=6, ignore_eos=True),
    ]
    outcomes = []
    for buckets, budget in (((), 0), ((2, 4), 0), ((2, 4), 8)):
        monkeypatch.setattr(device_steps, "BUCKETS", buckets)
        config = SchedulerConfig(token_budget=budget)
        engine = LLMEngine(load(folder, CudaBackend(device)), config)
        contexts = [engine.generate([p], [one])[0] for p, one in zip(prompts, params, strict=True)]
        outcomes.append([c.tokens.generated.tolist() for c in contexts])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_the_first_step_leaves_a_clean_pool(folder: Path, device: Device) -> None:
    runner, times = load(folder, CudaBackend(device)), StepTime()
    warm_up(runner.pipeline, times)
    assert not device.download(runner.pool).any()


def test_blocks_travel_as_they_are(folder: Path, device: Device, rng: np.random.Generator) -> None:
    """By the host, from pool to pool, and out of another process's memory; damage shows."""
    sender, chunk, payload, digest = check_blocks_travel(folder, device, rng, kv_type="int8")
    layers, blocks, layout = SHAPE.layers, chunk.block_table, sender.card.layout
    stream = sender.backend.block_stream(sender.pool, len(payload))
    move = stream.gather(0, layers, blocks)
    move.wait()
    assert move.digest == digest and move.payload.tobytes() == payload.tobytes()
    move.release()
    if device.name == "host":
        pools = MappedPools(layout, open_device=load(folder, CudaBackend(device)).backend.open_pool)
        assert pools.open(b"peer", 7, sender.backend.pool_ticket(sender.pool)) == ""
        opened = pools.get(7)
        assert opened.dtype == np.int8 and opened.shape == sender.pool.shape
        wide = load(folder, CudaBackend(device), kv_type="bfloat16").backend
        other = MappedPools(layout, open_device=wide.open_pool)
        assert other.open(b"peer", 8, sender.backend.pool_ticket(sender.pool))


def test_the_card_names_the_rounding(folder: Path, device: Device) -> None:
    narrow, wide = (load(folder, CudaBackend(device), kv_type=kind) for kind in ("int8", "auto"))
    assert narrow.card.numerics == f"{wide.card.numerics}/kv-int8"
    assert narrow.card.mismatch(wide.card)[0] == "numerics"
    assert narrow.card.layout.token_bytes * 128 == wide.card.layout.token_bytes * 66


# ----------------------------------------------------------------------------------------- memory


def test_a_pool_leaves_room_for_the_widened_blocks(folder: Path, device: Device) -> None:
    share = 0.004
    runner = load(
        folder, CudaBackend(device), num_blocks=0, kv_bytes=0, gpu_memory_utilization=share
    )
    wide = runner.backend._widened.nbytes
    assert wide == widened_bytes(runner.card.layout, runner.card.max_length) > 0
    limit = int(device.memory_bytes() * share)
    left = limit - runner.pipeline.model.weights_bytes - runner.pool.nbytes - wide
    layout = runner.card.layout
    assert 0 <= left < layout.num_layers * layout.block_bytes + widened_bytes(layout, 8)


def test_a_pool_that_does_not_fit_is_refused_with_all_sizes(folder: Path, host_device) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, CudaBackend(host_device), num_blocks=0, kv_bytes=1 << 30)
    text = str(caught.value)
    assert " to widen a context's int8 blocks do not fit" in text
    assert "\n" not in text
