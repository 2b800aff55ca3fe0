"""The device through CuPy: arrays of its memory pool, kernels compiled by NVRTC at first use."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....proto.errors import ConfigError
from .device import Argument, Array, DeviceArray, Kernel
from .sources import cuda_source

_PLAIN_SHARED_BYTES = 48 * 1024
_OPTIONS = ("-std=c++17",)
_CUDA_R_32F, _CUDA_R_16BF = 0, 14
"""cuBLAS's names of float32 and bfloat16."""


def cuda_is_available() -> bool:
    """Whether CuPy is installed and finds a GPU; never raises."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy  # pyright: ignore[reportMissingImports]

    return bool(cupy.cuda.is_available())


class CupyGraph:
    """A captured graph with the arrays its kernels use."""

    def __init__(self, graph: Any, stream: Any, kept: list[Any]) -> None:
        self._graph, self._stream, self._kept = graph, stream, kept

    def replay(self) -> None:
        """Queue the graph on the device's stream."""
        self._graph.launch(self._stream)


class CupyMapping:
    """Memory of another process; see :class:`~baton.engine.kernels.cuda.device.Mapping`."""

    def __init__(self, device: CupyDevice, pointer: int) -> None:
        self._device, self._pointer = device, pointer

    def close(self) -> None:
        """Wait for what was queued, then unmap."""
        self._device.unmap(self._pointer)


class CupyDevice:
    """One GPU; see :class:`~baton.engine.kernels.cuda.device.Device`.

    Everything is queued on one stream of its own, whichever thread asks: a graph can be captured
    there, and what one thread writes another's later launch sees.
    ``source`` gives the text of a kernel's file. Raises ConfigError without CuPy or without a GPU.
    """

    def __init__(self, ordinal: int = 0, source: Callable[[str], str] = cuda_source) -> None:
        if importlib.util.find_spec("cupy") is None:
            raise ConfigError("the CUDA device needs CuPy: pip install 'baton[cuda]'")
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
        self._kept: list[Any] | None = None  # arrays of the launches being captured
        self._shared_bytes: dict[Kernel, int] = {}
        self._source = source
        capability = self._device.compute_capability
        self.name = f"cuda-sm_{capability}"

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
        """Make an array of zeros by an allocation past the memory pool, whose handle is its own."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock, self._device, self._stream:
            memory = self._cupy.cuda.Memory(nbytes)
            pointer = self._cupy.cuda.MemoryPointer(memory, 0)
            array: Any = self._cupy.ndarray(tuple(shape), dtype, pointer)
            array.data.memset_async(0, nbytes, self._stream)
        return cast("DeviceArray", array)

    def export(self, array: DeviceArray) -> tuple[bytes, int]:
        """CUDA IPC handle of the allocation that ``array`` lies in, and its offset there."""
        base: Any = array
        start = base.data.mem.ptr
        with self._device:
            handle = self._cupy.cuda.runtime.ipcGetMemHandle(start)
        return bytes(handle), int(base.data.ptr - start)

    def open(
        self, handle: bytes, offset: int, shape: Sequence[int], dtype: npt.DTypeLike
    ) -> tuple[CupyMapping, DeviceArray]:
        """Map what another process exported; OSError when that cannot be."""
        cuda, dtype = self._cupy.cuda, np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._device:
            try:
                pointer = cuda.runtime.ipcOpenMemHandle(handle)
            except (cuda.runtime.CUDARuntimeError, ValueError) as error:
                raise OSError(f"the GPU memory of another process: {error}") from None
            mapping = CupyMapping(self, pointer)
            memory = cuda.UnownedMemory(pointer, offset + nbytes, mapping, self._device.id)
            where = cuda.MemoryPointer(memory, offset)
            array: DeviceArray = self._cupy.ndarray(tuple(shape), dtype, where)
        return mapping, array

    def unmap(self, pointer: int) -> None:
        """Give back what :meth:`open` mapped, once everything queued is done."""
        with self._lock, self._device:
            self._stream.synchronize()
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
        if array.shape != values.shape or array.dtype != values.dtype:
            raise ValueError(f"{values.dtype} {values.shape} into {array.dtype} {array.shape}")
        if not (array.flags.c_contiguous and values.flags.c_contiguous):
            raise ValueError("only contiguous arrays can be written")
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
        return CupyGraph(graph, self._stream, kept)

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
        if self._kept is not None:
            self._kept.extend(args)
        with self._lock, self._device, self._stream:
            function = self._function(kernel, shared_bytes)
            function(tuple(grid), tuple(block), values, shared_mem=shared_bytes)

    def matmul(
        self, x: DeviceArray, weight: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """Queue a product of cuBLAS; ``cupy.matmul`` cannot give float32 from bfloat16."""
        from cupy_backends.cuda.libs import cublas  # pyright: ignore[reportMissingImports]

        (rows, depth), width = x.shape, weight.shape[0]
        arrays: list[Any] = [weight, x, out]
        if self._kept is not None:
            self._kept.extend(arrays)
        w, given, result = (array.data.ptr for array in arrays)
        one, onto = np.ones(1, np.float32), np.full(1, add, np.float32)
        into = _CUDA_R_32F if out.dtype == np.float32 else _CUDA_R_16BF
        with self._lock, self._device, self._stream:
            # cuBLAS counts columns first: out.T = weight @ x.T.
            cublas.gemmEx(
                self._cupy.cuda.device.get_cublas_handle(),
                cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, width, rows, depth, one.ctypes.data,
                w, _CUDA_R_16BF, depth, given, _CUDA_R_16BF, depth, onto.ctypes.data,
                result, into, width, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
            )  # fmt: skip

    def synchronize(self) -> None:
        """Wait for everything queued."""
        with self._device:
            self._stream.synchronize()

    def _function(self, kernel: Kernel, shared_bytes: int) -> Any:
        function = self._functions.get(kernel)
        if function is None:
            module = self._modules.get(kernel.source)
            if module is None:
                module = self._cupy.RawModule(code=self._source(kernel.source), options=_OPTIONS)
                self._modules[kernel.source] = module
            function = self._functions[kernel] = module.get_function(kernel.name)
        # More than 48 KiB must be asked for once; it stays with the function.
        if shared_bytes > self._shared_bytes.get(kernel, _PLAIN_SHARED_BYTES):
            function.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes[kernel] = shared_bytes
        return function


def _as_passed(argument: Argument) -> Any:
    """Null, and a structure, as CuPy takes them by value: an array of one record."""
    if argument is None:
        return np.uint64(0)
    return np.array([argument]) if isinstance(argument, np.void) else argument
