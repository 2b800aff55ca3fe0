"""Compiled kernels beside OpenBLAS, plain copies and the limits of the same run.

Limits: reading a weight once (a dot product over as many bytes) and multiplying at the rate
of a large sgemm, whichever takes longer. Best of several rounds taken in turn, so that a busy
machine slows all columns alike; only ratios carry over to other machines.

``python -m baton.benchmarks.kernels [ISA]``; run with one BLAS thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.backend import F32, Backend
from baton.engine.kernels.load import load_backend
from baton.engine.pipeline.model import make_pool
from baton.proto.layout import KVLayout
from baton.runtime.process.os_settings import limit_blas_threads

Call = Callable[[], object]

COLD_ROWS = (1, 2, 4, 6, 8, 12, 16)
COLD_BYTES = 400 << 20
ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 128, 512)
# model: (in, out) of qkv, attention out, gate+up, down, head
SHAPES = {
    "m25": [(512, 1024), (512, 512), (512, 2816), (1408, 512), (512, 8192)],
    "m125": [(768, 1280), (768, 768), (768, 4096), (2048, 768), (768, 32000)],
}
HEADS = {"m25": (8, 4, 64), "m125": (12, 4, 64)}
BLOCK_SIZE = 16


def measure(calls: dict[str, Call], rounds: int = 7, seconds: float = 0.01) -> dict[str, float]:
    """Best seconds of each call, the calls measured in turn."""
    best, counts = dict.fromkeys(calls, float("inf")), {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / counts[name])
    return best


def sgemm_rate() -> float:
    """Flops per second of a large sgemm."""
    a = np.ones((768, 768), np.float32)
    out = np.empty_like(a)
    return 2 * 768**3 / measure({"sgemm": lambda: np.matmul(a, a, out=out)}, 15)["sgemm"]


def linear_rows(backend: Backend, name: str, width: int, out: int, peak: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((out, width), dtype=np.float32)
    transposed = np.ascontiguousarray(weights.T)
    halves = (weights.view(np.uint32) >> 16).astype(np.uint16)
    packed, packed_half = backend.pack_linear([weights]), backend.pack_linear([halves])
    flat = weights.reshape(-1)
    half = flat[: len(flat) // 2]
    for rows in ROWS:
        x = rng.standard_normal((rows, width), dtype=np.float32)
        y = np.empty((rows, out), np.float32)
        best = measure(
            {
                "f32": partial(backend.linear, x, packed, y),
                "bf16": partial(backend.linear, x, packed_half, y),
                "blas": partial(np.matmul, x, transposed, out=y),
                "read f32": partial(np.dot, flat, flat),
                "read bf16": partial(np.dot, half, half),
            },
            rounds=5 if rows > 100 else 7,
        )
        flops = 2.0 * rows * width * out
        line = f"{name} {width}x{out:<5d} rows {rows:3d}  blas {flops / best['blas'] / 1e9:5.1f}"
        for kind in ("f32", "bf16"):
            limit = max(best[f"read {kind}"], flops / peak) / best[kind]
            line += f"  {kind} {flops / best[kind] / 1e9:5.1f} GFLOP/s"
            line += f" {best['blas'] / best[kind]:5.2f} x blas, {limit:4.0%} of the limit"
        print(line, flush=True)


def attention_row(backend: Backend, name: str, rows: int, context: int, peak: float) -> None:
    """Six layers in turn, as a model does: the first caches do not hold them all."""
    heads, kv_heads, dim = HEADS[name]
    rng = np.random.default_rng(0)
    blocks = context // BLOCK_SIZE
    layers = [
        rng.standard_normal((blocks, 2, kv_heads, BLOCK_SIZE, dim), dtype=np.float32)
        for _ in range(6)
    ]
    table = rng.permutation(blocks).astype(np.int32)[None]
    q = rng.standard_normal((rows, heads, dim), dtype=np.float32)
    out = np.empty((rows, heads * dim), np.float32)
    positions = np.arange(context - rows, context, dtype=np.int32)
    offsets = np.array([0, rows], np.int32)

    def run() -> None:
        for kv in layers:
            backend.attention(q, kv, table, offsets, positions, dim**-0.5, 0, out)

    flat = [kv.reshape(-1) for kv in layers]
    best = measure({"run": run, "read": lambda: [np.dot(kv, kv) for kv in flat]})
    flops = 6 * 4.0 * dim * heads * float((positions + 1).sum())
    floor = max(best["read"], flops / peak)
    took = best["run"]
    print(
        f"{name} attention rows {rows:3d} context {context:4d}  {took / 6 * 1e6:7.1f} us a layer"
        f"  {flops / took / 1e9:6.1f} GFLOP/s  {6 * layers[0].nbytes / took / 1e9:5.1f} GB/s"
        f"  {floor / took:4.0%} of the limit",
        flush=True,
    )


def cold_weights_row(backend: Backend, shape: tuple[int, int]) -> None:
    """GB/s at which weights that no cache holds are used, by rows, beside a dot product."""
    rng, (into, out) = np.random.default_rng(0), shape
    weight = rng.standard_normal((out, into), dtype=np.float32)
    packed = [backend.pack_linear([weight]) for _ in range(COLD_BYTES // weight.nbytes)]
    big = np.ones(COLD_BYTES // 16, np.float32)
    figures = [f"dot {big.nbytes / min(_timed(lambda: big @ big) for _ in range(7)) / 1e9:.1f}"]
    for rows in COLD_ROWS:
        x, y = (
            rng.standard_normal((rows, into), dtype=np.float32),
            np.empty((rows, out), np.float32),
        )
        times = [_timed(partial(backend.linear, x, p, y)) for _ in range(3) for p in packed]
        figures.append(f"{rows} rows {weight.nbytes / statistics.median(times) / 1e9:.1f}")
    print(f"cold f32 weights {into}x{out}  GB/s  {'  '.join(figures)}", flush=True)


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def move_row(backend: Backend, blocks: int) -> None:
    """Six layers of blocks of m25: to a payload and back, to another pool, and only read."""
    rng = np.random.default_rng(0)
    layout = KVLayout(num_layers=6, num_kv_heads=4, head_dim=64, block_size=BLOCK_SIZE)
    pool = make_pool(layout, 3 * blocks)
    rng.standard_normal(out=pool, dtype=np.float32)
    ids = rng.permutation(3 * blocks)[:blocks].astype(np.int32)
    size = 6 * blocks * pool[0, 0].nbytes
    target = make_pool(layout, 3 * blocks)
    others = rng.permutation(3 * blocks)[:blocks].astype(np.int32)
    payload: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)
    source = np.ones(size, np.uint8)
    best = measure(
        {
            "memcpy": lambda: np.copyto(payload, source),
            "gather and sum": lambda: backend.gather_blocks(pool, 0, 6, ids, payload),
            "scatter and sum": lambda: backend.scatter_blocks(pool, 0, 6, ids, payload),
            "copy and sum": lambda: backend.copy_blocks(pool, target, 0, 6, ids, others),
            "sum": lambda: backend.sum_blocks(pool, 0, 6, ids),
        }
    )
    figures = "".join(f"  {name} {size / each / 1e9:5.1f}" for name, each in best.items())
    print(f"{blocks:3d} blocks x 6 layers, {size >> 20:3d} MiB  GB/s{figures}", flush=True)


def row_kernels(backend: Backend, rows: int) -> None:
    """Norm and activation of m125 beside reading their inputs."""
    rng = np.random.default_rng(0)
    x, gate_up = (rng.standard_normal((rows, n), dtype=np.float32) for n in (768, 4096))
    normed: F32 = np.empty((rows, 768), np.float32)
    gated: F32 = np.empty((rows, 2048), np.float32)
    weight = np.ones(768, np.float32)
    best = measure(
        {
            "rms_norm": lambda: backend.rms_norm(x, weight, 1e-6, normed),
            "silu_mul": lambda: backend.silu_mul(gate_up, gated),
            "copy of gate_up": lambda: gate_up.copy(),
        }
    )
    figures = "".join(f"  {name} {each * 1e6:7.1f}" for name, each in best.items())
    print(f"m125 rows {rows:3d}  us{figures}", flush=True)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(prog="kernels", description=__doc__)
    parser.add_argument("isa", nargs="?", metavar="ISA", help="an instruction set [the best here]")
    arguments = parser.parse_args()
    limit_blas_threads(1)
    backend = load_backend("cpu", isa=arguments.isa)
    peak = sgemm_rate()
    print(f"{backend.numerics}  sgemm {peak / 1e9:.1f} GFLOP/s")
    for name, shapes in SHAPES.items():
        for width, out in shapes:
            linear_rows(backend, name, width, out, peak)
    for shape in ((512, 2816), (768, 4096)):
        cold_weights_row(backend, shape)
    for name in HEADS:
        for rows, context in ((512, 512), (512, 2048), (1, 512), (1, 2048)):
            attention_row(backend, name, rows, context, peak)
    for blocks in (8, 32, 128):
        move_row(backend, blocks)
    for rows in (1, 512):
        row_kernels(backend, rows)


if __name__ == "__main__":
    main()
