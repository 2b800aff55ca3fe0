"""The device whose kernels run on the CPU: the unchanged sources through ``host/cuda_host.h``."""

from __future__ import annotations

import copy
import ctypes
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.backend import Gpu
from baton.engine.kernels.cuda.dependent import defines_of
from baton.engine.kernels.cuda.device import TENSOR_MAP, Argument, Array, Kernel
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.cuda.tuning import Tuning

from .host.builder import CSRC, build, mentioned
from .host_streams import HostEvent, HostStream, StreamFamily

GUARD = 512
GUARD_BYTE, POISON_BYTE = 0xCD, 0xFF
MAP_MAGIC = int.from_bytes(b"bato_map", "little")
VARIANT = os.environ.get("BATON_CUDA_HOST_VARIANT", "plain")
SHARED_BYTES_LIMIT = 227 * 1024
SCALARS = {"i4": np.int32, "u4": np.uint32, "i8": np.int64, "u8": np.uint64, "f4": np.float32}


_ADDRESS = re.compile(r"<([0-9a-f]+)>")
_KIND = re.compile(r"_[a-z]*\d+$")
"""A type or head size at the end of a kernel's name."""


class LaunchFailed(Exception):
    """A kernel did something that a GPU leaves undefined, or that it would await without end."""


class HostArray(np.ndarray):
    """An array between two guards that no kernel may touch; views share them."""

    guarded: HostArray | None = None

    def __array_finalize__(self, source: object) -> None:
        self.guarded = getattr(source, "guarded", None)


class PinnedArray(np.ndarray):
    """Memory of the host that copies read or write when their turn comes."""


def host_array(shape: Sequence[int], dtype: npt.DTypeLike, fill: int = POISON_BYTE) -> HostArray:
    """Make an array of equal bytes, aligned to 512 and guarded on both sides.

    With its guards it is more than the 1 KiB up to which NumPy keeps freed memory, poison and all.
    """
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.full(nbytes + 3 * GUARD, GUARD_BYTE, np.uint8)
    start = -raw.ctypes.data % GUARD + GUARD
    raw = raw[start - GUARD : start + nbytes + GUARD].view(HostArray)
    raw[GUARD : GUARD + nbytes] = fill
    array = raw[GUARD : GUARD + nbytes].view(dtype).reshape(tuple(shape))
    array.guarded = raw
    if VARIANT == "sanitized":
        _forbid(raw, nbytes)
    return array


def _forbid(raw: HostArray, nbytes: int) -> None:
    """Under the address sanitizer a read of the guards stops the process, with the line."""
    poison = ctypes.CDLL(None).__asan_poison_memory_region
    poison.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    poison(raw.ctypes.data, GUARD)
    poison(raw.ctypes.data + GUARD + nbytes, GUARD)


class Library:
    """A built source: its kernels and their launch, one at a time in the process."""

    _lock = threading.Lock()
    _stacks: int | None = None

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._launch = self._library.baton_launch
        self._launch.restype = ctypes.c_char_p
        self._launch.argtypes = [
            ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
            ctypes.c_uint64, ctypes.c_double,
        ]  # fmt: skip
        self._library.baton_stacks.restype = ctypes.c_void_p
        self._library.baton_stacks.argtypes = [ctypes.c_void_p]
        with Library._lock:
            Library._stacks = self._library.baton_stacks(Library._stacks)
        self.kernels: dict[str, tuple[int, list[str], int]] = {}
        for text in ("name", "signature"):
            getattr(self._library, f"baton_kernel_{text}").restype = ctypes.c_char_p
        for i in range(self._library.baton_kernel_count()):
            name = self._library.baton_kernel_name(i).decode()
            signature = self._library.baton_kernel_signature(i).decode().split()
            self.kernels[name] = (i, signature, self._library.baton_kernel_threads(i))

    def launch(
        self,
        index: int,
        grid: Array,
        block: Array,
        shared_bytes: int,
        values: Array,
        seed: int,
        seconds: float,
    ) -> str | None:
        """Run kernel ``index``; return what went wrong."""
        with Library._lock:
            message = self._launch(
                index, grid.ctypes.data, block.ctypes.data, shared_bytes, values.ctypes.data, seed,
                seconds,
            )  # fmt: skip
        return None if message is None else _ADDRESS.sub(self._line, message.decode())

    def _line(self, match: re.Match[str]) -> str:
        """The kernel's file and line of an address after a call, as in messages about races."""
        address = f"{int(match[1], 16) - 1:x}"
        command = ["addr2line", "-s", "-i", "-e", self._library._name, address]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        frames = [line.split(" ")[0] for line in run.stdout.splitlines()]
        own = [frame for frame in frames if not frame.startswith("cuda_")]
        return (own or frames or [match[0]])[0]


class HostGraph:
    """Launches with the arguments they had: what changes later must change inside the arrays."""

    def __init__(self, stream: HostStream) -> None:
        self.launches: list[Callable[[], None]] = []
        self._stream = stream

    def replay(self) -> None:
        """Queue all of them again."""
        for launch in self.launches:
            self._stream.add(launch)


class HostMapping:
    """Memory of another device of this process; a test sees whether it was closed."""

    closed = False

    def close(self) -> None:
        """Note it."""
        self.closed = True


_EXPORTED: dict[bytes, HostArray] = {}


class HostDevice:
    """Device on NumPy arrays; every launch is checked as far as the machine can see.

    ``seed`` decides the order of threads, warps and blocks of the launches to come; 0 is
    ascending. ``defines`` are macros of the build, ``folder`` holds the sources, ``variant`` is
    one of the builder's. Work is carried out when it is queued; :meth:`late` gives a device
    where it is not.
    """

    name = "host"
    gpu = Gpu(0, "GPU-host", "host memory")
    lost = ""
    multiprocessors = 132
    tuning = Tuning()

    def __init__(
        self,
        cache_folder: Path,
        defines: Sequence[str] = (),
        folder: Path = CSRC,
        seconds: float = 60.0,
        variant: str = VARIANT,
    ) -> None:
        self.seed = 0
        self._cache, self._defines = cache_folder, tuple(defines)
        self._folder, self._seconds, self._variant = folder, seconds, variant
        self._libraries: dict[tuple[str, str, str], Library] = {}
        self._capturing: HostGraph | None = None
        self._stream = HostStream(StreamFamily())

    def late(self, seed: int) -> HostDevice:
        """Return a device of the same kernels whose streams run late; see :mod:`.host_streams`."""
        other = copy.copy(self)
        other._stream = HostStream(StreamFamily(seed))
        return other

    def another_stream(self, *, urgent: bool = False) -> HostDevice:
        """The same memory with a separate queue."""
        other = copy.copy(self)
        other._capturing = None
        other._stream = HostStream(self._stream.family)
        return other

    def record(self) -> HostEvent:
        """Mark the work queued so far."""
        with self._stream.family.lock:
            return HostEvent(self._stream)

    def wait_for(self, event: HostEvent) -> None:
        """Queue the rest of ``event``'s stream up to it before anything else."""
        self._stream.add(event.wait)

    def read(self, array: Array, out: Array) -> None:
        """Copy into pinned memory, which is full of 0xff until then."""
        _check_copy(out, array)
        if not isinstance(out, PinnedArray):
            raise LaunchFailed("a copy that nobody waits for, into memory that is not pinned")
        if self._capturing is not None:
            raise LaunchFailed("a copy to the host while a graph is captured")
        np.asarray(out).reshape(-1).view(np.uint8)[...] = POISON_BYTE

        def work() -> None:
            out[...] = array

        self._stream.add(work)

    def tuned(self, tuning: Tuning) -> HostDevice:
        """Return a device of the same queue with other variants of the kernels."""
        other = copy.copy(self)
        other.tuning, other._libraries = tuning, {}
        return other

    def with_defines(self, *defines: str) -> HostDevice:
        """Return a device whose kernels are built with these macros, as planted bugs are."""
        return HostDevice(self._cache, defines, self._folder, self._seconds, self._variant)

    @contextmanager
    def order(self, seed: int) -> Iterator[None]:
        """Launch in another order for a while."""
        before, self.seed = self.seed, seed
        try:
            yield
        finally:
            self.seed = before

    def free_bytes(self) -> int:
        """As if nobody used it."""
        return self.memory_bytes()

    def memory_bytes(self) -> int:
        """A small device's."""
        return 1 << 30

    @contextmanager
    def watching_races(self) -> Iterator[None]:
        """Refuse, for a while, accesses without a barrier: slower, and sure in any order."""
        before = self._variant
        self._variant = "races" if before == "plain" else before
        try:
            yield
        finally:
            self._variant = before

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        """Make an array of 0xff bytes: an unwritten element stays a NaN or -1."""
        if self._capturing is not None:
            raise LaunchFailed("an allocation while a graph is captured")
        return host_array(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        """Make an array of zeros."""
        return self._filled(host_array(shape, dtype, fill=0), 0)

    def _filled(self, array: HostArray, values: Array | int) -> HostArray:
        """Give a new array its content when its turn comes; poison until then."""
        if not self._stream.family.eager:
            values = np.array(values)
            np.asarray(array).reshape(-1).view(np.uint8)[...] = POISON_BYTE
        self._stream.add(lambda: array.__setitem__(..., values))
        return array

    def shareable(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        """Make an array of zeros."""
        return self.zeros(shape, dtype)

    def export(self, array: HostArray) -> tuple[bytes, int]:
        """Name the array for other devices of this process; the offset is not 0, as on a GPU."""
        handle = id(array).to_bytes(64, "little")
        _EXPORTED[handle] = array
        return handle, 512

    def open(
        self,
        handle: bytes,
        offset: int,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        gpu: str = "",
    ) -> tuple[HostMapping, HostArray]:
        """Find an exported array; as on a GPU, only its owner knows its content."""
        array = _EXPORTED.get(handle)
        if array is None or offset < 512:
            raise OSError("the handle names nothing here")
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if offset - 512 + nbytes > array.nbytes:
            text = f"the allocation has {512 + array.nbytes} bytes, its ticket says"
            raise ValueError(f"{text} {offset + nbytes}")
        whole = array.reshape(-1).view(np.uint8)[offset - 512 :][:nbytes]
        return HostMapping(), whole.view(dtype).reshape(tuple(shape))

    def upload(self, array: Array) -> HostArray:
        """Copy an array into guarded memory."""
        if self._capturing is not None:
            raise LaunchFailed("an upload while a graph is captured")
        return self._filled(host_array(array.shape, array.dtype), array)

    def download(self, array: Array) -> Array:
        """Copy an array out of guarded memory."""
        if self._capturing is not None:
            raise LaunchFailed("a download while a graph is captured")
        self.synchronize()
        return np.array(array, order="C", subok=False)

    def host_buffer(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make an array of zeros."""
        return np.zeros(tuple(shape), dtype).view(PinnedArray)

    def trim_host(self) -> None:
        """Nothing: freed arrays are gone."""

    def write(self, array: Array, values: Array) -> None:
        """Copy ``values``, which must fit exactly; pinned ones are read when their turn comes."""
        _check_copy(array, values)
        if self._capturing is not None:
            raise LaunchFailed("a copy from the host while a graph is captured")
        taken = values if isinstance(values, PinnedArray) else values.copy()
        self._stream.add(lambda: array.__setitem__(..., taken))

    def capture(self, work: Callable[[], None]) -> HostGraph:
        """Run ``work``, then again without doing anything but keeping its launches."""
        work()
        self.synchronize()
        graph = self._capturing = HostGraph(self._stream)
        try:
            work()
        finally:
            self._capturing = None
        return graph

    def matmul(self, x: Array, weight: Array, out: Array, *, add: bool = False) -> None:
        """Stand-in for cuBLAS: a float32 product of NumPy, rounded once where ``out`` is bf16."""

        def work() -> None:
            product = from_bf16(x).astype(np.float32) @ from_bf16(weight).astype(np.float32).T
            if add:
                product += out if out.dtype == np.float32 else from_bf16(out).astype(np.float32)
            out[...] = product if out.dtype == np.float32 else to_bf16(product)

        if self._capturing is not None:
            self._capturing.launches.append(work)
        else:
            self._stream.add(work)

    def tensor_map(self, array: Array, box_rows: int) -> np.void:
        """Name a matrix as ``host/hopper_words.h`` reads it."""
        rows, columns = array.shape
        words = np.zeros(1, TENSOR_MAP)
        words["words"][0, :5] = (MAP_MAGIC, array.ctypes.data, rows, columns, box_rows)
        return words[0]

    def synchronize(self) -> None:
        """Run everything queued."""
        self._stream.run_to(self._stream.queued)

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel; LaunchFailed for wrong arguments, barriers, hangs and torn guards."""
        arguments = tuple(args)
        if self._capturing is None:
            self._stream.add(lambda: self._run(kernel, grid, block, arguments, shared_bytes))
        else:
            self._capturing.launches.append(
                lambda: self._run(kernel, grid, block, arguments, shared_bytes)
            )

    def _run(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int,
    ) -> None:
        library = self._library(kernel.source, kernel.name)
        if kernel.name not in library.kernels:
            raise LaunchFailed(f"{kernel.source} has no kernel {kernel.name}")
        index, signature, threads = library.kernels[kernel.name]
        grid_size, block_size = _size(kernel, "grid", grid), _size(kernel, "block", block)
        if not 0 < int(block_size.prod()) <= threads:
            raise LaunchFailed(
                f"{kernel.name}: a block of {block_size.prod()} threads, bounds {threads}"
            )
        if grid_size[0] >= 2**31 or max(grid_size[1:]) > 65535 or block_size[2] > 64:
            raise LaunchFailed(f"{kernel.name}: grid {tuple(grid)}, block {tuple(block)} too large")
        if not 0 <= shared_bytes <= SHARED_BYTES_LIMIT:
            raise LaunchFailed(f"{kernel.name}: {shared_bytes} bytes of shared memory")
        values = _values(kernel, signature, args)
        pointers = np.array([v.ctypes.data for v in values], np.uint64)
        message = library.launch(
            index, grid_size, block_size, shared_bytes, pointers, self.seed, self._seconds
        )
        if message is not None:
            raise LaunchFailed(message)
        if self._variant != "sanitized":
            _check_guards(kernel, args)

    def _library(self, source: str, kernel: str = "") -> Library:
        """Return the built source; with a planted bug, only the kernels of ``kernel``'s variant.

        A bug is planted for one type or head size, and those are built in less than half the time.
        """
        variant = _KIND.search(kernel) if self._defines else None
        suffix = variant[0] if variant else ""
        key = source, self._variant, suffix
        library = self._libraries.get(key)
        if library is None:
            path = self._folder / source
            planted = mentioned(path, self._defines)
            defines = (*planted, *defines_of(self.tuning, source))
            built = build(path, self._cache, self._variant, defines, suffix if planted else "")
            library = self._libraries[key] = Library(built)
        return library


def _check_copy(target: Array, source: Array) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(f"{source.dtype} {source.shape} into {target.dtype} {target.shape}")
    if not target.flags.c_contiguous:
        raise ValueError("the array is not contiguous")


def _size(kernel: Kernel, what: str, size: Sequence[int]) -> Array:
    if not 1 <= len(size) <= 3 or any(not isinstance(n, int) or n < 1 for n in size):
        raise LaunchFailed(f"{kernel.name}: {what} {tuple(size)} is not 1 to 3 positive ints")
    return np.array([*size, 1, 1][:3], np.uint32)


def _values(kernel: Kernel, signature: Sequence[str], args: Sequence[Argument]) -> list[Array]:
    """Each argument as the bytes the kernel reads; its type must be the declared one."""
    if len(args) != len(signature):
        raise LaunchFailed(f"{kernel.name} takes {len(signature)} arguments, got {len(args)}")
    values: list[Array] = []
    for i, (declared, arg) in enumerate(zip(signature, args, strict=True)):
        kind, size = declared[0], int(declared[1:])
        if kind == "p" and (arg is None or isinstance(arg, np.ndarray)):
            address = 0 if arg is None else arg.ctypes.data
            if address % size:
                raise LaunchFailed(f"{kernel.name}: argument {i} is not aligned to {size} bytes")
            values.append(np.array([address], np.uint64))
        elif isinstance(arg, SCALARS.get(declared, ())) or (
            isinstance(arg, np.void) and declared == f"s{arg.nbytes}"
        ):
            values.append(np.array([arg]))
        else:
            raise LaunchFailed(
                f"{kernel.name}: argument {i} is {type(arg).__name__}, not of type {declared}"
            )
    return values


def _check_guards(kernel: Kernel, args: Sequence[Argument]) -> None:
    for i, arg in enumerate(args):
        raw = getattr(arg, "guarded", None)
        if raw is None:
            continue
        for side, guard in (("before", raw[:GUARD]), ("behind", raw[-GUARD:])):
            if (np.asarray(guard) != GUARD_BYTE).any():
                raise LaunchFailed(f"{kernel.name}: writes {side} the array of argument {i}")
