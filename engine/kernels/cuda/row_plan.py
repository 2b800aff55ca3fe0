"""Plans the attention of a pass, on the host, before the launch.

Rows are grouped by sequence, decode rows first. The leading sequences of one row use decode
attention; all others use prefill attention.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .attention_plan import DecodeShape, decode_chunk, decode_pieces, plan_decode, plan_prefill
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


class GraphPlan(RowPlan):
    """Work lists of a captured step: buffers of fixed shape, written before each replay.

    ``rows`` sequences of up to ``max_length`` tokens, in a pool of ``pool_tokens``. A window's list
    is created when a layer needs it during the capture.
    """

    def __init__(self, device: Device, rows: int, max_length: int, pool_tokens: int) -> None:
        super().__init__(device, np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32))
        self._rows, self._max_length, self._pool_tokens = rows, max_length, pool_tokens
        self._host: dict[tuple[int, int], I32] = {}
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
            host = self._host[key] = self._device.host_buffer((shape.rows, 4), np.int32)
            plan_decode(shape, self._lengths, host)
            self._decode[key] = DecodeWork(self._device, self._device.upload(host), shape)
        return self._decode[key]

    def fits(self, positions: I32) -> bool:
        """True if the lists can hold the work of rows at these positions."""
        lengths = positions + np.int32(1)
        if len(lengths) > self._rows or int(lengths.max()) > self._max_length:
            return False
        shapes = (work.shape for work in self._decode.values())
        return all(_pieces(lengths, s.chunk, s.window) <= s.items for s in shapes)

    def write(self, positions: I32) -> None:
        """Write the lists for rows at these positions; further rows get no keys."""
        self._lengths = positions + np.int32(1)
        for key, work in self._decode.items():
            plan_decode(work.shape, self._lengths, self._host[key])
            self._device.write(work.plan, self._host[key])


def _pieces(lengths: I32, chunk: int, window: int) -> int:
    """Return the number of work items of the sequences."""
    return int(decode_pieces(lengths, chunk, window)[2].sum())
