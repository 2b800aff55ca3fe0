import contextlib
import copy
import dataclasses
import pickle
import random

import numpy as np
import pytest

from baton.proto import Range, TokenBuffer


def buffer(*tokens):
    return TokenBuffer(np.array(tokens or (1, 2, 3, 4), np.int64))


class TestRange:
    def test_length_and_moves(self):
        window = Range(2, 5)
        assert len(window) == 3
        window.bump_start(-2)
        window.bump_end(1)
        assert window == Range(0, 6)
        window.advance()
        assert window == Range(6, 6)

    @pytest.mark.parametrize("ends", [(-1, 2), (3, 2), (-2, -1)])
    def test_bad_ends(self, ends):
        with pytest.raises(ValueError):
            Range(*ends)

    def test_moves_stay_inside(self):
        window = Range(2, 5)
        for move, n in [("start", -3), ("start", 4), ("end", -4), ("end", -6)]:
            with pytest.raises(ValueError):
                getattr(window, f"bump_{move}")(n)
        assert window == Range(2, 5)


class TestConstruction:
    def test_refusals_in_order(self):
        with pytest.raises(ValueError, match="one-dimensional"):
            TokenBuffer(np.zeros((0, 2), np.int32))
        with pytest.raises(ValueError, match="int64"):
            TokenBuffer(np.zeros(0, np.int32))
        with pytest.raises(ValueError, match="empty"):
            TokenBuffer(np.zeros(0, np.int64))

    def test_read_only_arrays_are_copied(self):
        array = np.array([1, 2, 3])
        array.flags.writeable = False
        tokens = TokenBuffer(array)
        tokens.overwrite_last_token(9)
        assert array.tolist() == [1, 2, 3]
        assert tokens.all.tolist() == [1, 2, 9]

    def test_start(self):
        tokens = buffer()
        assert tokens.active.tolist() == tokens.prompt.tolist() == [1, 2, 3, 4]
        assert (tokens.processed_length, tokens.active_length, tokens.current_position) == (0, 4, 4)
        assert tokens.generated_length == 0
        assert tokens.processing_range == Range(0, 4)
        assert tokens.completion_range == Range(4, 4)
        assert not tokens.has_outstanding_generated_tokens


class TestIndexing:
    def test_ints_and_slices(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        assert [tokens[0], tokens[-1], tokens[4], tokens[-5]] == [1, 5, 5, 1]
        assert type(tokens[0]) is int
        assert tokens[1:3].tolist() == [2, 3]
        assert tokens[::-2].tolist() == [5, 3, 1]

    @pytest.mark.parametrize("index", [5, -6, 100])
    def test_bounds_are_the_length_not_the_capacity(self, index):
        tokens = buffer()
        tokens.advance_with_token(5)
        with pytest.raises(IndexError):
            tokens[index]

    @pytest.mark.parametrize("index", [np.int64(0), 1.0, "0", None, [0]])
    def test_other_index_types(self, index):
        with pytest.raises(TypeError):
            buffer()[index]


class TestProcessing:
    def test_offset_sets_and_does_not_add(self):
        tokens = buffer()
        tokens.apply_processing_offset(2)
        tokens.apply_processing_offset(1)
        assert tokens.active.tolist() == [2, 3, 4]
        tokens.apply_processing_offset(2)
        assert (tokens.active_length, tokens.current_position) == (2, 2)
        for bad in (-1, 5):
            with pytest.raises(ValueError):
                tokens.apply_processing_offset(bad)

    def test_negative_offset_shows_processed_tokens(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        tokens.apply_processing_offset(-2)
        assert tokens.active.tolist() == [3, 4, 5]

    def test_rewind_and_skip(self):
        tokens = buffer()
        tokens.skip_processing(3)
        assert tokens.active.tolist() == [4]
        with pytest.raises(ValueError):
            tokens.skip_processing(1)
        with pytest.raises(ValueError):
            tokens.skip_processing(-1)
        tokens.rewind_processing(2)
        assert tokens.active.tolist() == [2, 3, 4]
        for bad in (-1, 2):
            with pytest.raises(ValueError):
                tokens.rewind_processing(bad)
        tokens.apply_processing_offset(3)
        with pytest.raises(ValueError):
            tokens.skip_processing(0)

    def test_chunks(self):
        tokens = buffer()
        tokens.chunk(1)
        assert tokens.active.tolist() == [1]
        with pytest.raises(ValueError):
            tokens.advance_with_token(9)
        tokens.advance_chunk()
        assert tokens.active.tolist() == [2, 3, 4]
        with pytest.raises(ValueError, match="not chunked"):
            tokens.advance_chunk()
        for bad in (0, 3, -1):
            with pytest.raises(ValueError):
                tokens.chunk(bad)


class TestGrowth:
    def test_append_past_the_capacity_keeps_everything(self):
        tokens = buffer()
        for token in range(5, 200):
            tokens.advance_with_token(token)
        assert tokens.all.tolist() == list(range(1, 200))
        assert tokens.active.tolist() == [199]
        assert tokens.generated.tolist() == list(range(5, 200))

    def test_unmarked_append_widens_the_active_window(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        tokens.advance_with_token(6, mark_previous_as_processed=False)
        assert tokens.active.tolist() == [5, 6]

    def test_consume_empties_the_window(self):
        tokens = buffer()
        with pytest.raises(ValueError, match="no recently generated"):
            tokens.consume_recently_generated_tokens()
        tokens.advance_with_token(5)
        tokens.advance_with_token(6)
        assert tokens.consume_recently_generated_tokens().tolist() == [5, 6]
        assert not tokens.has_outstanding_generated_tokens

    def test_reset_makes_everything_prompt(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        tokens.reset_as_new_prompt()
        assert (tokens.prompt_length, tokens.generated_length, tokens.active_length) == (5, 0, 5)
        with pytest.raises(ValueError):
            tokens.consume_recently_generated_tokens()
        with pytest.raises(ValueError, match="no generated token"):
            tokens.reset_as_new_prompt(delete_last_generated_token=True)
        tokens.advance_with_token(6)
        tokens.reset_as_new_prompt(delete_last_generated_token=True)
        assert tokens.all.tolist() == [1, 2, 3, 4, 5]

    def test_truncate(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        tokens.truncate(3)
        assert tokens.all.tolist() == [1, 2, 3]
        assert tokens.active.tolist() == [3]
        for bad in (0, 4):
            with pytest.raises(ValueError):
                tokens.truncate(bad)


class TestValue:
    def test_equality_is_by_value_and_windows(self):
        one, two = buffer(), buffer()
        assert one == two
        one.advance_with_token(5)
        assert one != two
        two.advance_with_token(5)
        assert one == two
        two.consume_recently_generated_tokens()
        assert one != two
        assert one != [1, 2, 3, 4, 5]

    def test_copies_are_independent(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        for other in (copy.deepcopy(tokens), pickle.loads(pickle.dumps(tokens))):
            assert other == tokens
            other.advance_with_token(6)
            assert len(tokens) == 5

    def test_the_array_field_has_no_slack(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        values = {item.name: getattr(tokens, item.name) for item in dataclasses.fields(tokens)}
        assert values["array"].tolist() == [1, 2, 3, 4, 5]
        assert "length=5" in repr(tokens)


class TestInt32Ids:
    """``ids`` are cached between calls; every change of a token must show."""

    VIEWS = ("all", "prompt", "generated", "active", "array")

    def change(self, rng, tokens):
        """Do one random change or read; refusals are ignored."""
        token = rng.choice([rng.randrange(1000), -999, (1 << 31) - 1, -(1 << 31)])
        n = rng.randint(-3, 4)
        end, length = tokens._end, tokens._length
        kind = rng.choice(
            [
                lambda: tokens.advance_with_token(token),
                lambda: tokens.advance_with_token(token),
                lambda: tokens.advance_with_token(1 << 31 if rng.random() < 0.1 else token),
                lambda: tokens.overwrite_last_token(token),
                lambda: tokens.truncate(length + n),
                lambda: tokens.chunk(n),
                tokens.advance_chunk,
                lambda: tokens.reset_as_new_prompt(delete_last_generated_token=n > 0),
                lambda: tokens.set_windows(0, max(1, end + n), max(1, length + n)),
                lambda: (tokens.lend(n), tokens.ids(), tokens.take_back(end, length)),
                lambda: tokens.lend(n),
                lambda: copy.deepcopy(tokens),
            ]
        )
        with contextlib.suppress(ValueError):
            kind()

    def look(self, rng, tokens, held):
        """Take a view, write through one, or drop some."""
        what = rng.random()
        if what < 0.3:
            view = getattr(tokens, rng.choice(self.VIEWS)) if what < 0.25 else tokens[1:]
            held.append(memoryview(view) if rng.random() < 0.2 else view)
        elif what < 0.6 and held:
            view = rng.choice(held)
            if len(view):
                view[rng.randrange(len(view))] = rng.choice([7, 8, 1 << 40])
        elif what < 0.8:
            held.clear()

    @pytest.mark.parametrize("seed", range(4))
    def test_follow_every_change(self, seed):
        rng = random.Random(seed)
        for _ in range(300):
            start = np.array([rng.randrange(1000) for _ in range(rng.randint(1, 5))])
            tokens, held, given = TokenBuffer(start), [start], []
            if rng.random() < 0.5:
                narrow = start.astype(np.int32)
                narrow.flags.writeable = rng.random() < 0.5
                tokens = TokenBuffer.from_state(narrow, tokens.state())
            for _ in range(rng.randrange(25)):
                self.change(rng, tokens)
                if rng.random() < 0.3:
                    self.look(rng, tokens, held)
                if rng.random() < 0.6:
                    ids = tokens.ids()
                    plain = [tokens[i] for i in range(len(tokens))]
                    fits = all(-(1 << 31) <= token < 1 << 31 for token in plain)
                    assert ids.tolist() == plain
                    assert ids.dtype == (np.int32 if fits else np.int64)
                    assert not ids.flags.writeable
                    given += [(ids, plain)] if fits else []
            for ids, plain in given:
                assert ids.tolist() == plain, "ids on their way were changed"

    def test_a_view_that_is_gone_is_forgotten(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        view = tokens.all
        assert not np.shares_memory(tokens.ids(), tokens.ids())
        part = view[2:]
        del view
        assert not np.shares_memory(tokens.ids(), tokens.ids())
        del part
        assert np.shares_memory(tokens.ids(), tokens.ids())

    def test_of_an_array_somebody_else_has(self):
        array = np.arange(4)
        tokens = TokenBuffer(array)
        assert tokens.ids().tolist() == [0, 1, 2, 3]
        array[1] = 9
        assert tokens.ids().tolist() == [0, 9, 2, 3]
        whole = array[:]
        tokens = TokenBuffer(whole)
        del whole
        assert tokens.ids().tolist() == [0, 9, 2, 3]
        array[1] = 8
        assert tokens.ids().tolist() == [0, 8, 2, 3]

    def test_of_a_shallow_copy(self):
        tokens = buffer()
        tokens.advance_with_token(5)
        assert tokens.ids().tolist() == [1, 2, 3, 4, 5]
        twin = copy.copy(tokens)
        assert twin.ids().tolist() == [1, 2, 3, 4, 5]
        twin.overwrite_last_token(6)
        assert tokens.ids().tolist() == tokens.all.tolist() == [1, 2, 3, 4, 6]

    def test_room_for_the_first_tokens_after_arrival(self):
        ids = np.arange(1000, dtype=np.int32)
        ids.flags.writeable = False
        tokens = TokenBuffer.from_state(ids, [1000, 0, 1000, 0, 1000, 1000, 1000, 0])
        tokens.advance_with_token(1)
        store = tokens._store
        for token in range(100):
            tokens.advance_with_token(token)
        assert tokens._store is store
        tokens.lend(3)
        assert tokens.all[-3:].tolist() == [0, 0, 0]


def test_tokens_are_an_array():
    with pytest.raises(TypeError, match="an array, not list"):
        TokenBuffer([1, 2])
