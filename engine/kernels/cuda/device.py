"""What the launchers of the CUDA kernels need of a device.

CuPy offers it on a GPU (:mod:`.cupy_device`); the tests offer it by executing the same sources on
the CPU. bfloat16 is uint16 bits, fp8 is uint8 bits: neither NumPy nor CuPy has these types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..backend import Mapping

Array = npt.NDArray[Any]


class Flags(Protocol):
    """Memory order of an array."""

    @property
    def c_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        ...


class DeviceArray(Protocol):
    """An array in the device's memory; CuPy's and NumPy's arrays both are one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        ...

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, per axis."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        ...

    @property
    def flags(self) -> Flags:
        """Memory order."""
        ...


Scalar = np.int32 | np.uint32 | np.int64 | np.uint64 | np.float32 | np.float64
Argument = DeviceArray | Scalar | np.void | None
"""What a kernel takes: an array (its address), a number of exactly that type, a record (a structure
by value), None (null)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by its file in ``csrc/`` and its exported name."""

    source: str
    name: str


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Queue all of them again, with the same arrays and numbers."""
        ...


class Event(Protocol):
    """A place in a stream: everything that was queued before it."""

    @property
    def done(self) -> bool:
        """Whether all of that has been carried out; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling thread, which may be any, until that is so."""
        ...


class Device(Protocol):
    """Memory of one device, and a stream of it: what is queued here is carried out in order."""

    name: str

    def another_stream(self) -> Device:
        """The same memory and kernels behind a queue of its own.

        Nothing orders two streams but :meth:`wait_for`.
        """
        ...

    def record(self) -> Event:
        """Mark what has been queued here so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """Queue nothing before ``event`` of another stream is done; the caller does not wait."""
        ...

    def read(self, array: DeviceArray, out: Array) -> None:
        """Queue a copy of a contiguous array into ``out`` of :meth:`host_buffer`.

        ``out`` is undefined until an event recorded behind this is done. ValueError for another
        shape or type.
        """
        ...

    def memory_bytes(self) -> int:
        """All memory of the device."""
        ...

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array with undefined content, aligned to 256 bytes."""
        ...

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros."""
        ...

    def shareable(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros in an allocation of its own, which can be exported."""
        ...

    def export(self, array: DeviceArray) -> tuple[bytes, int]:
        """Return a handle for other processes of this host, and where in it the array begins.

        OSError where the system has no such handles.
        """
        ...

    def open(
        self, handle: bytes, offset: int, shape: Sequence[int], dtype: npt.DTypeLike
    ) -> tuple[Mapping, DeviceArray]:
        """Map what another process exported; OSError when that cannot be.

        ValueError when the allocation behind the handle is smaller than what is asked for; nothing
        stays mapped then.
        """
        ...

    def upload(self, array: Array) -> DeviceArray:
        """Copy a NumPy array to the device."""
        ...

    def download(self, array: DeviceArray) -> Array:
        """Copy an array to the host; waits for what was queued before."""
        ...

    def host_buffer(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make an array of the host that :meth:`write` copies from without waiting."""
        ...

    def write(self, array: DeviceArray, values: Array) -> None:
        """Queue a copy of host ``values`` into a contiguous array of the same shape and type.

        ``values`` of :meth:`host_buffer` must stay as they are until something downloaded later
        is there, or an event recorded later is done. ValueError for what does not fit.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run ``work`` once, then capture what it launches; its arrays live as long as the graph.

        ``work`` may launch, and allocate in its first run only; it may not download.
        """
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel with ``shared_bytes`` of dynamic shared memory.

        Nothing is checked here that the launchers have checked: arrays pass as addresses, so
        their strides count for nothing, and a number of another type is read as garbage.
        """
        ...

    def matmul(
        self, x: DeviceArray, weight: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """Queue ``out[m, N] = x[m, K] @ weight[N, K].T``, on top of ``out`` if ``add``.

        ``x`` and ``weight`` bf16, ``out`` bf16 or float32, sums in float32; checked by
        :func:`.linear.linear`.
        """
        ...

    def synchronize(self) -> None:
        """Wait for everything queued."""
        ...
