"""Kernels over rows, products with weights, and the sampler, in the shapes of a Llama-3.1-8B."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from baton.engine.kernels.cuda import elementwise, linear, sampling
from baton.engine.scheduling.plan import SampleSpec
from baton.proto.sampling import SamplingParams

from .lines import Line
from .races import (
    Bars,
    Runner,
    as_torch,
    copy_bandwidth,
    entered,
    has_torch,
    matrix_rate,
    node_seconds,
    of_torch,
    own,
    race,
    verdict,
)
from .stage import Stage, Work
from .sweep import RINGS

HIDDEN, WIDE, VOCAB, EPS = 4096, 14336, 128256, 1e-5
_NODES = 200


def rows(stage: Stage) -> Iterator[Line]:
    """RMSNorm with residual, SwiGLU, and keys into the cache; in graphs, as in a decode step."""
    ceiling, node = copy_bandwidth(stage), node_seconds(stage)
    device, hidden = stage.device, stage.size(HIDDEN, 64)
    for count in (stage.size(256, 3), stage.size(4096, 5)):
        x, residual = (stage.random_bf16((count, hidden), seed=i) for i in range(2))
        weight, out = stage.random_bf16((hidden,)), device.empty((count, hidden), np.uint16)
        work = partial(elementwise.add_rms_norm, device, x, residual, weight, EPS, out)
        few = count <= 256
        bars = Bars(4 * x.nbytes / ceiling, 0 if few else 1 / 1.3, 2 * node if few else 0)
        peers = {"torch": partial(_torch_norm, stage, x, residual, weight, _NODES if few else 8)}
        runners, refused = entered(peers if has_torch() else {})
        one = device.tuned(msgspec.structs.replace(device.tuning, norm_rows=count))
        again = partial(elementwise.add_rms_norm, one, x, residual, weight, EPS, out)
        rounds, apart = _NODES if few else 8, replace(stage, device=one)
        mine = [own(stage, [work], rounds), own(apart, [again], rounds, "a word per thread")]
        times = race(stage, [*mine, *runners])
        yield verdict(f"add + RMSNorm {count} x {hidden}", times, bars, refused)
    count, wide = stage.size(256, 3), stage.size(WIDE, 64)
    gate_up, out = stage.random_bf16((count, 2 * wide)), device.empty((count, wide), np.uint16)
    work = partial(elementwise.silu_mul, device, gate_up, out)
    times = race(stage, [own(stage, [work], _NODES)])
    yield verdict(f"SwiGLU {count} x {wide}", times, Bars(1.5 * gate_up.nbytes / ceiling))
    yield _append(stage, count)
    yield _node(stage)


def _node(stage: Stage) -> Line:
    """A node of a graph that does next to nothing, also if it may begin before the one before."""
    runners = []
    for device, name in ((stage.device, "ours"), (stage.early, "dependent launches")):
        if device is not None:
            gate_up, out = device.zeros((1, 16), np.uint16), device.zeros((1, 8), np.uint16)
            work = partial(elementwise.silu_mul, device, gate_up, out)
            runners.append(own(replace(stage, device=device), [work], 500, name))
    return verdict("node of a graph", race(stage, runners), Bars())


def _torch_norm(stage: Stage, x: Any, residual: Any, weight: Any, rounds: int) -> Runner:
    import torch

    def norm(x: Any, residual: Any, weight: Any) -> Any:
        residual = residual + x
        return residual, torch.nn.functional.rms_norm(residual, weight.shape, weight, EPS)

    call: Any = torch.compile(norm) if stage.cupy is not None else norm
    arrays = [as_torch(array) for array in (x, residual, weight)]
    return of_torch(stage, "torch.compile", [lambda: call(*arrays)], rounds)


def _append(stage: Stage, count: int) -> Line:
    device, blocks = stage.device, stage.size(4096, 8)
    qkv = stage.random_bf16((count, 48 * 128))
    pool = stage.random_bf16((blocks, 2, 8, 16, 128))
    slots = np.random.default_rng(9).permutation(blocks * 16)[:count].astype(np.int64)
    angles = np.random.default_rng(9).standard_normal((64, 128), np.float32)
    positions = device.upload(np.arange(count, dtype=np.int32) % 64)
    where, table = device.upload(slots), device.upload(angles)
    out = device.empty((count, 32, 128), np.uint16)
    work = partial(
        elementwise.qk_norm_rope_append, device, qkv, positions, where, table, None, None, EPS,
        pool, out,
    )  # fmt: skip
    times = race(stage, [own(stage, [work], _NODES)])
    return verdict(f"RoPE + KV append, {count} rows", times, Bars())


def products(stage: Stage) -> Iterator[Line]:
    """Few rows against the bandwidth of their weights, many against the matrix rate and torch."""
    ceiling = copy_bandwidth(stage)
    matrix = matrix_rate(stage)
    yield Line("matrix rate", f"{matrix / 1e12:.0f} TFLOP/s", figures={"flops": matrix})
    hidden, wide, vocab = stage.size(HIDDEN, 64), stage.size(WIDE, 64), stage.size(VOCAB, 96)
    shapes = (
        ("qkv", 3 * hidden // 2, hidden),
        ("down", hidden, wide),
        ("gate-up", 2 * wide, hidden),
    )
    for name, width, depth in (*shapes, ("head", vocab, hidden)):
        for count in (1, 8, 16, stage.size(64, 20), stage.size(256, 24)):
            yield _product(stage, name, count, width, depth, (ceiling, matrix))
    yield _product(stage, "gate-up", stage.size(8192, 32), 2 * wide, hidden, (ceiling, matrix))


def _product(
    stage: Stage, name: str, count: int, width: int, depth: int, ceilings: tuple[float, float]
) -> Line:
    device, nbytes = stage.device, 2 * width * depth
    copies = stage.size(max(1, -(-(512 << 20) // nbytes)), 1)
    weights = [stage.random_bf16((width, depth), seed=i) for i in range(copies)]
    x, out = stage.random_bf16((count, depth)), device.empty((count, width), np.uint16)
    works: list[Work] = [partial(linear.linear, device, x, w, None, out) for w in weights]

    def torch_product() -> Runner:
        import torch

        there, result = as_torch(x), as_torch(out)
        each: list[Work] = [
            partial(torch.matmul, there, as_torch(w).T, out=result) for w in weights
        ]
        return of_torch(stage, "torch", each, 2)

    runners, refused = entered({"torch": torch_product} if has_torch() else {})
    few, rings = count <= linear.MAX_SKINNY, []
    for tiles in RINGS[1:] if 8 < count <= linear.MAX_SKINNY else ():
        ring = device.tuned(msgspec.structs.replace(device.tuning, skinny_ring=((0, tiles),)))
        ours: list[Work] = [partial(linear.linear, ring, x, w, None, out) for w in weights]
        rings.append(own(replace(stage, device=ring), ours, 2, f"ring of {tiles} tiles"))
    times = race(stage, [own(stage, works, 2), *rings, *runners], 12)
    flops = 2 * count * width * depth
    floor = max(nbytes / ceilings[0], flops / ceilings[1])
    bars = Bars(floor, 0.9 if few and nbytes >= 32 << 20 else 0.0)
    line = verdict(f"{name} {count} x {width} x {depth}", times, bars, refused)
    rate = flops / times["ours"].median
    return Line(
        line.what, f"{line.result}, {rate / 1e12:.0f} TFLOP/s", line.bar, line.state,
        {**line.figures, "flops": rate},
    )  # fmt: skip


def fp8_products(stage: Stage) -> Iterator[Line]:
    """Products with weights in 8-bit floats, beside ours with the bfloat16 weights they stand for.

    The floor counts the bytes of the codes.
    """
    ceiling = copy_bandwidth(stage)
    hidden, wide = stage.size(HIDDEN, 64), stage.size(WIDE, 64)
    for name, width, depth in (("down", hidden, wide), ("gate-up", 2 * wide, hidden)):
        for count in (1, 8, 16, stage.size(64, 20), stage.size(256, 70)):
            yield _fp8_product(stage, name, count, width, depth, ceiling)


def _fp8_product(
    stage: Stage, name: str, count: int, width: int, depth: int, ceiling: float
) -> Line:
    device, rng = stage.device, np.random.default_rng(5)
    copies = stage.size(max(1, -(-(512 << 20) // (width * depth))), 1)
    some = rng.integers(0, 0x7F, (min(width, 1024), depth)).astype(np.uint8)
    codes = np.tile(linear.in_pieces(some), (-(-width // len(some)), 1))[:width]
    scales = rng.uniform(1e-3, 2e-3, (width, -(-depth // 128))).astype(np.float32)
    weights = [
        linear.Fp8Matrix(device.upload(codes), device.upload(scales), depth, 2)
        for _ in range(copies)
    ]
    plain = [stage.random_bf16((width, depth), seed=i) for i in range(max(1, copies // 2))]
    x, out = stage.random_bf16((count, depth)), device.empty((count, width), np.uint16)
    space = device.empty((weights[0].space,), np.uint16)
    narrow = [partial(linear.fp8_linear, device, x, w, None, out, space) for w in weights]
    wide: list[Work] = [partial(linear.linear, device, x, w, None, out) for w in plain]
    times = race(stage, [own(stage, narrow, 2), own(stage, wide, 2, name="bfloat16")], 12)
    return verdict(f"fp8 {name} {count} x {width} x {depth}", times, Bars(codes.nbytes / ceiling))


_PARAMS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},  # keeps 11,000 tokens
    "top-p 0.9, few kept": {"temperature": 0.3, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def drawing(stage: Stage) -> Iterator[Line]:
    """Tokens of float32 logits.

    The bar of 256 rows is two and a half passes over them, of one row the time of eight empty nodes
    of a graph.
    """
    ceiling, vocab = copy_bandwidth(stage), stage.size(VOCAB, 500)
    passes, nodes = 2.5 * 256 * VOCAB * 4 / ceiling, 8 * node_seconds(stage)
    for batch, limit in ((stage.size(256, 3), passes), (1, nodes)):
        copies = stage.size(2 if batch > 1 else 256, 1)
        logits = [_logits(stage, batch, vocab, seed) for seed in range(copies)]
        for name, params in _PARAMS.items():
            yield _draw(stage, name, params, logits, limit, ceiling)
        yield _draw(
            stage, "grammar", {"temperature": 0.8}, logits, limit * 1.05, ceiling, mask=True
        )


def _logits(stage: Stage, batch: int, vocab: int, seed: int) -> Any:
    """Normal logits times 3, which is about as peaked as a model's."""
    values = np.random.default_rng(seed).standard_normal(min(batch, 8) * vocab, np.float32)
    rows = np.tile(3 * values.reshape(-1, vocab), (-(-batch // 8), 1))[:batch]
    return stage.device.upload(np.ascontiguousarray(rows))


def _draw(
    stage: Stage,
    name: str,
    params: dict[str, Any],
    logits: Sequence[Any],
    limit_s: float,
    ceiling: float,
    *,
    mask: bool = False,
) -> Line:
    device, (batch, vocab) = stage.device, logits[0].shape
    asked = np.zeros(batch, sampling.ROW)
    for at in range(batch):
        spec = SampleSpec(SamplingParams(seed=at, **params), 100 + at, np.empty(0, np.int32), 1)
        sampling.fill_row(asked, at, spec, 0 if mask else -1)
    on_device = device.upload(asked.view(np.uint8).reshape(batch, -1))
    restrictions = sampling.Restrictions()
    if mask:
        allowed = np.random.default_rng(10).random(vocab) < 0.5
        restrictions = sampling.Restrictions(device.upload(sampling.mask_words(allowed)[None]))
    space = sampling.workspace(device, batch, vocab)
    tokens, errors = (device.zeros((batch,), np.int32) for _ in range(2))
    works = [
        partial(
            sampling.sample, device, each, on_device, space, tokens, errors, restrictions,
            filters=sampling.filtered(asked, vocab),
        )
        for each in logits
    ]  # fmt: skip
    runners, refused = entered(_drawn_by_others(stage, name, params, logits))
    rounds = max(1, stage.size(16, 1) // len(works))
    times = race(stage, [own(stage, works, rounds), *runners])
    bars = Bars(logits[0].nbytes / ceiling * 2, 0, limit_s)
    return verdict(f"draw {name}, {batch} x {vocab}", times, bars, refused)


def _drawn_by_others(
    stage: Stage, name: str, params: dict[str, Any], logits: Sequence[Any]
) -> dict[str, Callable[[], Runner]]:
    def by_torch() -> Runner:
        import torch

        def draw(rows: Any) -> Any:
            if not params["temperature"]:
                return rows.argmax(-1)
            weights = torch.softmax(rows / params["temperature"], -1)
            return (weights / torch.empty_like(weights).exponential_()).argmax(-1)

        works = [partial(draw, as_torch(each)) for each in logits]
        return of_torch(stage, "torch", works)

    def by_flashinfer() -> Runner:
        import torch
        from flashinfer import sampling as theirs

        # Tensors, because the state of torch's generator cannot be read while a graph is captured.
        seed, offset = torch.zeros((2, 1), dtype=torch.int64, device="cuda")
        fixed = {"seed": seed, "offset": offset}

        def draw(rows: Any) -> Any:
            if "top_k" in params:  # without a temperature, as is the last
                k, p = params["top_k"], params["top_p"]
                return theirs.top_k_top_p_sampling_from_logits(rows, k, p, **fixed)
            if "top_p" in params:
                weights = theirs.softmax(rows, params["temperature"])
                return theirs.top_p_sampling_from_probs(weights, params["top_p"], **fixed)
            if "min_p" in params:
                weights = theirs.softmax(rows, params["temperature"])
                return theirs.min_p_sampling_from_probs(weights, params["min_p"], **fixed)
            return theirs.sampling_from_logits(rows, **fixed)

        return of_torch(stage, "FlashInfer", [partial(draw, as_torch(each)) for each in logits])

    found: dict[str, Callable[[], Runner]] = {}
    if has_torch() and name in ("greedy", "temperature"):
        found["torch"] = by_torch
    if importlib.util.find_spec("flashinfer") is not None and name not in ("greedy", "grammar"):
        found["FlashInfer"] = by_flashinfer
    return found
