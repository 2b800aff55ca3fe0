"""Modes on recorded traffic: goodput of colocated, disaggregated and adaptive clusters.

Each trace is played on modelled workers with the router's own policy and decider (``forecast/``),
with nine pairs of limits: multiples of the 95th percentile of TTFT and of the median ITL when
requests come one by one. Goodput is the highest rate at which 95 % of the requests keep both. Of
every mode the best split counts; a disaggregated cluster may begin prompts by deadline, too, and
an adaptive one may have no prefill worker. Deterministic: the figures do not depend on the machine.

    python -m baton.benchmarks.modes [--traces FOLDER] [--workers 4] [--requests N] [--trace NAME]

The ceiling is what no mode can do: as many prefill workers as workers, as many decode workers
besides, and handoffs that take no time. So prompts and streams do not delay each other at all.

The regret of single decisions: a sample of them is played with the other way for that request
alone, and the requests that keep their limits among the next hundred are counted.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from baton.forecast.cluster import Slo, fixed
from baton.forecast.goodput import EDF, STEP, Cluster, Trials, clusters, unloaded
from baton.forecast.service import ServiceModel
from baton.loadgen.traces import read_trace

from .replay.cases import FOLDER

TTFT = {"tight": 2.0, "middle": 4.0, "loose": 8.0}
ITL = {"tight": 1.5, "middle": 2.5, "loose": 5.0}
"""Limits, as multiples of an unloaded run."""
NO_WORSE, GAIN, CLOSE = 0.98, 1.25, 0.2
"""Adaptive must reach this part of the better pure mode, and this gain if they are so close."""
REGRET = 0.05
WINDOW = 100
SAMPLES = 24


@dataclass(frozen=True)
class Cell:
    """One pair of limits; rates in multiples of the trace's own, with the split that reached it.

    ``ceiling``: the rate of twice as many workers, without handoffs.
    """

    trace: str
    ttft: str
    itl: str
    colocated: float
    disaggregated: tuple[float, Cluster | None]
    adaptive: tuple[float, Cluster | None]
    ceiling: float
    regret: float

    @property
    def ratio(self) -> float:
        """Adaptive beside the better pure mode."""
        return self.adaptive[0] / max(self.pure) if max(self.pure) else float("inf")

    @property
    def pure(self) -> tuple[float, float]:
        """Goodput of the pure modes."""
        return self.colocated, self.disaggregated[0]

    @property
    def most(self) -> float:
        """The ceiling beside the better pure mode."""
        return self.ceiling / max(self.pure) if max(self.pure) else float("inf")

    @property
    def close(self) -> bool:
        """Whether the pure modes are about as good as each other."""
        return min(self.pure) >= (1 - CLOSE) * max(self.pure) > 0

    @property
    def missed(self) -> list[str]:
        """The bars that this cell misses."""
        bar = GAIN if self.close else NO_WORSE
        name = f"{self.trace}, TTFT {self.ttft}, ITL {self.itl}"
        found = [f"{name}: {self.ratio:.2f} of {bar}"] if self.ratio < bar else []
        return found + ([f"{name}: regret {self.regret:.1%}"] if self.regret > REGRET else [])


def cells(name: str, folder: Path, workers: int, most: int) -> list[Cell]:
    """All cells of one trace."""
    service = ServiceModel()
    trials = Trials(read_trace(folder / f"{name}.csv.gz", most), service)
    base = unloaded(trials.trace, service)
    ceiling = Trials(trials.trace, replace(service, handoff_rate=math.inf))
    ways = clusters(workers)
    (colocated,) = (one for one in ways if one.mode == "colocated")
    found, near = [], 0
    for itl, times in ITL.items():
        for ttft, more in TTFT.items():
            slo = Slo(more * base.ttft, times * base.itl)
            alone = trials.goodput(colocated, slo, near)
            near = round(math.log(alone, STEP)) if alone else near
            apart = trials.best((c for c in ways if c.mode == "disaggregated"), slo, near)
            mixed = trials.best((c for c in ways if c.mode == "adaptive"), slo, near)
            top = ceiling.goodput(Cluster("disaggregated", workers, workers, EDF), slo, near)
            lost = regret(trials, mixed[1], slo, mixed[0])
            found.append(Cell(name, ttft, itl, alone, apart, mixed, top, lost))
            print(line(found[-1]), flush=True)
    return found


def regret(trials: Trials, cluster: Cluster | None, slo: Slo, speed: float) -> float:
    """Return the part of the kept limits that single decisions cost, at a cluster's goodput."""
    if cluster is None or not cluster.prefill:
        return 0.0
    setup = trials.setup(cluster, slo)
    chosen = fixed(trials.trace, trials.service, cluster.pools, setup, speed)
    stride = max(1, len(chosen.decided) // SAMPLES)
    kept = chosen.kept(slo)
    ours = better = 0
    for number in chosen.decided[::stride][:SAMPLES]:
        end = number + WINDOW
        part = trials.trace[:end]
        other = fixed(part, trials.service, cluster.pools, replace(setup, flipped=number), speed)
        mine, theirs = sum(kept[number:end]), sum(other.kept(slo)[number:end])
        ours += mine
        better += max(mine, theirs)
    return 1 - ours / better if better else 0.0


def line(cell: Cell) -> str:
    """Return a cell as a row of the table."""
    apart, mixed = (f"{rate:.2f} {_split(c)}" for rate, c in (cell.disaggregated, cell.adaptive))
    return (
        f"{cell.trace:24}{cell.ttft:>8}{cell.itl:>8}{cell.colocated:11.2f}{apart:>16}{mixed:>13}"
        f"{cell.ratio:8.2f}{cell.most:9.2f}"
        f"  {'close' if cell.close else '-':7}{cell.regret:7.1%}"
    )


def _split(cluster: Cluster | None) -> str:
    if cluster is None:
        return "(-)"
    by_deadline = cluster.mode == "disaggregated" and cluster.order == EDF
    return f"({cluster.prefill}:{cluster.decode}{' edf' if by_deadline else ''})"


def main(argv: Sequence[str] | None = None) -> int:
    """Print every cell; 0 if all bars are met."""
    parser = argparse.ArgumentParser(prog="modes", description=__doc__)
    parser.add_argument("--traces", type=Path, default=FOLDER, help="folder of *.csv.gz")
    parser.add_argument("--trace", help="this trace alone")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=0, help="first so many of each (0: all)")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(argv)
    names = sorted(path.name.removesuffix(".csv.gz") for path in options.traces.glob("*.csv.gz"))
    names = [options.trace] if options.trace else names
    titles = ("TTFT", "ITL", "colocated", "disaggregated", "adaptive", "ratio", "ceiling")
    widths = (8, 8, 11, 16, 13, 8, 9)
    heads = "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    print(f"{'trace':24}{heads}  {'pure':7}{'regret':>7}", flush=True)
    with ProcessPoolExecutor(options.processes) as pool:
        tables = pool.map(
            cells,
            names,
            *([one] * len(names) for one in (options.traces, options.workers, options.requests)),
        )
        found = [cell for table in tables for cell in table]
    missed = [text for cell in found for text in cell.missed]
    print(
        f"\n  limit: adaptive >= {NO_WORSE} of the better pure mode, >= {GAIN} if they are within"
    )
    print(f"  {CLOSE:.0%}; regret <= {REGRET:.0%}: {'MISSED' if missed else 'held'}")
    for text in missed:
        print(f"    {text}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
