"""``python -m baton.simulator --seeds 100 --scenario crash``: search for faults.

Prints results per scenario and the violation of every failing seed. Exit code 1 if a seed failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .coverage import observed
from .invariants import Violation
from .run import run
from .scenarios import SCENARIOS

SHOWN = 5
"""Maximum violations printed per scenario."""


def main(argv: list[str] | None = None) -> int:
    """Run scenarios over seeds. Return 0 if no invariant was violated."""
    options = _options(argv)
    names = options.scenario or list(SCENARIOS)
    failed = 0
    with observed() as coverage:
        for name in names:
            failed += _play(name, range(options.first, options.first + options.seeds))
    taken, missing = coverage.report()
    sys.stdout.write(f"steps taken: {len(taken)} of {len(taken) + len(missing)}\n")
    for step in sorted(missing):
        sys.stdout.write(f"  not taken: {step}\n")
    return 1 if failed else 0


def _play(name: str, seeds: range) -> int:
    """Run one scenario and return the number of failed seeds."""
    started, sums, failures = time.perf_counter(), Counter[str](), []
    for seed in seeds:
        try:
            sums += run(seed, SCENARIOS[name])
        except Violation as violation:
            failures.append(str(violation))
    seconds = time.perf_counter() - started
    text = " ".join(f"{key.replace(' ', '_')}={value}" for key, value in sorted(sums.items()))
    sys.stdout.write(f"{name}: {len(seeds) - len(failures)}/{len(seeds)} in {seconds:.1f} s\n")
    sys.stdout.write(f"  {text}\n")
    for failure in failures[:SHOWN]:
        sys.stdout.write(f"  {failure[:400]}\n")
    return len(failures)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m baton.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="seeds per scenario")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--scenario", action="append", choices=sorted(SCENARIOS), help="default: all"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
