"""Cuts the work of an attention call into pieces: pure, on the host, from lengths alone.

Decode: the keys of a sequence are cut at multiples of ``chunk`` positions, or of twice as many as
often as it takes to get at most :data:`MAX_SPLITS` pieces. So the cuts, and with them the bits of
the result, depend on the sequence's own length and never on the batch. A plan is written into an
array of fixed shape: a captured graph reads it from a buffer that is filled before each replay.

Prefill: the rows of each chunk are cut into tiles of 128 rows of tokens and heads.

Longer pieces come first, so that the last pieces, which nothing overlaps, are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .checks import check_below

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

PREFILL_ROWS = 128
PREFILL_KEYS = 64
MAX_CHUNK = 1024
MAX_SPLITS = 64
"""Pieces of a sequence; one more where a window begins within a piece."""
ALL_POSITIONS = 1 << 30
"""A window that includes all positions."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Capacity of a decode plan; determines its buffers and is fixed for a captured graph.

    ``sequences``: rows of q. ``items``: maximum pieces of work in total. ``chunk``: positions per
    piece of all but long sequences. ``window``: positions visible to a row (0: all).
    """

    sequences: int
    items: int
    chunk: int
    window: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for invalid sizes."""
        if min(self.sequences, self.items, self.chunk) < 1 or self.window < 0:
            raise ValueError(f"invalid shape of a decode plan: {self}")

    @classmethod
    def longest(cls, sequences: int, length: int, chunk: int, window: int = 0) -> DecodeShape:
        """Return the shape that holds ``sequences`` of up to ``length`` positions."""
        pieces = min(-(-length // chunk), MAX_SPLITS)
        if 0 < window < length:
            pieces = min(pieces, (window - 1) // chunk + 1) + 1
        return cls(sequences, max(sequences * pieces, 1), chunk, window)

    @property
    def rows(self) -> int:
        """Rows of four int32 in a plan: a header, one per sequence, one per item."""
        return 1 + self.sequences + self.items


def decode_chunk(sequences: int, kv_heads: int, least: int = 256) -> int:
    """Return a good ``chunk`` for a batch size: few rows need many pieces to fill a GPU.

    ``least``: :attr:`.tuning.Tuning.decode_chunk`.

    At a group of 4, the partial results are 0.8 % of the traffic with pieces of 1024 positions and
    3 % with pieces of 256. But with 256, one sequence of 8,192 tokens with 8 KV heads gives as many
    thread blocks as an H200 runs at once.
    """
    wanted = 2 * sequences * kv_heads
    return min(max(1 << (wanted - 1).bit_length(), least), MAX_CHUNK)


def decode_pieces(lengths: I32, chunk: int, window: int = 0) -> tuple[I64, I64, I64]:
    """Return per sequence the first position that is seen, the positions of a piece, the pieces.

    The first piece may begin before the first position that is seen.
    """
    ends = lengths.astype(np.int64)
    begins = np.maximum(ends - (window or ALL_POSITIONS), 0)
    smallest = -(-(ends - begins) // (MAX_SPLITS * chunk))  # in chunks
    doublings = np.frexp(np.maximum(smallest - 1, 0))[1]
    sizes = np.int64(chunk) << doublings.astype(np.int64)
    pieces = np.where(ends > 0, -(-ends // sizes) - begins // sizes, 0)
    return begins, sizes, pieces


def plan_decode(shape: DecodeShape, lengths: I32, out: I32) -> None:
    """Write the plan for one row per sequence at positions ``lengths - 1`` into ``out[rows, 4]``.

    ``lengths[n]`` has up to ``shape.sequences`` entries. Rows of length 0 and missing rows have no
    keys, and their output is zeros. Raises ValueError if the shape is too small or ``out`` has
    another shape.
    """
    if out.shape != (shape.rows, 4) or out.dtype != np.int32:
        raise ValueError(f"out is {out.dtype} {out.shape}, not int32 ({shape.rows}, 4)")
    if lengths.ndim != 1 or len(lengths) > shape.sequences or (lengths < 0).any():
        raise ValueError(f"lengths must be at most {shape.sequences} numbers, none negative")
    begins, sizes, splits = decode_pieces(lengths, shape.chunk, shape.window)
    total = int(splits.sum())
    if total > shape.items:
        raise ValueError(f"{total} pieces of {shape.chunk} positions, the plan holds {shape.items}")
    sequence = np.repeat(np.arange(len(lengths)), splits)
    piece = np.arange(total) - np.repeat(np.cumsum(splits) - splits, splits)
    size = sizes[sequence]
    start = (begins[sequence] // size + piece) * size
    end = np.minimum(start + size, lengths[sequence])
    start = np.maximum(start, begins[sequence])
    slots = np.where(splits > 1, splits, 0)
    first_slot = np.cumsum(slots) - slots
    slot = np.where(splits[sequence] > 1, first_slot[sequence] + piece, -1)
    order = np.argsort(start - end, kind="stable")
    out[:] = 0
    out[0, 0] = total
    out[1 : 1 + len(lengths), 0] = first_slot
    out[1 : 1 + len(lengths), 1] = splits
    items = out[1 + shape.sequences :][:total]
    items[:] = np.stack([sequence, start, end, slot], axis=1)[order]


def plan_prefill(row_offsets: I32, positions: I32, group: int, window: int = 0) -> I32:
    """Return the tiles ``[n, 8]`` of rows that see up to ``positions[T]`` in their sequences.

    A tile: sequence, first row, rows, the positions ``begin, end`` seen by some row, those seen by
    every row, 0. Raises ValueError if offsets and positions do not match, or if a group has
    more heads than a tile has rows.
    """
    rows = len(positions)
    steps = np.diff(row_offsets)
    if row_offsets[0] != 0 or row_offsets[-1] != rows or (steps < 0).any():
        raise ValueError(f"row_offsets must rise from 0 to the {rows} rows")
    if not 1 <= group <= PREFILL_ROWS:
        raise ValueError(f"a group has 1 to {PREFILL_ROWS} heads, got {group}")
    if window < 0:
        raise ValueError(f"the window must not be negative: {window}")
    check_below("positions", positions, ALL_POSITIONS)
    if rows == 0:
        return np.empty((0, 8), np.int32)
    tokens = PREFILL_ROWS // group
    tiles = -(-steps // tokens)
    sequence = np.repeat(np.arange(len(steps)), tiles)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    start = row_offsets[sequence] + tile * tokens
    count = np.minimum(tokens, row_offsets[sequence + 1] - start)
    first_seen = np.maximum(positions.astype(np.int64) + 1 - (window or ALL_POSITIONS), 0)
    begin, common_begin = (f.reduceat(first_seen, start) for f in (np.minimum, np.maximum))
    common_end, end = (f.reduceat(positions, start) + 1 for f in (np.minimum, np.maximum))
    plan = np.stack(
        [sequence, start, count, begin, end, common_begin, common_end, np.zeros_like(start)], axis=1
    )
    work = -(-end // PREFILL_KEYS) - begin // PREFILL_KEYS
    return plan[np.argsort(-work, kind="stable")].astype(np.int32)


@dataclass(frozen=True, slots=True)
class WidenedPiece:
    """Sequences ``first .. last`` whose blocks are widened together.

    ``entries``: int32 ``[n]``, places in the flat block tables ``[S, width]`` of the blocks that
    some row sees. ``tables``: int32 ``[last - first, width]``, the widened block of each entry.
    """

    first: int
    last: int
    entries: I32
    tables: I32


def plan_widened(
    row_offsets: I32, positions: I32, window: int, block_size: int, width: int, capacity: int
) -> list[WidenedPiece]:
    """Divide sequences into pieces of at most ``capacity`` blocks that their rows see.

    Raises ValueError if one sequence sees more.
    """
    spans = []
    for first, last in pairwise(row_offsets.tolist()):
        seen = positions[first:last]
        end = int(seen.max(initial=-1)) + 1
        begin = max(0, int(seen.min(initial=end)) + 1 - window) if window else 0
        spans.append((begin // block_size, -(-end // block_size)))
    most = max((end - begin for begin, end in spans), default=0)
    if most > capacity:
        raise ValueError(f"a sequence has {most} blocks, of which {capacity} can be widened")
    pieces, first, count = [], 0, 0
    for sequence, (begin, end) in enumerate([*spans, (0, capacity + 1)]):
        if count + end - begin > capacity:
            if count:
                pieces.append(_widened_piece(spans, first, sequence, width))
            first, count = sequence, 0
        count += end - begin
    return pieces


def _widened_piece(
    spans: Sequence[tuple[int, int]], first: int, last: int, width: int
) -> WidenedPiece:
    tables = np.zeros((last - first, width), np.int32)
    entries: list[int] = []
    for row, (begin, end) in enumerate(spans[first:last]):
        tables[row, begin:end] = np.arange(end - begin) + len(entries)
        entries += range((first + row) * width + begin, (first + row) * width + end)
    return WidenedPiece(first, last, np.array(entries, np.int32), tables)
