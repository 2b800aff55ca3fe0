"""The part of CuPy that Baton calls, on host memory: kernels are executed by the host device.

Names, arguments and refusals are those of CuPy 14.2, read in its source. Everything queued is
done at once, so this shows that the calls fit together and what they compute, not their order.
Memory is exported between processes as memfds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from . import cuda

__version__ = "14.2.0"


class ndarray(np.ndarray):
    """An array on a :class:`cuda.MemoryPointer`."""

    _mem: Any = None

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None) -> Self:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if memptr is None:
            memptr = cuda.pool_malloc(nbytes)
        if memptr.ptr - memptr.mem.ptr + nbytes > memptr.mem.size:
            raise ValueError("the memory is smaller than the array")
        buffer = (ctypes.c_char * max(nbytes, 1)).from_address(memptr.ptr)
        array = np.ndarray.__new__(cls, shape, dtype, buffer)
        array._mem = memptr.mem
        return array

    def __array_finalize__(self, source: Any) -> None:
        self._mem = getattr(source, "_mem", None)

    @property
    def data(self) -> cuda.MemoryPointer:  # type: ignore[override]
        if self._mem is None:
            raise TypeError("not an array of the device")
        return cuda.MemoryPointer(self._mem, self.ctypes.data - self._mem.ptr)


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    array = empty(shape, dtype)
    np.asarray(array)[...] = 0
    return array


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return array(np.ones(shape, dtype))


def matmul(a: ndarray, b: ndarray, out: Any = None) -> ndarray:
    if cuda.capturing():
        raise NotImplementedError(
            "calling cuBLAS API during stream capture is currently unsupported"
        )
    return array(np.matmul(np.asarray(a), np.asarray(b)))


def array(values: Any, order: str = "C") -> ndarray:
    assert not cuda.capturing(), "an upload while a graph is captured"
    values = np.asarray(values, order=order)
    copy = empty(values.shape, values.dtype)
    np.asarray(copy)[...] = values
    return copy


def asnumpy(array: ndarray) -> np.ndarray:
    assert not cuda.capturing(), "a download while a graph is captured"
    cuda.check_reach(array._mem)
    return np.array(np.asarray(array), order="C")


def get_default_memory_pool() -> Any:
    return cuda.Pool()


def get_default_pinned_memory_pool() -> Any:
    return cuda.PinnedPool()


class RawKernel:
    """A kernel of the host device; attributes as far as Baton reads them."""

    def __init__(self, source: str, name: str, defines: tuple[str, ...] = ()) -> None:
        self.source, self.name, self._defines = source, name, defines
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(self, grid: tuple, block: tuple, args: tuple, *, shared_mem: int = 0) -> None:
        assert isinstance(grid, tuple) and isinstance(block, tuple) and isinstance(args, tuple)
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise cuda.runtime.CUDARuntimeError("invalid argument: shared memory")
        for value in args:
            if isinstance(value, np.ndarray) and not isinstance(value, ndarray):
                assert value.size == 1, "only arrays of size one are passed by value"
        for value in args:
            if isinstance(value, ndarray):
                cuda.check_reach(value._mem)
        kept = tuple(_seen(value) for value in args)

        def run() -> None:
            cuda.check_alive(self.name)
            cuda.host(self._defines).launch(self._kernel, grid, block, kept, shared_mem)

        cuda.do(run)

    @property
    def kernel(self) -> Any:
        """The function as the driver knows it."""
        return cuda.function_of(self)

    def bound(self, grid: Any, block: Any, shared: int, values: Any) -> Callable[[], None]:
        """The launch of this kernel with values that the driver was given, read now."""
        library = cuda.host(self._defines)._library(self.source)
        index, signature, _ = library.kernels[self.name]
        sizes = [8 if kind[0] == "p" else int(kind[1:]) for kind in signature]
        kept = [
            np.frombuffer(ctypes.string_at(values[i], n), np.uint8) for i, n in enumerate(sizes)
        ]
        aligned = [np.zeros(-(-len(each) // 8), np.uint64) for each in kept]
        for to, each in zip(aligned, kept, strict=True):
            to.view(np.uint8)[: len(each)] = each

        def run() -> None:
            cuda.check_alive(self.name)
            places = np.array([each.ctypes.data for each in aligned], np.uint64)
            problem = library.launch(
                index,
                np.array(grid, np.uint32),
                np.array(block, np.uint32),
                shared,
                places,
                0,
                60.0,
            )
            if problem is not None:
                raise RuntimeError(problem)

        return run

    @property
    def local_size_bytes(self) -> int:
        cuda.here()  # CuPy loads a kernel once per device, on the current one
        return 0

    @property
    def _kernel(self) -> Any:
        from baton.engine.kernels.cuda.device import Kernel

        return Kernel(self.source, self.name)


def _seen(value: Any) -> Any:
    """A record and null as the host device takes them."""
    if isinstance(value, np.uint64) and value == 0:
        return None
    if isinstance(value, np.ndarray) and not isinstance(value, ndarray):
        return value[0].copy()
    return value


class RawModule:
    """The kernels of a source, which its first line names."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        assert isinstance(code, str) and all(isinstance(option, str) for option in options)
        self.source = code.split('"')[1]
        self._defines = tuple(option[2:] for option in options if option.startswith("-D"))

    def compile(self, log_stream: Any = None) -> None:
        cuda.here()
        cuda.host(self._defines)._library(self.source)

    def get_function(self, name: str) -> RawKernel:
        cuda.here()
        if os.environ.get("BATON_FAKE_NO_NVRTC"):
            raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: cannot open\n\nHint")
        if self.source == "proof.cu":
            return RawKernel(self.source, name)
        if name not in cuda.host(self._defines)._library(self.source).kernels:
            raise cuda.driver_error(f"named symbol not found: {name}")
        return RawKernel(self.source, name, self._defines)
