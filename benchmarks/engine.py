"""Speed of model execution through the executor, beside transformers and the machine's limits.

``python -m baton.benchmarks.engine [--models m25,m125] [--peer-python PATH]``. One thread
everywhere; medians of wall time, both sides taking turns. Limits are measured in the same
run: sgemm for prefill, streaming the weights from memory for decode. Absolute figures move
with the machine's load, ratios of one run carry over.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..engine.plan import Chunk, SampleSpec, StepPlan
from ..engine.runner import RunnerConfig, load_runner
from ..proto.sampling import SamplingParams
from .checkpoints import SHAPES, Shape, write_checkpoint

PROMPT, CONTEXT, BLOCK = 512, 128, 16
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
MEASURES = ("prefill", "decode_1", "decode_8")
I32 = npt.NDArray[np.int32]
GREEDY = SamplingParams(temperature=0)
EMPTY = np.empty(0, np.int32)


class Engine:
    """A loaded model, driven through its executor without a scheduler."""

    def __init__(self, folder: Path, backend: str, steps: int) -> None:
        blocks = 8 * -(-(PROMPT + CONTEXT) // BLOCK)
        self.runner = load_runner(
            RunnerConfig(
                model=str(folder),
                backend=backend,
                block_size=BLOCK,
                num_blocks=blocks,
                max_length=2 * PROMPT,
            )
        )
        vocab = self.runner.card.vocab_size
        self.ids = np.random.default_rng(1).integers(4, vocab, (8, PROMPT)).astype(np.int32)
        self.steps = steps

    def rate(self, measure: str) -> float:
        """Tokens per second of one measurement."""
        return self._prefill() if measure == "prefill" else self._decode(int(measure[7:]))

    def close(self) -> None:
        """Nothing to end."""

    def _prefill(self) -> float:
        began = time.perf_counter()
        self._execute([chunk(0, 0, self.ids[0])])
        return PROMPT / (time.perf_counter() - began)

    def _decode(self, streams: int) -> float:
        last = self._execute([chunk(i, 0, self.ids[i, :CONTEXT]) for i in range(streams)])
        began = time.perf_counter()
        for at in range(CONTEXT, CONTEXT + self.steps):
            tokens = np.array(last, np.int32)[:, None]
            last = self._execute([chunk(i, at, row) for i, row in enumerate(tokens)])
        return streams * self.steps / (time.perf_counter() - began)

    def _execute(self, chunks: Sequence[Chunk]) -> list[int]:
        result = self.runner.executor.execute(StepPlan(0, tuple(chunks)))
        if result.failed:
            raise RuntimeError(str(result.failed))
        return [s.token for s in result.sampled]


def chunk(stream: int, start: int, tokens: I32) -> Chunk:
    """Tokens of a stream, which has its own stretch of the pool."""
    blocks = -(-(PROMPT + CONTEXT) // BLOCK)
    table = np.arange(stream * blocks, (stream + 1) * blocks, dtype=np.int32)
    spec = SampleSpec(GREEDY, start + len(tokens), EMPTY, 0)
    return Chunk(bytes([stream]), start, tokens, table, spec)


class Transformers:
    """The same measurements in a process of another Python."""

    def __init__(self, python: str, folder: Path, dtype: str, steps: int) -> None:
        script = Path(__file__).with_name("engine_peer.py")
        numbers = [str(n) for n in (PROMPT, CONTEXT, steps)]
        self._process = subprocess.Popen(
            [python, "-P", str(script), str(folder), dtype, *numbers],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def rate(self, measure: str) -> float:
        """Tokens per second of one measurement."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        self._process.stdin.write(f"{measure}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with code {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def measure(sides: Sequence[Engine | Transformers], repeats: int) -> dict[str, list[float]]:
    """Median tokens per second of every measurement and side, the sides taking turns."""
    medians = {}
    for name in MEASURES:
        for side in sides:
            side.rate(name)  # warm
        rates = [[side.rate(name) for side in sides] for _ in range(repeats)]
        medians[name] = [statistics.median(column) for column in zip(*rates, strict=True)]
    return medians


def timed(action: Callable[[], object]) -> float:
    """Seconds an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def machine_limits() -> tuple[float, float]:
    """Large sgemm in FLOP/s and streaming reads in bytes/s, of one thread."""
    a = np.ones((1024, 1024), np.float32)
    gemm = min(timed(lambda: a @ a) for _ in range(7))
    big = np.ones(1 << 26, np.float32)
    read = min(timed(lambda: big @ big) for _ in range(5))
    return 2 * 1024**3 / gemm, big.nbytes / read


def limits_of(shape: Shape, item: int, gemm: float, read: float) -> dict[str, float]:
    """Tokens per second if nothing but arithmetic, or but reading weights, took time."""
    step = shape.decode_parameters() * item / read
    eight = max(step, 8 * 2 * shape.decode_parameters() / gemm)
    prefill = PROMPT / (shape.prefill_flops(PROMPT) / gemm)
    return {"prefill": prefill, "decode_1": 1 / step, "decode_8": 8 / eight}


def run_model(
    args: argparse.Namespace, shape: Shape, folder: Path, gemm: float, read: float
) -> None:
    """Measure and print one size in both dtypes."""
    single = []
    for dtype, torch_dtype in (("F32", "float32"), ("BF16", "bfloat16")):
        path = write_checkpoint(folder / f"{shape.name}-{dtype}", shape, dtype)
        sides: list[Engine | Transformers] = [Engine(path, args.backend, args.steps)]
        if args.peer_python:
            sides.append(Transformers(args.peer_python, path, torch_dtype, args.steps))
        try:
            rates = measure(sides, args.repeats)
        finally:
            for side in sides:
                side.close()
        limits = limits_of(shape, 4 if dtype == "F32" else 2, gemm, read)
        for name, (ours, *peer) in rates.items():
            beside = f"{peer[0]:10.0f} {ours / peer[0]:6.2f}x" if peer else ""
            label = f"{shape.name} {dtype}"
            print(f"{label:12} {name:9} {ours:9.0f} {beside:18} {limits[name]:9.0f}", flush=True)
        single.append(rates["decode_1"][0])
    print(f"{shape.name:12} BF16 / F32 at one stream: {single[1] / single[0]:.2f}x", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine", description=__doc__)
    parser.add_argument("--models", default="m25,m125", help="comma-separated: m25, m125")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--steps", type=int, default=48, help="decode steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print the figures of all models asked for."""
    args = parse(argv)
    os.environ.update(ONE_THREAD)
    gemm, read = machine_limits()
    print(f"one thread: sgemm {gemm / 1e9:.0f} GFLOP/s, reads {read / 1e9:.0f} GB/s")
    print(f"{'tokens/s':12} {'':9} {'engine':>9} {'transformers':>18} {'limit':>9}")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for name in args.models.split(","):
            run_model(args, SHAPES[name], Path(folder), gemm, read)
    return 0


if __name__ == "__main__":
    sys.exit(main())
