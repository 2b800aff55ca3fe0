"""A GPU verb from its command line to its exit code.

Baton is imported only after the check of this machine's requirements.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .lines import FAILED, PartResult, table, write_report
from .machine import description, why_not
from .parts import Part, narrate, run_parts

CANNOT = 2
"""Exit code for a machine without the requirements; 1 means that a part failed."""
GPU_STAGE = "baton.benchmarks.gpu.stage:on_gpu"
MEANINGLESS = "run without a GPU to see that it runs: the figures mean nothing"


def run_verb(verb: str, parts: Sequence[Part], budget_s: float, about: str) -> int:
    """Run the parts, print a table, write the report; 1 if anything is wrong, 2 if nothing ran."""
    parser = argparse.ArgumentParser(prog=verb, description=about)
    known = [part.name for part in parts]
    parser.add_argument("names", nargs="*", metavar="PART", help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("build") / verb, help="folder")
    parser.add_argument("--commit", default="", help="where the folder has no git")
    parser.add_argument("--stage", default=GPU_STAGE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(known)}")
    on_gpu = options.stage == GPU_STAGE
    if reason := why_not(needs_gpu=on_gpu):
        print(f"{verb}: {reason}", file=sys.stderr)
        return CANNOT
    from ..scratch import leave_on_signals

    leave_on_signals()
    machine = description(options.commit)
    print("; ".join(str(machine[k]) for k in ("gpu", "processor", "commit") if k in machine))
    chosen = [part for part in parts if not options.names or part.name in options.names]
    results: list[PartResult] = []
    report = options.out / f"{verb}.json"
    for result in run_parts(chosen, options.stage, options.out, budget_s):
        results.append(result)
        print(narrate(result), flush=True)
        # Write after each part: the results are kept if a later part fails.
        write_report(report, verb, machine, results, "" if on_gpu else MEANINGLESS)
    order = {name: at for at, name in enumerate(known)}
    results.sort(key=lambda result: order[result.name])
    print(f"\n{table(results)}\n")
    if not on_gpu:
        print(f"Note: {MEANINGLESS}.")
    failed = [result.name for result in results if result.failed]
    print(f"{report}: " + (f"{FAILED}: {', '.join(failed)}" if failed else "all right"))
    return int(bool(failed))
