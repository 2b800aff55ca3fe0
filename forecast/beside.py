"""Forecasts the latencies of a measurement with modelled workers, beside the measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from baton.loadgen.plan import Job
from baton.loadgen.statistics import Distribution
from baton.loadgen.traces import BLOCK_TOKENS, Arrival

from .cluster import Setup, Targets, fixed
from .service import ServiceModel
from .spread import Spreads

SEEDS = 8
"""Runs of a forecast with spreads, because the tails of one run depend on its draws."""
_LEVELS = ("mean", "p50", "p95", "p99")
_ROWS = ("ttft", "itl", "tpot")


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of all requests in one configuration, predicted or measured.

    ``itl``: of all gaps between two tokens. ``tpot``: without answers of one token.
    """

    ttft: Distribution
    itl: Distribution
    tpot: Distribution


def forecast(jobs: Sequence[Job], service: ServiceModel, pools: Targets, setup: Setup) -> Latencies:
    """Play the jobs of an open loop in a cluster of ``pools`` of modelled workers.

    A service model without spreads needs one run. With spreads, the requests of several seeds are
    joined.
    """
    trace = list(_arrivals(jobs))
    seeds = range(1 if service.spreads == Spreads() else SEEDS)
    runs = [fixed(trace, service, pools, replace(setup, seed=seed, gaps=True)) for seed in seeds]
    requests = [one for run in runs for one in run.requests]
    return Latencies(
        ttft=Distribution.of(one.ttft for one in requests),
        itl=Distribution.of(gap for run in runs for gap in run.gaps().tolist()),
        tpot=Distribution.of(one.itl for one in requests if one.arrival.output > 1),
    )


def _arrivals(jobs: Sequence[Job]) -> Iterator[Arrival]:
    """Yield the jobs as a trace; blocks with equal names have equal tokens up to their end."""
    for job in jobs:
        if job.at is None:
            raise ValueError("a closed loop has no arrival times")
        tokens = np.ascontiguousarray(job.prompt, np.int32)
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        blocks = tuple(
            hash(tokens[:end].tobytes()).to_bytes(8, "little", signed=True) for end in ends
        )
        yield Arrival(job.at, len(tokens), job.output, blocks)


def lines(found: Mapping[str, tuple[Latencies, Latencies]], error: float) -> list[str]:
    """Return a table of predicted times, and of measured times as multiples of them.

    ``found``: by configuration, the predicted and the measured latencies. ``error``: of the fit of
    steps.
    """
    table = [["", *found]]
    for row in _ROWS:
        for level in _LEVELS:
            cells = [
                _cell(getattr(one, row), getattr(real, row), level) for one, real in found.values()
            ]
            table.append([f"{row.upper()} {level}, ms", *cells])
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    shown = [f"simulated with steps measured on this machine (mean error of the fit {error:.0%}),"]
    shown.append("and the measured times as multiples of the simulated ones")
    for line in table:
        placed = (f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        shown.append(f"{line[0]:{widths[0]}}  " + "  ".join(list(placed)[1:]).rstrip())
    return shown


def _cell(predicted: Distribution, measured: Distribution, level: str) -> str:
    simulated, real = getattr(predicted, level), getattr(measured, level)
    if simulated is None:
        return "-"
    beside = f" x {real / simulated:.2f}" if real is not None and simulated > 0 else ""
    return f"{1e3 * simulated:.1f}{beside}"
