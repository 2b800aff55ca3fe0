"""Gives memory back to the system after a burst.

Python takes small objects from arenas of 1 MiB, and frees an arena only when it is empty. A burst
leaves something in each of them: a number that was counted up, a handle that the event loop keeps
for reuse. The C library's heap frees single pages. It takes a tenth more of the processor time of a
request, so only a burst gets its objects from there.
"""

from __future__ import annotations

import ctypes
import gc
import sysconfig
from contextlib import suppress


class _Allocator(ctypes.Structure):
    """``PyMemAllocatorEx``."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


_RAW, _MEM, _OBJ = range(3)
"""``PyMemAllocatorDomain``."""


class Burst:
    """Where small objects come from while a number, such as of connections, exceeds ``least``."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._most = 0
        self._small = None if sysconfig.get_config_var("Py_GIL_DISABLED") else _of_python()
        self.is_on = False
        """Whether new objects come from the C library's heap."""

    def count(self, now: int) -> None:
        """Take the present number."""
        self._most = max(self._most, now)
        if self._small is not None and self.is_on != (now > self._least):
            self.is_on = not self.is_on
            _use(_for_bursts(self._small) if self.is_on else self._small)

    def tidy(self, now: int) -> None:
        """Return free memory if a burst has ended. Takes some milliseconds, so call it seldom.

        A burst has ended when an eighth of the greatest number since the last one is left.
        """
        if self._most > self._least and now <= self._most // 8:
            self._most = now
            gc.collect()
            with suppress(AttributeError):  # a C library without it
                ctypes.CDLL(None).malloc_trim(0)


def _of_python() -> _Allocator | None:
    """Return Python's allocator of small objects, or None if they have another one.

    ``PYTHONMALLOC``, development mode and tracemalloc change it. Each of theirs has a context, or
    is the C library's.
    """
    raw, mem, obj = (_Allocator() for _ in range(3))
    for domain, found in ((_RAW, raw), (_MEM, mem), (_OBJ, obj)):
        ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(found))
    is_own = bytes(obj) == bytes(mem) != bytes(raw)
    return obj if is_own and not obj.ctx and not raw.ctx else None


def _for_bursts(own: _Allocator) -> _Allocator:
    """Return an allocator that takes from the C library and frees what either has given.

    Python's own does the same with objects above 512 bytes.
    """
    raw = _Allocator()
    ctypes.pythonapi.PyMem_GetAllocator(_RAW, ctypes.byref(raw))
    return _Allocator(own.ctx, raw.malloc, raw.calloc, own.realloc, own.free)


def _use(allocator: _Allocator) -> None:
    for domain in (_MEM, _OBJ):
        ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(allocator))
