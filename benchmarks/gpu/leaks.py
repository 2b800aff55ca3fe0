"""Device memory after a model was loaded, used and let go, and after much use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np

from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.llm import LLMEngine
from baton.proto.sampling import SamplingParams

from .lines import Line, checked
from .models import SMALL, on_device, write
from .stage import Stage

SLACK = 8 << 20


def leaks(stage: Stage) -> Iterator[Line]:
    """Graphs, sampler, every kernel of the model; the first round compiles and does not count."""
    folder = write(stage, SMALL)
    rng = np.random.default_rng(4)
    used = []
    for _ in range(stage.size(5, 2)):
        engine = LLMEngine(on_device(stage, folder, blocks=stage.size(2048, 48)))
        _use(engine, rng, stage)
        del engine
        gc.collect()
        used.append(stage.memory_used())
    more = used[-1] - used[0]
    yield checked(
        "models loaded and let go", more <= SLACK, _grown(stage, more), f"{SLACK >> 20} MiB"
    )
    engine = LLMEngine(on_device(stage, folder, blocks=stage.size(2048, 48)))
    _use(engine, rng, stage)
    gc.collect()
    before = stage.memory_used()
    for _ in range(stage.size(40, 1)):
        _use(engine, rng, stage)
    gc.collect()
    more = stage.memory_used() - before
    yield checked(
        "one model used on and on", more <= SLACK, _grown(stage, more), f"{SLACK >> 20} MiB"
    )
    spilled = stage.device.local_bytes() if isinstance(stage.device, CupyDevice) else {}
    names = [name for name, count in spilled.items() if count]
    yield checked(
        "kernels use no local memory", not names, ", ".join(names) or f"{len(spilled)} kernels"
    )


def _grown(stage: Stage, more: int) -> str:
    return f"{more / 2**20:+.1f} MiB" if stage.cupy is not None else "not counted here"


def _use(engine: LLMEngine, rng: np.random.Generator, stage: Stage) -> None:
    vocab, longest = engine.runner.card.vocab_size, stage.size(300, 20)
    count = stage.size(20, 3)
    prompts = [rng.integers(0, vocab, int(n)).tolist() for n in rng.integers(1, longest, count)]
    steps = stage.size(24, 3)
    greedy = SamplingParams(temperature=0, max_new_tokens=steps, ignore_eos=True)
    drawn = SamplingParams(
        temperature=1, top_k=40, seed=1, presence_penalty=0.5, max_new_tokens=steps, ignore_eos=True
    )
    engine.generate(prompts, greedy)
    engine.generate(prompts[: count // 2], drawn)
