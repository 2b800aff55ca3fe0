"""The host's half of loading a model to a GPU: reading, converting, and filling pinned slots.

The checkpoint is in the page cache, the loader is the product's, and the device takes each copy at
once, as a GPU does that reads pinned memory faster than the host fills it. What a GPU adds is not
counted. The first column is the copy of as many bytes by one thread into memory that is there.

    python -m baton.benchmarks.loading [--mib 1024] [--threads 1 4] [--turns 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.staging import THREADS, Staging
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.models.decoder import Decoder

from .checkpoints import Shape, write_checkpoint
from .device_idle import TimedDevice, Timeline
from .scratch import scratch_folder

SHAPE = Shape("layers", vocab=8192, hidden=2048, intermediate=7168, layers=1, heads=16, kv_heads=4)
SLOT = 8 << 20


class TakingDevice(TimedDevice):
    """A device that has read what is copied to it when the copy is queued."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """Make an array with undefined content, whose memory nobody touches."""
        return np.empty(tuple(shape), dtype)

    def host_buffer(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        """Make an array whose memory is there, as pinned memory is."""
        return np.full(tuple(shape), 1, dtype)

    def write(self, array: Any, values: Any) -> None:
        """Read nothing: a GPU reads without the host's processors."""


def load(folder: Path, threads: int) -> tuple[float, float]:
    """Load the model. Return seconds, and CPU seconds of all threads."""
    backend = CudaBackend(TakingDevice(Timeline(0.0)))
    backend.staging = Staging(backend.device, threads=threads)
    began, used = time.perf_counter(), time.process_time()
    Decoder(load_checkpoint(folder), backend, 64)
    return time.perf_counter() - began, time.process_time() - used


def copied(nbytes: int) -> float:
    """Return the seconds in which one thread copies so many bytes, a slot at a time."""
    source, target = np.full(nbytes, 1, np.uint8), np.full(SLOT, 1, np.uint8)
    began = time.perf_counter()
    for at in range(0, nbytes, SLOT):
        part = source[at : at + SLOT]
        np.copyto(target[: len(part)], part)
    return time.perf_counter() - began


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="loading", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="about the size of the checkpoint")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, THREADS])
    parser.add_argument("--turns", type=int, default=3, help="the best of so many is printed")
    given = parser.parse_args()
    print(
        "GB/s of a checkpoint to pinned memory, without a GPU; CPU: seconds of all threads per GB"
    )
    print("weights  one copy  threads    GB/s     CPU")
    for dtype, width in (("BF16", 2), ("F32", 4)):
        layers = max(1, (given.mib << 20) // (SHAPE.layer_parameters() * width))
        with scratch_folder() as place:
            folder = write_checkpoint(place / "model", replace(SHAPE, layers=layers), dtype)
            nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            load(folder, 1)  # the pages are in memory after it
            for threads in given.threads:
                turns = [load(folder, threads) for _ in range(given.turns)]
                copy = min(copied(nbytes) for _ in range(given.turns))
                seconds, used = min(turns)
                rates = nbytes / copy / 1e9, nbytes / seconds / 1e9, used / nbytes * 1e9
                print(
                    f"{dtype:7} {rates[0]:9.2f} {threads:8} {rates[1]:7.2f} {rates[2]:7.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
