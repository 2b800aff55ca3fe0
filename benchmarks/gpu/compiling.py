"""All kernels compiled at once, one process per source: later parts find them in CuPy's cache."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .child import named
from .lines import Line, checked, skipped, wrong
from .machine import ROOT
from .stage import Stage, readable

HOPPER = ("prefill_wgmma.cu", "prefill_bulk.cu")
"""Sources for cards of compute capability 9.0 alone."""


def compiling(stage: Stage) -> Iterator[Line]:
    """Seconds until the last kernel is there."""
    sources = sorted(path.name for path in (ROOT / "engine/kernels/csrc").glob("*.cu"))
    if stage.cupy is None:
        yield skipped("kernels compiled for this GPU", f"{len(sources)} sources, no GPU")
        return
    if stage.device.tuning.prefill == "mma":
        sources = [name for name in sources if name not in HOPPER]
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", __name__, stage.factory]
    running = {
        name: subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True)
        for name in sources
    }
    words = {name: process.communicate()[1] for name, process in running.items()}
    refused = [name for name, process in running.items() if process.returncode]
    for name in refused:
        lines = words[name].strip().splitlines()
        yield wrong(f"{name} compiles", lines[-1][:300] if lines else "no word")
    seconds = time.monotonic() - began
    count = f"{len(sources) - len(refused)} of {len(sources)} sources in {readable(seconds)}"
    yield checked(f"kernels compiled for {stage.device.name}", not refused, count, seconds=seconds)


def compile_one(factory: str, source: str) -> None:
    """In the child."""
    stage: Stage = named(factory)(Path())
    stage.device.compile(source)  # type: ignore[attr-defined]


if __name__ == "__main__":
    compile_one(sys.argv[1], sys.argv[2])
