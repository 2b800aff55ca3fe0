"""What a process settles with the operating system: signals, parent's death, memory, threads."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .log import get_logger
from .loop import Loop

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_log = get_logger()


def on_stop_signal(loop: Loop, callback: Callable[[int], object]) -> None:
    """Call ``callback(times)`` on the loop at every SIGTERM or SIGINT, counting from 1.

    The first usually drains, the second ends at once. Main thread only.
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
    """Deliver signals that ask for the end only afterwards.

    An exception of theirs in the middle of a constructor would lose what it has made so far.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int, sig: int = signal.SIGTERM) -> None:
    """Get ``sig`` when the process that started us ends; at once when it already did.

    ``parent``: its pid, handed down by itself, since after its death getppid() names another.
    Tied to the parent's *thread* that forked: that one must live as long as the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), sig)


def outlive_parent() -> None:
    """Take :func:`die_with_parent` back."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def limit_blas_threads(count: int = 1) -> None:
    """Let NumPy's BLAS use ``count`` threads, whether or not NumPy is loaded already.

    Several workers share a machine; each owns one compute thread, and a pool of spinning
    BLAS threads per process would fight over the cores.
    """
    for name in _BLAS_VARIABLES:
        os.environ[name] = str(count)
    for path in _loaded_libraries("openblas"):
        _set_openblas_threads(path, count)


def recycle_large_buffers(limit: int = 64 << 20) -> bool:
    """Keep freed buffers up to ``limit`` bytes in the heap instead of returning them.

    By default every frame of 1 to 16 MiB is mapped afresh and its pages are faulted in
    again. False where the C library has no mallopt.
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
