"""Asks the CUDA driver about memory exported by other processes; CuPy has no function for this."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_LIBRARY = "libcuda.so.1"

AddressRange = Callable[[int], tuple[int, int]]
"""Returns start and size of the allocation at a device address; raises OSError if none exists."""


def address_range(pointer: int) -> tuple[int, int]:
    """Ask the driver (cuMemGetAddressRange); the calling thread needs a current context."""
    query = ctypes.CDLL(_LIBRARY).cuMemGetAddressRange_v2
    query.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    failure = query(ctypes.byref(start), ctypes.byref(nbytes), pointer)
    if failure:
        raise OSError(f"no CUDA allocation at this address: error {failure}")
    return start.value, nbytes.value


def check_allocation(pointer: int, needed: int, ask: AddressRange = address_range) -> None:
    """Raise ValueError unless ``needed`` bytes from ``pointer`` lie in one allocation.

    The size comes from another process and is not trusted: a read past the end would kill this
    process. Raises OSError if the driver does not know the allocation.
    """
    start, nbytes = ask(pointer)
    room = start + nbytes - pointer
    if needed > room:
        raise ValueError(f"the allocation has {room} bytes, its ticket says {needed}")
