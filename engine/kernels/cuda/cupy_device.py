"""A GPU through CuPy: arrays in its memory pool, kernels compiled by NVRTC at first use."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from baton.proto.errors import ConfigError

from . import dependent
from .cublas import WORKSPACE_BYTES, Cublas, CublasFailed, find_library
from .device import (
    Argument,
    Array,
    CaptureFailed,
    DeviceArray,
    DeviceLost,
    Event,
    Kernel,
)
from .driver import check_allocation, driver_tensor_map
from .gpus import INSTALL_CUPY, VISIBLE, checked_gpu, visible_gpus
from .tuning import Tuning, tuning_of

_PLAIN_SHARED_BYTES = 48 * 1024
_PIECE = 2 << 20
_OPTIONS = ("-std=c++17",)
_OWN_OPTIONS = {
    "prefill_wgmma.cu": ("-arch=sm_90a",),
    "prefill_bulk.cu": ("-arch=sm_90a",),
}
"""Of some sources; the compiler takes the first target, and CuPy's own comes later."""
_PROOF = '#line 1 "proof.cu"\nextern "C" __global__ void proof() {}\n'
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_ONCE = "#pragma once\n"
_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: mapping another GPU's memory makes it readable here."""
_MOST_MAPS = 4096


@cache
def cuda_source(name: str) -> str:
    """Return ``csrc/name`` for the compiler, with its headers inserted, each once.

    CuPy's cache of compiled kernels is keyed by the source alone, so a changed header outside of it
    would go unnoticed. Line numbers in messages are those of the files.
    """
    return _inline(name, set())


def _inline(name: str, seen: set[str]) -> str:
    text = files("baton.engine.kernels").joinpath("csrc", name).read_text("utf-8")
    parts, end = [f'#line 1 "{name}"\n'], 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end() + 1
        if match[1] not in seen:
            seen.add(match[1])
            parts.append(_inline(match[1], seen))
        line = text.count("\n", 0, end) + 1
        parts.append(f'#line {line} "{name}"\n')
    parts.append(text[end:])
    return "".join(parts).replace(_ONCE, "\n")


class Fate:
    """Whether the CUDA context of this process still works; shared by all its streams.

    As a context manager it turns an error of ``fatal`` into DeviceLost and keeps the first one.
    """

    def __init__(self, fatal: tuple[type[Exception], ...]) -> None:
        self.fatal = fatal
        self.lost = ""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if isinstance(error, self.fatal):
            self.lost = self.lost or f"{type(error).__name__}: {error}"
            raise DeviceLost(f"the GPU failed: {self.lost}") from error


class CupyGraph:
    """A captured graph with the arrays of its kernels."""

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
        """Wait for the queued work, then unmap."""
        self._device.unmap(self._pointer)


_LATER, _COMPUTE, _URGENT = 0, -1, -2
"""Priorities of streams; CUDA begins work of the lowest number first."""


class CupyEvent:
    """A position in a stream; see :class:`~baton.engine.kernels.cuda.device.Event`."""

    def __init__(self, event: Any, fate: Fate) -> None:
        self.event, self._fate = event, fate

    @property
    def done(self) -> bool:
        """True if the GPU has reached the event."""
        with self._fate:
            return bool(self.event.done)

    def wait(self) -> None:
        """Sleep until the GPU has reached the event; other Python threads keep running."""
        with self._fate:
            self.event.synchronize()


class CupyDevice:
    """One GPU; see :class:`~baton.engine.kernels.cuda.device.Device`.

    All threads queue on one separate stream: a graph can be captured there, and a launch sees
    earlier writes of other threads. :meth:`another_stream` returns a device with the same memory
    and another stream, with a lower priority unless it is urgent.
    CUDA has one current device per thread, at first device 0. So every call here sets it, for its
    own time: a thread needs no preparation, and a process may use several devices.
    ``source`` returns the text of a kernel's file. ``instance``: the only instance of a split GPU
    that this process will see; CUDA must not have been used before. Raises ConfigError without CuPy
    or a GPU, and if this installation cannot compile a kernel or load cuBLAS.
    """

    def __init__(
        self, ordinal: int = 0, source: Callable[[str], str] = cuda_source, *, instance: str = ""
    ) -> None:
        if instance:
            os.environ[VISIBLE] = instance
        gpus = visible_gpus()
        self.gpu = checked_gpu(ordinal, gpus)
        self._others = {one.uuid: one.ordinal for one in gpus if one != self.gpu}
        import cupy  # pyright: ignore[reportMissingImports]

        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        cuda = cupy.cuda
        self._fate = Fate(
            (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, CublasFailed)
        )
        self._modules: dict[str, Any] = {}
        self._functions: dict[Kernel, Any] = {}
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=_COMPUTE)
        self._lock = threading.RLock()  # keeps other threads' launches out of a capture
        self._streams = [(self._lock, self._stream)]  # all streams that use this memory
        self._load_lock = threading.Lock()
        self._kept: list[Any] | None = None  # arrays of the launches being captured
        self._cublas: Cublas | None = None
        self._cublas_space: DeviceArray | None = None  # the workspace of cuBLAS
        self._shared_bytes: dict[Kernel, int] = {}
        self._maps: dict[tuple[int, int, int, int], np.void] = {}
        self._source = source
        capability = self._device.compute_capability
        self.multiprocessors = int(self._device.attributes["MultiProcessorCount"])
        self.tuning = tuning_of(self.gpu.name, capability)
        # Other releases of the compiler or of cuBLAS may round or order sums differently.
        self.name = f"cuda-sm_{capability}-{self._proven()}{self.tuning.numerics}"

    @property
    def cupy(self) -> Any:
        """The CuPy module."""
        return self._cupy

    @property
    def stream(self) -> Any:
        """The CuPy stream on which everything is queued."""
        return self._stream

    @property
    def lost(self) -> str:
        """Error after which the device can do no more work in this process; "" while it works."""
        return self._fate.lost

    def _proven(self) -> str:
        """Compile a kernel and load cuBLAS; return their versions. Raises ConfigError."""
        try:
            with self._fate, self._lock, self._device, self._stream:
                module = self._cupy.RawModule(code=_PROOF, options=_OPTIONS)
                module.get_function("proof")
                major, minor = self._cupy.cuda.nvrtc.getVersion()
                cublas = self._cublas = self._new_cublas()
        except Exception as error:  # of several packages, which need not be importable here
            lines = [line for line in str(error).splitlines() if line.strip()]
            why = f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
            raise ConfigError(
                f"this installation of CuPy cannot compute: {INSTALL_CUPY} ({why})"
            ) from error
        return f"nvrtc{major}.{minor}-cublas{cublas.version}"

    def compile(self, source: str) -> None:
        """Compile the kernels of a file now, or load them from CuPy's cache."""
        with self._fate, self._lock, self._device, self._stream:
            self._module(source).compile()

    def tuned(self, tuning: Tuning) -> CupyDevice:
        """Return a device with the same stream and memory and other variants of the kernels."""
        other = copy.copy(self)
        other.tuning = tuning
        other._modules, other._functions, other._shared_bytes = {}, {}, {}
        return other

    def another_stream(self, *, urgent: bool = False) -> CupyDevice:
        """Return a device with the same GPU, memory and kernels and a new stream."""
        other, priority = copy.copy(self), _URGENT if urgent else _LATER
        with self._device:
            other._stream = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
        other._lock, other._kept = threading.RLock(), None
        other._cublas = other._cublas_space = None  # bound to the other stream
        self._streams.append((other._lock, other._stream))
        return other

    def record(self) -> CupyEvent:
        """Record an event after the queued work; waiting threads sleep instead of spinning."""
        with self._fate, self._lock, self._device:
            event = self._cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._stream)
        return CupyEvent(event, self._fate)

    def wait_for(self, event: Event) -> None:
        """Make later work on this stream wait for ``event``."""
        theirs: Any = event
        with self._fate, self._lock, self._device:
            self._stream.wait_event(theirs.event)

    def read(self, array: DeviceArray, out: Array) -> None:
        """Queue a copy to the host; a copy to unpinned memory blocks."""
        _check_copy(out, array)
        source: Any = array
        with self._fate, self._lock, self._device:
            source.data.copy_to_host_async(out.ctypes.data, out.nbytes, self._stream)

    def local_bytes(self) -> dict[str, int]:
        """Return the local memory per thread of each launched kernel (spilled registers)."""
        with self._fate, self._lock, self._device:
            return {k.name: int(f.local_size_bytes) for k, f in self._functions.items()}

    def free_bytes(self) -> int:
        """Return the bytes that no process uses; unused blocks of CuPy's pool become free."""
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()
            return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def memory_bytes(self) -> int:
        """Return the GPU's total memory, used or not."""
        with self._device:
            return int(self._cupy.cuda.runtime.memGetInfo()[1])

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array with undefined content."""
        with self._fate, self._lock, self._device, self._stream:
            array: DeviceArray = self._cupy.empty(tuple(shape), np.dtype(dtype))
        return array

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros."""
        with self._fate, self._lock, self._device, self._stream:
            array: DeviceArray = self._cupy.zeros(tuple(shape), np.dtype(dtype))
        return array

    def shareable(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Allocate a zeroed array outside the memory pool, with a separate IPC handle.

        Raises MemoryError if the GPU has no room for it.
        For allocations below 2 MiB, the driver may export several together with one handle.
        """
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._fate, self._lock, self._device, self._stream:
            try:
                memory = self._cupy.cuda.Memory(-(-nbytes // _PIECE) * _PIECE)
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise MemoryError(f"the GPU cannot allocate {nbytes} bytes: {error}") from None
            pointer = self._cupy.cuda.MemoryPointer(memory, 0)
            array: Any = self._cupy.ndarray(tuple(shape), dtype, pointer)
            array.data.memset_async(0, nbytes, self._stream)
        return cast("DeviceArray", array)

    def export(self, array: DeviceArray) -> tuple[bytes, int]:
        """Return the CUDA IPC handle of the allocation of ``array``, and the array's offset."""
        base: Any = array
        start, runtime = base.data.mem.ptr, self._cupy.cuda.runtime
        with self._device:
            try:
                handle = runtime.ipcGetMemHandle(start)
            except runtime.CUDARuntimeError as error:
                raise OSError(f"this system cannot share GPU memory: {error}") from None
        return bytes(handle), int(base.data.ptr - start)

    def open(
        self,
        handle: bytes,
        offset: int,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        gpu: str = "",
    ) -> tuple[CupyMapping, DeviceArray]:
        """Map another process's memory. OSError if impossible, ValueError if it is too small."""
        cuda, dtype = self._cupy.cuda, np.dtype(dtype)
        other = self._others.get(gpu)  # None if hidden: the driver decides when it is mapped
        if other is not None and not cuda.runtime.deviceCanAccessPeer(self._device.id, other):
            raise OSError(f"{self.gpu.uuid} cannot read the memory of {gpu}")
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._device:
            try:
                pointer = cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
            except (cuda.runtime.CUDARuntimeError, ValueError) as error:
                raise OSError(f"cannot map another process's GPU memory: {error}") from None
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
        """Unmap memory mapped by :meth:`open`, after the queued work of all streams."""
        with self._fate, self._device:
            for lock, stream in self._streams:
                with lock:  # waiting would end another thread's capture
                    stream.synchronize()
            self._cupy.cuda.runtime.ipcCloseMemHandle(pointer)

    def upload(self, array: Array) -> DeviceArray:
        """Copy a NumPy array to the device, in row-major order.

        CuPy returns before it has read a pinned array, and after it has read another one.
        """
        with self._fate, self._lock, self._device, self._stream:
            copy: DeviceArray = self._cupy.array(array, order="C")
        return copy

    def download(self, array: DeviceArray) -> Array:
        """Copy an array to the host; waits for the queued work."""
        with self._fate, self._lock, self._device, self._stream:
            copy: Array = self._cupy.asnumpy(array)
        return copy

    def host_buffer(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Allocate a zeroed pinned array, freed with its last reference."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        with self._fate, self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
        array: Array = np.frombuffer(memory, dtype, count).reshape(tuple(shape))
        array[...] = 0
        return array

    def trim_host(self) -> None:
        """Free the unused blocks of CuPy's pool of pinned memory."""
        with self._fate, self._device:
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def write(self, array: DeviceArray, values: Array) -> None:
        """Queue a copy from the host; unpinned ``values`` are read before this returns."""
        _check_copy(array, values)
        target: Any = array
        with self._fate, self._lock, self._device:
            target.data.copy_from_host_async(values.ctypes.data, values.nbytes, self._stream)

    def capture(self, work: Callable[[], None]) -> CupyGraph:
        """Run ``work`` once, which compiles and allocates, then capture it.

        Raises CaptureFailed if the second run cannot be captured.
        """
        with self._fate, self._lock, self._device, self._stream:
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
                graph.upload(self._stream)
            except self._fate.fatal as error:
                raise CaptureFailed(f"{type(error).__name__}: {error}") from error
            finally:
                self._kept = None
        return CupyGraph(self, graph, kept)

    def replay(self, graph: Any) -> None:
        """Queue a CuPy graph."""
        with self._fate, self._lock, self._device:
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
        with self._fate, self._lock, self._device, self._stream:
            if self._kept is not None:
                self._kept.extend(args)
            with self._load_lock:
                function = self._functions.get(kernel)
                if function is None:
                    function = self._module(kernel.source).get_function(kernel.name)
                    self._functions[kernel] = function
                # More than 48 KiB must be requested once per function.
                if shared_bytes > self._shared_bytes.get(kernel, _PLAIN_SHARED_BYTES):
                    function.max_dynamic_shared_size_bytes = shared_bytes
                    self._shared_bytes[kernel] = shared_bytes
            if (
                self._kept is not None
                and self.tuning.dependent
                and kernel.source in dependent.SOURCES
            ):
                place = function.kernel.ptr
                dependent.launch(place, grid, block, shared_bytes, self._stream.ptr, args)
            else:
                function(tuple(grid), tuple(block), values, shared_mem=shared_bytes)

    def tensor_map(self, array: DeviceArray, box_rows: int) -> np.void:
        """Return the driver's map of a matrix; one is kept per place and shape."""
        matrix: Any = array
        rows, columns = array.shape
        key = (int(matrix.data.ptr), rows, columns, box_rows)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            with self._fate, self._lock, self._device:
                found = self._maps[key] = driver_tensor_map(*key)
        return found

    def matmul(
        self, x: DeviceArray, weight: DeviceArray, out: DeviceArray, *, add: bool = False
    ) -> None:
        """Queue a cuBLAS product; CuPy's own has no float32 output and cannot be captured."""
        sizes = (x.shape[0], weight.shape[0], x.shape[1])
        arrays: list[Any] = [x, weight, out]
        at = [array.data.ptr for array in arrays]
        with self._fate, self._lock, self._device, self._stream:
            if self._kept is not None:
                self._kept.extend(arrays)
            cublas = self._cublas = self._cublas or self._new_cublas()
            wide, stride = out.dtype == np.float32, out.strides[0] // out.dtype.itemsize
            cublas.matmul(at[0], at[1], at[2], sizes, stride=stride, wide=wide, add=add)

    def _new_cublas(self) -> Cublas:
        space: Any = self.empty((WORKSPACE_BYTES,), np.uint8)
        self._cublas_space = space
        return Cublas(find_library(), self._stream.ptr, space.data.ptr)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        with self._fate, self._lock, self._device:  # waiting would end another thread's capture
            self._stream.synchronize()

    def _module(self, source: str) -> Any:
        module = self._modules.get(source)
        if module is None:
            options = (*_OPTIONS, *_OWN_OPTIONS.get(source, ()))
            options += tuple(f"-D{define}" for define in dependent.defines_of(self.tuning, source))
            module = self._cupy.RawModule(code=self._source(source), options=options)
            self._modules[source] = module
        return module


def _check_copy(target: DeviceArray, source: DeviceArray) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {source.dtype} {source.shape} to {target.dtype} {target.shape}"
        )
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("only contiguous arrays can be copied")


def _as_passed(argument: Argument) -> Any:
    """Convert null and structures for CuPy, which takes a structure as an array of one record."""
    if argument is None:
        return np.uint64(0)
    return np.array([argument]) if isinstance(argument, np.void) else argument
