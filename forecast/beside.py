"""What modelled workers take for the requests of a measurement, beside what real ones took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from baton.loadgen.plan import Job
from baton.loadgen.statistics import Distribution
from baton.loadgen.traces import BLOCK_TOKENS, Arrival

from .cluster import Setup, Targets, fixed
from .service import ServiceModel

_LEVELS = ("mean", "p50", "p95")


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of all requests in one configuration; TPOT without answers of one token."""

    ttft: Distribution
    tpot: Distribution


def forecast(jobs: Sequence[Job], service: ServiceModel, pools: Targets, setup: Setup) -> Forecast:
    """Play the jobs of an open loop in a cluster of ``pools`` of modelled workers."""
    requests = fixed(list(_arrivals(jobs)), service, pools, setup).requests
    return Forecast(
        ttft=Distribution.of(one.ttft for one in requests),
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


def lines(
    found: Mapping[str, tuple[Forecast, Distribution, Distribution]], error: float
) -> list[str]:
    """Return a table: what is predicted, and the measured time as a multiple of it.

    ``found``: by configuration, with the measured TTFT and TPOT. ``error``: of the fit of steps.
    """
    table = [["", *found]]
    for level in _LEVELS:
        cells = [_cell(one.ttft, real, level) for one, real, _ in found.values()]
        table.append([f"TTFT {level}, ms", *cells])
    for level in _LEVELS:
        cells = [_cell(one.tpot, real, level) for one, _, real in found.values()]
        table.append([f"TPOT {level}, ms", *cells])
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    shown = [f"simulated with steps measured on this machine (mean error of the fit {error:.0%}),"]
    shown.append("and what was measured as a multiple of it")
    for row in table:
        placed = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        shown.append(f"{row[0]:{widths[0]}}  " + "  ".join(list(placed)[1:]).rstrip())
    return shown


def _cell(predicted: Distribution, measured: Distribution, level: str) -> str:
    simulated, real = getattr(predicted, level), getattr(measured, level)
    if simulated is None:
        return "-"
    beside = f" x {real / simulated:.2f}" if real is not None and simulated > 0 else ""
    return f"{1e3 * simulated:.1f}{beside}"
