"""Where parts run: a device, a clock for its work, and how large things are.

On a GPU the clock is CUDA events. Tests put the host device in its place, with tiny shapes: then
every line of a part runs, and its figures mean nothing.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.tuning import WGMMA

Work = Callable[[], object]
_RANDOM = (1 << 22) + 37
"""Odd, so that repeated copies do not align with rows."""


class Clock(Protocol):
    """Times work that is queued on a device."""

    def seconds(self, work: Work) -> float:
        """From the start of what ``work`` queues to its end."""
        ...


class EventClock:
    """CUDA events around the work."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        cuda = device.cupy.cuda
        self._begin, self._end = cuda.Event(), cuda.Event()
        self._elapsed = cuda.get_elapsed_time

    def seconds(self, work: Work) -> float:
        """By the device's own clock."""
        self._begin.record(self._device.stream)
        work()
        self._end.record(self._device.stream)
        self._end.synchronize()
        return float(self._elapsed(self._begin, self._end)) * 1e-3


class WallClock:
    """The host's clock, waiting for the device before and after."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def seconds(self, work: Work) -> float:
        """Including what the host does."""
        self._device.synchronize()
        began = time.perf_counter()
        work()
        self._device.synchronize()
        return time.perf_counter() - began


@dataclass(frozen=True)
class Timing:
    """Repeated times: median and the range of the middle half, in seconds."""

    median: float
    low: float
    high: float
    best: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """Summarise at least one time."""
        ranked = sorted(times)
        quarter = len(ranked) // 4
        return cls(statistics.median(ranked), ranked[quarter], ranked[-1 - quarter], ranked[0])

    @property
    def text(self) -> str:
        """For a table."""
        return f"{readable(self.median)} ({readable(self.low)} to {readable(self.high)})"


def readable(seconds: float) -> str:
    """A time with three digits and its unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


@dataclass
class Stage:
    """What a part is given.

    ``tiny``: shapes that the CPU can compute in a moment; figures then mean nothing. ``factory``:
    "module:function" that makes the same stage in another process. ``scratch``: a folder.
    ``shared``: a folder for all parts of a call, None for ``scratch``.
    """

    device: Device
    clock: Clock
    scratch: Path
    factory: str
    tiny: bool = False
    flags: Sequence[str] = ("--device=cuda",)
    options: dict[str, Any] = field(default_factory=dict)
    shared: Path | None = None

    @property
    def cupy(self) -> Any:
        """The CuPy module, None where the device is not CuPy's."""
        return self.device.cupy if isinstance(self.device, CupyDevice) else None

    @property
    def early(self) -> Device | None:
        """The device with kernels that may begin before the one before has ended, if it can."""
        can = self.tiny or int(self.cupy.cuda.Device().compute_capability) >= int(WGMMA)
        if not can or self.device.tuning.dependent:
            return None
        return self.device.tuned(msgspec.structs.replace(self.device.tuning, dependent=True))

    def size(self, full: int, tiny: int) -> int:
        """One of two sizes."""
        return tiny if self.tiny else full

    def kept(self, name: str, write: Callable[[Path], object]) -> Path:
        """A folder that ``write`` fills, once in a call; not for parts that run together."""
        folder = (self.shared or self.scratch) / name
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a part that was ended
            write(unfinished)
            unfinished.rename(folder)
        return folder

    def time(self, works: Sequence[Work], repeats: int = 30, warm: int = 3) -> Timing:
        """Time ``works`` in turn, which do the same over different memory.

        ``repeats`` in all, after ``warm`` of each that do not count.
        """
        repeats, warm = (2, 1) if self.tiny else (repeats, warm)
        for work in works:
            for _ in range(warm):
                work()
        return Timing.of([self.clock.seconds(works[i % len(works)]) for i in range(repeats)])

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy between contiguous arrays of the device."""
        if self.cupy is None:
            target[...] = source
        else:
            stream = self.device.stream  # type: ignore[attr-defined]
            target.data.copy_from_device_async(source.data, source.nbytes, stream)

    def random_bf16(self, shape: Sequence[int], scale: float = 1.0, seed: int = 0) -> Any:
        """Normal numbers as bfloat16 on the device; a few million of them, over and over."""
        total = math.prod(shape)
        count = min(total, _RANDOM)
        values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(scale)
        array: Any = self.device.empty((total,), np.uint16)
        self.device.write(array[:count], bfloat16_bits(values))
        while count < total:
            more = min(count, total - count)
            self.copy(array[count : count + more], array[:more])
            count += more
        self.device.synchronize()
        return array.reshape(tuple(shape))

    def memory_used(self) -> int:
        """Used bytes of the device, by all processes; 0 if unknown."""
        if self.cupy is None:
            return 0
        self.device.synchronize()
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)


GPU = f"{__name__}:on_gpu"


def on_gpu(scratch: Path) -> Stage:
    """The first GPU of this machine. Raises ConfigError without one."""
    device = CupyDevice()
    return Stage(device, EventClock(device), scratch, GPU)
