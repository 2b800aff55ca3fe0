"""Products with quantized weights beside the machine's read bandwidth.

``python -m baton.benchmarks.quantized [--isa NAME] [--kinds Q4_K,Q8_0]``: random weights in one
thread, more than the caches hold; bytes of weights a second with few rows beside reading as many
bytes, operations a second with many. Of processor time, because other programs then slow only
what they share: caches and memory. ``baton.benchmarks.engine --gguf`` has whole models.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from baton.engine.kernels.backend import F32, Backend, PackedLinear, QuantizedWeights
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.quantized import KINDS
from baton.runtime.process.os_settings import limit_blas_threads

FEW, MANY = (1, 4, 8), 512
SHAPE = (1536, 17920)
"""Inputs and outputs: gate and up of a model with 1.5 billion weights."""
BYTES = 160 << 20
"""Weights that no cache holds."""


def timed(action: Callable[[], object], times: int) -> float:
    """Return the least processor time of a few calls, in seconds."""
    best = math.inf
    for _ in range(times):
        began = time.process_time()
        action()
        best = min(best, time.process_time() - began)
    return best


def random_weights(rng: np.random.Generator, kind: str) -> QuantizedWeights:
    """Random bits; the speed does not depend on the values."""
    columns, rows = SHAPE
    nbytes = columns // KINDS[kind].items * KINDS[kind].nbytes
    blocks = rng.integers(0, 256, (rows, nbytes), dtype=np.uint8)
    return QuantizedWeights(kind, blocks, columns)


def kind_row(backend: Backend, kind: str, read: float) -> str:
    """Measure one kind of weights."""
    rng = np.random.default_rng(0)
    weights = random_weights(rng, kind)
    packed = [backend.pack_linear([weights]) for _ in range(-(-BYTES // weights.nbytes))]
    size, figures = sum(each.nbytes for each in packed), ""
    for rows in FEW:
        x = rng.standard_normal((rows, SHAPE[0]), dtype=np.float32)
        y: F32 = np.empty((rows, SHAPE[1]), np.float32)
        rate = size / timed(partial(all_products, backend, x, packed, y), 5)
        figures += f"{rate / 1e9:7.1f} {rate / read:4.0%}"
    x = rng.standard_normal((MANY, SHAPE[0]), dtype=np.float32)
    y = np.empty((MANY, SHAPE[1]), np.float32)
    seconds = timed(partial(backend.linear, x, packed[0], y), 3)
    operations = 2.0 * MANY * SHAPE[0] * SHAPE[1] / seconds
    return f"{kind:7} {packed[0].nbytes / weights.nbytes:6.3f} {figures} {operations / 1e9:8.0f}"


def all_products(backend: Backend, x: F32, packed: Sequence[PackedLinear], y: F32) -> None:
    for each in packed:
        backend.linear(x, each, y)


def products(isa: str | None, kinds: list[str]) -> None:
    """Print a row for each kind."""
    backend = load_backend("cpu", isa=isa)
    big = np.ones(BYTES // 4, np.float32)
    read = big.nbytes / timed(lambda: big @ big, 7)
    few = "".join(f"{f'GB/s, {rows} row' + 's' * (rows > 1):>12}" for rows in FEW)
    print(f"{backend.numerics}; reading: {read / 1e9:.1f} GB/s", flush=True)
    print(f"{'kind':7} {'bytes':>6} {few} {f'GOPS, {MANY}':>9}")
    for kind in kinds:
        print(kind_row(backend, kind, read), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Print all tables."""
    limit_blas_threads(1)
    parser = argparse.ArgumentParser(prog="quantized", description=__doc__)
    parser.add_argument("--isa", help="an instruction set of the CPU kernels")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated")
    args = parser.parse_args(argv)
    products(args.isa, args.kinds.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
