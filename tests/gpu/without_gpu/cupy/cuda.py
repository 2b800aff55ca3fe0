"""Streams, events, memory and graphs, on host memory; see the package.

``BATON_FAKE_GPUS`` is the number of GPUs (1). A GPU reads the memory of another one only after
mapping it as a peer; with ``BATON_FAKE_NO_PEERS`` no two GPUs are peers. Each thread begins with
device 0. Streams and cuBLAS handles work only on the device that was current at their creation.
With ``BATON_FAKE_ONE_GPU`` a call that makes a context on a second GPU fails.
``BATON_FAKE_MIG`` instead splits one GPU into that many instances: a process sees the first one
that CUDA_VISIBLE_DEVICES names, and maps no memory of another.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

_TOTAL = 1 << 30
_live: dict[int, Memory] = {}
_opened: dict[int, mmap.mmap] = {}
_reach: dict[int, set[int]] = {}
_here = threading.local()
_hosts: dict[tuple[str, ...], Any] = {}
_host_lock = threading.Lock()


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


def driver_error(text: str) -> Exception:
    return CUDADriverError(text)


_FAILS = os.environ.get("BATON_FAKE_GPU_FAILS", "")
_dead = False


def check_alive(kernel: str = "") -> None:
    """Fail from the launch of a kernel on, as a GPU does after a wild access.

    ``BATON_FAKE_GPU_FAILS`` names the kernel and a file; the process that removes the file fails.
    """
    global _dead
    name, _, order = _FAILS.partition(":")
    if name and kernel.startswith(name) and Path(order).exists():
        Path(order).unlink()
        _dead = True
    if _dead:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


_INSTANCES = int(os.environ.get("BATON_FAKE_MIG", "0"))


def _uuid(gpu: int) -> bytes:
    return bytes([gpu + 1] * 16)


def _visible() -> list[int]:
    """The GPUs of the machine that this process sees, by ordinal."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _INSTANCES:
        named = [f"MIG-{uuid.UUID(bytes=_uuid(one))}" for one in range(_INSTANCES)]
        first = named[0] if shown is None else shown.split(",")[0]
        return [named.index(first)] if first in named else []
    machine = range(int(os.environ.get("BATON_FAKE_GPUS", "1")))
    return [*machine] if shown is None else [int(one) for one in shown.split(",") if one]


_gpus = _visible()
touched: set[int] = set()
"""GPUs on which this process has created a context."""


def is_available() -> bool:
    return bool(_gpus)


def here() -> int:
    """The GPU of the machine that is current in this thread; creates its context."""
    gpu = _gpus[_here.__dict__.setdefault("devices", [0])[-1]]
    touched.add(gpu)
    if len(touched) > 1 and "BATON_FAKE_ONE_GPU" in os.environ:
        raise CUDARuntimeError("a second GPU got a context, of several hundred MiB")
    return gpu


def check_stream(stream: Stream | None) -> None:
    if stream is not None and stream.gpu != here():
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")


def check_reach(memory: Any) -> None:
    """Fail as a kernel does that reads the memory of a GPU that is not a peer."""
    if here() not in memory.reach:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def _can_access(device: int, peer: int) -> int:
    return int(_gpus[device] != _gpus[peer] and "BATON_FAKE_NO_PEERS" not in os.environ)


def host(defines: tuple[str, ...] = ()) -> Any:
    """The device that executes kernels built with these macros in this process."""
    with _host_lock:
        if defines not in _hosts:
            from cuda_host_device import HostDevice

            _hosts[defines] = HostDevice(Path(os.environ["BATON_HOST_BUILDS"]), defines)
    return _hosts[defines]


# -------------------------------------------------------------------- memory


class Memory:
    """cudaMalloc: exportable."""

    def __init__(self, size: int) -> None:
        self.size, self.reach = size, {here()}
        self._fd = os.memfd_create("fake-cuda")
        os.ftruncate(self._fd, max(size, 1))
        self._map = mmap.mmap(self._fd, max(size, 1))
        self._map.write(b"\xff" * min(size, 1 << 20))
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _live[self.ptr] = self

    def ticket(self) -> bytes:
        words = np.array([os.getpid(), self._fd, self.size, *self.reach, 0, 0, 0, 0], np.int64)
        return words.tobytes()


class PooledMemory:
    """Of the memory pool: no handle."""

    def __init__(self, size: int) -> None:
        self.size, self.reach = max(size, 1), {here()}
        self._raw = np.full(self.size + 1024, 0xFF, np.uint8)
        self.ptr = self._raw.ctypes.data + -self._raw.ctypes.data % 512


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id
        self.reach = _reach[ptr]


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def copy_from_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        check_stream(stream)
        if capturing(stream):
            raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")
        ctypes.memmove(self.ptr, mem, size)

    def copy_to_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        check_stream(stream)
        if capturing(stream):
            raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
        ctypes.memmove(mem, self.ptr, size)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        do(lambda: ctypes.memmove(self.ptr, src.ptr, size), stream)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        do(lambda: ctypes.memset(self.ptr, value, size), stream)


def pool_malloc(nbytes: int) -> MemoryPointer:
    return MemoryPointer(PooledMemory(nbytes), 0)


def set_allocator(allocator: Any = None) -> None:
    pass


class Pool:
    def free_all_blocks(self) -> None:
        pass


class PinnedPool:
    def free_all_blocks(self) -> None:
        here()


def alloc_pinned_memory(size: int) -> memoryview:
    here()
    rounded = 1 << max(9, (size - 1).bit_length())
    return memoryview(bytearray(rounded))


# -------------------------------------------------------------------- streams


class Device:
    compute_capability = "80"
    attributes = {"MultiProcessorCount": 4}  # noqa: RUF012

    def __init__(self, device: int = 0) -> None:
        self.id = int(device)

    def __enter__(self) -> Self:
        _here.__dict__.setdefault("devices", [0]).append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        _here.devices.pop()


class Graph:
    def __init__(self, work: list[Callable[[], object]]) -> None:
        self._work = work

    def launch(self, stream: Any = None) -> None:
        check_alive()
        assert not capturing(stream)
        check_stream(stream)
        for each in self._work:
            each()

    def upload(self, stream: Any = None) -> None:
        check_stream(stream)


class Stream:
    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        self.ptr, self.gpu = id(self), here()
        self.priority = priority or 0
        self.captured: list[Callable[[], object]] | None = None

    def __enter__(self) -> Self:
        stack = _here.__dict__.setdefault("streams", [])
        stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _here.streams.pop()

    def begin_capture(self, mode: Any = None) -> None:
        check_stream(self)
        self.captured = []
        _gemm_hook(self)

    def end_capture(self) -> Graph:
        work, self.captured = self.captured or [], None
        _gemm_hook(None)
        return Graph(work)

    def synchronize(self) -> None:
        check_alive()
        check_stream(self)
        if self.captured is not None:
            raise CUDARuntimeError("operation not permitted when stream is capturing")

    def wait_event(self, event: Event) -> None:
        check_stream(self)
        assert isinstance(event, Event)


def current() -> Stream | None:
    streams = _here.__dict__.get("streams", [])
    return streams[-1] if streams else None


def capturing(stream: Stream | None = None) -> bool:
    stream = stream or current()
    return stream is not None and stream.captured is not None


def do(work: Callable[[], object], stream: Stream | None = None) -> None:
    """Do it now, or keep it for the graph."""
    stream = stream or current()
    check_stream(stream)
    if stream is not None and stream.captured is not None:
        stream.captured.append(work)
    else:
        work()


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.at: float | None = None

    @property
    def done(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        check_stream(stream)
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        check_alive()


def get_elapsed_time(begin: Event, end: Event) -> float:
    assert begin.at is not None and end.at is not None
    return (end.at - begin.at) * 1e3


_UINTS = ctypes.POINTER(ctypes.c_uint)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, _UINTS, _UINTS, ctypes.c_uint, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip
_functions: dict[int, Any] = {}
early: list[str] = []
"""Names of the kernels that were launched so that they may begin early."""


def function_of(kernel: Any) -> Any:
    """Number a kernel, and take its launches by the driver."""
    if not _functions:
        ctypes.CDLL("libcuda.so.1").baton_on_launch(_take_launch)
    _functions[id(kernel)] = kernel
    return SimpleNamespace(ptr=id(kernel))


def _launched(function: int, grid: Any, block: Any, shared: int, stream: int, values: Any) -> int:
    kernel, here = _functions.get(function), current()
    if kernel is None or here is None or here.ptr != stream or here.captured is None:
        return 1  # Baton launches so only while it captures
    if shared > kernel.max_dynamic_shared_size_bytes:
        return 1
    early.append(kernel.name)
    do(kernel.bound(grid[:3], block[:3], shared, values))
    return 0


_take_launch = _LAUNCH(_launched)

_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int)
_keep: list[Any] = []


def _gemm_hook(stream: Stream | None) -> None:
    """Products of the stand-in for cuBLAS go into the graph too."""
    from baton.engine.kernels.cuda import cublas

    if not cublas.find_library.cache_info().currsize:
        return
    library = ctypes.CDLL(cublas.find_library())
    if stream is None:
        library.baton_capture(_HOOK(0))
        return

    def captured(index: int) -> None:
        assert stream.captured is not None
        stream.captured.append(lambda: library.baton_replay(index))

    hook = _HOOK(captured)
    _keep.append(hook)
    library.baton_capture(hook)


# -------------------------------------------------------------------- runtime


def _memcpy(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert kind in (1, 2, 3)
    ctypes.memmove(dst, src, size)


def _export(ptr: int) -> bytes:
    here()  # asking for a handle makes a context on the current device
    if ptr not in _live:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
    return _live[ptr].ticket()


def _open(handle: bytes, flags: int = 1) -> int:
    if len(handle) != 64:
        raise IndexError("not enough values found during array assignment, expected 64")
    pid, fd, size, gpu = (int(word) for word in np.frombuffer(handle, np.int64)[:4])
    if gpu != here() and (flags != 1 or "BATON_FAKE_NO_PEERS" in os.environ):
        raise CUDARuntimeError("cudaErrorPeerAccessUnsupported: not supported between these two")
    if gpu != here() and _INSTANCES:
        raise CUDARuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")
    if pid == os.getpid():
        raise CUDARuntimeError("cudaErrorInvalidContext: invalid device context")
    try:
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        raise CUDARuntimeError(f"cudaErrorMapBufferObjectFailed: {error}") from None
    mapped = mmap.mmap(theirs, size)
    os.close(theirs)
    ptr = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _opened[ptr], _reach[ptr] = mapped, {here()}
    return ptr


def _close(ptr: int) -> None:
    here()
    del _opened[ptr]


def _memory_info() -> tuple[int, int]:
    here()
    return _TOTAL - int(os.environ.get("BATON_FAKE_GPU_USED", "0")), _TOTAL


nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
driver = SimpleNamespace(CUDADriverError=CUDADriverError)
runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    getDeviceCount=lambda: len(_gpus),
    getDeviceProperties=lambda device: {
        "name": b"Host memory MIG 1g.10gb" if _INSTANCES else b"Host memory",
        "uuid": _uuid(_gpus[device]),
    },
    deviceCanAccessPeer=_can_access,
    memGetInfo=_memory_info,
    memcpyAsync=_memcpy,
    ipcGetMemHandle=_export,
    ipcOpenMemHandle=_open,
    ipcCloseMemHandle=_close,
)
