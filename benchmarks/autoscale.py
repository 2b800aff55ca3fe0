"""The autoscaler on recorded traffic: attainment and worker-hours beside fixed pools and oracles.

Whole traces on a simulated clock, with the policy that the controller runs and the router's
own placement; docs/operations/autoscaling.md says what is modelled. Deterministic: the figures do
not depend on the machine. ``--variations`` plays the policy where workers, starts or load are
otherwise, ``--search KIND`` finds oracles anew, ``--trace NAME`` takes one trace.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .replay.cases import GOAL, SLOS, VARIATIONS, Variation, case
from .replay.oracle import Case, smallest
from .replay.rivals import (
    FILE,
    KINDS,
    Row,
    at_once,
    equal_cost,
    find,
    first_pools,
    goal,
    policy,
    row,
    stored,
)

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
"""The oracles the policy is judged by; the third one turns as often as it likes."""


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
    parser.add_argument(
        "--variations", action="store_true", help="also where things are otherwise; minutes"
    )
    options = parser.parse_args()
    names = [options.trace] if options.trace else list(SLOS)
    if options.search:
        search_again(names, list(KINDS) if options.search == "all" else [options.search])
    missed = []
    for name in names:
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
