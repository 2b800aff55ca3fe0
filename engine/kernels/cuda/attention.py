"""Launchers of ``decode_attention.cu`` and ``prefill_*.cu``: attention over the paged pool.

Queries, outputs and the pool are bfloat16 bits (uint16). ``kv_layer[NB, 2, Hk, BS, D]`` is one
layer of the pool, ``D`` 32, 64 or 128 (in prefill also 80), ``BS`` a multiple of 8; in decode it
may be int8 ``[NB, 2, Hk, BS, D + 2]`` (:mod:`.reference_int8`), with the bits of a bfloat16 pool
that has the same values. Query head
``h`` reads KV head ``h // (Hq / Hk)``. A row's bits do not depend on other rows, on the placement
of its blocks or, in prefill, on its chunk. All keys visible to the rows of a tile must be finite;
other keys are not read. Plans come from :mod:`.attention_plan`. Wrong types, shapes and orders
raise ValueError before the launch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .attention_plan import ALL_POSITIONS, PREFILL_KEYS, PREFILL_ROWS, DecodeShape
from .checks import BF16, check_array, check_multiple
from .device import Argument, Device, DeviceArray, Kernel
from .elementwise import check_kv_layer

HEAD_DIMS = (32, 64, 128)
PREFILL_DIMS = (32, 64, 80, 128)
WGMMA_DIMS = (64, 128)
_DECODE = {d: Kernel("decode_attention.cu", f"decode_attention_d{d}") for d in HEAD_DIMS}
_DECODE_INT8 = {d: Kernel("decode_attention.cu", f"decode_attention_int8_d{d}") for d in HEAD_DIMS}
_COMBINE = {d: Kernel("decode_attention.cu", f"decode_combine_d{d}") for d in HEAD_DIMS}
_PREFILL = {d: Kernel("prefill_attention.cu", f"prefill_attention_d{d}") for d in PREFILL_DIMS}
_WGMMA = {d: Kernel("prefill_wgmma.cu", f"prefill_wgmma_d{d}") for d in WGMMA_DIMS}
_BULK = {d: Kernel("prefill_bulk.cu", f"prefill_bulk_d{d}") for d in WGMMA_DIMS}
_THREADS = 128
_WARPS = 4
_WGMMA_THREADS = 384
_WGMMA_KEYS = 128
_WGMMA_STAGES = 2
_GROUP = 8


def decode_attention(
    device: Device,
    q: DeviceArray,
    kv_layer: DeviceArray,
    block_tables: DeviceArray,
    plan: DeviceArray,
    shape: DecodeShape,
    scale: float,
    partial: DeviceArray,
    partial_stats: DeviceArray,
    out: DeviceArray,
    blocks: int | None = None,
) -> None:
    """Compute ``out[S, Hq, D]`` for one query row ``q[S, Hq, D]`` per sequence, by the plan.

    ``block_tables[S, Nmax]`` and ``plan[shape.rows, 4]`` are int32. The workspace is float32
    ``partial[shape.items, Hq, D]`` and ``partial_stats[shape.items, Hq, 2]`` (maximum in base 2,
    sum of weights), undefined before the call. Grids depend only on ``shape`` and ``blocks``, the
    number of thread blocks: by default all that run at once.
    """
    kv_heads, group, block_size, dim, is_int8 = _check_heads(q, kv_layer, scale, HEAD_DIMS)
    sequences, heads = shape.sequences, kv_heads * group
    check_array("q", q, BF16, (sequences, heads, dim))
    check_array("out", out, BF16, (sequences, heads, dim))
    check_array("block_tables", block_tables, np.int32, (sequences, None))
    check_array("plan", plan, np.int32, (shape.rows, 4))
    check_array("partial", partial, np.float32, (shape.items, heads, dim))
    check_array("partial_stats", partial_stats, np.float32, (shape.items, heads, 2))
    tuning = device.tuning
    if blocks is None:
        blocks = tuning.decode_bounds * device.multiprocessors
    if blocks < 1:
        raise ValueError(f"the number of thread blocks must be positive, not {blocks}")
    numbers = [sequences, block_tables.shape[1], kv_heads, group, block_size]
    device.launch(
        (_DECODE_INT8 if is_int8 else _DECODE)[dim],
        (blocks,),
        (_THREADS,),
        [q, kv_layer, block_tables, plan, out, partial, partial_stats]
        + [np.int32(n) for n in numbers]
        + [_base2(scale)],
        tuning.decode_shared_bytes,
    )
    device.launch(
        _COMBINE[dim],
        (-(-heads * tuning.combine_warps // _WARPS), sequences),
        (_THREADS,),
        [plan, partial, partial_stats, out, np.int32(heads)],
    )


def prefill_attention(
    device: Device,
    q: DeviceArray,
    kv_layer: DeviceArray,
    block_tables: DeviceArray,
    positions: DeviceArray,
    plan: DeviceArray,
    scale: float,
    window: int,
    out: DeviceArray,
) -> None:
    """Compute ``out[T, Hq, D]`` for rows ``q[T, Hq, D]``, each with keys up to ``positions[T]``.

    ``block_tables[S, Nmax]``, ``positions`` and ``plan[n, 8]`` are int32; the plan must be made
    with the same positions and window (0: all). An empty plan launches nothing.
    """
    kv_heads, group, block_size, dim, is_int8 = _check_heads(q, kv_layer, scale, PREFILL_DIMS)
    if is_int8:
        raise ValueError("prefill attention reads bfloat16: widen the blocks first")
    rows, heads = q.shape[0], kv_heads * group
    check_array("q", q, BF16, (rows, heads, dim))
    check_array("out", out, BF16, (rows, heads, dim))
    check_array("block_tables", block_tables, np.int32, (None, None))
    check_array("positions", positions, np.int32, (rows,))
    check_array("plan", plan, np.int32, (None, 8))
    if group > PREFILL_ROWS:
        raise ValueError(f"a group has 1 to {PREFILL_ROWS} heads, got {group}")
    if window < 0:
        raise ValueError(f"the window must not be negative: {window}")
    if plan.shape[0] == 0:
        return
    numbers = [block_tables.shape[1], kv_heads, group, block_size, window or ALL_POSITIONS]
    arguments: list[Argument] = [q, kv_layer, block_tables, positions, plan, out]
    arguments += [*(np.int32(n) for n in numbers), _base2(scale)]
    items = plan.shape[0] * kv_heads
    if device.tuning.prefill != "mma" and dim in _WGMMA:
        more: list[Argument] = [np.int32(items)]
        bulk = device.tuning.prefill == "bulk"
        if bulk:
            more.append(device.tensor_map(_as_matrix(kv_layer), box_rows(block_size)))
        device.launch(
            _BULK[dim] if bulk else _WGMMA[dim],
            (min(items, device.multiprocessors),),
            (_WGMMA_THREADS,),
            [*arguments, *more],
            # Aligned to 1,024 bytes: queries, stages of keys and of values; then barriers.
            1024 + (PREFILL_ROWS + 2 * _WGMMA_STAGES * _WGMMA_KEYS) * dim * 2 + 256,
        )
        return
    device.launch(
        _PREFILL[dim],
        (items,),
        (_THREADS,),
        arguments,
        (PREFILL_ROWS + 4 * PREFILL_KEYS) * _row_bytes(dim) + PREFILL_ROWS * 4 + 32,
    )


def box_rows(block_size: int) -> int:
    """Return how many rows of a block ``prefill_bulk.cu`` copies at once."""
    return min(block_size & -block_size, _WGMMA_KEYS)


def _as_matrix(kv_layer: DeviceArray) -> DeviceArray:
    """Return a layer of the pool as a matrix of its rows."""
    layer: Any = kv_layer
    matrix: DeviceArray = layer.reshape(-1, layer.shape[-1])
    return matrix


def refusal(head_dim: int, block_size: int, group: int) -> str:
    """Return why the kernels do not support a model, or ""; ``group``: query heads per KV head."""
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        return f"the CUDA kernels support head sizes {known}, this model has {head_dim}"
    if block_size % _GROUP:
        return f"on CUDA block_size must be a multiple of {_GROUP}, not {block_size}"
    if group > PREFILL_ROWS:
        return f"the CUDA kernels support up to {PREFILL_ROWS} query heads per KV head, not {group}"
    return ""


def tower_refusal(head_dim: int) -> str:
    """Return why the kernels do not support the heads of a vision tower, or ""; padded if small."""
    if head_dim > PREFILL_DIMS[-1]:
        limit = PREFILL_DIMS[-1]
        return f"the CUDA kernels support tower heads of up to {limit} channels, not {head_dim}"
    return ""


def _row_bytes(dim: int) -> int:
    """Return the bytes from one row to the next in shared memory, as ``kRowPieces``."""
    pieces = dim // 8
    return 16 * (pieces if pieces % 8 == 0 or pieces == 4 else pieces | 1)


def _check_heads(
    q: DeviceArray, kv_layer: DeviceArray, scale: float, head_dims: tuple[int, ...]
) -> tuple[int, int, int, int, bool]:
    """Return KV heads, group, block size, head dim and if the layer is int8, after checks."""
    blocks, kv_heads, block_size, dim, is_int8 = check_kv_layer(kv_layer)
    if dim not in head_dims:
        raise ValueError(f"head_dim is {dim}; the CUDA kernels support {head_dims}")
    check_multiple("the block size", block_size, _GROUP)
    if blocks * 2 * kv_heads * block_size >= 2**31:
        raise ValueError(f"a layer of {kv_layer.shape} has more than 2^31 rows")
    if len(q.shape) != 3 or q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"q has shape {q.shape}, not a multiple of {kv_heads} heads")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"the scale must be positive and finite, not {scale}")
    return kv_heads, q.shape[1] // kv_heads, block_size, dim, is_int8


def _base2(scale: float) -> np.float32:
    """Return the factor for scores with which 2^score equals exp() of the scaled score."""
    return np.float32(scale * math.log2(math.e))
