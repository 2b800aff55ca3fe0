"""Moves KV blocks between paged pools and payloads: one kernel per move, see ``csrc/blocks.cu``.

A pool is ``[L, NB, 2, Hk, BS, D]`` of bf16 (uint16 bits), or ``[L, NB, 2, Hk, BS, D + 2]`` of int8
(:mod:`.reference_int8`); its blocks are moved as bytes. A payload holds some blocks of some of a
pool's layers, ``[layers, blocks, ...]``. Every move computes the payload's digest
(``engine/kernels/digest.py``), even if it writes no payload. Wrong arguments raise ValueError
before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from .device import Argument, Device, DeviceArray, Kernel

I32 = npt.NDArray[np.int32]

SOURCE = "blocks.cu"
WORKSPACE_WORDS = 2
"""uint64 words of a workspace; they must be zero at first, and every launch leaves them zero."""
VECTOR = 8
"""Elements of bf16 that kernels move at once; a head, or a block of int8, is a multiple of this."""
_VECTOR_BYTES = 16
PROCESSORS = 132
"""Streaming multiprocessors that the grid is sized for; other GPUs need more or fewer rounds."""
PIECE_THREADS, PIECE_BLOCKS = 256, 4
PIECE_VECTORS = 32 * 4
"""Vectors of a piece, which a warp moves at once; as in ``blocks.cu``."""

_DIVISOR = np.dtype([("by", "u4"), ("factor", "u4"), ("shift", "u4")])
GEOMETRY = np.dtype(
    [
        ("pool_start", "i8"), ("layer_stride", "i8"), ("payload_bytes", "i8"),
        ("block_vectors", "u4"), ("pieces", "u4"),
        ("pieces_per_block", _DIVISOR), ("blocks", _DIVISOR),
    ],
    align=True,
)  # fmt: skip
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


def payload_bytes(pool: DeviceArray, layers: int, blocks: int) -> int:
    """Return the bytes of a payload of some blocks of a pool."""
    return layers * blocks * _block_bytes(pool)


def _block_bytes(pool: DeviceArray) -> int:
    return prod(pool.shape[2:]) * pool.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a move, ``start .. start + count``, and the processors that its grid fills."""

    start: int
    count: int
    processors: int = PROCESSORS


def gather_blocks(
    device: Device,
    pool: DeviceArray,
    ids: BlockIds,
    layers: Layers,
    payload: DeviceArray,
    digest: DeviceArray,
    workspace: DeviceArray,
) -> None:
    """Pack the blocks ``ids``.

    Writes all of ``payload`` (uint8 ``[payload_bytes]``, aligned to 16 bytes) and ``digest``
    (uint64 ``[1]``). ``workspace``: uint64 ``[WORKSPACE_WORDS]``, zeros at first, one per stream.
    """
    record = _geometry("pool", pool, ids, layers)
    _check_payload(payload, record)
    _launch(device, "gather", layers, record, (pool, payload, ids.array), digest, workspace)


def scatter_blocks(
    device: Device,
    payload: DeviceArray,
    layers: Layers,
    ids: BlockIds,
    pool: DeviceArray,
    digest: DeviceArray,
    workspace: DeviceArray,
) -> None:
    """Unpack a payload into the pool: the inverse of :func:`gather_blocks`.

    ``digest`` is computed from the payload as it was read. A receiver compares it with the
    sender's before the blocks are used. Ids must be distinct.
    """
    record = _geometry("pool", pool, ids, layers)
    _check_payload(payload, record)
    _check_distinct(ids)
    _launch(device, "scatter", layers, record, (pool, payload, ids.array), digest, workspace)


def copy_blocks(
    device: Device,
    source: DeviceArray,
    source_ids: BlockIds,
    target: DeviceArray,
    target_ids: BlockIds,
    layers: Layers,
    digest: DeviceArray,
    workspace: DeviceArray,
) -> None:
    """``target[l, target_ids[i]] = source[l, source_ids[i]]`` for some layers.

    The pools share no memory and differ only in their number of blocks; ``source`` may
    be another process's. ``digest`` equals that of the blocks' payload. Target ids must
    be distinct.
    """
    here = _geometry("source", source, source_ids, layers)
    there = _geometry("target", target, target_ids, layers)
    if (source.shape[0], *source.shape[2:]) != (target.shape[0], *target.shape[2:]):
        raise ValueError(f"pools of shape {source.shape} and {target.shape} differ in more than NB")
    if source.dtype != target.dtype:
        raise ValueError(f"pools of {source.dtype} and {target.dtype} have no common blocks")
    if source_ids.count != target_ids.count:
        raise ValueError(f"{source_ids.count} blocks do not fit {target_ids.count}")
    _check_distinct(target_ids)
    args = (source, source_ids.array, target, target_ids.array, there)
    _launch(device, "copy", layers, here, args, digest, workspace)


def sum_blocks(
    device: Device,
    pool: DeviceArray,
    ids: BlockIds,
    layers: Layers,
    digest: DeviceArray,
    workspace: DeviceArray,
) -> None:
    """Write only the digest that :func:`gather_blocks` would write."""
    record = _geometry("pool", pool, ids, layers)
    _launch(device, "sum", layers, record, (pool, ids.array), digest, workspace)


def _launch(
    device: Device,
    name: str,
    layers: Layers,
    record: np.void,
    args: tuple[Argument, ...],
    digest: DeviceArray,
    workspace: DeviceArray,
) -> None:
    for what, array, words in (("digest", digest, 1), ("workspace", workspace, WORKSPACE_WORDS)):
        _check_array(what, array, np.uint64)
        if array.shape != (words,):
            raise ValueError(f"{what} has shape {array.shape}, not ({words},)")
    warps = PIECE_THREADS // 32
    grid = min(-(-int(record["pieces"]) // warps), layers.processors * PIECE_BLOCKS)
    kernel = Kernel(SOURCE, f"{name}_bf16")
    device.launch(kernel, (grid,), (PIECE_THREADS,), (*args, workspace, digest, record))


def _check_payload(payload: DeviceArray, record: np.void) -> None:
    _check_array("payload", payload, np.uint8)
    if payload.shape != (int(record["payload_bytes"]),):
        raise ValueError(f"payload has shape {payload.shape}, not ({record['payload_bytes']},)")


def _check_distinct(ids: BlockIds) -> None:
    if not ids.distinct:
        raise ValueError("block ids must be distinct: a block would be written twice")


def _check_array(name: str, array: DeviceArray, dtype: npt.DTypeLike) -> None:
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{name} is of {array.dtype}, not of {np.dtype(dtype)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")


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


def _geometry(name: str, pool: DeviceArray, ids: BlockIds, layers: Layers) -> np.void:
    """Return the record for a move of blocks of a pool, after checks."""
    is_int8 = pool.dtype == np.dtype(np.int8)
    _check_array(name, pool, np.int8 if is_int8 else np.uint16)
    shape = pool.shape
    eights = "BS" if is_int8 else "D"
    if len(shape) != 6 or shape[2] != 2 or shape[4 if is_int8 else 5] % VECTOR:
        raise ValueError(f"{name} has shape {shape}, not [L, NB, 2, Hk, BS, D], {eights} in eights")
    if ids.highest >= shape[1]:
        raise ValueError(f"block {ids.highest} is not in a pool of {shape[1]} blocks")
    end = layers.start + layers.count
    if layers.start < 0 or layers.count < 1 or end > shape[0]:
        raise ValueError(f"layers {layers.start} to {end} are not in a pool of {shape[0]}")
    block = _block_bytes(pool) // _VECTOR_BYTES
    pieces_per_block = -(-block // PIECE_VECTORS)
    pieces = layers.count * ids.count * pieces_per_block
    if max(pieces, block) >= _LIMIT:
        raise ValueError(f"a move of {pieces} pieces is too large for one launch")
    nbytes = payload_bytes(pool, layers.count, ids.count)
    starts = (layers.start * shape[1] * block, shape[1] * block, nbytes)
    divisors = (divisor(pieces_per_block), divisor(ids.count))
    found: np.void = np.array([(*starts, block, pieces, *divisors)], GEOMETRY)[0]
    return found
