"""A model of Llama-3.1-8B's shapes with random bf16 weights: decode steps and prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline.decode_graph import DecodeGraph
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.sampling import SamplingParams

from ..checkpoints import Shape
from .lines import Line, measured, skipped
from .models import LLAMA_8B, TINY, checkpoint
from .races import copy_bandwidth, has_torch, matrix_rate
from .stage import Stage, Timing

BLOCK = 16
DECODE_BARS = {(1, 128): 0.85, (64, 2048): 0.82, (256, 1024): 0.8}
"""Shares of the time that reading weights, keys and values takes, by rows and tokens of context."""
PREFILL_BARS = {8192: 0.6, 2048: 0.75, 512: 0.0}
"""Shares of the time of the products at the matrix rate, by tokens. 0: no bar."""


def model(stage: Stage) -> Iterator[Line]:
    """Steps as a worker runs them, from a plan to its tokens."""
    runner, line = loaded(stage, stage.size(256 * 1024 // BLOCK + 64, 24))
    yield line
    cases = {(1, 20): 0.0, (3, 17): 0.0} if stage.tiny else DECODE_BARS
    yield from steps(stage, runner, cases, PREFILL_BARS)


def loaded(stage: Stage, blocks: int, kv_type: str = "auto") -> tuple[Runner, Line]:
    """Return a model with random keys and values, and a line about its loading."""
    began = time.monotonic()
    folder = checkpoint(stage)
    written = time.monotonic()
    config = RunnerConfig(
        model=str(folder), num_blocks=blocks, block_size=BLOCK, kv_type=kv_type,
        max_length=stage.size(16384, 64),
    )  # fmt: skip
    runner = load_runner(config, backend=CudaBackend(stage.device))
    words = f"{written - began:.1f} s written, {time.monotonic() - written:.1f} s loaded"
    gigabytes = runner.card.weights_bytes / 1e9
    fill(stage, runner.pool)
    return runner, Line(f"weights, {gigabytes:.1f} GB", words, figures={"bytes": gigabytes * 1e9})


def steps(
    stage: Stage,
    runner: Runner,
    decodes: Mapping[tuple[int, int], float],
    prefills: Mapping[int, float],
) -> Iterator[Line]:
    """Decode steps by rows and context, and prompts by their tokens, with their bars."""
    ceiling, matrix = copy_bandwidth(stage), matrix_rate(stage)
    shape = TINY if stage.tiny else LLAMA_8B
    for (rows, context), bar in decodes.items():
        yield decode(stage, runner, rows, context, bar, ceiling)
    for length, bar in ({40: 0.0} if stage.tiny else prefills).items():
        yield prefill(stage, runner, length, bar, prefill_flops(shape, length) / matrix)


def int8(stage: Stage) -> Iterator[Line]:
    """One stream, 64 streams and prompts over int8 keys and values."""
    rows = 64
    runner, line = loaded(stage, stage.size(rows * 2048 // BLOCK + 64, 24), "int8")
    yield line
    bars = {case: bar for case, bar in DECODE_BARS.items() if case[0] <= rows}
    yield from steps(stage, runner, {(1, 20): 0.0} if stage.tiny else bars, PREFILL_BARS)


def transformers(stage: Stage) -> Iterator[Line]:
    """The steps of transformers with the same model."""
    yield _transformers(stage, checkpoint(stage))


def fill(stage: Stage, pool: Any) -> None:
    """Random keys and values everywhere, a layer at a time."""
    *outer, length = pool.shape[1:]
    some = stage.random_bf16((*outer, length * pool.dtype.itemsize // 2)).view(pool.dtype)
    for layer in pool:
        stage.copy(layer, some)
    stage.device.synchronize()


def decode(
    stage: Stage, runner: Runner, rows: int, context: int, bar: float, ceiling: float
) -> Line:
    """Steps of ``rows`` sequences that see ``context`` tokens each, drawn at temperature 0.8."""
    width = -(-context // BLOCK)
    order = np.random.default_rng(11).permutation(rows * width).astype(np.int32)
    tables = order.reshape(rows, width)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    spec = SampleSpec(params, context, np.empty(0, np.int32), 1)
    token = np.array([7], np.int32)
    chunks = tuple(
        Chunk(at.to_bytes(2, "big"), context - 1, token, tables[at], spec) for at in range(rows)
    )
    steps = _seconds(stage, runner, chunks, 30)
    graph = _graph(stage, runner)
    rate = rows / steps.median
    nbytes = runner.card.weights_bytes + rows * context * _block_bytes(runner) / BLOCK
    floor = nbytes / ceiling
    words = f"{rate:.0f} tok/s, step {steps.text}, {floor / steps.median:.2f} of the floor"
    figures = {"tokens_per_s": rate, "seconds": steps.median, "floor": floor}
    if graph is not None:
        words += f", graph alone {graph.text}"
        figures["graph_seconds"] = graph.median
    early = _early_graph(stage, runner)
    if early is not None:
        words += f", with dependent launches {early.text}"
        figures["early_graph_seconds"] = early.median
    held = floor / steps.median >= bar
    return measured(f"decode {rows} x {context}", words, f"{bar:.2f}", held, **figures)


def _block_bytes(runner: Runner) -> int:
    """Bytes of a block of all layers."""
    layout = runner.card.layout
    return layout.num_layers * layout.block_bytes


def _graph(stage: Stage, runner: Runner) -> Timing | None:
    """The captured step that ran last, by itself."""
    graph = _last_graph(runner)
    return None if graph is None else stage.time([graph.replay], 20)


def _early_graph(stage: Stage, runner: Runner) -> Timing | None:
    """The same launches captured again, but those of the model may begin early; None: they cannot.

    The sampler's launches are as before.
    """
    graph, early, backend = _last_graph(runner), stage.early, runner.backend
    if graph is None or early is None or not isinstance(backend, CudaBackend):
        return None
    usual, backend.device = backend.device, early
    try:
        parts = [early.capture(part._work) for part in graph._parts]

        def replay() -> None:
            for part in parts:
                part.replay()

        return stage.time([replay], 20)
    finally:
        backend.device = usual


def _last_graph(runner: Runner) -> DecodeGraph | None:
    computer = runner.pipeline._computer
    if not isinstance(computer, DeviceSteps) or not computer._graphs:
        return None
    return [*computer._graphs.values()][-1]


def prefill_flops(shape: Shape, length: int) -> float:
    """Operations of the products and of causal attention; the head counts for one row."""
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    weights = shape.hidden * (heads + shape.heads * shape.head_dim + 3 * shape.intermediate)
    attention = 2.0 * shape.heads * shape.head_dim * length * (length + 1)
    return shape.layers * (2.0 * weights * length + attention)


def prefill(stage: Stage, runner: Runner, length: int, bar: float, floor: float) -> Line:
    """One prompt in one chunk; ``floor``: its seconds at the matrix rate."""
    tokens = np.random.default_rng(12).integers(0, runner.card.vocab_size, length).astype(np.int32)
    table = np.arange(-(-length // BLOCK), dtype=np.int32)
    spec = SampleSpec(SamplingParams(temperature=0), length, np.empty(0, np.int32), length)
    timing = _seconds(stage, runner, (Chunk(b"prompt", 0, tokens, table, spec),), 8)
    rate = length / timing.median
    share = floor / timing.median
    words = f"{rate:.0f} tok/s, {timing.text}, {share:.2f} of the floor"
    figures = {"tokens_per_s": rate, "seconds": timing.median, "floor": floor}
    if not bar:
        return Line(f"prefill of {length}", words, figures=figures)
    return measured(f"prefill of {length}", words, f"{bar:.2f}", share >= bar, **figures)


def _seconds(stage: Stage, runner: Runner, chunks: Sequence[Chunk], repeats: int) -> Timing:
    """From a plan to its tokens on the host; raises what the step failed with."""
    times = []
    for at in range(stage.size(repeats, 2) + 2):
        began = time.perf_counter()
        result = runner.pipeline.execute(StepPlan(at, tuple(chunks)))
        times.append(time.perf_counter() - began)
        for error in result.failed.values():
            raise error
    return Timing.of(times[2:])


def _transformers(stage: Stage, folder: Path) -> Line:
    """One stream, compiled, with a static cache."""
    what = "transformers, compiled, static cache, 1 x 128"
    if not has_torch():
        return skipped(what, "torch is not installed")

    context, steps = stage.size(128, 16), stage.size(40, 2)
    try:
        timing = Timing.of(_transformers_times(folder, context, steps, gpu=stage.cupy is not None))
    except Exception as error:
        return skipped(what, f"{type(error).__name__}: {str(error)[:160]}")
    rate = 1 / timing.median
    return Line(what, f"{rate:.0f} tok/s, step {timing.text}", figures={"tokens_per_s": rate})


def _transformers_times(folder: Path, context: int, steps: int, *, gpu: bool) -> list[float]:
    """Seconds of each decode step after ``context`` tokens, from a token to the next.

    transformers at its fastest for one stream: compiled, with a static cache.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    where = "cuda" if gpu else "cpu"
    kind: Any = torch.bfloat16
    load = transformers.AutoModelForCausalLM.from_pretrained
    model: Any = load(folder, dtype=kind).to(where).eval()
    warm = 8
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + steps + warm + 1)
    compiled: Any = torch.compile(model, mode="reduce-overhead" if gpu else "default")
    ids = torch.randint(4, model.config.vocab_size, (1, context), device=where)
    times = []
    with torch.inference_mode():
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        for step in range(steps + warm):
            began = time.perf_counter()
            if gpu:
                torch.compiler.cudagraph_mark_step_begin()
            out = compiled(
                input_ids=token, past_key_values=cache, use_cache=True,
                position_ids=torch.tensor([[context + step]], device=where),
            )  # fmt: skip
            token = out.logits[:, -1:].argmax(-1).clone()
            token.item()
            times.append(time.perf_counter() - began)
    return times[warm:]
