"""Products with weight matrices: our own kernel for few rows, cuBLAS for many rows.

Up to :data:`MAX_SKINNY` rows, reading the weights limits the speed. The kernel streams them and
gives a row the same bits whatever the other rows and their number. With more rows, the device's
matrix product is used, whose bits depend on the number of rows. Wrong types, shapes or orders raise
ValueError before anything is launched; nothing is allocated.

Weights in 8-bit floats (:class:`Fp8Matrix`) are the bf16 numbers nearest to code times scale. Up to
:data:`MAX_FP8` rows the kernel reads the codes, and a row's bits are those of :func:`linear` with
these bf16 weights in up to :data:`MAX_SKINNY` rows. With more, they are written to a workspace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .checks import BF16, check_array, check_multiple
from .device import Device, DeviceArray, Kernel
from .elementwise import silu_mul

_SOURCE, _FP8_SOURCE, _RING_SOURCE = "skinny_linear.cu", "fp8_linear.cu", "ring_linear.cu"
_THREADS = 256
_TILE_ROWS, _HALF_ROWS = 16, 8

MAX_SKINNY = 16
MAX_FP8 = 64
PIECE = 64
"""Columns of weights in 8-bit floats that lie together: a group of a scale is a multiple of it."""
_STEP_BYTES = 8 * 1024
"""Of a step of the ring of ``ring_linear.cu`` and a tile, for a block."""
_SPACE = 1 << 25
"""Weights that the workspace of a large matrix holds."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix ``[N, depth]`` of e4m3 codes with scales, on a device.

    ``codes`` uint8 ``[N, depth rounded up to PIECE]``: :func:`in_pieces`. ``scales`` float32
    ``[N, groups]``, each for ``pieces`` pieces of a row.
    """

    codes: DeviceArray
    scales: DeviceArray
    depth: int
    pieces: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape[0], self.depth

    @property
    def space(self) -> int:
        """Bf16 numbers of the workspace of a product with many rows."""
        rows, depth = self.shape
        return depth * min(rows, max(1, _SPACE // max(depth, 1)))


def in_pieces(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Lay rows of codes out as the kernel reads them, with codes of zero behind the last column.

    Of each 64 columns, 8 of the first 32 are followed by the 8 that lie 32 columns further on.
    """
    rows, depth = codes.shape
    padded = np.zeros((rows, -(-depth // PIECE) * PIECE), np.uint8)
    padded[:, :depth] = codes
    pieces = padded.reshape(rows, -1, 2, 4, 8).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(pieces).reshape(padded.shape)


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
    sizes = (np.int32(rows), np.int32(width), np.int32(depth), np.int32(add))
    tiles = ring = _ring_tiles(device, rows, width)
    if ring:
        kernel = Kernel(_RING_SOURCE, f"ring_linear_{ring}_{name}")
    else:
        tiles = 1 + device.tuning.wide(width, device.multiprocessors)
        kernel = Kernel(_SOURCE, f"skinny_linear_{tiles}_{1 + (rows > _HALF_ROWS)}_{name}")
    grid = (-(-width // (tiles * _TILE_ROWS)),)
    device.launch(kernel, grid, (_THREADS,), (x, weight, bias, out, *sizes), _ring_bytes(ring))


def _ring_tiles(device: Device, rows: int, width: int) -> int:
    """Return the tiles of a block of ``ring_linear.cu``; 0 if another kernel is chosen."""
    return device.tuning.ring_tiles(width) if rows > _HALF_ROWS else 0


def _ring_bytes(tiles: int) -> int:
    """Return the shared memory of a block of ``ring_linear.cu``, as its ``kSteps``."""
    return tiles * _STEP_BYTES * (8 if tiles == 1 else 12 // max(tiles, 1))


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
    sizes = (np.int32(rows), np.int32(width), np.int32(depth))
    ring = _ring_tiles(device, rows, 2 * width)
    if ring:
        ring = max(ring, 2)  # gate and up
        kernel = Kernel(_RING_SOURCE, f"ring_linear_silu_mul_{ring}")
    else:
        kernel = Kernel(_SOURCE, f"skinny_linear_silu_mul_{1 + (rows > _HALF_ROWS)}")
    grid = (-(-width // (max(ring // 2, 1) * _TILE_ROWS)),)
    device.launch(kernel, grid, (_THREADS,), (x, weight, out, *sizes), _ring_bytes(ring))


def fp8_linear(
    device: Device,
    x: DeviceArray,
    weight: Fp8Matrix,
    bias: DeviceArray | None,
    out: DeviceArray,
    space: DeviceArray,
    *,
    add: bool = False,
) -> None:
    """:func:`linear` with weights in 8-bit floats; ``space`` bf16, at least ``weight.space``."""
    rows, width, depth = _check_fp8(x, weight, out)
    if bias is not None:
        check_array("bias", bias, np.float32, (width,))
    if not rows or not width:
        return
    name = "bf16" if out.dtype == BF16 else "f32"
    groups = np.int32(weight.scales.shape[1]), np.int32(weight.pieces)
    if rows > MAX_FP8:
        _widened(device, x, weight, out, space, add=add)
        if bias is not None:
            columns = min(-(-width // _THREADS), 64)
            kernel = Kernel(_SOURCE, f"add_bias_{name}")
            device.launch(kernel, (rows, columns), (_THREADS,), (out, bias, np.int32(width)))
        return
    kernel = Kernel(_FP8_SOURCE, f"fp8_linear_{1 + (rows > _HALF_ROWS)}_{name}")
    sizes = (np.int32(rows), np.int32(width), np.int32(depth), np.int32(add), *groups)
    grid = (-(-width // _TILE_ROWS) * -(-rows // MAX_SKINNY),)
    device.launch(kernel, grid, (_THREADS,), (x, weight.codes, weight.scales, bias, out, *sizes))


def _widened(
    device: Device,
    x: DeviceArray,
    weight: Fp8Matrix,
    out: DeviceArray,
    space: DeviceArray,
    *,
    add: bool,
) -> None:
    """Multiply with some rows of the weights at a time, in bf16."""
    (width, depth), words = weight.shape, weight.codes.shape[1] // 16
    numbers: Any = space
    columns: Any = out
    check_array("space", space, BF16, (None,))
    most = space.shape[0] // depth
    if not most:
        raise ValueError(f"space has {space.shape[0]} numbers, a row of the weights {depth}")
    for first in range(0, width, most):
        count = min(most, width - first)
        some = numbers[: count * depth].reshape(count, depth)
        sizes = (first, count, depth, weight.scales.shape[1], weight.pieces)
        device.launch(
            Kernel(_FP8_SOURCE, "fp8_widen"), (-(-count * words // _THREADS),), (_THREADS,),
            (weight.codes, weight.scales, some, *(np.int32(size) for size in sizes)),
        )  # fmt: skip
        device.matmul(x, some, columns[:, first : first + count], add=add)


def fp8_linear_silu_mul(
    device: Device, x: DeviceArray, weight: Fp8Matrix, space: DeviceArray, out: DeviceArray
) -> bool:
    """:func:`linear_silu_mul` in one kernel for up to 8 rows, if the card's tuning fuses it.

    Return whether it was computed. ``space`` is not written.
    """
    rows, width = out.shape
    check_array("out", out, BF16, (None, None))
    check_array("space", space, BF16, (rows, 2 * width))
    depth = _check_fp8(x, weight, space)[2]
    if rows > _HALF_ROWS or not device.tuning.fuses(width, device.multiprocessors):
        return False
    if rows:
        kernel = Kernel(_FP8_SOURCE, "fp8_linear_silu_mul")
        sizes = (rows, width, depth, weight.scales.shape[1], weight.pieces)
        args = (x, weight.codes, weight.scales, out, *(np.int32(size) for size in sizes))
        device.launch(kernel, (-(-width // _TILE_ROWS),), (_THREADS,), args)
    return True


def _check_fp8(x: DeviceArray, weight: Fp8Matrix, out: DeviceArray) -> tuple[int, int, int]:
    """Return rows, width and depth. Raises ValueError if the arguments do not fit together."""
    width, depth = weight.shape
    padded = -(-depth // PIECE) * PIECE
    check_multiple("the depth of weight", depth, 8)
    check_multiple("the pieces of a group", weight.pieces, 1)
    check_array("codes", weight.codes, np.uint8, (width, padded))
    groups = -(-padded // (PIECE * weight.pieces))
    check_array("scales", weight.scales, np.float32, (width, groups))
    if width * padded // 4 >= 2**31:
        raise ValueError(f"weight has {width} x {padded} codes, more than 8 GiB")
    dtype = out.dtype if out.dtype == BF16 else np.float32
    check_array("out", out, dtype, (None, width))
    rows = out.shape[0]
    check_array("x", x, BF16, (rows, depth))
    return rows, width, depth


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
