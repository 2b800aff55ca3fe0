"""Plans of attention calls: every key and row exactly once, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.cuda import row_plan
from baton.engine.kernels.cuda.attention_plan import (
    MAX_SPLITS,
    PREFILL_ROWS,
    DecodeShape,
    decode_chunk,
    plan_decode,
    plan_prefill,
    plan_widened,
)
from baton.engine.kernels.cuda.row_plan import GraphPlan
from baton.engine.kernels.cuda.tuning import Tuning


def plan_of(shape, lengths):
    out = np.full((shape.rows, 4), -7, np.int32)
    plan_decode(shape, np.array(lengths, np.int32), out)
    items = out[1 + shape.sequences :]
    assert not items[out[0, 0] :].any()
    return out[1 : 1 + shape.sequences], items[: out[0, 0]]


@pytest.mark.parametrize("window", [0, 1, 70, 128, 5000])
@pytest.mark.parametrize("chunk", [64, 1000])
def test_a_decode_plan_has_every_key_once(rng, chunk, window):
    lengths = rng.integers(0, 900, 12)
    shape = DecodeShape.longest(14, 900, chunk, window)
    heads, items = plan_of(shape, lengths)
    assert (np.diff(items[:, 2] - items[:, 1]) <= 0).all()
    slots = []
    for s, length in enumerate(lengths):
        mine = items[items[:, 0] == s]
        mine = mine[np.argsort(mine[:, 1])]
        first, splits = heads[s, :2]
        assert len(mine) == splits
        seen = np.concatenate([np.arange(a, b) for _, a, b, _ in mine] or [np.arange(0)])
        begin = max(0, length - window) if window else 0
        np.testing.assert_array_equal(seen, np.arange(begin, length))
        assert (mine[1:, 1] % chunk == 0).all()
        assert mine[:, 3].tolist() == ([-1] if splits == 1 else list(range(first, first + splits)))
        slots += [slot for slot in mine[:, 3] if slot >= 0]
        alone = plan_of(shape, [length])[1]
        np.testing.assert_array_equal(alone[np.argsort(alone[:, 1]), 1:3], mine[:, 1:3])
    assert sorted(slots) == list(range(len(slots)))
    assert not heads[len(lengths) :].any()


class Arrays:
    """A device whose memory is the host's."""

    tuning = Tuning()

    def host_buffer(self, shape, dtype):
        return np.zeros(shape, dtype)

    def upload(self, array):
        return array.copy()

    def write(self, array, values):
        array[...] = values


def test_lists_that_are_extended_are_those_planned_anew(rng, monkeypatch):
    """Rows grow by a position per step, some end, others join, in two buffers by turns."""
    planned = []
    anew = row_plan.plan_decode
    monkeypatch.setattr(
        row_plan, "plan_decode", lambda shape, *a: (planned.append(shape.window), anew(shape, *a))
    )
    plan = GraphPlan(Arrays(), rows=6, max_length=2000, pool_tokens=12_000, turns=2)
    lengths = rng.integers(1, 600, 6).astype(np.int32)
    plan.write(lengths)
    plan.decode(1, 0)
    plan.decode(1, 300)
    for step in range(400):
        lengths[lengths > 0] += 1
        if step % 37 == 5:
            lengths[rng.integers(6)] = 0
        if step % 37 == 20:
            lengths[rng.integers(6)] = rng.integers(1, 600)
        plan.write(lengths, step % 2)
        for (_, window), got in plan._decode.items():
            heads, items = plan_of(got.shape, lengths)
            listed = got.plan[1 + got.shape.sequences :][: got.plan[0, 0]]
            assert sorted(map(tuple, listed)) == sorted(map(tuple, items)), (step, window)
            np.testing.assert_array_equal(got.plan[1 : 1 + got.shape.sequences], heads)
    assert planned.count(300) > 400
    assert 10 < planned.count(0) < 100


@pytest.mark.parametrize(
    ("lengths", "message"), [([300], "5 pieces"), ([1, 1, 1], "at most 2"), ([-1], "none negative")]
)
def test_a_decode_plan_that_does_not_fit_is_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        plan_of(DecodeShape(2, 4, 64), lengths)


@pytest.mark.parametrize("out", [np.zeros((8, 4), np.int32), np.zeros((7, 4), np.int64)])
def test_a_buffer_of_another_shape_is_refused(out):
    with pytest.raises(ValueError, match="out is"):
        plan_decode(DecodeShape(2, 4, 64), np.ones(1, np.int32), out)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, -1)])
def test_a_shape_without_room_is_refused(sizes):
    with pytest.raises(ValueError, match="shape of a decode plan"):
        DecodeShape(*sizes)


def test_chunks_grow_with_the_batch():
    assert [decode_chunk(n, 8) for n in (1, 16, 17, 64, 256)] == [256, 256, 512, 1024, 1024]
    assert [decode_chunk(n, 8, 1024) for n in (1, 256)] == [1024, 1024]


@pytest.mark.parametrize("window", [0, 300, 70_000])
def test_long_sequences_have_at_most_64_pieces(window):
    limit = MAX_SPLITS * 256
    lengths = [1, limit, limit + 1, 2 * limit, 2 * limit + 1, 131_072, 0]
    shape = DecodeShape.longest(len(lengths), 131_072, 256, window)
    heads, items = plan_of(shape, lengths)
    assert heads[:, 1].max() <= MAX_SPLITS + bool(window)
    for s, length in enumerate(lengths):
        mine = items[items[:, 0] == s]
        mine = mine[np.argsort(mine[:, 1])]
        begin = max(0, length - window) if window else 0
        assert int((mine[:, 2] - mine[:, 1]).sum()) == length - begin
        assert (mine[1:, 1] == mine[:-1, 2]).all()
        alone = plan_of(DecodeShape.longest(1, length + 1, 256, window), [length])[1]
        np.testing.assert_array_equal(alone[np.argsort(alone[:, 1]), 1:3], mine[:, 1:3])
    if not window:
        assert heads[1:5, 1].tolist() == [64, 33, 64, 33]


@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize("group", [1, 5, 64, 128])
def test_a_prefill_plan_has_every_row_once(rng, group, window):
    offsets = np.cumsum([0, 200, 0, 1, 77]).astype(np.int32)
    positions = rng.integers(0, 500, offsets[-1]).astype(np.int32)
    plan = plan_prefill(offsets, positions, group, window)
    assert plan.dtype == np.int32
    rows = []
    for sequence, first, count, begin, end, common_begin, common_end, _ in plan:
        assert 0 < count * group <= PREFILL_ROWS
        assert offsets[sequence] <= first
        assert first + count <= offsets[sequence + 1]
        rows += range(first, first + count)
        seen = positions[first : first + count]
        lows = np.maximum(seen + 1 - window, 0) if window else np.zeros_like(seen)
        assert (begin, end) == (lows.min(), seen.max() + 1)
        assert (common_begin, common_end) == (lows.max(), seen.min() + 1)
    assert sorted(rows) == list(range(offsets[-1]))
    work = -(-plan[:, 4] // 64) - plan[:, 3] // 64
    assert (np.diff(work) <= 0).all()


def test_a_prefill_plan_of_nothing():
    assert plan_prefill(np.zeros(3, np.int32), np.zeros(0, np.int32), 4).shape == (0, 8)


@pytest.mark.parametrize(
    ("offsets", "group", "window", "message"),
    [
        ([0, 3], 4, 0, "rise from 0 to the 4 rows"),
        ([0, 5, 4], 4, 0, "rise"),
        ([1, 4], 4, 0, "rise"),
        ([0, 4], 129, 0, "1 to 128 heads"),
        ([0, 4], 0, 0, "1 to 128 heads"),
        ([0, 4], 4, -1, "window"),
    ],
)
def test_a_wrong_prefill_plan_is_refused(offsets, group, window, message):
    with pytest.raises(ValueError, match=message):
        plan_prefill(np.array(offsets, np.int32), np.arange(4, dtype=np.int32), group, window)


def test_negative_positions_are_refused():
    with pytest.raises(ValueError, match="positions"):
        plan_prefill(np.array([0, 1], np.int32), np.array([-1], np.int32), 4)


def test_pieces_have_the_blocks_that_rows_see():
    offsets = np.array([0, 2, 2, 5, 6], np.int32)
    positions = np.array([30, 31, 3, 4, 5, 16], np.int32)
    (whole,) = plan_widened(offsets, positions, 0, 8, 6, 100)
    assert (whole.first, whole.last) == (0, 4)
    assert whole.entries.tolist() == [0, 1, 2, 3, 12, 18, 19, 20]
    assert whole.tables[3].tolist() == [5, 6, 7, 0, 0, 0]
    seen = plan_widened(offsets, positions, 9, 8, 6, 3)
    assert [(piece.first, piece.last) for piece in seen] == [(0, 3), (3, 4)]
    assert seen[0].entries.tolist() == [2, 3, 12]
    assert seen[0].tables[0].tolist() == [0, 0, 0, 1, 0, 0]
    assert seen[1].entries.tolist() == [19, 20]
    assert plan_widened(offsets[:1], positions[:0], 0, 8, 6, 3) == []


@pytest.mark.parametrize("window", [0, *range(1, 20)])
def test_pieces_have_no_other_blocks_and_none_too_many(rng, window):
    """Rows at the edges of blocks and windows; whole pieces are as full as they can be."""
    lengths = rng.integers(1, 5, 40)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    starts = rng.integers(0, 36, 40)
    rows = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    positions, width, capacity = np.concatenate(rows).astype(np.int32), 5, 7
    seen = []
    for sequence, own in enumerate(rows):
        first = max(0, own[0] + 1 - window) if window else 0
        seen.append([width * sequence + block for block in range(first // 8, own[-1] // 8 + 1)])
    pieces = plan_widened(offsets, positions, window, 8, width, capacity)
    assert [piece.first for piece in pieces] == [0, *(piece.last for piece in pieces[:-1])]
    assert pieces[-1].last == len(rows)
    for piece in pieces:
        wanted = [block for own in seen[piece.first : piece.last] for block in own]
        assert piece.entries.tolist() == wanted and len(wanted) <= capacity
        places = np.flatnonzero(np.isin(np.arange(piece.tables.size) + width * piece.first, wanted))
        assert piece.tables.reshape(-1)[places].tolist() == [*range(len(wanted))]
        after = seen[piece.last] if piece.last < len(rows) else range(capacity)
        assert len(wanted) + len(after) > capacity
