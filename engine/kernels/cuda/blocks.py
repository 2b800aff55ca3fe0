"""Moves KV blocks between paged pools and payloads: one kernel per move, see ``csrc/blocks.cu``.

A pool is ``[L, NB, 2, Hk, BS, D]`` of bf16 (uint16 bits). A payload holds some layers and some
blocks of a pool, in the receiver's heads, block size and encoding (:class:`PayloadLayout`). Every
move computes the payload's digest (``engine/kernels/digest.py``), even if it writes no payload.

Tokens are counted along the list of blocks: token t of a request is slot ``t % size`` of block
``t // size`` on both sides. If one side has room for more tokens than the other, a payload gets
zeros there and a pool keeps its old values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .device import Device, DeviceArray, Kernel
from .payload import VECTOR, PayloadLayout

I32 = npt.NDArray[np.int32]

SOURCE = "blocks.cu"
WORKSPACE_WORDS = 2
"""uint64 words of a workspace; they must be zero at first, and every launch leaves them zero."""

PROCESSORS = 132
"""Streaming multiprocessors that the grid is sized for; other GPUs need more or fewer rounds."""
PIECE_THREADS, PIECE_BLOCKS = 256, 4
PIECE_SLOTS, BYTE_PIECE_SLOTS = 4, 8
"""Vectors of a piece that a lane has in flight, of 16 and of 8 bytes; as in ``blocks.cu``."""
TILE_SLOTS, MAX_TILE_THREADS, TILE_THREADS_PER_PROCESSOR = 8, 512, 1024

PIECE_LANES = 32

_DIVISOR = np.dtype([("by", "u4"), ("factor", "u4"), ("shift", "u4")])
_WIDE = ("pool_start", "layer_stride", "scales_at", "payload_bytes")
_NARROW = (
    "block_stride", "side_stride", "head_stride", "tile_vectors", "pieces", "tiles", "pool_ids",
    "scales",
)  # fmt: skip
_DIVISORS = (
    "run_vectors", "pieces_per_run", "runs_per_tile", "heads", "sides", "blocks",
    "runs_per_pool_block", "token_vectors",
)  # fmt: skip
GEOMETRY = np.dtype(
    [
        *((name, "i8") for name in _WIDE),
        *((name, "u4") for name in _NARROW),
        *((name, _DIVISOR) for name in _DIVISORS),
    ],
    align=True,
)
"""``struct Geometry``, passed to kernels by value."""

_LIMIT = 2**31  # the kernels' divisions are exact below this number


@dataclass(frozen=True, slots=True)
class BlockIds:
    """Ids of pool blocks in token order: on the device, already checked."""

    array: DeviceArray
    count: int
    highest: int
    distinct: bool


def upload_ids(device: Device, ids: Sequence[int] | I32) -> BlockIds:
    """Copy block ids to the device. Raises ValueError if empty or outside ``0..2^31``."""
    host = np.asarray(ids)
    if host.ndim != 1 or not len(host) or host.dtype.kind not in "iu":
        raise ValueError("block ids must be one row of at least one integer")
    if host.min() < 0 or host.max() >= 2**31:
        raise ValueError(f"block ids from {host.min()} to {host.max()} are out of range")
    distinct = len(np.unique(host)) == len(host)
    array = device.upload(np.ascontiguousarray(host, np.int32))
    return BlockIds(array, len(host), int(host.max()), distinct)


def gather_blocks(
    device: Device,
    pool: DeviceArray,
    ids: BlockIds,
    layout: PayloadLayout,
    payload: DeviceArray,
    digest: DeviceArray,
    workspace: DeviceArray,
    *,
    layer_start: int = 0,
    head_start: int = 0,
    processors: int = PROCESSORS,
) -> None:
    """Pack layers ``layer_start..`` and heads ``head_start..`` of the blocks ``ids``.

    Writes all of ``payload`` (uint8 ``[layout.nbytes]``, aligned to 16 bytes) and ``digest``
    (uint64 ``[1]``). ``workspace``: uint64 ``[WORKSPACE_WORDS]``, zeros at first, one per stream.
    Raises ValueError before anything is launched.
    """
    _check_move(pool, ids, layout, payload, layer_start, head_start)
    _check_words(digest, workspace)
    record = geometry(pool.shape, layout, layer_start, head_start, ids.count, PIECE_SLOTS)
    if layout.scales:
        grid, block, shared = _tile_launch(layout, processors)
    else:
        grid, block, shared = _piece_launch(record, processors)
    args = (pool, payload, ids.array, workspace, digest, record)
    kernel = Kernel(SOURCE, f"gather_{layout.encoding}")
    device.launch(kernel, (grid,), (block,), args, shared)


def scatter_blocks(
    device: Device,
    payload: DeviceArray,
    layout: PayloadLayout,
    ids: BlockIds,
    pool: DeviceArray,
    digest: DeviceArray,
    workspace: DeviceArray,
    *,
    layer_start: int = 0,
    head_start: int = 0,
    processors: int = PROCESSORS,
) -> None:
    """Unpack a payload into the pool: the inverse of :func:`gather_blocks`.

    ``digest`` is computed from the payload as it was read. A receiver compares it with the
    sender's before the blocks are used. Ids must be distinct. Raises ValueError before
    anything is launched.
    """
    _check_move(pool, ids, layout, payload, layer_start, head_start)
    _check_words(digest, workspace)
    if not ids.distinct:
        raise ValueError("block ids must be distinct: a block would be written twice")
    slots = BYTE_PIECE_SLOTS if layout.scales else PIECE_SLOTS
    record = geometry(pool.shape, layout, layer_start, head_start, ids.count, slots)
    grid, block, shared = _piece_launch(record, processors)
    args = (pool, payload, ids.array, workspace, digest, record)
    kernel = Kernel(SOURCE, f"scatter_{layout.encoding}")
    device.launch(kernel, (grid,), (block,), args, shared)


def copy_blocks(
    device: Device,
    source: DeviceArray,
    source_ids: BlockIds,
    target: DeviceArray,
    target_ids: BlockIds,
    digest: DeviceArray,
    workspace: DeviceArray,
    *,
    layer_start: int = 0,
    layer_count: int,
    processors: int = PROCESSORS,
) -> None:
    """``target[l, target_ids[i]] = source[l, source_ids[i]]`` for ``layer_count`` layers.

    The pools share no memory and differ only in their number of blocks; ``source`` may
    be another process's. ``digest`` equals that of the blocks' bf16 payload. Target ids must
    be distinct. Raises ValueError before anything is launched.
    """
    _check_pool("source", source, source_ids)
    _check_pool("target", target, target_ids)
    _check_words(digest, workspace)
    if (source.shape[0], *source.shape[2:]) != (target.shape[0], *target.shape[2:]):
        raise ValueError(f"pools of shape {source.shape} and {target.shape} differ in more than NB")
    if source_ids.count != target_ids.count:
        raise ValueError(f"{source_ids.count} blocks do not fit {target_ids.count}")
    if not target_ids.distinct:
        raise ValueError("block ids must be distinct: a block would be written twice")
    here = _whole_blocks(source, source_ids, layer_start, layer_count)
    there = _whole_blocks(target, target_ids, layer_start, layer_count)
    grid, block, shared = _piece_launch(here, processors)
    args = (source, source_ids.array, here, target, target_ids.array, there, workspace, digest)
    device.launch(Kernel(SOURCE, "copy_bf16"), (grid,), (block,), args, shared)


def reslice_blocks(
    device: Device,
    source: DeviceArray,
    source_ids: BlockIds,
    target: DeviceArray,
    target_ids: BlockIds,
    digest: DeviceArray,
    workspace: DeviceArray,
    *,
    heads: int,
    source_head: int = 0,
    target_head: int = 0,
    layer_start: int = 0,
    layer_count: int,
    processors: int = PROCESSORS,
) -> None:
    """Copy ``heads`` heads of a request from pool to pool, between block sizes, without a payload.

    In one pass, ``target`` and ``digest`` get the same values as from :func:`gather_blocks` in the
    target's block size followed by :func:`scatter_blocks`. Tokens that only the target has room for
    become zeros. The pools share no memory; target ids must be distinct. Raises ValueError before
    anything is launched.
    """
    _check_pool("target", target, target_ids)
    layout = PayloadLayout(layer_count, target_ids.count, heads, target.shape[4], target.shape[5])
    _check_request(source, source_ids, layout, layer_start, source_head)
    _check_request(target, target_ids, layout, layer_start, target_head)
    _check_words(digest, workspace)
    if not target_ids.distinct:
        raise ValueError("block ids must be distinct: a block would be written twice")
    run = min(source.shape[4], target.shape[4])
    here, there = (
        geometry(pool.shape, layout, layer_start, head, ids.count, PIECE_SLOTS, run)
        for pool, ids, head in (
            (source, source_ids, source_head),
            (target, target_ids, target_head),
        )
    )
    grid, block, shared = _piece_launch(here, processors)
    args = (source, source_ids.array, here, target, target_ids.array, there, workspace, digest)
    device.launch(Kernel(SOURCE, "reslice_bf16"), (grid,), (block,), args, shared)


def sum_blocks(
    device: Device,
    pool: DeviceArray,
    ids: BlockIds,
    digest: DeviceArray,
    workspace: DeviceArray,
    *,
    layer_start: int = 0,
    layer_count: int,
    processors: int = PROCESSORS,
) -> None:
    """Write only the digest that :func:`copy_blocks` would write.

    Raises ValueError before anything is launched.
    """
    _check_pool("pool", pool, ids)
    _check_words(digest, workspace)
    record = _whole_blocks(pool, ids, layer_start, layer_count)
    grid, block, shared = _piece_launch(record, processors)
    args = (pool, ids.array, workspace, digest, record)
    device.launch(Kernel(SOURCE, "sum_bf16"), (grid,), (block,), args, shared)


def _whole_blocks(pool: DeviceArray, ids: BlockIds, layer_start: int, layer_count: int) -> np.void:
    layers, _, _, heads, block_size, head_dim = pool.shape
    _check_range("layers", layer_start, layer_count, layers)
    layout = PayloadLayout(layer_count, ids.count, heads, block_size, head_dim)
    return geometry(pool.shape, layout, layer_start, 0, ids.count, PIECE_SLOTS)


def _piece_launch(record: np.void, processors: int) -> tuple[int, int, int]:
    """Return grid, block and shared bytes of a kernel in which warps process pieces."""
    warps = PIECE_THREADS // 32
    grid = min(-(-int(record["pieces"]) // warps), processors * PIECE_BLOCKS)
    return grid, PIECE_THREADS, 0


def _tile_launch(layout: PayloadLayout, processors: int) -> tuple[int, int, int]:
    """Return grid, block and shared bytes of a kernel in which thread blocks process tiles."""
    vectors = layout.block_size * layout.head_dim // VECTOR
    block = -(-vectors // (TILE_SLOTS * 32)) * 32
    if block > MAX_TILE_THREADS:
        raise ValueError(
            f"a head of a block has {vectors * VECTOR} elements; "
            f"at most {MAX_TILE_THREADS * TILE_SLOTS * VECTOR} share a scale"
        )
    grid = min(layout.tiles, processors * max(1, TILE_THREADS_PER_PROCESSOR // block))
    return grid, block, 4 * (3 * layout.scales + layout.scale_slots)


def _check_move(
    pool: DeviceArray,
    ids: BlockIds,
    layout: PayloadLayout,
    payload: DeviceArray,
    layer_start: int,
    head_start: int,
) -> None:
    _check_array("payload", payload, np.uint8)
    if payload.shape != (layout.nbytes,):
        raise ValueError(f"payload has shape {payload.shape}, not ({layout.nbytes},)")
    _check_request(pool, ids, layout, layer_start, head_start)


def _check_request(
    pool: DeviceArray, ids: BlockIds, layout: PayloadLayout, layer_start: int, head_start: int
) -> None:
    _check_pool("pool", pool, ids)
    layers, _, _, heads, block_size, head_dim = pool.shape
    if head_dim != layout.head_dim:
        raise ValueError(f"head_dim is {head_dim} in the pool, {layout.head_dim} in the payload")
    _check_range("layers", layer_start, layout.layers, layers)
    _check_range("heads", head_start, layout.heads, heads)
    if max(block_size, layout.block_size) % min(block_size, layout.block_size):
        raise ValueError(
            f"block sizes {block_size} and {layout.block_size}: one must divide the other"
        )
    if (
        (layout.blocks - 1) * layout.block_size >= ids.count * block_size
        or (ids.count - 1) * block_size >= layout.blocks * layout.block_size
    ):  # fmt: skip
        raise ValueError(
            f"{ids.count} blocks of {block_size} tokens and {layout.blocks} of "
            f"{layout.block_size} do not hold the same request"
        )


def _check_pool(name: str, pool: DeviceArray, ids: BlockIds) -> None:
    _check_array(name, pool, np.uint16)
    if len(pool.shape) != 6 or pool.shape[2] != 2:
        raise ValueError(f"{name} has shape {pool.shape}, not [L, NB, 2, Hk, BS, D]")
    if ids.highest >= pool.shape[1]:
        raise ValueError(f"block {ids.highest} is not in a pool of {pool.shape[1]} blocks")


def _check_words(digest: DeviceArray, workspace: DeviceArray) -> None:
    for name, array, words in (("digest", digest, 1), ("workspace", workspace, WORKSPACE_WORDS)):
        _check_array(name, array, np.uint64)
        if array.shape != (words,):
            raise ValueError(f"{name} has shape {array.shape}, not ({words},)")


def _check_array(name: str, array: DeviceArray, dtype: npt.DTypeLike) -> None:
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{name} is of {array.dtype}, not of {np.dtype(dtype)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")


def _check_range(what: str, start: int, count: int, limit: int) -> None:
    if start < 0 or count < 1 or start + count > limit:
        raise ValueError(f"{what} {start} to {start + count} are not in a pool of {limit}")


# --------------------------------------------------------------------------- kernel arguments


def divisor(by: int) -> tuple[int, int, int]:
    """``(by, factor, shift)`` with ``n // by == (n * factor >> 32) >> shift`` for n < 2^31.

    No such factor exists for ``by`` 1; kernels leave n unchanged. Source: Granlund and Montgomery
    1994, "Division by invariant integers using multiplication".
    """
    if not 1 <= by < _LIMIT:
        raise ValueError(f"cannot divide by {by}")
    if by == 1:
        return 1, 0, 0
    power = 31 + (by - 1).bit_length()
    return by, -(-(1 << power) // by), power - 32


def geometry(
    pool_shape: tuple[int, ...],
    layout: PayloadLayout,
    layer_start: int,
    head_start: int,
    pool_ids: int,
    slots: int,
    run_tokens: int = 0,
) -> np.void:
    """Return the record for a pool ``[L, NB, 2, Hk, BS, D]`` and a payload of the pool.

    ``slots``: vectors of a piece per lane. Elements that are contiguous on both sides form one run:
    a whole block, all heads of a shard, or the tokens shared by both block sizes. With scales,
    runs stay within a tile.
    ``run_tokens``: tokens of a run of one head, if a second pool limits the runs; then
    runs are not joined. The arguments must be checked already. Raises ValueError
    for a move of more than 2^31 pieces.
    """
    _, num_blocks, _, pool_heads, pool_block, _ = pool_shape
    vectors = layout.head_dim // VECTOR
    head = pool_block * vectors
    apart = run_tokens > 0
    run_tokens = run_tokens or min(pool_block, layout.block_size)
    sides, heads, run = 2, layout.heads, run_tokens * vectors
    if layout.block_size == pool_block and not layout.scales and not apart:
        heads, run = 1, layout.heads * head
        if layout.heads == pool_heads:
            sides, run = 1, 2 * run
    per_tile, per_pool_block = layout.block_size // run_tokens, pool_block // run_tokens
    pieces_per_run = -(-run // (PIECE_LANES * slots))
    tiles = layout.layers * layout.blocks * sides * heads
    pieces = tiles * per_tile * pieces_per_run
    block = 2 * pool_heads * head
    if max(pieces, tiles * per_tile, block, pool_ids * per_pool_block) >= _LIMIT:
        raise ValueError(f"a move of {pieces} pieces is too large for one launch")
    values = {
        "pool_start": layer_start * num_blocks * block + head_start * head,
        "layer_stride": num_blocks * block,
        "scales_at": layout.element_bytes,
        "payload_bytes": layout.nbytes,
        "block_stride": block,
        "side_stride": pool_heads * head,
        "head_stride": head,
        "tile_vectors": layout.block_size * vectors,
        "pieces": pieces,
        "tiles": tiles,
        "pool_ids": pool_ids,
        "scales": layout.scale_slots,
        "run_vectors": divisor(run),
        "pieces_per_run": divisor(pieces_per_run),
        "runs_per_tile": divisor(per_tile),
        "heads": divisor(heads),
        "sides": divisor(sides),
        "blocks": divisor(layout.blocks),
        "runs_per_pool_block": divisor(per_pool_block),
        "token_vectors": divisor(vectors),
    }
    record = np.array([tuple(values[name] for name in (*_WIDE, *_NARROW, *_DIVISORS))], GEOMETRY)
    found: np.void = record[0]
    return found
