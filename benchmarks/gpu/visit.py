"""A short visit to a machine with a GPU: ``make gpu-visit``.

Parts that have never run on a card come first, then parts whose figures are old. A call takes at
most nine minutes and continues after the last one; all calls take at most 13. The results are one
table and one JSON file with commit and card. ``--dry`` prints the order and the budgets.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import bench, check
from .lines import FAILED, PartResult, Report, table
from .parts import Part, lines_of, narrate, run_parts
from .verb import CANNOT, GPU_STAGE, UNFINISHED, begun
from .visit_plan import (
    CALL_S,
    VISIT_S,
    Planned,
    Progress,
    call_seconds,
    next_fitting,
    outline,
    waiting,
)

_HERE = "baton.benchmarks.gpu"
_LOG_BYTES = 8192
INTERRUPTED = "interrupted by the end of a call"
_KNOWN = {part.name: part for part in (*bench.PARTS, *check.PARTS)}


def _part(name: str, budget_s: float) -> Part:
    """A part of ``gpu-check`` or ``gpu-bench``, with the budget of a visit."""
    known = _KNOWN[name]
    return Part(name, known.code, budget_s, known.together)


PLAN = (
    Planned(_part("compile", 45), 15, "every kernel for this card, for all parts after it"),
    Planned(Part("peers", f"{_HERE}.peers:peers", 30, together=True), 0, "what can be compared"),
    Planned(
        _part("kinds", 120),
        0,
        "clusters with images, speech, pictures, demos, fp8, int8: never run",
    ),
    Planned(_part("attention", 60), 12, "int8 rows: never run; prefill changed since it ran"),
    Planned(_part("sampling", 60), 3, "the sampler: changed since it ran"),
    Planned(
        _part("decode", 100), 24, "int8 KV: never run; FlashInfer, flex_attention: never timed"
    ),
    Planned(_part("draw", 60), 13, "top-p by all blocks of a row, sums without shared memory"),
    Planned(_part("rows", 40), 12, "RMSNorm with a word per thread; nodes that begin early"),
    Planned(_part("prefill", 50), 20, "prompts, also with bulk copies, beside peers"),
    Planned(_part("products", 50), 20, "products, 16 rows also by ring_linear.cu, beside cuBLAS"),
    Planned(_part("fp8", 30), 0, "products with weights in 8-bit floats: never run"),
    Planned(_part("cluster", 120), 0, "handoffs and streams of an 8B model in a part of its own"),
    Planned(
        Part("modes", f"{_HERE}.bench_modes:modes", 95),
        0,
        "64 streams of 128 + 1,024: one worker, two, two with a choice per request",
    ),
    Planned(_part("int8", 50), 0, "an 8B model's steps and prompts over int8 KV: never run"),
    Planned(_part("transformers", 70), 0, "the compiled peer of a decode step: never run"),
    Planned(_part("model", 110), 45, "steps, also with dependent launches, prefill, loading"),
    Planned(_part("serving", 40), 6, "tokens of a cluster beside the CPU's"),
    Planned(_part("others", 60), 15, "all other kernels"),
    Planned(_part("blocks", 30), 4, "gather and scatter"),
    Planned(_part("handoffs", 20), 7, "1,000 handoffs between two processes"),
    Planned(_part("values", 30), 13, "attention over 16,384 tokens"),
    Planned(_part("sweep", 45), 15, "variants of this card; writes its entry, so it is late"),
    Planned(_part("memcheck", 20), 2, "compute-sanitizer's memcheck"),
    Planned(_part("racecheck", 20), 7, "compute-sanitizer's racecheck"),
    Planned(_part("leaks", 20), 4, "memory after models are let go"),
    Planned(_part("probes", 20), 4, "limits of the card"),
    Planned(_part("words", 20), 3, "single words of CUDA: last, because one may hang"),
)
"""In the order of their value."""


@dataclass
class Visit:
    """The results and the progress of a visit, in the files of one folder."""

    folder: Path
    report: Report
    order: Sequence[str]
    progress: Progress = field(default_factory=Progress)

    @property
    def path(self) -> Path:
        """The one JSON file; the table is beside it."""
        return self.folder / "gpu-visit.json"

    @property
    def parts(self) -> Path:
        """Lines and the ends of logs."""
        return self.folder / "parts"

    def resume(self, plan: Sequence[Planned]) -> None:
        """Take over what earlier calls found on the same machine, and begin a call."""
        found = self.report.read(self.path)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            self.progress = Progress.from_json(found["progress"])
        self._salvage()  # of a call that was killed
        limits = {each.part.name: each.part.limit_s for each in plan}
        self.progress = self.progress.resumed(limits, time.time())
        self.write()

    def _salvage(self) -> None:
        """Keep what running parts have found out, until they run again."""
        for name in self.progress.begun:
            lines = lines_of(self.parts / f"{name}.lines")
            self.report.results[name] = PartResult(name, lines, 0.0, INTERRUPTED)

    @property
    def done(self) -> set[str]:
        """Names of parts that need not run again."""
        return {n for n, result in self.report.results.items() if result.error != INTERRUPTED}

    def begins(self, part: Part) -> None:
        """Record that ``part`` runs, before it does."""
        self.progress.begun[part.name] = time.time()
        self.write()

    def ended(self, result: PartResult, spent_s: float) -> None:
        """Record a result. ``spent_s``: by all calls until now."""
        self.report.results[result.name] = result
        self.progress.begun.pop(result.name, None)
        self.progress.spent_s = spent_s
        _shorten(self.parts / f"{result.name}.log")
        self.write()

    def stop(self, spent_s: float) -> None:
        """End the call. Parts that still run are interrupted."""
        self._salvage()
        self.progress = self.progress.interrupted(spent_s)
        self.write()

    def write(self) -> None:
        """Write both files."""
        self.report.extra = {"progress": self.progress.to_json()}
        self.report.write(self.path, self.order)


def _shorten(log: Path) -> None:
    """Keep the end of a log."""
    content = log.read_bytes() if log.exists() else b""
    if len(content) > _LOG_BYTES:
        log.write_bytes(content[-_LOG_BYTES:])


def main() -> int:
    """Run one call of a visit."""
    options = _options()
    plan = [each for each in PLAN if not options.names or each.part.name in options.names]
    if options.dry:
        print(_outline(plan, options.call))
        return 0
    report = begun("gpu-visit", options.stage, options.commit)
    if report is None:
        return CANNOT
    visit = Visit(options.out, report, [each.part.name for each in PLAN])
    visit.resume(PLAN)
    _call(visit, [each.part for each in plan], options.call, options.stage)
    return _told(visit, [each.part for each in plan])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-visit", description=__doc__)
    known = [each.part.name for each in PLAN]
    parser.add_argument("names", nargs="*", metavar="PART", help=f"of {', '.join(known)}")
    parser.add_argument("--dry", action="store_true", help="print the order and the budgets")
    parser.add_argument("--call", type=float, default=CALL_S, help="most seconds of this call")
    parser.add_argument("--out", type=Path, default=Path("build") / "gpu-visit", help="folder")
    parser.add_argument("--commit", default="", help="where the folder has no git")
    parser.add_argument("--stage", default=GPU_STAGE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(known)}")
    return options


def _outline(plan: Sequence[Planned], call_s: float) -> str:
    rows = ["call   from  budget  part          why"]
    for call, at, each in outline(plan, call_s):
        when = f"{call:4} {at:4.0f} s" if call else "   -      -"
        rows.append(f"{when}  {each.part.limit_s:4.0f} s  {each.part.name:12}  {each.why}")
    rows.append(
        f"From: if each part takes what it took on an H200, or its budget if it has never run. A "
        f"call ends within {min(call_s, CALL_S):.0f} s, the visit within {VISIT_S:.0f} s; a part "
        "that exceeds its budget is ended and named."
    )
    return "\n".join(rows)


def _call(visit: Visit, parts: Sequence[Part], asked_s: float, stage: str) -> None:
    """Run what fits into a call. Whatever ends it, the time is counted."""
    began, before = time.monotonic(), visit.progress.spent_s
    budget = call_seconds(before, asked_s)
    left = waiting(parts, visit.done, visit.progress.tries)

    def spent() -> float:
        return before + time.monotonic() - began

    try:
        results = run_parts(
            left, stage, visit.parts, budget, choose=next_fitting, begins=visit.begins
        )
        for result in results:
            visit.ended(result, spent())
            print(narrate(result), flush=True)
    finally:
        visit.stop(spent())


def _told(visit: Visit, parts: Sequence[Part]) -> int:
    """Print the table, the parts that went wrong and those that are left; the exit code."""
    results = visit.report.ordered(visit.order)
    print(f"\n{table(results)}\n")
    if visit.report.note:
        print(f"Note: {visit.report.note}.")
    left = waiting(parts, visit.done, visit.progress.tries)
    spent = visit.progress.spent_s
    more = next_fitting(left, call_seconds(spent)) is not None
    print(f"{visit.path}: {spent:.0f} s of {VISIT_S:.0f} s, call {visit.progress.calls}")
    if failed := [result.name for result in results if result.failed]:
        print(f"{FAILED} or cut: {', '.join(failed)}")
    if left:
        names = ", ".join(part.name for part in left)
        print(f"left for another call: {names}" if more else f"no time is left for: {names}")
    return UNFINISHED if more else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
