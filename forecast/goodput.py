"""The goodput of modelled clusters: the highest rate at which enough requests keep both limits.

A rate is the trace's own, times a speed: arrival times are divided by it. Speeds are powers of
:data:`STEP`, so the same run serves every pair of limits on which the cluster does not depend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.loadgen.traces import Arrival

from .cluster import Setup, Slo, Targets, fixed
from .service import ServiceModel

KEEP = 0.95
"""Share of the requests that must keep both limits."""
STEP_MARGIN = 0.97
"""Part of the longest step that is used: steps are not exactly as long as their target."""
STEP = 1.02
MOST_STEPS = 500
"""Speeds from 1/20,000 to 20,000; beyond them the limits do not depend on the rate."""
FCFS, EDF = "fcfs", "edf"
CHUNK_TOKENS = 4096
"""Prompt tokens of a step at most, outside mode disaggregated; its target time may bound them."""
PREFILL_STEP_S, PREFILL_TOKENS = 0.05, 512
"""The same of a prefill worker in mode disaggregated, by default of ``baton serve``."""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A mode, its pools, and the order of waiting prompts at prefill workers."""

    mode: str
    prefill: int
    decode: int
    order: str = FCFS

    @property
    def pools(self) -> Targets:
        """Number of workers by role."""
        return {"prefill": self.prefill, "decode": self.decode}

    def setup(self, slo: Slo, step_s: float) -> Setup:
        """Return how the cluster serves within ``slo``; equal if it does not depend on it.

        ``step_s``: target seconds of a decode worker's step with prompt tokens.
        """
        by_deadline = self.order == EDF and (self.prefill or self.mode == "adaptive")
        found = Setup(mode=self.mode, token_budget=CHUNK_TOKENS)
        if self.mode != "disaggregated":
            found = replace(found, step_s=step_s)
        if self.mode == "adaptive" and self.prefill:
            found = replace(found, slo=slo)
        return replace(found, slo_ttft=slo.ttft if by_deadline else 0.0)

    def __str__(self) -> str:
        split = f"{self.prefill}:{self.decode}" if self.mode != "colocated" else str(self.decode)
        return f"{self.mode}:{split}"


class Trials:
    """Runs of one trace on one kind of worker; every run is made once."""

    def __init__(self, trace: Sequence[Arrival], service: ServiceModel) -> None:
        self.trace = trace
        self.service = service
        self._runs: dict[tuple[str, Setup, int], Values] = {}
        gaps = [arrival.output - 1 for arrival in trace if arrival.output > 1]
        self._gaps = float(np.quantile(gaps, 1 - KEEP)) if gaps else 1.0

    def setup(self, cluster: Cluster, slo: Slo) -> Setup:
        """Return how a cluster serves within ``slo``."""
        found = cluster.setup(slo, self.step_s(slo))
        if not self.service.chunk_s:
            return found
        if cluster.mode == "disaggregated":
            return replace(found, chunk=self.service.chunk(PREFILL_STEP_S, PREFILL_TOKENS))
        return replace(found, chunk=self.service.chunk(found.step_s, CHUNK_TOKENS))

    def step_s(self, slo: Slo) -> float:
        """Return the longest step with prompt tokens that keeps the ITL limit; 0 without a limit.

        The second token of a stream also waits for the end of a step that runs already. So a short
        answer has a gap more than it has tokens after the first.
        """
        return STEP_MARGIN * slo.itl / (1 + 1 / self._gaps) if math.isfinite(slo.itl) else 0.0

    def latencies(self, cluster: Cluster, slo: Slo, power: int = 0) -> Values:
        """Return TTFT and mean ITL of each request, float64 ``[n, 2]``, at ``STEP ** power``."""
        setup = self.setup(cluster, slo)
        key = str(cluster), setup, power
        if key not in self._runs:
            outcome = fixed(self.trace, self.service, cluster.pools, setup, STEP**power)
            self._runs[key] = np.array([(r.ttft, r.itl) for r in outcome.requests])
        return self._runs[key]

    def kept(self, cluster: Cluster, slo: Slo, power: int = 0) -> float:
        """Return the share of requests within both limits."""
        found = self.latencies(cluster, slo, power)
        return float(np.mean((found[:, 0] <= slo.ttft) & (found[:, 1] <= slo.itl)))

    def tails(self, cluster: Cluster, slo: Slo) -> tuple[float, float]:
        """Return the 99th percentiles of TTFT and of all gaps, at the trace's own rate."""
        setup = replace(self.setup(cluster, slo), gaps=True)
        outcome = fixed(self.trace, self.service, cluster.pools, setup)
        gaps = outcome.gaps()
        first = float(np.quantile([one.ttft for one in outcome.requests], 0.99))
        return first, float(np.quantile(gaps, 0.99)) if len(gaps) else 0.0

    def goodput(self, cluster: Cluster, slo: Slo, near: int = 0) -> float:
        """Return the highest speed at which :data:`KEEP` of the requests keep both limits, or 0.

        ``near``: a guess of its power, which only saves time.
        """
        power = self._highest(cluster, slo, near)
        return 0.0 if power is None else STEP**power

    def best(
        self, candidates: Iterable[Cluster], slo: Slo, near: int = 0
    ) -> tuple[float, Cluster | None]:
        """Return the highest goodput of several clusters and the cluster with it.

        A cluster that misses the limits at a rate above the best one so far is not played further.
        """
        highest: int | None = None
        found = None
        for cluster in candidates:
            if highest is not None:
                if self.kept(cluster, slo, highest + 1) < KEEP:
                    continue
                near = highest + 1
            power = self._highest(cluster, slo, near)
            if power is not None:
                highest, found = power, cluster
        return (0.0 if highest is None else STEP**highest), found

    def _highest(self, cluster: Cluster, slo: Slo, near: int) -> int | None:
        stride, good = 8, self.kept(cluster, slo, near) >= KEEP
        known = near
        while True:  # to the other side
            following = known + (stride if good else -stride)
            if abs(following) > MOST_STEPS:
                return known if good else None
            if (self.kept(cluster, slo, following) >= KEEP) != good:
                break
            known, stride = following, 2 * stride
        least, most = sorted((known, following))
        while most - least > 1:
            middle = (least + most) // 2
            if self.kept(cluster, slo, middle) >= KEEP:
                least = middle
            else:
                most = middle
        return least


def unloaded(trace: Sequence[Arrival], service: ServiceModel) -> Slo:
    """Return the 95th percentile of TTFT and the median ITL of requests that come one by one."""
    apart = [replace(arrival, at=1e4 * number) for number, arrival in enumerate(trace)]
    setup = Setup(mode="colocated", step_s=0.0, token_budget=0)
    outcome = fixed(apart, service, {"prefill": 0, "decode": 1}, setup)
    itl = [request.itl for request in outcome.requests if request.arrival.output > 1]
    ttft = [request.ttft for request in outcome.requests]
    return Slo(float(np.quantile(ttft, KEEP)), float(np.median(itl)) if itl else math.inf)


def clusters(workers: int) -> list[Cluster]:
    """Return all ways to use so many workers.

    An adaptive cluster without a prefill worker that begins prompts by arrival is a colocated one.
    """
    splits = range(1, workers)
    return [
        Cluster("colocated", 0, workers),
        *(Cluster("disaggregated", p, workers - p, o) for p in splits for o in (FCFS, EDF)),
        *(Cluster("adaptive", p, workers - p, EDF) for p in range(workers)),
        Cluster("adaptive", 0, workers, FCFS),
    ]
