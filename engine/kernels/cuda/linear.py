"""Products with weight matrices: our own kernel for few rows, cuBLAS for many rows.

Up to :data:`MAX_SKINNY` rows, reading the weights limits the speed. The kernel streams them and
gives a row the same bits whatever the other rows and their number. With more rows, the device's
matrix product is used, whose bits depend on the number of rows. Wrong types, shapes or orders raise
ValueError before anything is launched; nothing is allocated.
"""

from __future__ import annotations

import numpy as np

from .checks import BF16, check_array, check_multiple
from .device import Device, DeviceArray, Kernel
from .elementwise import silu_mul

_SOURCE = "skinny_linear.cu"
_THREADS = 256
_TILE_ROWS, _HALF_ROWS = 16, 8

MAX_SKINNY = 16


def linear(
    device: Device,
    x: DeviceArray,
    weight: DeviceArray,
    bias: DeviceArray | None,
    out: DeviceArray,
    *,
    add: bool = False,
) -> None:
    """``out[m, N] = x[m, K] @ weight[N, K].T + bias[N]``; ``add`` adds to ``out``.

    ``x`` and ``weight`` bf16, ``bias`` float32, ``out`` bf16 or float32, ``K`` a multiple of 8.
    Sums are float32, rounded once; with a bias and more than 16 rows they are rounded twice.
    """
    rows, width, depth = _check(x, weight, out)
    if bias is not None:
        check_array("bias", bias, np.float32, (width,))
    if not rows or not width:
        return
    name = "bf16" if out.dtype == BF16 else "f32"
    if rows > MAX_SKINNY:
        device.matmul(x, weight, out, add=add)
        if bias is not None:
            kernel = Kernel(_SOURCE, f"add_bias_{name}")
            columns = min(-(-width // _THREADS), 64)
            args = (out, bias, np.int32(width))
            device.launch(kernel, (rows, columns), (_THREADS,), args)
        return
    wide = device.tuning.wide(width, device.multiprocessors)
    tiles, halves = 1 + wide, 1 + (rows > _HALF_ROWS)
    kernel = Kernel(_SOURCE, f"skinny_linear_{tiles}_{halves}_{name}")
    sizes = (np.int32(rows), np.int32(width), np.int32(depth), np.int32(add))
    grid = (-(-width // (tiles * _TILE_ROWS)),)
    device.launch(kernel, grid, (_THREADS,), (x, weight, bias, out, *sizes))


def linear_silu_mul(
    device: Device, x: DeviceArray, weight: DeviceArray, space: DeviceArray, out: DeviceArray
) -> None:
    """``out[m, F] = silu(x @ gate.T) * (x @ up.T)``, ``weight[2 F, K]`` gate above up; all bf16.

    Gate and up are rounded to bf16 in between. Up to 16 rows one kernel computes all, if the card's
    tuning fuses; the bits are those of :func:`linear` and ``silu_mul``. Otherwise ``space``, bf16
    ``[m, 2 F]``, holds the products. ``F`` and ``K`` are multiples of 8.
    """
    check_array("out", out, BF16, (None, None))
    rows, width = out.shape
    check_array("space", space, BF16, (rows, 2 * width))
    depth = _check(x, weight, space)[2]
    check_multiple("the width of out", width, 8)
    if not rows:
        return
    if rows > MAX_SKINNY or not device.tuning.fuses(width, device.multiprocessors):
        linear(device, x, weight, None, space)
        silu_mul(device, space, out)
        return
    kernel = Kernel(_SOURCE, f"skinny_linear_silu_mul_{1 + (rows > _HALF_ROWS)}")
    sizes = (np.int32(rows), np.int32(width), np.int32(depth))
    device.launch(kernel, (-(-width // _TILE_ROWS),), (_THREADS,), (x, weight, out, *sizes))


def _check(x: DeviceArray, weight: DeviceArray, out: DeviceArray) -> tuple[int, int, int]:
    """Return rows, width and depth. Raises ValueError if the arguments do not fit together."""
    check_array("weight", weight, BF16, (None, None))
    width, depth = weight.shape
    check_multiple("the depth of weight", depth, 8)
    if width * depth // 8 >= 2**31:
        raise ValueError(f"weight has {width} x {depth} elements, more than 32 GiB")
    dtype = out.dtype if out.dtype == BF16 else np.float32
    check_array("out", out, dtype, (None, width))
    rows = out.shape[0]
    check_array("x", x, BF16, (rows, depth))
    return rows, width, depth
