"""Several compute threads beside one, and processes that want the same cores.

``python -m baton.benchmarks.threads [--models m25,m125] [--threads 2]``. The best of rounds in
which both sides take turns, so that a busy machine slows both alike. Then as many processes as
threads compute at once, with one thread each and with as many as there are cores: what the second
lose is the price of a crowded machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import SHAPES, write_checkpoint
from .engine import MEASURES, Engine
from .scratch import scratch_folder


def rates(folder: Path, threads: int, measure: str, rounds: int) -> list[tuple[float, float]]:
    """Tokens per second with one thread and with several, in turns."""
    sides = [Engine(folder, "cpu", 20, threads=count) for count in (1, threads)]
    for side in sides:
        side.rate(measure)
    found = []
    for _ in range(rounds):
        one, several = (side.rate(measure) for side in sides)
        found.append((one, several))
    return found


def at_once(folder: str, threads: int, measure: str, begin: float, seconds: float) -> float:
    """Mean tokens per second of a process that computes for some seconds from ``begin`` on."""
    engine = Engine(Path(folder), "cpu", 20, threads=threads)
    engine.rate(measure)
    time.sleep(max(0.0, begin - time.time()))
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(engine.rate(measure))
    return statistics.harmonic_mean(found)


def crowded(folder: Path, processes: int, threads: int, measure: str, seconds: float) -> float:
    """Tokens per second of several processes at once, in sum."""
    begin = time.time() + 5.0
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        each = [
            pool.submit(at_once, str(folder), threads, measure, begin, seconds)
            for _ in range(processes)
        ]
        return sum(one.result() for one in each)


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    limit_blas_threads(1)
    parser = argparse.ArgumentParser(prog="threads", description=__doc__)
    parser.add_argument("--models", default="m25,m125", help="comma-separated: m25, m125")
    parser.add_argument("--dtypes", default="F32,BF16", help="comma-separated: F32, BF16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each crowded measurement")
    args = parser.parse_args(argv)
    count = args.threads
    print(f"{'tokens/s, best':20}  {'1 thread':>9}  {f'{count} threads':>9}  {'ratio':>6}")
    with scratch_folder() as folder:
        for name in args.models.split(","):
            for dtype in args.dtypes.split(","):
                path = write_checkpoint(folder / f"{name}-{dtype}", SHAPES[name], dtype)
                for measure in MEASURES:
                    pairs = rates(path, count, measure, args.rounds)
                    one, several = (max(column) for column in zip(*pairs, strict=True))
                    label = f"{name} {dtype} {measure}"
                    print(
                        f"{label:20}  {one:9.0f}  {several:9.0f}  {several / one:6.2f}", flush=True
                    )
        print()
        heads = f"{count} x 1 thread", f"{count} x {count} threads"
        print(f"{'at once, in sum':20}  {heads[0]:>14}  {heads[1]:>14}  {'ratio':>6}")
        path = folder / f"{args.models.split(',')[0]}-{args.dtypes.split(',')[0]}"
        for measure in ("prefill", "decode_1"):
            turns = [
                [crowded(path, count, n, measure, args.seconds) for n in (1, count)]
                for _ in range(3)
            ]
            one, several = (statistics.median(column) for column in zip(*turns, strict=True))
            print(f"{measure:20}  {one:14.0f}  {several:14.0f}  {several / one:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
