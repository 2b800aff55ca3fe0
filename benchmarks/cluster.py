"""Decode and time to first token through a whole cluster, beside the engine alone.

Engine alone: scheduler and executor in one loop of one process. Cluster: router, one prefill
and one decode process, tokens counted at the client. Both decode the same prompts greedily,
taking turns; a rate counts the tokens after the first of each stream. "Wait" is how much of that
time the decode worker's engine computed no step, by its own books. The last columns are the
kernel's figures for its compute thread, per step: µs on a processor, µs ready to run without a
processor, µs asleep, and how often it went to sleep: within a step only for the GIL.

    python -m baton.benchmarks.cluster [--models m25] [--streams 1 8] [--tokens 256]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.sampling import SamplingParams
from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import SHAPES, write_checkpoint
from .scratch import scratch_folder
from .served import Served

PROMPT = 128
Prompts = list[npt.NDArray[np.int32]]
HEARD_S = 1.5


def prompts_for(streams: int, vocab: int, seed: int) -> Prompts:
    """Fresh prompts, so that no prefix is cached."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab, PROMPT).astype(np.int32) for _ in range(streams)]


def rate_of(stamps: list[list[float]]) -> float:
    """Tokens per second of all streams while all of them decode.

    ``stamps``: arrival time of every token, by stream.
    """
    start, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
    tokens = sum(start < at <= end for stream in stamps for at in stream)
    return tokens / (end - start)


class Spent(NamedTuple):
    """What a thread has done since its start, in ns, and how often it went to sleep."""

    ran: int
    ready: int
    sleeps: int


def threads_of(pid: int) -> dict[str, Spent]:
    """All threads of a process by id. Threads that end meanwhile are left out."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran, ready, _ = (task / "schedstat").read_text().split()
            status = (task / "status").read_text()
        except (OSError, ValueError):
            continue
        sleeps = status.partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0]
        spent[task.name] = Spent(int(ran), int(ready), int(sleeps))
    return spent


def busiest(before: dict[str, Spent], after: dict[str, Spent]) -> Spent:
    """What the thread that ran most has done in between."""
    nothing = Spent(0, 0, 0)
    changes = (
        Spent(*(b - a for a, b in zip(before.get(name, nothing), now, strict=True)))
        for name, now in after.items()
    )
    return max(changes, key=lambda spent: spent.ran)


class Alone:
    """The engine in this process."""

    def __init__(self, folder: Path) -> None:
        self._engine = LLMEngine(load_runner(RunnerConfig(model=str(folder))))

    def run(self, prompts: Prompts, params: SamplingParams) -> list[list[float]]:
        """Arrival times of all tokens."""
        from baton.proto.contexts.text import TextContext

        stamps: dict[bytes, list[float]] = {}
        for prompt in prompts:
            context = TextContext(tokens=prompt, max_length=4096, sampling_params=params)  # type: ignore[arg-type]
            stamps[self._engine.add(context)] = []
        while self._engine.has_work:
            events = self._engine.step()
            now = time.perf_counter()
            for event in events:
                if hasattr(event, "token"):
                    stamps[event.request].append(now)
        return list(stamps.values())

    def close(self) -> None:
        """Nothing to end."""


class Cluster:
    """A real one, one prefill and one decode process."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._served = Served(scratch, folder)

    def run(self, prompts: Prompts, params: SamplingParams) -> list[list[float]]:
        """Arrival times of all tokens at the client."""
        stamps: list[list[float]] = [[] for _ in prompts]

        def stream(index: int) -> None:
            for output in self._served.client.generate(prompts[index], params):
                now = time.perf_counter()
                stamps[index] += [now] * len(output.tokens)

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return stamps

    def compute_seconds(self) -> float:
        """Counters of the decode worker's engine, from its last heartbeat."""
        time.sleep(HEARD_S)
        workers = self._served.client.status()["workers"]
        return float(sum(w["compute_seconds"] for w in workers if w["role"] == "decode"))

    def decode_pid(self) -> int:
        """The decode worker's process."""
        workers = self._served.client.status()["workers"]
        return next(int(w["pid"]) for w in workers if w["role"] == "decode")

    def close(self) -> None:
        """End the cluster."""
        self._served.close()


def compare(name: str, streams: list[int], tokens: int, runs: int) -> None:
    """Print one model's rows."""
    shape = SHAPES[name]
    with scratch_folder() as scratch:
        folder = write_checkpoint(scratch / name, shape, "F32")
        alone, served = Alone(folder), Cluster(folder, scratch)
        try:
            for count in streams:
                _row(name, shape.vocab, alone, served, count, tokens, runs)
        finally:
            served.close()


def _row(
    name: str, vocab: int, alone: Alone, served: Cluster, streams: int, tokens: int, runs: int
) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    warm = prompts_for(streams, vocab, runs)
    alone.run(warm, params), served.run(warm, params)
    pid, steps = served.decode_pid(), []
    rates, decoding, before = [], 0.0, served.compute_seconds()
    for run in range(runs):
        prompts = prompts_for(streams, vocab, run)
        own, threads = alone.run(prompts, params), threads_of(pid)
        stamps = served.run(prompts, params)
        spent = busiest(threads, threads_of(pid))
        rates.append((rate_of(own), rate_of(stamps)))
        seconds = max(s[-1] for s in stamps) - min(s[0] for s in stamps)
        decoding += seconds
        slept = seconds * 1e9 - spent.ran - spent.ready
        steps.append([ns / tokens for ns in (spent.ran / 1e3, spent.ready / 1e3, slept / 1e3)])
        steps[-1].append(spent.sleeps / tokens)
    wait = 1 - (served.compute_seconds() - before) / decoding
    ours, theirs = (statistics.median(r[i] for r in rates) for i in (1, 0))
    share = statistics.median(r[1] / r[0] for r in rates)
    ran, ready, slept, sleeps = (statistics.median(column) for column in zip(*steps, strict=True))
    print(
        f"{name:6s} {streams:7d} {theirs:14.0f} {ours:15.0f} {share:7.2f} {wait:6.1%}"
        f" {ran:7.0f} {ready:7.0f} {slept:7.0f} {sleeps:7.2f}",
        flush=True,
    )


def main() -> None:
    """Command line."""
    limit_blas_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["m25", "m125"], choices=list(SHAPES))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print("decode through the cluster beside the engine alone, tokens/s, medians")
    print(
        "model  streams   engine alone   whole cluster   share   wait"
        "    runs   ready  sleeps   times"
    )
    for name in options.models:
        compare(name, options.streams, options.tokens, options.runs)


if __name__ == "__main__":
    main()
