"""A GPU verb from its command line to its exit code.

Baton is imported only after the check of this machine's requirements.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .lines import FAILED, Report, table
from .machine import description, why_not
from .parts import Part, narrate, run_parts

CANNOT, UNFINISHED = 2, 3
"""Exit codes: the machine lacks a requirement; parts are left for --rest. 1: a part failed."""
CALL_S = 540.0
"""Most seconds of one call."""
GPU_STAGE = "baton.benchmarks.gpu.stage:on_gpu"
MEANINGLESS = "run without a GPU to see that it runs: the figures mean nothing"


def begun(verb: str, stage: str, commit: str) -> Report | None:
    """Print the machine and return an empty report; say what is missing and return None."""
    on_gpu = stage == GPU_STAGE
    if reason := why_not(needs_gpu=on_gpu):
        print(f"{verb}: {reason}", file=sys.stderr)
        return None
    from ..scratch import leave_on_signals

    leave_on_signals()
    machine = description(commit)
    print("; ".join(str(machine[k]) for k in ("gpu", "processor", "commit") if k in machine))
    return Report(verb, machine, "" if on_gpu else MEANINGLESS)


def run_verb(verb: str, parts: Sequence[Part], about: str) -> int:
    """Run parts for up to nine minutes, print a table of all results, write the report."""
    parser = argparse.ArgumentParser(prog=verb, description=about)
    known = [part.name for part in parts]
    parser.add_argument("names", nargs="*", metavar="PART", help=f"of {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="print the parts and their limits")
    parser.add_argument("--rest", action="store_true", help="run parts that have no result yet")
    parser.add_argument("--out", type=Path, default=Path("build") / verb, help="folder")
    parser.add_argument("--commit", default="", help="where the folder has no git")
    parser.add_argument("--stage", default=GPU_STAGE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(known)}")
    if options.list:
        print("\n".join(f"{part.name:12} at most {part.limit_s:4.0f} s" for part in parts))
        print(f"A call ends after {CALL_S:.0f} s; --rest runs the parts that have no result yet.")
        return 0
    report = begun(verb, options.stage, options.commit)
    if report is None:
        return CANNOT
    path = options.out / f"{verb}.json"
    report.read(path)
    chosen = [part for part in parts if not options.names or part.name in options.names]
    if options.rest:
        chosen = [part for part in chosen if part.name not in report.results]
    for part in chosen:
        report.results.pop(part.name, None)
    for result in run_parts(chosen, options.stage, options.out, CALL_S):
        report.results[result.name] = result
        print(narrate(result), flush=True)
        # Write after each part: the results are kept if a later part fails.
        report.write(path, known)
    results = report.ordered(known)
    print(f"\n{table(results)}\n")
    if options.stage != GPU_STAGE:
        print(f"Note: {MEANINGLESS}.")
    failed = [result.name for result in results if result.failed]
    left = [part.name for part in chosen if part.name not in report.results]
    print(f"{path}: " + (f"{FAILED}: {', '.join(failed)}" if failed else "all right"))
    if left:
        print(f'left for another call: {", ".join(left)} (make {verb} ARGS="--rest")')
    return 1 if failed else UNFINISHED if left else 0
