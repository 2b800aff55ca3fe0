"""Plans the attention of a pass, on the host, before the launch.

Rows are grouped by sequence, decode rows first. The leading sequences of one row use decode
attention; all others use prefill attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .attention_plan import (
    DecodeShape,
    decode_chunk,
    decode_pieces,
    plan_decode,
    plan_prefill,
    plan_widened,
)
from .device import Device, DeviceArray

I32 = npt.NDArray[np.int32]


class DecodeWork:
    """A decode work list on the device, with memory for its partial results."""

    def __init__(self, device: Device, plan: DeviceArray, shape: DecodeShape) -> None:
        self.plan, self.shape = plan, shape
        self._device = device
        self._partial: DeviceArray | None = None
        self._stats: DeviceArray | None = None

    def partial(self, q: DeviceArray) -> DeviceArray:
        """float32 ``[items, Hq, D]`` for queries ``q[S, Hq, D]``; reused by each layer."""
        if self._partial is None:
            shape = (self.shape.items, *q.shape[1:])
            self._partial = self._device.empty(shape, np.float32)
        return self._partial

    def stats(self, q: DeviceArray) -> DeviceArray:
        """float32 ``[items, Hq, 2]``."""
        if self._stats is None:
            self._stats = self._device.empty((self.shape.items, q.shape[1], 2), np.float32)
        return self._stats


@dataclass(slots=True, frozen=True)
class WidenedWork:
    """Prefill attention of some sequences over widened blocks (:class:`.WidenedPiece`).

    ``rows``: of the pass, after the decode rows. The arrays are on the device.
    """

    rows: slice
    tiles: DeviceArray
    entries: DeviceArray
    tables: DeviceArray


class RowPlan:
    """The work lists of one pass, created per window when a layer first needs them.

    ``row_offsets[S+1]``, ``positions[T]``: int32 on the host, as in the model's inputs.
    """

    def __init__(self, device: Device, row_offsets: I32, positions: I32) -> None:
        steps = np.diff(row_offsets)
        longer = np.flatnonzero(steps != 1)
        self.decoded = int(longer[0]) if len(longer) else len(steps)
        """Number of leading sequences, and rows, for decode attention."""
        self._device = device
        self._offsets, self._positions = row_offsets, positions
        self._decode: dict[tuple[int, int], DecodeWork] = {}
        self._prefill: dict[tuple[int, int, int], DeviceArray] = {}
        self._widened: dict[tuple[int, ...], list[WidenedWork]] = {}

    def decode(self, kv_heads: int, window: int) -> DecodeWork:
        """Return the work list of the decode rows."""
        key = kv_heads, window
        if key not in self._decode:
            lengths = self._positions[: self.decoded] + np.int32(1)
            chunk = decode_chunk(self.decoded, kv_heads, self._device.tuning.decode_chunk)
            shape = DecodeShape.longest(self.decoded, int(lengths.max()), chunk, window)
            plan = np.zeros((shape.rows, 4), np.int32)
            plan_decode(shape, lengths, plan)
            self._decode[key] = DecodeWork(self._device, self._device.upload(plan), shape)
        return self._decode[key]

    def prefill(self, first: int, group: int, window: int) -> DeviceArray:
        """Return the tiles of the rows from row ``first`` on, relative to it.

        ``first``: number of decode rows, which are sequences too.
        """
        key = first, group, window
        if key not in self._prefill:
            offsets = self._offsets[first:] - self._offsets[first]
            tiles = plan_prefill(offsets, self._positions[first:], group, window)
            self._prefill[key] = self._device.upload(tiles)
        return self._prefill[key]

    def widened(
        self, first: int, group: int, window: int, block_size: int, width: int, capacity: int
    ) -> list[WidenedWork]:
        """Return the work of the rows from row ``first`` on over an int8 pool, piece by piece.

        ``width``: of the block tables. ``capacity``: blocks that can be widened at once.
        """
        key = first, group, window, block_size, width, capacity
        if key not in self._widened:
            offsets = self._offsets[first:] - self._offsets[first]
            positions = self._positions[first:]
            upload = self._device.upload
            self._widened[key] = []
            for piece in plan_widened(offsets, positions, window, block_size, width, capacity):
                some = offsets[piece.first : piece.last + 1]
                rows = slice(int(some[0]), int(some[-1]))
                tiles = plan_prefill(some - some[0], positions[rows], group, window)
                work = WidenedWork(rows, *map(upload, (tiles, piece.entries, piece.tables)))
                self._widened[key].append(work)
        return self._widened[key]


class GraphPlan(RowPlan):
    """Work lists of a captured step: buffers of fixed shape, written before each replay.

    ``rows`` sequences of up to ``max_length`` tokens, in a pool of ``pool_tokens``. A window's list
    is created when a layer needs it during the capture. ``turns``: steps that may be queued at
    once; each writes from separate pinned memory.
    """

    def __init__(
        self, device: Device, rows: int, max_length: int, pool_tokens: int, turns: int = 1
    ) -> None:
        super().__init__(device, np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32))
        self._rows, self._max_length, self._pool_tokens = rows, max_length, pool_tokens
        self._turns, self._turn = turns, 0
        self._host: dict[tuple[int, int], list[I32]] = {}
        # The list written last, and where the last piece of each row is in it.
        self._newest: dict[tuple[int, int], tuple[I32, npt.NDArray[np.int64]]] = {}
        self._lengths = np.zeros(0, np.int32)

    def decode(self, kv_heads: int, window: int) -> DecodeWork:
        """Return the work list of all rows."""
        key = kv_heads, window
        if key not in self._decode:
            chunk = decode_chunk(self._rows, kv_heads, self._device.tuning.decode_chunk)
            longest = DecodeShape.longest(self._rows, self._max_length, chunk, window)
            # Every sequence reads shared prefixes again, so the work can exceed the pool. Twice the
            # pool is an estimate; steps that do not fit are launched without a graph.
            likely = 2 * -(-self._pool_tokens // chunk) + self._rows
            items = max(min(longest.items, likely), _pieces(self._lengths, chunk, window))
            shape = DecodeShape(self._rows, items, chunk, window)
            pinned = self._device.host_buffer
            host = self._host[key] = [pinned((shape.rows, 4), np.int32) for _ in range(self._turns)]
            plan_decode(shape, self._lengths, host[self._turn])
            self._decode[key] = DecodeWork(
                self._device, self._device.upload(host[self._turn]), shape
            )
        return self._decode[key]

    def fits(self, lengths: I32) -> bool:
        """True if the lists can hold the work of rows that see so many positions."""
        if len(lengths) > self._rows or int(lengths.max()) > self._max_length:
            return False
        shapes = (work.shape for work in self._decode.values())
        return all(_pieces(lengths, s.chunk, s.window) <= s.items for s in shapes)

    def write(self, lengths: I32, turn: int = 0) -> None:
        """Write the lists for rows that see so many positions; further rows get no keys.

        ``turn``: the pinned memory to use.
        """
        before, self._lengths, self._turn = self._lengths, lengths.copy(), turn
        for key, work in self._decode.items():
            host = self._host[key][turn]
            if not self._extend(key, before, host):
                plan_decode(work.shape, self._lengths, host)
                self._newest[key] = host, _last_items(work.shape, host)
            # Kernels read no piece beyond the number of pieces.
            used = 1 + work.shape.sequences + int(host[0, 0])
            plan: Any = work.plan
            self._device.write(plan[:used], host[:used])

    def _extend(self, key: tuple[int, int], before: I32, host: I32) -> bool:
        """Write the last list with the new ends, if every row sees as many pieces as before.

        The order of the pieces stays, which matters for speed alone. Returns False otherwise.
        """
        shape = self._decode[key].shape
        if shape.window or key not in self._newest or len(before) != len(self._lengths):
            return False
        grown = (before > 0) == (self._lengths > 0)
        same = (before - 1) // shape.chunk == (self._lengths - 1) // shape.chunk
        if not (grown & same).all():
            return False
        newest, last = self._newest[key]
        if newest is not host:
            used = 1 + shape.sequences + int(newest[0, 0])
            host[:used] = newest[:used]
        host[last, 2] = self._lengths[self._lengths > 0]
        self._newest[key] = host, last
        return True


def _last_items(shape: DecodeShape, plan: I32) -> npt.NDArray[np.int64]:
    """Return the row of ``plan`` with the last piece of each sequence that has one, in order."""
    items = plan[1 + shape.sequences :][: int(plan[0, 0])]
    order = np.lexsort((items[:, 1], items[:, 0]))
    sequence = items[order, 0]
    ends = np.flatnonzero(np.append(sequence[1:] != sequence[:-1], True)) if len(order) else order
    return order[ends] + 1 + shape.sequences


def _pieces(lengths: I32, chunk: int, window: int) -> int:
    """Return the number of work items of the sequences."""
    return int(decode_pieces(lengths, chunk, window)[2].sum())
