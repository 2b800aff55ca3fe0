"""Speed of model execution through the executor, beside its peers and plain passes of the machine.

``python -m baton.benchmarks.engine [--models m25,m125] [--gguf FILE ...] [--threads 1,2]
[--peer-python PATH] [--vllm-python PATH] [--llama-python PATH]``: models with random weights
beside transformers and vLLM, GGUF files beside llama.cpp, in one run. Medians of wall time; of
GGUF files with one thread, of processor time, which other programs change less. All sides take
turns, and so does the machine: the products of the same shapes by OpenBLAS in float32 for
prefill, streaming the weights from memory for decode, so its ratio is the share of the read
bandwidth. Of a GGUF file only the weights' bytes are known without running it. Absolute figures
move with the machine's load, ratios of one run carry over.
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.deploy.plan.sizing import bytes_read
from baton.engine.kernels.load import load_backend
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk, SampleSpec, StepPlan
from baton.proto.sampling import SamplingParams
from baton.runtime.process.cores import plural
from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import SHAPES, Shape, write_checkpoint
from .scratch import scratch_folder

PROMPT, CONTEXT, BLOCK = 512, 128, 16
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
MEASURES = ("prefill", "decode_1", "decode_8")
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Clock = Callable[[], float]
GREEDY = SamplingParams(temperature=0)
EMPTY = np.empty(0, np.int32)


class Engine:
    """A loaded model, driven through its executor without a scheduler."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        steps: int,
        clock: Clock = time.perf_counter,
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
    """The speed at which nothing but the products, or but reading the weights, took time.

    ``nbytes``: of weights per decode step. Without a ``shape`` only one stream has a rate.
    """

    def __init__(self, nbytes: int, shape: Shape | None, threads: int, clock: Clock) -> None:
        self._nbytes, self._shape, self._clock = nbytes, shape, clock
        self._parts = [np.ones((1 << 25) // threads, np.float32) for _ in range(threads)]
        self._threads = ThreadPoolExecutor(threads)
        if shape is not None:
            wide = 2 * shape.intermediate
            self._x = np.ones((PROMPT, shape.hidden), np.float32)
            self._weights = np.ones((shape.hidden, wide // threads), np.float32)

    def rate(self, measure: str) -> float:
        """Tokens per second of the bare passes, as the machine is just now; NaN if not known."""
        reading = self._nbytes / self._speed(self._read, sum(part.nbytes for part in self._parts))
        if self._shape is None:
            return 1 / reading if measure == "decode_1" else math.nan
        flops = 2 * self._x.size * self._weights.shape[1] * len(self._parts)
        gemm = self._speed(self._multiply, flops)
        if measure == "prefill":
            return gemm * PROMPT / self._shape.prefill_flops(PROMPT)
        streams = int(measure[7:])
        return streams / max(reading, 2 * streams * self._shape.decode_parameters() / gemm)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _speed(self, part: Callable[[F32], object], work: float) -> float:
        """Units of work per second when all threads run a part each, the best of a few."""
        action = partial(self._threads.map, part, self._parts)
        return work / timed(lambda: list(action()), 4, self._clock)

    def _read(self, part: F32) -> None:
        part @ part

    def _multiply(self, _part: F32) -> None:
        np.matmul(self._x, self._weights)


class Peer:
    """The same measurements in a process of another Python, which gets ``how`` to run the model."""

    def __init__(
        self, python: str, script: str, model: Path, how: str, steps: int, threads: int
    ) -> None:
        path = Path(__file__).with_name(script)
        numbers = [str(n) for n in (PROMPT, CONTEXT, steps)]
        self._process = subprocess.Popen(
            [python, "-P", str(path), str(model), how, *numbers],
            env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
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


def measure(sides: Sequence[Side], name: str, repeats: int) -> list[float]:
    """Median tokens per second of a measurement on each side, the sides taking turns."""
    for side in sides:
        side.rate(name)  # warm
    rates = [[side.rate(name) for side in sides] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rates, strict=True)]


def timed(action: Callable[[], object], times: int, clock: Clock) -> float:
    """Seconds an action takes, the fastest of a few."""
    best = math.inf
    for _ in range(times):
        began = clock()
        action()
        best = min(best, clock() - began)
    return best


def run(args: argparse.Namespace, label: str, sides: dict[str, Side]) -> dict[str, float]:
    """Measure and print a model; return the engine's tokens per second."""
    print(f"\n{label:26}{'engine':>9}" + "".join(f"{name:>19}" for name in list(sides)[1:]))
    found = {}
    try:
        for name in args.measures.split(","):
            ours, *others = measure(list(sides.values()), name, args.repeats)
            beside = (f"{each:12.1f} {ours / each:5.2f}x" for each in others)
            cells = "".join("-".rjust(19) if "nan" in cell else cell for cell in beside)
            print(f"{name:26}{ours:9.1f}{cells}", flush=True)
            found[name] = ours
    finally:
        for side in sides.values():
            side.close()
    return found


def run_shape(args: argparse.Namespace, shape: Shape, folder: Path, threads: int) -> None:
    """Measure and print one size in the dtypes asked for."""
    single = {}
    for dtype in args.dtypes.split(","):
        torch_dtype, item = {"F32": ("float32", 4), "BF16": ("bfloat16", 2)}[dtype]
        path = write_checkpoint(folder / f"{shape.name}-{dtype}-{threads}", shape, dtype)
        clock, nbytes = time.perf_counter, item * shape.decode_parameters()
        how = (path, torch_dtype, args.steps, threads)
        sides: dict[str, Side] = {
            "engine": Engine(path, args.backend, args.steps, clock, threads),
            "bare passes": Machine(nbytes, shape, threads, clock),
        }
        if args.peer_python:
            sides["transformers"] = Peer(args.peer_python, "engine_peer.py", *how)
        if args.vllm_python:
            sides["vLLM"] = Peer(args.vllm_python, "vllm_peer.py", *how)
        label = f"{shape.name} {dtype}, {threads} {plural(threads, 'thread')}"
        single[dtype] = run(args, label, sides).get("decode_1", math.nan)
    if len(single) == 2:
        print(f"BF16 / F32 at one stream: {single['BF16'] / single['F32']:.2f}x", flush=True)


def run_gguf(args: argparse.Namespace, path: Path, threads: int) -> None:
    """Measure and print a GGUF file."""
    clock = time.process_time if threads == 1 else time.perf_counter
    body, head = bytes_read(load_checkpoint(path), load_backend(args.backend))
    nbytes = sum(body.values()) + sum(head.values())
    sides: dict[str, Side] = {
        "engine": Engine(path, args.backend, args.steps, clock, threads),
        "reading": Machine(nbytes, None, threads, clock),
    }
    if args.llama_python:
        how = (path, str(threads), args.steps, threads)
        sides["llama.cpp"] = Peer(args.llama_python, "llama_peer.py", *how)
    run(args, f"{path.stem[:15]}, {threads} {plural(threads, 'thread')}", sides)


def main(argv: list[str] | None = None) -> int:
    """Print the figures of all models asked for, in tokens per second."""
    limit_blas_threads(1)
    parser = argparse.ArgumentParser(prog="engine", description=__doc__)
    parser.add_argument("--models", default="m25,m125", help="comma-separated; empty: none")
    parser.add_argument("--dtypes", default="F32,BF16", help="comma-separated: F32, BF16")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="GGUF files")
    parser.add_argument("--threads", default="1", help="comma-separated")
    parser.add_argument("--measures", default=",".join(MEASURES), help="comma-separated")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--vllm-python", help="a Python with vLLM's CPU build")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument("--steps", type=int, default=48, help="decode steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    with scratch_folder() as folder:
        for threads in map(int, args.threads.split(",")):
            for name in filter(None, args.models.split(",")):
                run_shape(args, SHAPES[name], folder, threads)
            for path in args.gguf:
                run_gguf(args, path, threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
