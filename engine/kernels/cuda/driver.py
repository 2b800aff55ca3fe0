"""Questions to the CUDA driver that CuPy has no function for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from baton.proto.errors import ConfigError

from .device import TENSOR_MAP

_LIBRARY = "libcuda.so.1"
UUID_BYTES = 16
_MAP_ALIGNED, _MAP_COLUMNS = 64, 64
# CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion, -FloatOOBfill
_MAP_UINT16, _MAP_NO_INTERLEAVE, _MAP_SWIZZLE_128, _MAP_L2_256, _MAP_ZEROS_OUTSIDE = 1, 0, 3, 3, 0
AddressRange = Callable[[int], tuple[int, int]]
"""Returns start and size of the allocation at a device address; raises OSError if none exists."""


def driver_uuid(ordinal: int) -> bytes:
    """Ask the driver for the UUID of a GPU, 16 bytes; of an instance of a split GPU, its own.

    The CUDA runtime must have been used before. Raises ConfigError if the driver refuses.
    """
    library = ctypes.CDLL(_LIBRARY)
    device, number = ctypes.c_int(), ctypes.create_string_buffer(UUID_BYTES)
    failure = library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal))
    failure = failure or library.cuDeviceGetUuid_v2(number, device)
    if failure:
        raise ConfigError(f"the CUDA driver names no UUID for device {ordinal}: error {failure}")
    return number.raw


def driver_tensor_map(pointer: int, rows: int, columns: int, box_rows: int) -> np.void:
    """Ask the driver for a map of a bf16 matrix, with boxes of 64 columns that arrive swizzled.

    Raises ConfigError if the driver refuses, as without a GPU that has the bulk copy engine.
    """
    try:
        encode = ctypes.CDLL(_LIBRARY).cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the CUDA driver has no maps for bulk copies: {error}") from None
    room = np.zeros(TENSOR_MAP.itemsize + _MAP_ALIGNED, np.uint8)
    place = room[-room.ctypes.data % _MAP_ALIGNED :][: TENSOR_MAP.itemsize]
    sizes = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(2 * columns)
    box, steps = (ctypes.c_uint32 * 2)(_MAP_COLUMNS, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    failure = encode(
        ctypes.c_void_p(place.ctypes.data), _MAP_UINT16, ctypes.c_uint32(2),
        ctypes.c_void_p(pointer), sizes, strides, box, steps, _MAP_NO_INTERLEAVE,
        _MAP_SWIZZLE_128, _MAP_L2_256, _MAP_ZEROS_OUTSIDE,
    )  # fmt: skip
    if failure:
        raise ConfigError(f"the CUDA driver makes no map for bulk copies: error {failure}")
    found: np.void = place.view(TENSOR_MAP)[0].copy()
    return found


def address_range(pointer: int) -> tuple[int, int]:
    """Ask for an allocation (cuMemGetAddressRange); the thread needs a current context."""
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
