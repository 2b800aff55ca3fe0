"""A whole model on the CUDA kernels: its logits, its captured steps and its blocks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.warm_up import warm_up
from baton.engine.pipeline import device_steps
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.frames import FramePacker, FrameWriter
from baton.kv_transfer.shared_pool import MappedPools
from baton.proto.errors import ConfigError
from baton.proto.sampling import SamplingParams
from baton.proto.wire.messages import DeviceTicket, GrantRef, KVFrame

from .host_device import HostDevice
from .small_model import (
    BLOCKS,
    GREEDY,
    SHAPE,
    check_blocks_travel,
    check_logits,
    chunks_of,
    load,
    logits_of,
    steps_of,
)


@pytest.mark.parametrize("heads", [2, 4])
def test_logits_are_the_reference_s_but_for_bfloat16(
    tmp_path: Path, device: Device, rng: np.random.Generator, heads: int
) -> None:
    """Heads of 64 and of 32 channels."""
    folder = write_checkpoint(tmp_path, replace(SHAPE, heads=heads, kv_heads=heads // 2), "BF16")
    reference, runner = load(folder), load(folder, CudaBackend(device))
    check_logits(reference, runner, steps_of(rng), 4e-2)  # 142 random prompts: to 1.8e-2


def test_captured_steps_give_the_tokens_of_single_launches(
    folder: Path, device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [rng.integers(0, SHAPE.vocab, n).tolist() for n in (19, 3, 8)]
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=6, ignore_eos=True),
        SamplingParams(temperature=1.1, top_k=20, seed=3, max_new_tokens=4, ignore_eos=True),
    ]
    outcomes = []
    for buckets in ((), (2, 4)):
        monkeypatch.setattr(device_steps, "BUCKETS", buckets)
        runner = load(folder, CudaBackend(device))
        steps = runner.pipeline._computer
        assert isinstance(steps, DeviceSteps)
        contexts = LLMEngine(runner).generate(prompts, params)
        outcomes.append([c.tokens.generated.tolist() for c in contexts])
        assert bool(steps.replays) == bool(buckets)
    assert outcomes[0] == outcomes[1]


def test_the_first_step_leaves_a_clean_pool(folder: Path, device: Device) -> None:
    runner, times = load(folder, CudaBackend(device)), StepTime()
    warm_up(runner.pipeline, times)
    assert times.predict(1) > 0
    assert not device.download(runner.pool).any()


def test_blocks_go_from_one_pool_to_another_and_their_digest_shows_damage(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    check_blocks_travel(folder, device, rng)


def test_a_decode_worker_reads_blocks_out_of_the_sender_s_gpu_memory(
    folder: Path, device: Device, rng: np.random.Generator
) -> None:
    sender, receiver = load(folder, CudaBackend(device)), load(folder, CudaBackend(device))
    layout = sender.card.layout
    ticket = sender.backend.pool_ticket(sender.pool)
    assert ticket is not None
    pools = MappedPools(layout, open_device=receiver.backend.open_pool)
    if device.name != "host":
        pytest.skip("CUDA opens a handle in another process only")
    assert pools.open(b"peer", 7, ticket) == ""
    (chunk,) = chunks_of([37], rng)
    logits_of(sender, [chunk])
    blocks, count = chunk.block_table, len(chunk.block_table)
    frame = KVFrame(
        grant=GrantRef(1, 0, 0),
        index=0,
        layer_start=0,
        layer_count=SHAPE.layers,
        block_start=0,
        block_count=count,
        nbytes=SHAPE.layers * count * layout.block_bytes,
        checksum=0,
    )
    packer = FramePacker(sender.backend, sender.pool)
    assert packer.view(frame, blocks) is None  # a GPU's memory is not read as bytes
    named, payload = packer.name(frame, blocks)
    theirs = rng.permutation(BLOCKS)[:count].astype(np.int32)
    writer = FrameWriter(receiver.backend, receiver.pool)
    assert writer.fetch(named, theirs, pools.get(7), payload)
    mine = device.download(sender.pool)[:, blocks]
    assert device.download(receiver.pool)[:, theirs].tobytes() == mine.tobytes()
    # What the sender has overwritten by then is not taken for what it named.
    scribble = np.full((1,), 0x3F80, np.uint16)
    device.write(sender.pool[1, blocks[0], 0, 0, 0, :1], scribble)
    assert not writer.fetch(named, theirs, pools.get(7), payload)
    pools.close(b"peer")
    assert pools.get(7) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"host": "elsewhere"}, "another host"),
        ({"nbytes": 100}, "not a multiple of block size"),
        ({"offset": 512 + 8}, "not aligned"),
        ({"offset": 512 + 256}, "its ticket says"),
        ({"handle": bytes(64)}, "names nothing"),
        ({"handle": bytes(63)}, "the handle has 63 bytes"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused_in_words(
    folder: Path, host_device: HostDevice, change: dict[str, object], why: str
) -> None:
    runner = load(folder, CudaBackend(host_device))
    ticket = runner.backend.pool_ticket(runner.pool)
    assert isinstance(ticket, DeviceTicket)
    pools = MappedPools(runner.card.layout, open_device=runner.backend.open_pool)
    assert why in pools.open(b"peer", 7, msgspec.structs.replace(ticket, **change))
    larger = msgspec.structs.replace(ticket, nbytes=2 * ticket.nbytes)
    assert "its ticket says" in pools.open(b"peer", 7, larger)
    assert pools.get(7) is None
    host = MappedPools(runner.card.layout, open_device=load(folder).backend.open_pool)
    assert "computes on the CPU" in host.open(b"peer", 7, ticket)


def assert_refused(device: Device, words: str, **settings: str | int) -> None:
    """Before the weights are read."""
    config = RunnerConfig(**{"num_blocks": 4, **settings})  # type: ignore[arg-type]
    read: list[int] = []
    with pytest.raises(ConfigError, match=words):
        load_runner(config, lambda done, _total: read.append(done), backend=CudaBackend(device))
    assert not read


def test_a_model_the_attention_kernels_cannot_serve_is_refused(
    folder: Path, device: Device, tmp_path: Path
) -> None:
    narrow = write_checkpoint(tmp_path / "narrow", replace(SHAPE, heads=8, kv_heads=1), "BF16")
    words = "support head sizes 32, 64, 128, this model has 16"
    assert_refused(device, words, model=str(narrow))
    words = "block_size must be a multiple of 8, not 12"
    assert_refused(device, words, model=str(folder), block_size=12)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", 132, "hidden_size must be a multiple of 8, not 132"),
        ("hidden_size", 16_392, "support hidden_size up to 16384, not 16392"),
        ("intermediate_size", 180, "intermediate_size must be a multiple of 8, not 180"),
        ("vocab_size", 262_145, "support vocabularies up to 262144 tokens, not 262145"),
    ],
)
def test_a_model_with_sizes_that_no_kernel_has_is_refused(
    folder: Path, device: Device, tmp_path: Path, key: str, value: int, words: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model/config.json"
    keys = {"head_dim": 64, **json.loads(path.read_text()), key: value}
    path.write_text(json.dumps(keys))
    assert_refused(device, words, model=str(path.parent))


@pytest.mark.parametrize("vocab", [129, 130, 131])
def test_a_vocabulary_may_have_any_size(
    device: Device, tmp_path: Path, rng: np.random.Generator, vocab: int
) -> None:
    """GPT-2's has 50,257 tokens; the sampler reads logits four at a time."""
    folder = write_checkpoint(tmp_path / "odd", replace(SHAPE, vocab=vocab), "BF16")
    reference, runner = load(folder), load(folder, CudaBackend(device))
    chunks = chunks_of([9, 4], rng)
    exact = logits_of(reference, chunks).astype(np.float64)
    got = device.download(logits_of(runner, chunks))[:, :vocab]
    assert (np.linalg.norm(got - exact, axis=1) < 2e-2 * np.linalg.norm(exact, axis=1)).all()
    params = [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_new_tokens=6, ignore_eos=True),
        replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.4),
    ]
    contexts = LLMEngine(runner).generate([[5, vocab - 1], [7] * 12, [1, 2]], params)
    assert [len(context.tokens.generated) for context in contexts] == [6, 6, 6]
    assert all((context.tokens.generated < vocab).all() for context in contexts)
