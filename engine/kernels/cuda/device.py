"""The device interface of the CUDA launchers.

CuPy implements it on a GPU (:mod:`.cupy_device`); the tests implement it by running the same
sources on the CPU. bfloat16 is uint16 bits and fp8 is uint8 bits, because NumPy and CuPy lack them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InternalError

from ..backend import Gpu, Mapping
from .tuning import Tuning

Array = npt.NDArray[Any]


class DeviceLost(InternalError):
    """A call to the driver or to cuBLAS failed, so no later result of this process can be trusted.

    After most of these errors CUDA rejects every further call of the process. Only a new process
    gets a new context.
    """


class CaptureFailed(RuntimeError):
    """Launches could not be captured as a graph; they can still be launched one by one."""


class Flags(Protocol):
    """Memory order of an array."""

    @property
    def c_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps."""
        ...


class DeviceArray(Protocol):
    """An array in device memory; implemented by CuPy's and NumPy's arrays."""

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
"""A kernel argument: an array (its address), a number of exactly this type, a record (a structure
by value), None (null)."""


TENSOR_MAP = np.dtype([("words", np.uint64, 16)])
"""A matrix and boxes of it, as the bulk copy engine wants them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, named by its file in ``csrc/`` and its exported name."""

    source: str
    name: str


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Queue all launches again, with the same arrays and numbers."""
        ...


class Event(Protocol):
    """A position in a stream, after all work queued before."""

    @property
    def done(self) -> bool:
        """True if that work is done; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling thread until that work is done. May be called from any thread."""
        ...


class Device(Protocol):
    """The memory of one device and one of its streams; work on the stream runs in order."""

    name: str
    gpu: Gpu
    multiprocessors: int
    tuning: Tuning
    """The variants that the launchers of this device choose."""

    def tuned(self, tuning: Tuning) -> Device:
        """Return a device of the same memory and stream with other variants of the kernels."""
        ...

    @property
    def lost(self) -> str:
        """Error after which the device can do no more work in this process; "" while it works.

        The call that fails raises :class:`DeviceLost`, in whatever thread it was.
        """
        ...

    def another_stream(self, *, urgent: bool = False) -> Device:
        """Return a device with the same memory and kernels and a new stream.

        Only :meth:`wait_for` orders two streams. Where both have work to begin, this one begins
        later than the first stream, or earlier if it is ``urgent``.
        """
        ...

    def record(self) -> Event:
        """Record an event after the work queued so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """Make later work here wait for ``event`` of another stream; the caller does not wait."""
        ...

    def read(self, array: DeviceArray, out: Array) -> None:
        """Queue a copy of a contiguous array into ``out``, an array of :meth:`host_buffer`.

        ``out`` is undefined until an event recorded later is done. Raises ValueError for another
        shape or type.
        """
        ...

    def free_bytes(self) -> int:
        """Return the bytes of the GPU's memory that no process uses."""
        ...

    def memory_bytes(self) -> int:
        """Return the total memory of the device in bytes."""
        ...

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array with undefined content, aligned to 256 bytes."""
        ...

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros."""
        ...

    def shareable(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make a zeroed array in a separate allocation, which can be exported.

        Raises MemoryError if the device has no room for it.
        """
        ...

    def export(self, array: DeviceArray) -> tuple[bytes, int]:
        """Return a handle for other processes of this host, and the array's offset in it.

        Raises OSError if the system has no such handles.
        """
        ...

    def open(
        self,
        handle: bytes,
        offset: int,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        gpu: str = "",
    ) -> tuple[Mapping, DeviceArray]:
        """Map memory exported by another process. Raises OSError if that is impossible.

        ``gpu``: UUID of the GPU that holds the memory; empty: unknown. Kernels of this device
        read the memory of another GPU directly, over NVLink or PCIe, if the two are peers.

        Raises ValueError, and leaves nothing mapped, if the allocation is smaller than requested.
        """
        ...

    def upload(self, array: Array) -> DeviceArray:
        """Copy a NumPy array to the device.

        An array of :meth:`host_buffer` may be read after this returns, as by :meth:`write`.
        """
        ...

    def download(self, array: DeviceArray) -> Array:
        """Copy an array to the host; waits for the queued work."""
        ...

    def host_buffer(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Allocate a host array from which :meth:`write` copies without waiting."""
        ...

    def trim_host(self) -> None:
        """Return the memory of freed arrays of :meth:`host_buffer` to the system."""
        ...

    def write(self, array: DeviceArray, values: Array) -> None:
        """Queue a copy of host ``values`` into a contiguous array of the same shape and type.

        ``values`` of :meth:`host_buffer` must not change until a later download returns or
        a later event is done. Raises ValueError if shapes or types differ.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run ``work`` once, then capture its launches; its arrays live as long as the graph.

        ``work`` may launch kernels, and allocate in its first run only; it must not download.
        Raises CaptureFailed if the launches of the second run cannot become a graph.
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

        The launchers have already checked the arguments. Arrays are passed as addresses, so
        their strides are ignored, and a number of the wrong type is read as garbage.
        """
        ...

    def tensor_map(self, array: DeviceArray, box_rows: int) -> np.void:
        """Return a :data:`TENSOR_MAP` of a bf16 matrix, with boxes of ``box_rows`` x 64.

        Boxes arrive in shared memory as rows of 128 bytes, swizzled (``csrc/hopper.cuh``). Raises
        ConfigError if the driver makes no such map.
        """
        ...

    def matmul(
        self, x: DeviceArray, weight: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """Queue ``out[m, N] = x[m, K] @ weight[N, K].T``; ``add`` adds to ``out``.

        ``x`` and ``weight`` are bf16, ``out`` bf16 or float32, sums float32; checked by
        :func:`.linear.linear`. ``out`` may be some columns of a larger array.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...
