"""The stage of the GPU verbs on the CPU, for processes that tests start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from baton.benchmarks.gpu.stage import Stage, WallClock
from cuda.host_device import HostDevice


def on_host(scratch: Path) -> Stage:
    """Tiny shapes on the host device."""
    device = HostDevice(Path(os.environ["BATON_HOST_BUILDS"]))
    flags = ("--device=cpu", "--kernels=numpy")
    return Stage(device, WallClock(device), scratch, "host_stage:on_host", tiny=True, flags=flags)
