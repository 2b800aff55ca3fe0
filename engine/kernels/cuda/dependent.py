"""Launches of kernels that may begin before the kernel before them has ended.

CUDA calls this programmatic dependent launch. CuPy's launches cannot ask for it, so the driver is
called. Only kernels of :data:`SOURCES` are launched so: each begins with ``begin_after_previous``
of ``csrc/device.cuh``, which waits for the kernel before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .device import Argument, CaptureFailed
from .tuning import Tuning

SOURCES = frozenset(
    {
        "decode_attention.cu", "elementwise.cu", "fp8_linear.cu", "ring_linear.cu", "sample.cu",
        "skinny_linear.cu",
    }
)  # fmt: skip
_LIBRARY = "libcuda.so.1"
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


def defines_of(tuning: Tuning, source: str) -> tuple[str, ...]:
    """Return the macros ``NAME=VALUE`` with which a source is compiled."""
    begins_early = tuning.dependent and source in SOURCES
    return tuning.defines + ("BATON_DEPENDENT=1",) * begins_early


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def launch(
    function: int,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    stream: int,
    args: Sequence[Argument],
) -> None:
    """Queue a kernel by its CUfunction and CUstream. Raises CaptureFailed if the driver refuses."""
    values = [_value(each) for each in args]
    places = (ctypes.c_void_p * len(values))(*(each.ctypes.data for each in values))
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = _Config(
        (ctypes.c_uint * 3)(*[*grid, 1, 1][:3]), (ctypes.c_uint * 3)(*[*block, 1, 1][:3]),
        shared_bytes, stream, ctypes.pointer(attribute), 1,
    )  # fmt: skip
    call = ctypes.CDLL(_LIBRARY).cuLaunchKernelEx
    failure = call(ctypes.byref(config), ctypes.c_void_p(function), places, None)
    if failure:
        raise CaptureFailed(f"the driver refuses a dependent launch: error {failure}")


def _value(argument: Argument) -> Any:
    """Return an array of the bytes that the kernel reads."""
    if argument is None:
        return np.zeros(1, np.uint64)
    if isinstance(argument, np.generic):
        return np.array([argument])
    array: Any = argument
    return np.array([array.data.ptr], np.uint64)
