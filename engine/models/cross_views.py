"""Where the keys and values of images are in the KV pool, and which rows of text see which.

The pool ``[L, NB, 2, Hk, BS, D]`` is read as ``[L * NB, 2, Hk, BS, D]``: the block ``b`` of layer
``l`` is number ``l * NB + b``. A cross-attention layer ``c`` uses the layers from ``c * k`` on, so
the positions of an image's block hold ``k * BS`` vision tokens of it:

    vision tokens   0 .. BS    BS .. 2 BS    ...    k BS .. (k + 1) BS    ...
    in layer        c k        c k + 1       ...    c k                   ...
    in block        first      first         ...    second                ...

Numbers here are those of layer 0; another cross-attention layer adds ``c * k * NB``. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.tiled_images import SeenImages

from ..pipeline.model import ModelInputs

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class CrossShape:
    """Numbers of vision tokens.

    ``per_position``: in one position's KV memory (``k``). ``tile_tokens``: of a tile.
    ``image_tokens``: of an image, with the tiles that it does not have.
    """

    per_position: int
    tile_tokens: int
    image_tokens: int


@dataclass(slots=True, frozen=True)
class Packed:
    """Rows of text that see several images, whose vision tokens lie apart.

    ``rows``: of the view. ``slots``: int64 ``[n]``, flat slots of all vision tokens they see.
    """

    rows: slice
    slots: I64


@dataclass(slots=True, frozen=True)
class CrossView:
    """The rows of a step that see images, in runs with the same images.

    ``rows``: int32 ``[R]``, of the step; None if it has no others. ``offsets``: int32 ``[G+1]``.
    ``ends``: int32 ``[R]``, last vision token that each row sees. ``tables``: int32 ``[G, N]``,
    blocks of the images. ``packed``: runs whose result must be computed from gathered tokens.
    ``scale``: ``[R, 1]``, 0 for rows before the first image's token, 1 for others.
    """

    rows: I32 | None
    offsets: I32
    ends: I32
    tables: I32
    packed: tuple[Packed, ...]
    scale: F32


def text_rows(inputs: ModelInputs) -> ModelInputs:
    """Return the rows of the text alone. Positions and block tables then begin with the text."""
    starts = np.array([0 if one is None else one.end for one in inputs.seen], np.int32)
    if not starts.any():
        return inputs
    sequence = np.repeat(np.arange(len(starts)), np.diff(inputs.row_offsets))
    kept = inputs.positions >= starts[sequence]
    before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    block_size = inputs.pool.shape[4]
    tables = np.zeros_like(inputs.block_tables)
    for table, whole, start in zip(tables, inputs.block_tables, starts // block_size, strict=True):
        table[: len(whole) - start] = whole[start:]
    return replace(
        inputs,
        tokens=inputs.tokens[kept],
        positions=(inputs.positions - starts[sequence])[kept],
        slots=inputs.slots[kept],
        block_tables=tables,
        row_offsets=before[inputs.row_offsets],
        logit_rows=before[inputs.logit_rows],
        rope_positions=None,
        rope_deltas=None,
        images=(),
    )


def cross_view(inputs: ModelInputs, tables: I32, shape: CrossShape) -> CrossView | None:
    """Return how the rows of a step see images; None if none does.

    ``inputs``: rows of the text. ``tables``: block tables with the blocks of images.
    """
    blocks, block_size = inputs.pool.shape[1], inputs.pool.shape[4]
    rows: list[int] = []
    offsets, ends, found, packed = [0], [], [], []
    scale: list[float] = []
    for run in _runs(inputs):
        parts = [
            (_blocks(tables[run.sequence], run.seen.ranges[one], block_size, blocks, shape), count)
            for one, count in run.counts(shape)
        ]
        length = run.last - run.first
        table, count = parts[0]
        if len(parts) > 1:
            where = [_slots(part, n, block_size) for part, n in parts]
            packed.append(Packed(slice(len(rows), len(rows) + length), np.concatenate(where)))
            count = 1  # the kernel's result for these rows is replaced
        found.append(table[: -(-count // block_size)])
        ends += [count - 1] * length
        scale += [0.0 if run.blind else 1.0] * length
        rows += range(run.first, run.last)
        offsets.append(len(rows))
    if not rows:
        return None
    padded = np.zeros((len(found), max(len(table) for table in found)), np.int32)
    for row, table in zip(padded, found, strict=True):
        row[: len(table)] = table
    return CrossView(
        rows=None if len(rows) == len(inputs.tokens) else np.array(rows, np.int32),
        offsets=np.array(offsets, np.int32),
        ends=np.array(ends, np.int32),
        tables=padded,
        packed=tuple(packed),
        scale=np.array(scale, np.float32)[:, None],
    )


def image_slots(table: I32, first: int, end: int, inputs: ModelInputs, shape: CrossShape) -> I64:
    """Return the flat slots of the vision tokens in whole blocks of positions ``[first, end)``."""
    blocks, block_size = inputs.pool.shape[1], inputs.pool.shape[4]
    numbers = _blocks(table, (first, end), block_size, blocks, shape)
    return _slots(numbers, len(numbers) * block_size, block_size)


@dataclass(slots=True, frozen=True)
class _Run:
    """Rows ``[first, last)`` of a sequence that see the same ``images``; ``blind``: none."""

    sequence: int
    seen: SeenImages
    first: int
    last: int
    images: tuple[int, int]
    blind: bool

    def counts(self, shape: CrossShape) -> Iterator[tuple[int, int]]:
        """Yield the images and how many vision tokens of each the rows attend to.

        Rows before the first image's token attend to all of them, as in transformers.
        """
        if self.blind:
            yield from ((one, shape.image_tokens) for one in range(len(self.seen.ranges)))
            return
        for one in range(*self.images):
            rows, columns = self.seen.canvases[one]
            yield one, rows * columns * shape.tile_tokens


def _runs(inputs: ModelInputs) -> Iterator[_Run]:
    """Yield runs of rows that see the same images, in the order of the rows."""
    for sequence, seen in enumerate(inputs.seen):
        row, last = inputs.row_offsets[sequence : sequence + 2].tolist()
        if seen is None or row == last:
            continue
        if last - row == 1:
            yield _run(sequence, seen, row, last, int(inputs.positions[row]))
            continue
        # Between two images' tokens, all rows see the same.
        bounds = np.array(seen.places) - seen.end
        cuts = np.searchsorted(inputs.positions[row:last], bounds) + row
        edges = sorted({row, last, *(cut for cut in cuts.tolist() if row < cut < last)})
        for start, stop in pairwise(edges):
            yield _run(sequence, seen, start, stop, int(inputs.positions[start]))


def _run(sequence: int, seen: SeenImages, first: int, last: int, position: int) -> _Run:
    images = seen.visible(position + seen.end)
    return _Run(sequence, seen, first, last, images, images[0] == images[1])


def _blocks(
    table: I32, place: tuple[int, int], block_size: int, blocks: int, shape: CrossShape
) -> I32:
    """Return the blocks that hold an image's vision tokens, in their order; int32 ``[n]``."""
    own = table[place[0] // block_size : place[1] // block_size]
    layers = np.arange(shape.per_position, dtype=np.int32) * np.int32(blocks)
    return (own[:, None] + layers).reshape(-1)


def _slots(numbers: I32, count: int, block_size: int) -> I64:
    """Return the flat slots of the first ``count`` vision tokens of an image's blocks."""
    within = np.arange(count, dtype=np.int64)
    return numbers[within // block_size].astype(np.int64) * block_size + within % block_size
