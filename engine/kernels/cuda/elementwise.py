"""Launchers of ``elementwise.cu``: kernels that process rows of bfloat16 bits (uint16).

Semantics: :class:`~baton.engine.kernels.backend.Backend`; float32 inside, rounded to bfloat16 on
writing. Every kernel writes into arrays of the caller and allocates nothing. Wrong types, shapes
or orders raise ValueError before the launch. Empty inputs launch nothing.

Ids on the device cannot be checked without waiting for the device. Callers that have them on the
host also pass them as ``known_...``, to be checked. The kernels themselves never access memory
outside the arrays, whatever the ids are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.layout import INT8_SCALE_BYTES

from ..backend import ACTIVATIONS, Activation
from .checks import BF16, check_array, check_below, check_multiple
from .device import Device, DeviceArray, Kernel

Known = npt.NDArray[np.integer[Any]]

HEAD_DIMS = (16, 32, 64, 80, 128, 256)
INT8_DIMS = (32, 64, 128)
GROUP = 8
"""Tokens of a block that an int8 pool keeps together, and divisor of its block sizes."""
MAX_WIDTH = 16_384
"""Widest row that a block of 1,024 threads can keep in registers."""

_SOURCE = "elementwise.cu"
VECTOR = 8
"""bf16 values in one load of 16 bytes."""
_INT_MAX = 2**31 - 1
_GRID_ROWS = 65_535


def _kernel(name: str) -> Kernel:
    return Kernel(_SOURCE, name)


def refusal(hidden: int, intermediate: int) -> str:
    """Return why the kernels do not support rows of a model's two widths, or ""."""
    for name, width in (("hidden_size", hidden), ("intermediate_size", intermediate)):
        if width % VECTOR:
            return f"on CUDA {name} must be a multiple of {VECTOR}, not {width}"
    if hidden > MAX_WIDTH:
        return f"the CUDA kernels support hidden_size up to {MAX_WIDTH}, not {hidden}"
    return ""


def tower_refusal(hidden: int, widest: int) -> str:
    """Return why the kernels do not support the rows of a vision tower, or ""; ``widest``: norm."""
    if hidden % VECTOR:
        return f"on CUDA the tower's hidden_size must be a multiple of {VECTOR}, not {hidden}"
    if widest > MAX_WIDTH:
        return f"the CUDA kernels support norms of up to {MAX_WIDTH} channels, not {widest}"
    return ""


def embed(
    device: Device,
    ids: DeviceArray,
    table: DeviceArray,
    out: DeviceArray,
    known_ids: Known | None = None,
) -> None:
    """``out[t] = table[ids[t]]``: int32 ``[T]``, bf16 ``[V, H]``, bf16 ``[T, H]``.

    ``H`` is a multiple of 8. An id outside the table gives zeros, or ValueError if it is in
    ``known_ids``.
    """
    check_array("ids", ids, np.int32, (None,))
    check_array("table", table, BF16, (None, None))
    vocabulary, width = table.shape
    check_array("out", out, BF16, (ids.shape[0], width))
    check_multiple("the width of the table", width, VECTOR)
    if known_ids is not None:
        check_below("token ids", known_ids, vocabulary)
    words = width // VECTOR
    if ids.shape[0]:
        grid = (ids.shape[0], -(-words // 512))
        args = (ids, table, out, np.int32(words), np.int32(vocabulary))
        device.launch(_kernel("embed"), grid, (128,), args)


def put_rows(
    device: Device,
    x: DeviceArray,
    rows: DeviceArray,
    out: DeviceArray,
    *,
    add: bool = False,
) -> None:
    """``out[rows[i]] = x[i]``, or the rounded sum with ``add``; all bf16, ``rows`` int32 ``[R]``.

    ``x[R, H]``, ``out[T, H]``, ``H`` a multiple of 8. The rows are distinct. A row outside ``out``
    is left out.
    """
    check_array("rows", rows, np.int32, (None,))
    check_array("out", out, BF16, (None, None))
    count, width = out.shape
    check_array("x", x, BF16, (rows.shape[0], width))
    check_multiple("the width of out", width, VECTOR)
    words = width // VECTOR
    if rows.shape[0]:
        kernel = _kernel("put_rows_add" if add else "put_rows")
        grid = (rows.shape[0], -(-words // 512))
        device.launch(kernel, grid, (128,), (x, rows, out, np.int32(words), np.int32(count)))


def rms_norm(
    device: Device, x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray
) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` per row ``[T, H]``; all bf16.

    ``out`` may be float32 instead. ``H`` is a multiple of 8 up to ``MAX_WIDTH``.
    """
    suffix, numbers = _check_norm(x, weight, eps, out)
    if x.shape[0]:
        args = (x, weight, out, *numbers)
        _launch_norm(device, "rms_norm", suffix, x.shape, args)


def add_rms_norm(
    device: Device,
    x: DeviceArray,
    residual: DeviceArray,
    weight: DeviceArray,
    eps: float,
    out: DeviceArray,
) -> None:
    """``residual += x`` in place, rounded to bf16, then ``out = rms_norm(residual)``.

    ``x`` and ``residual`` are bf16 ``[T, H]`` and share no memory; the rest as in
    :func:`rms_norm`.
    """
    suffix, numbers = _check_norm(x, weight, eps, out)
    check_array("residual", residual, BF16, x.shape)
    if x.shape[0]:
        args = (x, residual, weight, out, *numbers)
        _launch_norm(device, "add_rms_norm", suffix, x.shape, args)


def layer_norm(
    device: Device,
    x: DeviceArray,
    weight: DeviceArray,
    bias: DeviceArray,
    eps: float,
    out: DeviceArray,
    *,
    modulated: bool = False,
) -> None:
    """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` per row ``[T, H]``; all bf16.

    ``H`` is a multiple of 8 up to ``MAX_WIDTH``. ``modulated``: 1 is added to the weight.
    """
    numbers = _check_layer_norm(x, weight, bias, eps, out)
    if x.shape[0]:
        args = (x, weight, bias, out, *numbers)
        kernel = _kernel("modulated_norm" if modulated else "layer_norm")
        device.launch(kernel, (x.shape[0],), _norm_block(x.shape[1]), args)


def add_layer_norm(
    device: Device,
    x: DeviceArray,
    residual: DeviceArray,
    weight: DeviceArray,
    bias: DeviceArray,
    eps: float,
    out: DeviceArray,
) -> None:
    """``residual += x`` in place, rounded to bf16, then ``out = layer_norm(residual)``.

    ``x`` and ``residual`` are bf16 ``[T, H]`` and share no memory.
    """
    numbers = _check_layer_norm(x, weight, bias, eps, out)
    check_array("residual", residual, BF16, x.shape)
    if x.shape[0]:
        args = (x, residual, weight, bias, out, *numbers)
        device.launch(_kernel("add_layer_norm"), (x.shape[0],), _norm_block(x.shape[1]), args)


def _check_layer_norm(
    x: DeviceArray, weight: DeviceArray, bias: DeviceArray, eps: float, out: DeviceArray
) -> tuple[np.int32, np.float32, np.float32]:
    """Return the numeric arguments of a layer norm."""
    numbers = _check_norm(x, weight, eps, out)[1]
    check_array("bias", bias, BF16, weight.shape)
    check_array("out", out, BF16, x.shape)
    return numbers


def _check_norm(
    x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray
) -> tuple[str, tuple[np.int32, np.float32, np.float32]]:
    """Return the kernel's suffix for the type of ``out``, and its numeric arguments."""
    check_array("x", x, BF16, (None, None))
    rows, width = x.shape
    check_array("weight", weight, BF16, (width,))
    is_wide = out.dtype == np.dtype(np.float32)
    check_array("out", out, np.float32 if is_wide else BF16, (rows, width))
    check_multiple("the width of x", width, VECTOR)
    if width > MAX_WIDTH:
        raise ValueError(f"the width of x is {width}, more than {MAX_WIDTH}")
    if not eps > 0:
        raise ValueError(f"eps is {eps}, not positive")
    numbers = (np.int32(width // VECTOR), np.float32(1 / width), np.float32(eps))
    return ("_f32" if is_wide else ""), numbers


def _launch_norm(
    device: Device, name: str, suffix: str, shape: tuple[int, ...], args: tuple[Any, ...]
) -> None:
    """Launch an RMSNorm with one or two words per thread; the bits are the same."""
    rows, width = shape
    each = 1 if rows <= device.tuning.norm_rows and not suffix and width <= MAX_WIDTH // 2 else 2
    kernel = _kernel(f"{name}_one" if each == 1 else f"{name}{suffix}")
    device.launch(kernel, (rows,), _norm_block(width, each), args)


def _norm_block(width: int, each: int = 2) -> tuple[int]:
    """Return the block size for ``each`` loads of 16 bytes per thread and tensor."""
    return (32 * -(-width // (VECTOR * each * 32)),)


def qk_norm_rope_append(
    device: Device,
    qkv: DeviceArray,
    positions: DeviceArray,
    slots: DeviceArray,
    cos_sin: DeviceArray,
    q_norm: DeviceArray | None,
    k_norm: DeviceArray | None,
    eps: float,
    kv_layer: DeviceArray,
    q_out: DeviceArray,
    known_positions: Known | None = None,
    known_slots: Known | None = None,
) -> None:
    """Normalise and rotate q and k, then write q out and k, v into the paged cache.

    ``qkv`` bf16 ``[T, (Hq + 2 Hk) * D]``, ``positions`` int32 ``[T]``, ``slots`` int64 ``[T]``
    (``block * BS + offset``, distinct), ``cos_sin`` float32 ``[max_position, D]`` (first half
    cosines, second half sines), ``q_norm`` and ``k_norm`` bf16 ``[D]`` or None, ``kv_layer`` bf16
    ``[NB, 2, Hk, BS, D]``, ``q_out`` bf16 ``[T, Hq, D]``; ``D`` is one of ``HEAD_DIMS``. Heads of
    80 have no norms.

    If ``kv_layer`` is int8 ``[NB, 2, Hk, BS, D + 2]``, it gets rows of codes as
    :mod:`.reference_int8` lays them out, and queries and keys are transformed before
    (:func:`~..kv_rows.spread`); ``D`` is one of ``INT8_DIMS``.

    A slot outside the pool appends nothing: unused rows of a bucket have slot -1, which
    ``known_slots`` also allows. A position outside the table is replaced by the nearest one inside,
    or raises ValueError if it is in ``known_positions``.
    """
    blocks, kv_heads, block_size, dim, is_int8 = check_kv_layer(kv_layer)
    dims = INT8_DIMS if is_int8 else HEAD_DIMS
    if dim not in dims:
        raise ValueError(f"head size {dim} is not one of {dims}")
    check_array("q_out", q_out, BF16, (None, None, dim))
    rows, heads, _ = q_out.shape
    check_array("qkv", qkv, BF16, (rows, (heads + 2 * kv_heads) * dim))
    check_array("positions", positions, np.int32, (rows,))
    check_array("slots", slots, np.int64, (rows,))
    check_array("cos_sin", cos_sin, np.float32, (None, dim))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_array(name, norm, BF16, (dim,))
            if dim & (dim - 1):
                raise ValueError(f"{name}: heads of {dim} have no norm")
    if not eps > 0:
        raise ValueError(f"eps is {eps}, not positive")
    max_position, lanes = cos_sin.shape[0], dim // 16
    threads = rows * (heads + 2 * kv_heads) * lanes
    if max(threads, blocks * block_size) > _INT_MAX:
        raise ValueError(f"{rows} rows or {blocks} blocks are more than a launch can count")
    if known_positions is not None:
        check_below("positions", known_positions, max_position)
    if known_slots is not None:
        check_below("slots", known_slots[known_slots != -1], blocks * block_size)
    if threads == 0:
        return
    if max_position == 0:
        raise ValueError("cos_sin has no row")
    args = (
        qkv, positions, slots, cos_sin, np.int32(max_position), q_norm, k_norm, np.float32(eps),
        kv_layer, q_out, np.int32(rows), np.int32(heads), np.int32(kv_heads),
        np.int32(block_size), np.int32(blocks * block_size),
    )  # fmt: skip
    name = f"qk_norm_rope_append{'_int8' * is_int8}_{dim}"
    device.launch(_kernel(name), (-(-threads // 128),), (128,), args)


def check_kv_layer(kv_layer: DeviceArray) -> tuple[int, int, int, int, bool]:
    """Return blocks, KV heads, block size and head size of a layer of a pool, and if it is int8.

    Raises ValueError for another array.
    """
    is_int8 = kv_layer.dtype == np.dtype(np.int8)
    check_array("kv_layer", kv_layer, np.int8 if is_int8 else BF16, (None, 2, None, None, None))
    blocks, _, kv_heads, block_size, length = kv_layer.shape
    if is_int8:
        check_multiple("the block size", block_size, GROUP)
        length -= INT8_SCALE_BYTES
    return blocks, kv_heads, block_size, length, is_int8


def widen_kv(
    device: Device,
    kv_layer: DeviceArray,
    block_tables: DeviceArray,
    entries: DeviceArray,
    out: DeviceArray,
) -> None:
    """``out[i] = kv_layer[block_tables.flat[entries[i]]]`` as bfloat16.

    ``kv_layer`` int8 ``[NB, 2, Hk, BS, D + 2]``, ``block_tables`` int32 ``[S, N]``, ``entries``
    int32 ``[n]``, ``out`` bf16 ``[n, 2, Hk, BS, D]``. Values are those of the codes, exactly.
    """
    _, kv_heads, block_size, dim, is_int8 = check_kv_layer(kv_layer)
    if not is_int8 or dim not in INT8_DIMS:
        raise ValueError(f"kv_layer is {kv_layer.dtype}, not int8 with heads of {INT8_DIMS}")
    check_array("block_tables", block_tables, np.int32, (None, None))
    check_array("entries", entries, np.int32, (None,))
    count = entries.shape[0]
    check_array("out", out, BF16, (count, 2, kv_heads, block_size, dim))
    pieces = 2 * kv_heads * block_size * dim // 16
    for first in range(0, count, _GRID_ROWS):
        some: Any = entries
        there: Any = out
        part = slice(first, first + _GRID_ROWS)
        grid = (-(-pieces // 256), min(count - first, _GRID_ROWS))
        args = (kv_layer, block_tables, some[part], there[part], np.int32(pieces))
        device.launch(_kernel(f"widen_kv_{dim}"), grid, (256,), args)


def silu_mul(device: Device, gate_up: DeviceArray, out: DeviceArray) -> None:
    """``out[T, F] = silu(gate_up[:, :F]) * gate_up[:, F:]``; all bf16, ``F`` a multiple of 8."""
    check_array("out", out, BF16, (None, None))
    rows, width = out.shape
    check_array("gate_up", gate_up, BF16, (rows, 2 * width))
    check_multiple("the width of out", width, VECTOR)
    words = width // VECTOR
    if rows:
        grid = (-(-words // 256), min(rows, 65_535))
        args = (gate_up, out, np.int32(words), np.int32(rows))
        device.launch(_kernel("silu_mul"), grid, (256,), args)


def activate(device: Device, x: DeviceArray, kind: Activation, out: DeviceArray) -> None:
    """Apply an activation to every element of ``x[T, F]``; bf16, ``F`` a multiple of 8.

    ``out`` may be ``x``. Kinds: :meth:`~baton.engine.kernels.backend.Backend.activate`.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"no activation {kind!r}")
    check_array("out", out, BF16, (None, None))
    check_array("x", x, BF16, out.shape)
    rows, width = out.shape
    check_multiple("the width of out", width, VECTOR)
    words = rows * width // VECTOR
    if words > _INT_MAX:
        raise ValueError(f"{rows} rows are more than a launch can count")
    if rows:
        grid = (-(-words // 256),)
        device.launch(_kernel(f"activate_{kind}"), grid, (256,), (x, out, np.int32(words)))
