"""The autoscaler on recorded traffic: attainment and worker-hours beside fixed pools and oracles.

Whole traces on a simulated clock, with the policy that the controller runs and the router's
own placement; docs/operations/autoscaling.md says what is modelled. Deterministic: the figures do
not depend on the machine. ``--search`` finds the oracles anew, ``--trace NAME`` takes one trace.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .replay.cases import GOAL, SLOS, VARIATIONS, Variation, case
from .replay.cluster import fixed
from .replay.compare import Row, equal_cost, first_pools, policy, row
from .replay.oracle import smallest
from .replay.oracles import FILE, KINDS, find, goal, stored

COST = 1.3
"""Times the oracle's worker-hours that the policy may take."""
TURNS_PER_HOUR = 6.0
"""More changes of direction of one pool are flapping."""


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
        row("fixed, for the peak", fixed(this.trace, this.service, peak), this),
        row("oracle, all that any can", stored(trace, "can").play(this), this),
        row("oracle, any 95 %", stored(trace, "least").play(this), this),
        row("policy, from 1 + 1", policy(this, _ONE), this, _ONE),
    ]


_ONE = {"prefill": 1, "decode": 1}


def show(trace: str) -> bool:
    """Print a trace's rows; whether the policy is within the bar."""
    limits = SLOS[trace]
    print(f"\n{trace}: first token {limits.ttft:g} s, gaps {limits.itl * 1e3:g} ms, start 60 s")
    titles = ("kept", "hours", "to policy", "prefill", "decode", "turns/h")
    print(f"  {'':26}" + "".join(f"{title:>11}" for title in titles))
    table = rows(trace)
    ours, oracle = table[0], table[3]
    for line in table:
        print(
            f"  {line.name:26}{line.attained:11.1%}{line.hours:11.2f}"
            f"{ours.hours / line.hours:11.2f}"
            f"{line.prefill:11.2f}{line.decode:11.2f}{line.turns:11.1f}"
        )
    return (
        ours.attained >= GOAL and ours.hours <= COST * oracle.hours and ours.turns <= TURNS_PER_HOUR
    )


def show_robustness(names: list[str], variations: tuple[Variation, ...]) -> None:
    """The policy where starts or workers differ; pools begin as if nothing did."""
    print("\npolicy, kept and worker-hours, where things are otherwise than the operator thought")
    print(f"  {'':26}" + "".join(f"{each.name:>16}" for each in variations))
    for name in names:
        first = first_pools(case(name))
        cells = []
        for variation in variations:
            this = case(name, variation)
            outcome = policy(this, first)
            cells.append(f"{outcome.attained(this.slo):.1%} {outcome.hours():.2f}")
        print(f"  {name:26}" + "".join(f"{cell:>16}" for cell in cells))


def search_again(names: list[str]) -> None:
    """Find the oracles' schedules and store them."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        found[name] = {kind: asdict(find(name, kind)) for kind in KINDS}
        FILE.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    """Print the tables; 0 when the policy is within the bar on every trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", choices=list(SLOS), help="this trace alone")
    parser.add_argument("--search", action="store_true", help="find the oracles anew first")
    options = parser.parse_args()
    names = [options.trace] if options.trace else list(SLOS)
    if options.search:
        search_again(names)
    within = [show(name) for name in names]
    show_robustness(names, VARIATIONS)
    print(f"\n  limit: kept >= {GOAL:.0%}, <= {COST} x the oracle that keeps all that any can,")
    print(f"  <= {TURNS_PER_HOUR:g} turns/h: {'held' if all(within) else 'MISSED'}")
    return int(not all(within))


if __name__ == "__main__":
    raise SystemExit(main())
