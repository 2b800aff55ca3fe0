"""Which of a worker's streams a GPU serves first."""

from __future__ import annotations

import subprocess
import sys

PRIORITIES = """
import numpy as np
from baton.engine.kernels.cuda.block_moves import BlockStream, LayerMarks
from baton.engine.kernels.cuda.cupy_device import CupyDevice
device = CupyDevice()
pool = device.shareable((1, 2, 2, 1, 8, 64), np.uint16)
moves = BlockStream(device, pool, LayerMarks(device), 1024)
streams = moves._device, device, device.another_stream()
print(*(one.stream.priority for one in streams))
"""


def test_blocks_go_before_steps_and_audio_after_them(with_cupy: dict[str, str]) -> None:
    """A step fills the GPU: without a higher priority, layers that are final would wait for it."""
    command = [sys.executable, "-P", "-c", PRIORITIES]
    run = subprocess.run(command, env=with_cupy, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    moves, steps, audio = map(int, run.stdout.split())
    assert moves < steps < audio
