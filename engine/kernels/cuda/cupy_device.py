"""The device through CuPy: arrays of its memory pool, kernels compiled by NVRTC at first use."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....proto.errors import ConfigError
from .cublas import WORKSPACE_BYTES, Cublas, find_library
from .device import Argument, Array, DeviceArray, Event, Kernel
from .driver import check_allocation
from .sources import cuda_source

_PLAIN_SHARED_BYTES = 48 * 1024
_PIECE = 2 << 20
_OPTIONS = ("-std=c++17",)
INSTALL_CUPY = "pip install 'cupy-cuda13x[ctk]'"
"""With ``ctk`` it brings NVRTC, which compiles the kernels."""


def cupy_is_installed() -> bool:
    """Whether there is CuPy, which may still find no GPU."""
    return importlib.util.find_spec("cupy") is not None


def cuda_is_available() -> bool:
    """Whether CuPy is installed and finds a GPU; never raises."""
    if not cupy_is_installed():
        return False
    import cupy  # pyright: ignore[reportMissingImports]

    return bool(cupy.cuda.is_available())


class CupyGraph:
    """A captured graph with the arrays its kernels use."""

    def __init__(self, device: CupyDevice, graph: Any, kept: list[Any]) -> None:
        self._device, self._graph, self._kept = device, graph, kept

    def replay(self) -> None:
        """Queue the graph on the device's stream."""
        self._device.replay(self._graph)


class CupyMapping:
    """Memory of another process; see :class:`~baton.engine.kernels.cuda.device.Mapping`."""

    def __init__(self, device: CupyDevice, pointer: int) -> None:
        self._device, self._pointer = device, pointer

    def close(self) -> None:
        """Wait for what was queued, then unmap."""
        self._device.unmap(self._pointer)


class CupyEvent:
    """A place in a stream; see :class:`~baton.engine.kernels.cuda.device.Event`."""

    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        """Whether the GPU has come to it."""
        return bool(self.event.done)

    def wait(self) -> None:
        """Sleep until it has; other Python threads run meanwhile."""
        self.event.synchronize()


class CupyDevice:
    """One GPU; see :class:`~baton.engine.kernels.cuda.device.Device`.

    Everything is queued on one stream of its own, whichever thread asks: a graph can be captured
    there, and what one thread writes another's later launch sees. :meth:`another_stream` gives
    a device of the same memory with another stream.
    ``source`` gives the text of a kernel's file. Raises ConfigError without CuPy or without a GPU.
    """

    def __init__(self, ordinal: int = 0, source: Callable[[str], str] = cuda_source) -> None:
        if not cupy_is_installed():
            raise ConfigError(f"--device cuda needs CuPy: {INSTALL_CUPY}")
        if not cuda_is_available():
            raise ConfigError("CuPy finds no CUDA device: no GPU, or its driver is missing or old")
        import cupy  # pyright: ignore[reportMissingImports]

        count = cupy.cuda.runtime.getDeviceCount()
        if not 0 <= ordinal < count:
            raise ConfigError(f"there is no CUDA device {ordinal}: this machine has {count}")
        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        self._modules: dict[str, Any] = {}
        self._functions: dict[Kernel, Any] = {}
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._lock = threading.RLock()  # what another thread queues must not join a capture
        self._streams = [(self._lock, self._stream)]  # of all devices over this memory
        self._load_lock = threading.Lock()
        self._kept: list[Any] | None = None  # arrays of the launches being captured
        self._cublas: Cublas | None = None
        self._cublas_space: DeviceArray | None = None  # cuBLAS writes there
        self._shared_bytes: dict[Kernel, int] = {}
        self._source = source
        capability = self._device.compute_capability
        self.name = f"cuda-sm_{capability}"

    @property
    def cupy(self) -> Any:
        """The CuPy module."""
        return self._cupy

    @property
    def stream(self) -> Any:
        """The CuPy stream that everything is queued on."""
        return self._stream

    def compile(self, source: str) -> None:
        """Compile the kernels of a file now, or find them compiled in CuPy's cache."""
        with self._lock, self._device, self._stream:
            self._module(source).compile()

    def another_stream(self) -> CupyDevice:
        """The same GPU, memory and kernels behind a stream of its own."""
        other = copy.copy(self)
        with self._device:
            other._stream = self._cupy.cuda.Stream(non_blocking=True)
        other._lock, other._kept = threading.RLock(), None
        other._cublas = other._cublas_space = None  # bound to the other stream
        self._streams.append((other._lock, other._stream))
        return other

    def record(self) -> CupyEvent:
        """Mark what has been queued so far; waiting threads sleep instead of spinning."""
        with self._lock, self._device:
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return CupyEvent(event)

    def wait_for(self, event: Event) -> None:
        """Queue nothing before ``event`` is done."""
        theirs: Any = event
        with self._lock, self._device:
            self._stream.wait_event(theirs.event)

    def read(self, array: DeviceArray, out: Array) -> None:
        """Queue a copy to the host; into memory that is not pinned it waits."""
        _check_copy(out, array)
        source: Any = array
        with self._lock, self._device:
            source.data.copy_to_host_async(out.ctypes.data, out.nbytes, self._stream)

    def local_bytes(self) -> dict[str, int]:
        """Local memory per thread of each kernel launched so far; spilled registers lie there."""
        with self._lock, self._device:
            return {k.name: int(f.local_size_bytes) for k, f in self._functions.items()}

    def memory_bytes(self) -> int:
        """All memory of the GPU, whoever uses it."""
        with self._device:
            return int(self._cupy.cuda.runtime.memGetInfo()[1])

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array with undefined content."""
        with self._lock, self._device, self._stream:
            array: DeviceArray = self._cupy.empty(tuple(shape), np.dtype(dtype))
        return array

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros."""
        with self._lock, self._device, self._stream:
            array: DeviceArray = self._cupy.zeros(tuple(shape), np.dtype(dtype))
        return array

    def shareable(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros by an allocation past the memory pool, whose handle is its own.

        Of smaller pieces than 2 MiB the driver packs several into what a handle shows.
        """
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock, self._device, self._stream:
            memory = self._cupy.cuda.Memory(-(-nbytes // _PIECE) * _PIECE)
            pointer = self._cupy.cuda.MemoryPointer(memory, 0)
            array: Any = self._cupy.ndarray(tuple(shape), dtype, pointer)
            array.data.memset_async(0, nbytes, self._stream)
        return cast("DeviceArray", array)

    def export(self, array: DeviceArray) -> tuple[bytes, int]:
        """CUDA IPC handle of the allocation that ``array`` lies in, and its offset there."""
        base: Any = array
        start, runtime = base.data.mem.ptr, self._cupy.cuda.runtime
        with self._device:
            try:
                handle = runtime.ipcGetMemHandle(start)
            except runtime.CUDARuntimeError as error:
                raise OSError(f"this system shares no GPU memory: {error}") from None
        return bytes(handle), int(base.data.ptr - start)

    def open(
        self, handle: bytes, offset: int, shape: Sequence[int], dtype: npt.DTypeLike
    ) -> tuple[CupyMapping, DeviceArray]:
        """Map what another process exported; OSError when that cannot be, ValueError for a lie."""
        cuda, dtype = self._cupy.cuda, np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._device:
            try:
                pointer = cuda.runtime.ipcOpenMemHandle(handle)
            except (cuda.runtime.CUDARuntimeError, ValueError) as error:
                raise OSError(f"the GPU memory of another process: {error}") from None
            mapping = CupyMapping(self, pointer)
            try:
                check_allocation(pointer, offset + nbytes)
            except (OSError, ValueError):
                mapping.close()
                raise
            memory = cuda.UnownedMemory(pointer, offset + nbytes, mapping, self._device.id)
            where = cuda.MemoryPointer(memory, offset)
            array: DeviceArray = self._cupy.ndarray(tuple(shape), dtype, where)
        return mapping, array

    def unmap(self, pointer: int) -> None:
        """Give back what :meth:`open` mapped, once everything queued on any stream is done."""
        with self._device:
            for lock, stream in self._streams:
                with lock:  # a stream that is captured cannot be waited for
                    stream.synchronize()
            self._cupy.cuda.runtime.ipcCloseMemHandle(pointer)

    def upload(self, array: Array) -> DeviceArray:
        """Copy a NumPy array to the device, in row-major order."""
        with self._lock, self._device, self._stream:
            copy: DeviceArray = self._cupy.array(array, order="C")
        return copy

    def download(self, array: DeviceArray) -> Array:
        """Copy an array to the host; waits for what was queued before."""
        with self._lock, self._device, self._stream:
            copy: Array = self._cupy.asnumpy(array)
        return copy

    def host_buffer(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make a pinned array of zeros, which goes back when nothing refers to it."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        with self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
        array: Array = np.frombuffer(memory, dtype, count).reshape(tuple(shape))
        array[...] = 0
        return array

    def write(self, array: DeviceArray, values: Array) -> None:
        """Queue a copy from the host; ``values`` that are not pinned are read at once."""
        _check_copy(array, values)
        target: Any = array
        with self._lock, self._device:
            target.data.copy_from_host_async(values.ctypes.data, values.nbytes, self._stream)

    def capture(self, work: Callable[[], None]) -> CupyGraph:
        """Run ``work`` once, which compiles and allocates, then capture it."""
        with self._lock, self._device, self._stream:
            work()
            self._stream.synchronize()
            kept: list[Any] = []
            self._kept = kept
            try:
                self._stream.begin_capture()
                try:
                    work()
                finally:
                    graph = self._stream.end_capture()
            finally:
                self._kept = None
            graph.upload(self._stream)
        return CupyGraph(self, graph, kept)

    def replay(self, graph: Any) -> None:
        """Queue a graph of CuPy's."""
        with self._lock, self._device:
            graph.launch(self._stream)

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel."""
        values = tuple(_as_passed(a) for a in args)
        with self._lock, self._device, self._stream:
            if self._kept is not None:
                self._kept.extend(args)
            with self._load_lock:
                function = self._function(kernel, shared_bytes)
            function(tuple(grid), tuple(block), values, shared_mem=shared_bytes)

    def matmul(
        self, x: DeviceArray, weight: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """Queue a product of cuBLAS; CuPy's own gives no float32 and cannot be captured."""
        sizes = (x.shape[0], weight.shape[0], x.shape[1])
        arrays: list[Any] = [x, weight, out]
        at = [array.data.ptr for array in arrays]
        with self._lock, self._device, self._stream:
            if self._kept is not None:
                self._kept.extend(arrays)
            cublas = self._cublas = self._cublas or self._new_cublas()
            wide = out.dtype == np.float32
            cublas.matmul(at[0], at[1], at[2], sizes, wide=wide, add=add)

    def _new_cublas(self) -> Cublas:
        space: Any = self.empty((WORKSPACE_BYTES,), np.uint8)
        self._cublas_space = space
        return Cublas(find_library(), self._stream.ptr, space.data.ptr)

    def synchronize(self) -> None:
        """Wait for everything queued."""
        with self._lock, self._device:  # waiting while another thread captures would end that
            self._stream.synchronize()

    def _function(self, kernel: Kernel, shared_bytes: int) -> Any:
        function = self._functions.get(kernel)
        if function is None:
            function = self._module(kernel.source).get_function(kernel.name)
            self._functions[kernel] = function
        # More than 48 KiB must be asked for once; it stays with the function.
        if shared_bytes > self._shared_bytes.get(kernel, _PLAIN_SHARED_BYTES):
            function.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes[kernel] = shared_bytes
        return function

    def _module(self, source: str) -> Any:
        module = self._modules.get(source)
        if module is None:
            module = self._cupy.RawModule(code=self._source(source), options=_OPTIONS)
            self._modules[source] = module
        return module


def _check_copy(target: DeviceArray, source: DeviceArray) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"{source.dtype} {source.shape} into {target.dtype} {target.shape}")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("only contiguous arrays can be copied")


def _as_passed(argument: Argument) -> Any:
    """Null, and a structure, as CuPy takes them by value: an array of one record."""
    if argument is None:
        return np.uint64(0)
    return np.array([argument]) if isinstance(argument, np.void) else argument
