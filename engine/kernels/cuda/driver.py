"""What the CUDA driver says of memory that another process exported; CuPy does not ask it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_LIBRARY = "libcuda.so.1"

AddressRange = Callable[[int], tuple[int, int]]
"""Start and bytes of the allocation that an address of the device lies in; OSError without one."""


def address_range(pointer: int) -> tuple[int, int]:
    """Ask the driver (cuMemGetAddressRange); the calling thread has a current context."""
    query = ctypes.CDLL(_LIBRARY).cuMemGetAddressRange_v2
    query.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    failure = query(ctypes.byref(start), ctypes.byref(nbytes), pointer)
    if failure:
        raise OSError(f"the driver knows no allocation there: error {failure}")
    return start.value, nbytes.value


def check_allocation(pointer: int, needed: int, ask: AddressRange = address_range) -> None:
    """Raise ValueError unless ``needed`` bytes from ``pointer`` lie in one allocation.

    What a peer says of its memory is believed only so far: a read behind the end would end this
    process. OSError when the driver cannot tell.
    """
    start, nbytes = ask(pointer)
    room = start + nbytes - pointer
    if needed > room:
        raise ValueError(f"the allocation has {room} bytes, its ticket says {needed}")
