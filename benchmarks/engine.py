"""Speed of model execution through the executor, beside its peers and plain passes of the machine.

``python -m baton.benchmarks.engine [--models m25,m125] [--peer-python PATH] [--vllm-python
PATH]``. One thread everywhere; medians of wall time. All sides take turns, and so does the
machine: the products of the same shapes by OpenBLAS in float32 for prefill, streaming the
weights from memory for decode. Absolute figures move with the machine's load, ratios of one
run carry over.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.sampling import SamplingParams
from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import SHAPES, Shape, write_checkpoint
from .scratch import scratch_folder

PROMPT, CONTEXT, BLOCK = 512, 128, 16
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
MEASURES = ("prefill", "decode_1", "decode_8")
I32 = npt.NDArray[np.int32]
GREEDY = SamplingParams(temperature=0)
EMPTY = np.empty(0, np.int32)


class Engine:
    """A loaded model, driven through its executor without a scheduler."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        steps: int,
        clock: Callable[[], float] = time.perf_counter,
        threads: int = 1,
    ) -> None:
        blocks = 8 * -(-(PROMPT + CONTEXT) // BLOCK)
        self.runner = load_runner(
            RunnerConfig(
                model=str(folder),
                backend=backend,
                threads=threads,
                block_size=BLOCK,
                num_blocks=blocks,
                max_length=2 * PROMPT,
            )
        )
        vocab = self.runner.card.vocab_size
        self.ids = np.random.default_rng(1).integers(4, vocab, (8, PROMPT)).astype(np.int32)
        self.steps = steps
        self.clock = clock

    def rate(self, measure: str) -> float:
        """Tokens per second of one measurement."""
        return self._prefill() if measure == "prefill" else self._decode(int(measure[7:]))

    def close(self) -> None:
        """Nothing to end."""

    def _prefill(self) -> float:
        began = self.clock()
        self._execute([chunk(0, 0, self.ids[0])])
        return PROMPT / (self.clock() - began)

    def _decode(self, streams: int) -> float:
        last = self._execute([chunk(i, 0, self.ids[i, :CONTEXT]) for i in range(streams)])
        began = self.clock()
        for at in range(CONTEXT, CONTEXT + self.steps):
            tokens = np.array(last, np.int32)[:, None]
            last = self._execute([chunk(i, at, row) for i, row in enumerate(tokens)])
        return streams * self.steps / (self.clock() - began)

    def _execute(self, chunks: Sequence[Chunk]) -> list[int]:
        result = self.runner.pipeline.execute(StepPlan(0, tuple(chunks)))
        if result.failed:
            raise RuntimeError(str(result.failed))
        return [s.token for s in result.sampled]


@cache
def table(stream: int) -> I32:
    """Blocks of a stream, its own stretch of the pool; one object, as a worker's request has."""
    blocks = -(-(PROMPT + CONTEXT) // BLOCK)
    return np.arange(stream * blocks, (stream + 1) * blocks, dtype=np.int32)


def chunk(stream: int, start: int, tokens: I32) -> Chunk:
    """Tokens of a stream."""
    spec = SampleSpec(GREEDY, start + len(tokens), EMPTY, 0)
    return Chunk(bytes([stream]), start, tokens, table(stream), spec)


class Machine:
    """The speed at which nothing but the products, or but reading the weights, took time."""

    def __init__(self, shape: Shape, item: int) -> None:
        self._shape, self._item = shape, item
        self._big = np.ones(1 << 25, np.float32)
        wide = 2 * shape.intermediate
        self._x = np.ones((PROMPT, shape.hidden), np.float32)
        self._weights = np.ones((shape.hidden, wide), np.float32)
        self._out = np.empty((PROMPT, wide), np.float32)

    def rate(self, measure: str) -> float:
        """Tokens per second of the bare passes, as the machine is just now."""
        gemm = 2 * self._x.size * self._weights.shape[1] / timed(self._multiply, 4)
        if measure == "prefill":
            return PROMPT / (self._shape.prefill_flops(PROMPT) / gemm)
        streams, parameters = int(measure[7:]), self._shape.decode_parameters()
        read = self._big.nbytes / timed(lambda: self._big @ self._big, 2)
        return streams / max(parameters * self._item / read, 2 * streams * parameters / gemm)

    def close(self) -> None:
        """Nothing to end."""

    def _multiply(self) -> None:
        np.matmul(self._x, self._weights, out=self._out)


class Peer:
    """The same measurements in a process of another Python, which gets ``how`` to run the model."""

    def __init__(self, script: str, python: str, model: Path, how: str, steps: int) -> None:
        path = Path(__file__).with_name(script)
        numbers = [str(n) for n in (PROMPT, CONTEXT, steps)]
        self._process = subprocess.Popen(
            [python, "-P", str(path), str(model), how, *numbers],
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


Side = Engine | Machine | Peer


def measure(sides: Sequence[Side], measures: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Median tokens per second of every measurement and side, the sides taking turns."""
    medians = {}
    for name in measures:
        for side in sides:
            side.rate(name)  # warm
        rates = [[side.rate(name) for side in sides] for _ in range(repeats)]
        medians[name] = [statistics.median(column) for column in zip(*rates, strict=True)]
    return medians


def timed(action: Callable[[], object], times: int) -> float:
    """Seconds an action takes, the fastest of a few."""
    best = math.inf
    for _ in range(times):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best


def run_model(args: argparse.Namespace, shape: Shape, folder: Path) -> None:
    """Measure and print one size in the dtypes asked for."""
    single = {}
    for dtype in args.dtypes.split(","):
        torch_dtype = {"F32": "float32", "BF16": "bfloat16"}[dtype]
        path = write_checkpoint(folder / f"{shape.name}-{dtype}", shape, dtype)
        sides: list[Side] = [Engine(path, args.backend, args.steps)]
        sides.append(Machine(shape, 4 if dtype == "F32" else 2))
        for script, python in peers(args).values():
            sides.append(Peer(script, python, path, torch_dtype, args.steps))
        try:
            rates = measure(sides, args.measures.split(","), args.repeats)
        finally:
            for side in sides:
                side.close()
        for name, (ours, *others) in rates.items():
            beside = "".join(f"{each:10.0f} {ours / each:6.2f}x" for each in others)
            label = f"{shape.name} {dtype}"
            print(f"{label:12} {name:9} {ours:9.0f} {beside}", flush=True)
        if "decode_1" in rates:
            single[dtype] = rates["decode_1"][0]
    if len(single) == 2:
        faster = single["BF16"] / single["F32"]
        print(f"{shape.name:12} BF16 / F32 at one stream: {faster:.2f}x", flush=True)


def peers(args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Script and Python of every peer asked for."""
    pythons = {
        "transformers": ("engine_peer.py", args.peer_python),
        "vLLM": ("vllm_peer.py", args.vllm_python),
    }
    return {name: each for name, each in pythons.items() if each[1]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine", description=__doc__)
    parser.add_argument("--models", default="m25,m125", help="comma-separated: m25, m125")
    parser.add_argument("--dtypes", default="F32,BF16", help="comma-separated: F32, BF16")
    parser.add_argument("--measures", default=",".join(MEASURES), help="comma-separated")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--vllm-python", help="a Python with vLLM's CPU build")
    parser.add_argument("--steps", type=int, default=48, help="decode steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print the figures of all models asked for."""
    limit_blas_threads(1)
    args = parse(argv)
    columns = "".join(f"{name:>18}" for name in ("bare passes", *peers(args)))
    print(f"{'tokens/s':12} {'':9} {'engine':>9} {columns}")
    with scratch_folder() as folder:
        for name in args.models.split(","):
            run_model(args, SHAPES[name], folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
