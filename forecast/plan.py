"""Which mode and split serve a recorded load best: the answer of ``baton plan``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.loadgen.plan import fitting
from baton.loadgen.traces import BLOCK_TOKENS, Arrival

from .cluster import Slo
from .goodput import CHUNK_TOKENS, EDF, FCFS, Cluster, Trials, clusters
from .moves import Moves, find_moves
from .service import ServiceModel


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the workers.

    ``kept``: share of the requests within both limits at the trace's own rate. ``goodput``: highest
    rate, as a multiple of the trace's, at which 95 % of the requests are. ``worse``: part of the
    best goodput that it lacks. ``ttft_p99``, ``itl_p99``: seconds at the trace's own rate, the
    latter of all gaps between tokens.
    """

    mode: str
    prefill: int
    decode: int
    order: str
    kept: float
    goodput: float
    worse: float = 0.0
    ttft_p99: float = 0.0
    itl_p99: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a plan. ``choices``: best first. ``rate``: requests per second.

    ``moves``: changes of role that improve the running cluster, or the best one; None: none do.
    """

    requests: int
    rate: float
    slo_ttft: float
    slo_itl: float
    step_time: float
    choices: list[Choice]
    moves: Moves | None = None

    @property
    def best(self) -> Choice:
        """The mode and split to use."""
        return self.choices[0]

    def command(self, model: str) -> str:
        """Return the command that starts such a cluster."""
        best = self.best
        pools = f"--prefill {best.prefill} --decode {best.decode}"
        if best.mode == "colocated":
            pools = f"--workers {best.decode}"
        default = {"adaptive": EDF, "colocated": FCFS}.get(best.mode)
        order = f" --prefill-order {best.order}" if best.order != default else ""
        limits = f"--slo-ttft {self.slo_ttft:g} --slo-itl {self.slo_itl:g}"
        step = ""
        if best.mode != "disaggregated":
            step = f" --step-time {self.step_time:.4g} --max-num-batched-tokens {CHUNK_TOKENS}"
        return f"baton serve {model} --mode {best.mode} {pools}{order} {limits}{step}"


def make_plan(
    trace: Sequence[Arrival],
    service: ServiceModel,
    workers: int,
    slo: Slo,
    now: Cluster | None = None,
) -> Plan:
    """Play the trace in every mode and split, and rank them by goodput, then by simplicity.

    ``now``: a running cluster of both pools, whose workers may change their role.
    """
    trials = Trials(trace, service)
    found: list[tuple[float, float, Cluster]] = []
    for cluster in clusters(workers):
        goodput = trials.goodput(cluster, slo)
        found.append((goodput, trials.kept(cluster, slo), cluster))
    best = max(goodput for goodput, _, _ in found)
    ranked = sorted(found, key=lambda one: (-one[0], -one[1]))
    like = now or next((one for _, _, one in ranked if one.prefill and one.decode), None)
    choices = []
    for goodput, kept, cluster in ranked:
        ttft_p99, itl_p99 = trials.tails(cluster, slo)
        choices.append(
            Choice(
                mode=cluster.mode, prefill=cluster.prefill, decode=cluster.decode,
                order=cluster.order, kept=kept, goodput=goodput,
                worse=1 - goodput / best if best else 0.0,
                ttft_p99=ttft_p99, itl_p99=itl_p99,
            )
        )  # fmt: skip
    span = trace[-1].at
    return Plan(
        requests=len(trace),
        rate=len(trace) / span if span else 0.0,
        slo_ttft=slo.ttft,
        slo_itl=slo.itl,
        step_time=trials.step_s(slo),
        choices=choices,
        moves=None if like is None else find_moves(trials, slo, like, now),
    )


def shortened(trace: Sequence[Arrival], longest: int) -> list[Arrival]:
    """Return the trace with requests that fit a context, as ``baton bench --trace`` sends them."""
    found = []
    for one in trace:
        prompt, output = fitting(one.prompt, one.output, longest)
        found.append(Arrival(one.at, prompt, output, one.blocks[: prompt // BLOCK_TOKENS]))
    return found
