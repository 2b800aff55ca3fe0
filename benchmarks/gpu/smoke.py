"""Every kernel once, with small shapes: what a memory checker can go through in a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from baton.engine.kernels.cuda import blocks
from baton.engine.llm import LLMEngine
from baton.proto.sampling import SamplingParams

from ..checkpoints import write_checkpoint
from .lines import Line, checked
from .models import TINY, on_device
from .stage import Stage, on_gpu


def exact_memory(scratch: Path) -> Stage:
    """The GPU without CuPy's memory pool, so that each array ends where its allocation does."""
    stage = on_gpu(scratch)
    stage.cupy.cuda.set_allocator(None)
    return stage


def smoke(stage: Stage) -> Iterator[Line]:
    """Models that generate, with both types of keys and values, and blocks that move."""
    folder = write_checkpoint(stage.scratch / "smoke", TINY, "BF16")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, TINY.vocab, n).tolist() for n in (1, 17, 40)]
    drawn = {"temperature": 1, "top_k": 5, "frequency_penalty": 0.5}
    for kind, sampling in (("auto", {"temperature": 0}), ("auto", drawn), ("int8", drawn)):
        engine = LLMEngine(on_device(stage, folder, blocks=24, kv_type=kind))
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, **sampling)
        found = engine.generate(prompts, params)
        lengths = [len(context.tokens.generated) for context in found]
        yield checked(f"tokens, KV {kind}", lengths == [3, 3, 3], f"{lengths}")
    yield checked("blocks", _moves(stage), "gathered and scattered")


def _moves(stage: Stage) -> bool:
    device, layers = stage.device, blocks.Layers(0, 2)
    pool = stage.random_bf16((2, 8, 2, 2, 16, 64))
    ids = blocks.upload_ids(device, np.array([5, 0, 3]))
    payload = device.empty((blocks.payload_bytes(pool, 2, 3),), np.uint8)
    digests, space = device.zeros((1,), np.uint64), device.zeros((2,), np.uint64)
    blocks.gather_blocks(device, pool, ids, layers, payload, digests, space)
    gathered = int(device.download(digests)[0])
    blocks.scatter_blocks(device, payload, layers, ids, pool, digests, space)
    return gathered == int(device.download(digests)[0])
