"""What ``baton bench`` sends, with and without ``--compare``: the jobs of a run, by its options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path

from baton.loadgen.plan import Job, Lengths, Shape, constant, poisson, random_jobs, trace_jobs
from baton.loadgen.run import LOST_S, Runner, until
from baton.loadgen.statistics import Record
from baton.loadgen.traces import read_trace
from baton.proto.errors import ConfigError, ConnectionLost

ROUNDS = 3
REQUESTS = 100
"""Requests of a run without --requests, --duration and --trace."""
WARMUP = 4


def unit_of(arguments: argparse.Namespace) -> str:
    """Return what the load of a run is."""
    if arguments.trace:
        return "trace speed"
    return "requests/s" if arguments.rates else "at a time"


def planned(
    arguments: argparse.Namespace, shape: Shape, load: float, seed: int, series: int = 0
) -> Iterable[Job]:
    """Return the jobs of a run; another ``series`` has other tokens. A trace is read here."""
    duration, number = arguments.duration, _number(arguments)
    if arguments.trace:
        arrivals, scale = read_trace(Path(arguments.trace), number), arguments.trace_scale
        found = trace_jobs(arrivals, shape, seed, speed=load, scale=scale, series=series)
        return list(until(found, duration))
    if arguments.rates:
        number = number or math.ceil(load * (duration or 1.0))
        schedule = constant(load, number)
        if arguments.arrivals == "poisson":
            schedule = poisson(load, number, seed)
        return list(until(random_jobs(shape, schedule, seed, series=series), duration))
    times = repeat(None, number) if number else repeat(None)
    return random_jobs(shape, times, seed, series=series)


def _number(arguments: argparse.Namespace) -> int:
    """Return the number of requests of a run; 0: as many as the duration or the trace has."""
    return arguments.requests or (0 if arguments.duration or arguments.trace else REQUESTS)


async def sent(
    arguments: argparse.Namespace, runner: Runner, jobs: Iterable[Job], load: float
) -> list[Record]:
    """Send the jobs of :func:`planned`."""
    if arguments.trace or arguments.rates:
        return await runner.open_loop(list(jobs))
    return await runner.closed_loop(jobs, int(load), arguments.duration)


def lost(
    arguments: argparse.Namespace, jobs: Iterable[Job], records: Sequence[Record]
) -> ConnectionLost:
    """Return the error of a run that ended because the server was lost."""
    number = len(jobs) if isinstance(jobs, list) else _number(arguments)
    rest = f"{number - len(records)} of {number} requests were" if number else "the rest was"
    return ConnectionLost(
        f"no connection to the server for over {LOST_S:g} s: the run ended, and {rest} not sent"
    )


def warmup_of(arguments: argparse.Namespace, workers: int = 1) -> int:
    """Return the number of requests before a run."""
    return WARMUP * max(1, workers) if arguments.warmup is None else int(arguments.warmup)


def loads_of(arguments: argparse.Namespace) -> Sequence[float]:
    """Return the loads to run at: speeds of a trace, rates, or requests at a time."""
    if arguments.trace:
        return arguments.trace_speed or [1.0]
    found: Sequence[float] = arguments.rates or arguments.concurrency or [8.0]
    return found


def workload(arguments: argparse.Namespace, *, embeds: bool) -> str:
    """Return what is sent, in words."""
    if arguments.trace:
        what = "embeddings of the prompts of " if embeds else ""
        return f"{what}trace {Path(arguments.trace).name}, lengths x {arguments.trace_scale:g}"
    loop = f"open loop, {arguments.arrivals}" if arguments.rates else "closed loop"
    what = f"{arguments.input} tokens in, {arguments.output} out"
    if embeds:
        what = f"embeddings of {arguments.texts} x {arguments.input} tokens"
    return f"{what}, {loop}, seed {arguments.seed}"


def options_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options for the JSON file."""
    skipped = ("run", "parser", "debug", "json", "plot", "api_key")
    return {
        name: str(value) if isinstance(value, Lengths) else value
        for name, value in vars(arguments).items()
        if name not in skipped
    }


def write(file: str, content: bytes) -> None:
    """Write a result. Raises ConfigError."""
    try:
        Path(file).write_bytes(content)
    except OSError as problem:
        raise ConfigError(f"cannot write {file}: {problem.strerror}") from None
