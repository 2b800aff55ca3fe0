"""The autoscaler on recorded traffic: attainment and worker-hours beside fixed pools and oracles.

Whole traces on a simulated clock, with the policy that the controller runs and the router's
own placement; docs/operations/autoscaling.md describes the model. Deterministic: the figures do
not depend on the machine. ``--variations`` plays the policy with other workers, starts or load,
``--search KIND`` searches oracles again (minutes), ``--trace NAME`` takes one trace, ``--roles``
plays the policy on a fixed number of hosts, with and without changes of role.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.deploy.autoscale.metrics import ROLES
from baton.deploy.autoscale.policy import Autoscaler, Room
from baton.deploy.autoscale.settings import ScaleSettings
from baton.deploy.plan.bounds import Bounds
from baton.forecast.cluster import Outcome, Targets

from .replay.cases import GOAL, SLOS, VARIATIONS, WHERE_ANY_CAN, Case, Variation, case
from .replay.oracle import Schedule, refine, search, smallest

COST = 1.3
"""Times the oracle's worker-hours that the policy may take."""
TURNS_PER_HOUR = 6.0
"""More changes of direction of one pool are flapping."""
ORACLES = {
    "can": "oracle, all that any can",
    "least": "oracle, any 95 %",
    "fine": "oracle, any 95 %, each 15 s",
}
JUDGES = ("can", "least")
"""The oracles the policy is judged by; the third one changes as often as it needs."""
FILE = Path(__file__).parent / "replay" / "oracles.json"
"""The schedules that the search found, for replays. Their costs are measured in every run."""
TURN_S = 2.0
"""Seconds of a change of role after the drain."""
INTERVAL_S = 300.0
"""An oracle may change each pool every five minutes, twice as often as the policy."""
OFFSETS_S = (0.0, 150.0)
FINE_S = 15.0
FINE_TRIES = {"mooncake_conversation": 200}
KINDS = ("can", "least", "fine")
"""What the oracle keeps: nearly all that any pool could keep; 95 % of all, however chosen; the
same with sizes that change every :data:`FINE_S`, however often they turn."""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``turns``: most changes of direction of a pool, per hour."""

    name: str
    attained: float
    hours: float
    prefill: float
    decode: float
    turns: float = 0.0


def row(name: str, outcome: Outcome, case: Case, first: Targets | None = None) -> Row:
    """What an outcome amounts to; pool sizes are means over the trace."""
    scale = 3600 / outcome.end
    return Row(
        name,
        outcome.attained(case.slo),
        outcome.hours(),
        outcome.hours("prefill") * scale,
        outcome.hours("decode") * scale,
        max(turns(outcome, first, role) for role in ROLES) * scale if first else 0.0,
    )


def turns(outcome: Outcome, first: Targets, role: str) -> int:
    """How often a pool's target changed its direction."""
    sizes = [first[role], *(size for _, who, size in outcome.changes if who == role)]
    rises = [after > before for before, after in pairwise(sizes)]
    return sum(a != b for a, b in pairwise(rises))


def scaler(case: Case, first: Targets) -> Autoscaler:
    """The policy as the controller makes it, knowing limits, bounds and the usual start."""
    settings = ScaleSettings(
        slo_ttft=case.slo.ttft,
        slo_itl=case.slo.itl,
        bounds=Bounds(prefill_max=case.most["prefill"], decode_max=case.most["decode"]),
    )
    return Autoscaler(settings, first)


def policy(case: Case, first: Targets) -> Outcome:
    """The case under the policy, from pools of size ``first``."""
    judge = scaler(case, first)
    return case.replay(first).run(lambda metrics, now: judge.observe(metrics(), now))


def at_once(case: Case, first: Targets) -> Outcome:
    """The largest pools, ordered when the trace begins: hardly more can be kept."""
    return case.replay(first).run(lambda _metrics, _now: case.most)


def first_pools(case: Case) -> Targets:
    """What an operator has before any autoscaling: the smallest fixed pools that keep 95 %."""
    return smallest(case, GOAL)


def equal_cost(case: Case, hours: float) -> Outcome:
    """The best fixed pools of no more than ``hours`` (to half a worker), split in hindsight."""
    workers = round(hours * 3600 / case.trace[-1].at)
    splits = [
        {"prefill": workers - decode, "decode": decode}
        for decode in range(1, min(case.most["decode"], workers - 1) + 1)
        if workers - decode <= case.most["prefill"]
    ]
    played = [case.fixed(split) for split in splits]
    return max(played, key=lambda outcome: outcome.attained(case.slo))


def stored(trace: str, kind: str) -> Schedule:
    """The schedule found for a trace."""
    found: dict[str, Any] = json.loads(FILE.read_text())[trace][kind]
    return Schedule(
        found["interval_s"], found["offset_s"], tuple(found["prefill"]), tuple(found["decode"])
    )


def goal(trace: str, kind: str) -> float:
    """Share of requests within the limits that this oracle must reach."""
    this = case(trace)
    can = this.fixed(this.most).attained(this.slo)
    return WHERE_ANY_CAN * can if kind == "can" else min(GOAL, can)


def find(trace: str, kind: str) -> Schedule:
    """Search anew; the fine one goes on from the stored one of kind ``least``."""
    this, least = case(trace), goal(trace, kind)
    if kind == "fine":
        tries = FINE_TRIES.get(trace, 500)
        return refine(this, least, stored(trace, "least"), FINE_S, tries)
    return search(this, least, INTERVAL_S, OFFSETS_S)


def rows(trace: str) -> list[Row]:
    """The policy and its rivals; the policy first."""
    this = case(trace)
    first = first_pools(this)
    ours = policy(this, first)
    peak = smallest(this, goal(trace, "can"))
    equal = equal_cost(this, ours.hours())
    return [
        row("policy", ours, this, first),
        row("fixed, equal cost", equal, this),
        row("fixed, for the peak", this.fixed(peak), this),
        *(_oracle(trace, kind, this) for kind in ORACLES),
        row("policy, from 1 + 1", policy(this, _ONE), this, _ONE),
    ]


def _oracle(trace: str, kind: str, this: Case) -> Row:
    schedule = stored(trace, kind)
    first = schedule.targets(0.0, this.cold_s)
    return row(ORACLES[kind], schedule.play(this), this, first)


_ONE = {"prefill": 1, "decode": 1}


def show(trace: str) -> list[str]:
    """Print a trace's rows; what misses the bar."""
    limits = SLOS[trace]
    print(f"\n{trace}: first token {limits.ttft:g} s, gaps {limits.itl * 1e3:g} ms, start 60 s")
    titles = ("kept", "hours", "to policy", "prefill", "decode", "turns/h")
    print(f"  {'':28}" + "".join(f"{title:>11}" for title in titles))
    table = rows(trace)
    ours = table[0]
    for line in table:
        print(
            f"  {line.name:28}{line.attained:11.1%}{line.hours:11.2f}"
            f"{ours.hours / line.hours:11.2f}"
            f"{line.prefill:11.2f}{line.decode:11.2f}{line.turns:11.1f}"
        )
    judges = [ORACLES[kind] for kind in JUDGES]
    missed = [
        f"{trace}: {ours.hours / line.hours:.2f} x {line.name}"
        for line in table
        if line.name in judges and ours.hours > COST * line.hours
    ]
    if ours.attained < GOAL or ours.turns > TURNS_PER_HOUR:
        missed.append(f"{trace}: kept {ours.attained:.1%}, {ours.turns:.1f} turns/h")
    return missed


def show_robustness(trace: str, variations: tuple[Variation, ...]) -> list[str]:
    """The policy where things are otherwise, from the pools it has in the table above."""
    print(f"\n{trace}: the policy where things are otherwise than the operator thought")
    titles = ("kept", "any could", "hours", "to fixed", "turns/h")
    print(f"  {'':28}" + "".join(f"{title:>11}" for title in titles))
    first = first_pools(case(trace))
    missed = []
    for variation in variations:
        this = case(trace, variation)
        ours = row("", policy(this, first), this, first)
        could = at_once(this, first).attained(this.slo)
        known = this.fixed(smallest(this, GOAL)).hours()
        print(
            f"  {variation.name:28}{ours.attained:11.1%}{could:11.1%}{ours.hours:11.2f}"
            f"{ours.hours / known:11.2f}{ours.turns:11.1f}"
        )
        if ours.attained < min(GOAL, could) or ours.turns > TURNS_PER_HOUR:
            missed.append(f"{trace}, {variation.name}: {ours.attained:.1%} of {could:.1%}")
    return missed


def on_hosts(case: Case, first: Targets, hosts: int, *, turns: bool) -> Outcome:
    """The case under the policy, which has room for ``hosts`` workers."""
    judge = scaler(case, first)
    room = Room(lambda targets: sum(targets.values()) <= hosts, turns)
    this = replace(case, turn_s=TURN_S if turns else 0.0)
    return this.replay(first).run(lambda metrics, now: judge.observe(metrics(), now, room))


def show_roles(trace: str) -> list[str]:
    """Print what changes of role are worth on the hosts of the smallest fixed pools."""
    this = case(trace)
    best = first_pools(this)
    hosts = sum(best.values())
    wrong = {"prefill": best["decode"], "decode": best["prefill"]}
    print(f"\n{trace}: {hosts} hosts")
    print(f"  {'':32}{'kept':>8}{'moves':>8}{'turns/h':>9}")
    missed = []
    for title, first in (("from the best split", best), ("from its mirror image", wrong)):
        for name, outcome in (
            ("fixed", this.fixed(first)),
            ("policy, roles kept", on_hosts(this, first, hosts, turns=False)),
            ("policy, roles change", on_hosts(this, first, hosts, turns=True)),
        ):
            line = row(name, outcome, this, first)
            moves = len(outcome.moves)
            split = f"{first['prefill']}:{first['decode']}"
            print(f"  {split:6}{name:26}{line.attained:8.1%}{moves:8}{line.turns:9.1f}")
            if line.turns > TURNS_PER_HOUR:
                missed.append(f"{trace}, {title}: {line.turns:.1f} turns/h")
    return missed


def search_again(names: list[str], kinds: list[str]) -> None:
    """Find the oracles' schedules and store them."""
    for name in names:
        for kind in kinds:
            schedule = asdict(find(name, kind))
            found = json.loads(FILE.read_text()) if FILE.exists() else {}
            found.setdefault(name, {})[kind] = schedule
            FILE.write_text(json.dumps(found) + "\n")


def main() -> int:
    """Print the tables; 0 when the policy is within the bar on every trace and variation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", choices=list(SLOS), help="this trace alone")
    parser.add_argument("--search", choices=["all", *KINDS], help="find these oracles anew first")
    parser.add_argument("--roles", action="store_true", help="only what changes of role are worth")
    parser.add_argument(
        "--variations", action="store_true", help="also where things are otherwise; minutes"
    )
    options = parser.parse_args()
    names = [options.trace] if options.trace else list(SLOS)
    if options.search:
        search_again(names, list(KINDS) if options.search == "all" else [options.search])
    missed = []
    for name in names:
        if options.roles:
            missed += show_roles(name)
            continue
        missed += show(name)
        missed += show_robustness(name, VARIATIONS) if options.variations else []
    print(f"\n  limit: kept >= {GOAL:.0%} where any pools could from the same start, no more")
    print(f"  than {COST} x the hours of a five-minute oracle and {TURNS_PER_HOUR:g} turns/h:")
    print(f"  {'MISSED' if missed else 'held'}")
    for line in missed:
        print(f"    {line}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
