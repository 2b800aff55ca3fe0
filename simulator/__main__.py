"""``python -m baton.simulator --seeds 100 --scenario crash``: search for faults.

Prints results per scenario and the violation of every failing seed. Exit code 1 if a seed failed.

``--check-every 16`` compares counters with states less often, which takes a third less time. Use it
for very many seeds, and repeat a seed that fails without it.

``--policy``, ``--decider`` and ``--prefill-order`` run the scenarios with a class of your own, as
``module:Class``. Exit code 1 also if it failed; the first traceback is printed. A warning is
printed if its calls take long.

``--record FILE`` writes a digest of the events and actions of all cores, one line per run. After a
change that should not change behaviour, the files of both versions are equal. ``--text FILE``
writes all events and actions of the last run: ``diff`` shows the first difference.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from .recording import Recording, observed
from .run import Calls, run
from .scenarios import SCENARIOS, Scenario, with_extensions
from .violation import Violation

GARBAGE = 200_000
"""Objects after which Python looks for cycles: a few runs."""
OWN_SCENARIOS = ("plain", "noise", "crash", "drain", "adaptive")
"""Scenarios for users' own classes: few, since each shows the classes other states."""
SLOW_S = 0.002
"""Mean seconds of a call of a user's class above which a warning is printed.

A call of 50 microseconds is fine; the rest is for busy machines."""
SHOWN = 5
"""Maximum violations printed per scenario."""


def main(argv: list[str] | None = None) -> int:
    """Run scenarios over seeds. Return 0 if no invariant was violated."""
    options = _options(argv)
    own = options.policy or options.decider or options.prefill_order
    names = options.scenario or list(OWN_SCENARIOS if own else SCENARIOS)
    failed, failures, calls = 0, dict[str, str](), Calls()
    records = options.record.open("w") if options.record else None
    text: list[str] | None = [] if options.text else None
    with records or nullcontext(), observed() as coverage:
        for name in names:
            seeds = range(options.first, options.first + options.seeds)
            scenario = with_extensions(
                SCENARIOS[name], options.policy, options.decider, options.prefill_order
            )
            failed += _play(
                (name, scenario), seeds, records, text, options.check_every, failures, calls
            )
    if options.text:
        options.text.write_text("".join(text or ()))
    if not own:  # the steps are Baton's
        taken, missing = coverage.report()
        sys.stdout.write(f"steps taken: {len(taken)} of {len(taken) + len(missing)}\n")
        for step in sorted(missing):
            sys.stdout.write(f"  not taken: {step}\n")
    for name, (count, seconds) in calls.items():
        if seconds > SLOW_S * count:
            sys.stdout.write(
                f"warning: {name} takes {seconds / count * 1e3:.1f} ms per call; every stream of "
                "its process waits meanwhile, so that it would often be skipped\n"
            )
    for event, text_ in failures.items():
        sys.stdout.write(f"{event}\n{text_}")
    return 1 if failed or failures else 0


def _play(
    named: tuple[str, Scenario], seeds: range, records: TextIO | None, text: list[str] | None,
    check_every: int, problems: dict[str, str], calls: Calls,
) -> int:  # fmt: skip
    """Run one scenario and return the number of failed seeds.

    ``problems``, ``calls``: of users' classes.
    """
    name, scenario = named
    started, sums, failures = time.perf_counter(), Counter[str](), []
    for seed in seeds:
        if text is not None:
            text.clear()
        recording = Recording(text) if records or text is not None else None
        try:
            sums += run(seed, scenario, recording, check_every, problems, calls)
        except Violation as violation:
            failures.append(str(violation))
        if records and recording:
            records.write(f"{name} {seed} {recording.digest()}\n")
    seconds = time.perf_counter() - started
    figures = " ".join(f"{key.replace(' ', '_')}={value}" for key, value in sorted(sums.items()))
    sys.stdout.write(f"{name}: {len(seeds) - len(failures)}/{len(seeds)} in {seconds:.1f} s\n")
    sys.stdout.write(f"  {figures}\n")
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
    parser.add_argument(
        "--check-every",
        type=int,
        default=1,
        metavar="N",
        help="compare a node's books after every Nth of its events; 1 names the event at fault",
    )
    for option in ("policy", "decider", "prefill-order"):
        parser.add_argument(f"--{option}", default="", metavar="MODULE:CLASS", help="of your own")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a digest per run")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the last run's events")
    return parser.parse_args(argv)


if __name__ == "__main__":
    gc.freeze()  # the modules live for ever
    gc.set_threshold(GARBAGE)  # a run leaves one large cycle, and little garbage before its end
    sys.exit(main())
