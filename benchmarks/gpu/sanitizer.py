"""The smoke part under compute-sanitizer, where the CUDA toolkit is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from .lines import Line, checked, skipped
from .stage import Stage

_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
_CODE = 99


def memcheck(stage: Stage) -> Iterator[Line]:
    """Reads and writes out of bounds, and misaligned ones."""
    return _under(stage, "memcheck")


def racecheck(stage: Stage) -> Iterator[Line]:
    """Races in shared memory."""
    return _under(stage, "racecheck")


def _under(stage: Stage, tool: str) -> Iterator[Line]:
    what = f"compute-sanitizer, {tool}"
    program = shutil.which("compute-sanitizer") or next(
        (path for place in _PLACES if (path := shutil.which("compute-sanitizer", path=place))), None
    )
    if program is None or stage.cupy is None:
        yield skipped(what, "not installed" if program is None else "needs a GPU")
        return
    out = stage.scratch / "smoke.lines"
    command = [program, "--tool", tool, "--error-exitcode", str(_CODE), "--print-limit", "50"]
    command += [sys.executable, "-P", "-m", "baton.benchmarks.gpu.child"]
    command += ["baton.benchmarks.gpu.smoke:smoke", "--out", str(out)]
    command += ["--stage", "baton.benchmarks.gpu.smoke:exact_memory"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    output = run.stdout + run.stderr
    print(output, flush=True)
    # With hazards that may be meant, such as those within a warp, the exit code is not 0 either.
    fine = run.returncode == 0 or (run.returncode == _CODE and "(0 errors" in verdict(output))
    yield checked(what, fine, verdict(output), "0 errors")
    for kernel, count in warned(output).items():
        yield Line(f"{what}, warnings", f"{kernel}: {count}")


def warned(output: str) -> dict[str, int]:
    """How many warnings name a kernel first."""
    found: dict[str, int] = {}
    for report in re.split(r"^=+ Warning:", output, flags=re.MULTILINE)[1:]:
        if match := re.search(r" in (\w+)[+(]|at (\w+)\+0x", report):
            kernel = match[1] or match[2]
            found[kernel] = found.get(kernel, 0) + 1
    return found


def verdict(output: str) -> str:
    """The tool's summary, and the first thing it found."""
    said = [line.strip("= \n") for line in output.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(said) if "SUMMARY" in line), "no summary")
    first = next((line for line in said if line.startswith(("Invalid", "Error", "Race"))), "")
    if summary == "no summary":
        first = output.strip().splitlines()[-1][:200] if output.strip() else "no word"
    return f"{summary}{': ' + first if first else ''}"[:300]
