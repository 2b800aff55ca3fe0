"""Process settings at the operating system: signals, parent's death, memory, BLAS threads."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..net.loop import Loop
from .log import get_logger

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_log = get_logger()


def on_stop_signal(loop: Loop, callback: Callable[[int], object]) -> None:
    """Call ``callback(count)`` on the loop at every SIGTERM or SIGINT, counted from 1.

    Usually the first signal drains and the second ends at once. Main thread only.
    """
    times = 0

    def received() -> None:
        nonlocal times
        times += 1
        callback(times)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.on_signal(number, received)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay :data:`STOP_SIGNALS` until the end of the block.

    An exception from a signal handler inside a constructor would leak the resources created so far.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int, sig: int = signal.SIGTERM) -> None:
    """Receive ``sig`` when the parent process ends; immediately if it has ended already.

    ``parent``: the parent's pid, passed by the parent itself, since getppid() changes after its
    death. The kernel watches the parent's *thread* that forked, so this thread must live as long as
    the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), sig)


def end_with_parent() -> None:
    """Receive SIGKILL when the parent process ends, for one that only looks at something.

    A child whose parent ended before this call goes on.
    """
    die_with_parent(os.getppid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def limit_blas_threads(count: int = 1) -> None:
    """Limit NumPy's BLAS to ``count`` threads, before or after NumPy is loaded.

    Each worker has one compute thread, and several workers share a machine. A pool of spinning BLAS
    threads per process would oversubscribe the cores.
    """
    for name in _BLAS_VARIABLES:
        os.environ[name] = str(count)
    for path in _loaded_libraries("openblas"):
        _set_openblas_threads(path, count)


def recycle_large_buffers(limit: int = 64 << 20) -> bool:
    """Keep freed buffers up to ``limit`` bytes in the heap instead of unmapping them.

    By default every frame of 1 to 16 MiB is newly mapped, with a page fault per page. Returns False
    if the C library has no mallopt.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    # glibc caps the mmap threshold at 32 MiB on 64 bit.
    mapped = mallopt(_M_MMAP_THRESHOLD, min(limit, 32 << 20))
    return bool(mapped) and bool(mallopt(_M_TRIM_THRESHOLD, 4 * limit))


def _loaded_libraries(word: str) -> set[str]:
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            paths = (line.split(maxsplit=5)[-1].strip() for line in maps if word in line)
            return {path for path in paths if path.startswith("/")}
    except OSError:
        return set()


def _set_openblas_threads(path: str, count: int) -> None:
    library = ctypes.CDLL(path)
    for name in (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ):
        setter = getattr(library, name, None)
        if setter is not None:
            setter(ctypes.c_int(count))
            return
    _log.warning("lifecycle.blas_threads_unlimited", library=path)
