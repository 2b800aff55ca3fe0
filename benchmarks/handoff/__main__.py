"""A handoff's data path between two processes, beside raw pyzmq moving the same bytes.

Handoff: Reserve, Grant, gather + checksum, KV frames within byte credit, checksum + scatter,
Commit, Committed; the real sender, receiver and packers. Over "shm" the receiver reads the
sender's pool itself, so sums and one copy are left. Raw: a DEALER pushes the same pool's
bytes to a ROUTER, frame by frame and without a copy, and waits for one answer. Blocks that lie
in a row are sent from the pool itself, scattered ones are gathered.

A prefill worker reserves before it computes, so a request waits for what follows its last layer
alone: "waited" is from the blocks being final, the grant in hand, to Committed. "All" adds the
round trip of Reserve and Grant. In between, and before the raw transfer, both sides are idle. "CPU"
is what both processes together compute for one handoff, and for one raw transfer.

    python -m baton.benchmarks.handoff [--tokens 256 1024 4096] [--frame-kib 1024] [--stages]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict

import numpy as np

from ...runtime.process.os_settings import limit_blas_threads, recycle_large_buffers
from ..scratch import scratch_folder
from .decode_side import Decode
from .prefill_side import Prefill
from .wiring import LAYOUT, Stamp


def measure(tokens: list[int], frame_bytes: int, runs: int, *, stages: bool) -> None:
    """Start the receiving process and print the table."""
    with scratch_folder() as folder:
        command = [
            sys.executable,
            "-m",
            __spec__.name if __spec__ else "",
            "--receive",
            str(folder),
        ]
        child = subprocess.Popen([*command, "--tokens", str(max(tokens))])
        try:
            while not (folder / "raw").exists():
                time.sleep(0.02)
            side = Prefill(str(folder), max(tokens), frame_bytes)
            print(f"handoff beside ZeroMQ ipc, frames of {frame_bytes >> 10} KiB, {runs} pairs")
            print(
                "over blocks    tokens     MiB   waited µs   GB/s   all µs   GB/s   raw µs   GB/s"
                "   share waited   share all   limit GB/s   CPU µs   raw's"
            )
            for over, name, table in (
                ("zmq", "scattered", side.scattered),
                ("zmq", "in a row", np.sort(side.scattered)),
                ("shm", "scattered", side.scattered),
                ("shm", "in a row", np.sort(side.scattered)),
            ):
                side.table, side.shared = table, over == "shm"
                for count in tokens:
                    print(f"{over:4s} {name:9s} {_row(side, child.pid, count, runs)}")
                    if stages:
                        print(_stages([side.stages() for _ in range(runs) if side.handoff(count)]))
            side.raw.send(b"stop")
            child.wait(10)
        finally:
            child.kill()
            child.wait()


def _row(side: Prefill, other: int, tokens: int, runs: int) -> str:
    nbytes = LAYOUT.blocks_for(tokens) * LAYOUT.block_bytes * LAYOUT.num_layers
    rows = []
    for _ in range(runs + 3):
        cpu = _cpu_seconds(other)
        whole, waited = side.handoff(tokens)
        spent, copies = _cpu_seconds(other) - cpu, side.copies(tokens)
        cpu = _cpu_seconds(other)
        plain = side.plain(nbytes)
        spent_plain = _cpu_seconds(other) - cpu
        # Over ZeroMQ nothing moves faster than raw, and all copies together need the cores they
        # have; through shared memory one core copies while the other one sums.
        least = (spent_plain + copies) / (os.cpu_count() or 1)
        limit = side.crossing(tokens) if side.shared else max(plain, least)
        side.stages()
        rows.append((waited, whole, plain, limit, spent, spent_plain))
    middle = [statistics.median(column) for column in zip(*rows[3:], strict=True)]
    rates = [nbytes / seconds / 1e9 for seconds in middle]
    shares = [statistics.median(row[2] / row[n] for row in rows[3:]) for n in (0, 1)]
    times = "   ".join(
        f"{s * 1e6:8.0f} {r:6.2f}" for s, r in zip(middle[:3], rates[:3], strict=True)
    )
    return (
        f"{tokens:6d} {nbytes / 2**20:8.1f} {times} {shares[0]:12.2f} {shares[1]:11.2f}"
        f" {rates[3]:11.2f} {middle[4] * 1e6:9.0f} {middle[5] * 1e6:7.0f}"
    )


def _stages(runs: list[list[Stamp]]) -> str:
    """Medians of when each stage was over, in µs since the blocks were final."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for stamps in runs:
        seen: Counter[str] = Counter()
        for done, at in stamps:
            seen[done] += 1
            times[f"{done} {seen[done]}"].append(at)
    usual = {done: statistics.median(at) for done, at in times.items() if 2 * len(at) > len(runs)}
    lines = [f"{at * 1e6:10.0f} {done}" for done, at in sorted(usual.items(), key=lambda i: i[1])]
    return "\n".join(lines)


def _cpu_seconds(other: int) -> float:
    """CPU time of this process and of another one."""
    clock = ~other << 3 | 2  # the kernel's id of a process's CPU clock
    return time.process_time() + time.clock_gettime(clock)


def main() -> None:
    """Command line."""
    limit_blas_threads(1)
    recycle_large_buffers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--frame-kib", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--stages", action="store_true", help="when each stage is over")
    options = parser.parse_args()
    if options.receive:
        Decode(options.receive, options.tokens[0]).serve()
    else:
        measure(options.tokens, options.frame_kib << 10, options.runs, stages=options.stages)


if __name__ == "__main__":
    main()
