import numpy as np
import pytest

from baton.proto import (
    GenerationStatus,
    InputError,
    TextAndVisionContext,
    TextContext,
    TokenBuffer,
    TTSContext,
    update_batch,
)


def context(**fields):
    return TextContext(max_length=100, tokens=np.array([1, 2, 3, 4]), **fields)


def indices(ctx):
    return ctx.start_idx, ctx.active_idx, ctx.end_idx, ctx.committed_idx


def test_views():
    ctx = context()
    assert indices(ctx) == (0, 4, 4, 0)
    assert ctx.is_ce
    ctx.update(5)
    assert indices(ctx) == (4, 5, 5, 0)
    assert not ctx.is_ce
    assert (ctx.current_length, ctx.active_length) == (5, 1)
    assert ctx.all_tokens.tolist() == [1, 2, 3, 4, 5]
    assert ctx.next_tokens.tolist() == ctx.generated_tokens.tolist() == [5]
    ctx.reset()
    assert ctx.prompt_tokens.tolist() == [1, 2, 3, 4]
    assert ctx.generated_tokens.tolist() == [5]


def test_chunked_prefill_by_indices():
    ctx = context()
    ctx.bump_token_indices(active_idx=-2)
    ctx.update(99)
    assert indices(ctx) == (2, 4, 4, 0)
    assert ctx.is_initial_prompt
    assert ctx.next_tokens.tolist() == [3, 4]


def test_a_prefix_hit_by_indices():
    ctx = context()
    ctx.bump_token_indices(start_idx=3, committed_idx=3)
    assert indices(ctx) == (3, 4, 4, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"start_idx": 4},
        {"start_idx": -1},
        {"active_idx": 5},
        {"active_idx": 0},
        {"end_idx": 3},
        {"start_idx": 4, "committed_idx": 7},
    ],
)
def test_bad_indices_change_nothing(change):
    ctx = context()
    with pytest.raises(ValueError):
        ctx.set_token_indices(**change)
    assert indices(ctx) == (0, 4, 4, 0)


def test_a_higher_end_reserves_zeroed_room():
    ctx = context()
    ctx.bump_token_indices(active_idx=3, end_idx=3)
    assert ctx.all_tokens.tolist() == [1, 2, 3, 4, 0, 0, 0]
    ctx.bump_token_indices(active_idx=-3, end_idx=-3)
    assert ctx.all_tokens.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "append", [TextContext.update, lambda c, token: update_batch([c], [token])]
)
def test_tokens_written_into_reserved_room_are_delivered_with_the_next(append):
    ctx = context()
    ctx.update(5)
    assert ctx.to_generation_output().tokens == [5]
    ctx.bump_token_indices(active_idx=2, end_idx=2)
    ctx.next_tokens[1:] = [6, 7]
    append(ctx, 8)
    assert ctx.to_generation_output().tokens == [6, 7, 8]
    append(ctx, 9)
    assert ctx.to_generation_output().tokens == [9]


@pytest.mark.parametrize("delivered", [False, True])
def test_the_end_cannot_fall_before_an_appended_token(delivered):
    ctx = context()
    ctx.update(5)
    expected = [6] if delivered else [5, 6]
    if delivered:
        ctx.to_generation_output()
    state = ctx.tokens.state()
    with pytest.raises(ValueError, match="roll back"):
        ctx.bump_token_indices(-1, -1, -1, committed_idx=2)
    assert (ctx.tokens.state(), ctx.committed_idx) == (state, 0)
    ctx.update(6)
    assert ctx.to_generation_output().tokens == expected


def test_cache_slot():
    ctx = context()
    with pytest.raises(ValueError):
        _ = ctx.cache_seq_id
    ctx.assign_to_cache(7)
    assert (ctx.is_assigned_to_cache, ctx.cache_seq_id) == (True, 7)
    with pytest.raises(RuntimeError):
        ctx.assign_to_cache(8)
    ctx.unassign_from_cache()
    ctx.unassign_from_cache()
    assert not ctx.is_assigned_to_cache


def test_outstanding_completion_tokens():
    ctx = context(eos_token_ids={9})
    ctx.update(5)
    assert ctx.outstanding_completion_tokens(strip_eos=True) == [(5, None)]
    ctx.update(9)
    assert ctx.outstanding_completion_tokens() == [(9, None)]
    assert ctx.is_done
    ctx.update(9)
    assert ctx.outstanding_completion_tokens(strip_eos=True) == []


def test_the_constructor_takes_the_fields_of_the_earlier_page():
    ctx = TextContext(
        max_length=9,
        tokens=np.array([1, 2, 3, 4, 5, 0, 0, 0], np.int32),
        _status=GenerationStatus.MAXIMUM_LENGTH,
        _cache_seq_id=7,
        _size=128,
        _start_idx=4,
        _active_idx=5,
        _end_idx=5,
        _completion_start_idx=4,
        _completion_end_idx=5,
        _prompt_len=3,
        _committed_idx=2,
        _is_initial_prompt=False,
        _draft_offset=1,
    )
    assert indices(ctx) == (4, 5, 5, 2)
    assert (ctx.status, ctx.cache_seq_id) == (GenerationStatus.MAXIMUM_LENGTH, 7)
    assert ctx.prompt_tokens.tolist() == [1, 2, 3]
    assert ctx.outstanding_completion_tokens() == [(5, None)]


def test_indices_that_are_left_out_follow_from_the_others():
    given = {"max_length": 9, "tokens": [1, 2, 3, 4]}
    assert indices(TextContext(**given, _start_idx=2)) == (2, 4, 4, 0)
    assert indices(TextContext(**given, _active_idx=3)) == (0, 3, 3, 0)
    chunked = TextContext(**given, _active_idx=3, _end_idx=4)
    assert chunked.tokens.is_chunked
    assert indices(chunked) == (0, 3, 4, 0)


def test_subclasses_take_their_earlier_fields():
    speech = TTSContext(
        max_length=9, tokens=[1, 2], _status=GenerationStatus.CANCELLED, _decoded_index=3,
        _audio_generation_status=GenerationStatus.END_OF_SEQUENCE,
    )  # fmt: skip
    assert (speech.decoded_index, speech.status) == (3, GenerationStatus.CANCELLED)
    assert speech.audio_generation_status is GenerationStatus.END_OF_SEQUENCE
    pixels = (np.zeros((2, 2), np.float32),)
    seen = TextAndVisionContext(
        max_length=9, tokens=[1, 2], pixel_values=pixels, _needs_vision_encoding=False
    )
    assert not seen.needs_vision_encoding


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"status": GenerationStatus.ACTIVE, "_status": GenerationStatus.ACTIVE}, TypeError),
        ({"tokens": TokenBuffer(np.array([1])), "_start_idx": 0}, TypeError),
        ({"_start_index": 0}, TypeError),
        ({"tokens": [1.5, 2.5], "_start_idx": 0}, InputError),
        ({"tokens": [[1, 2]], "_start_idx": 0}, ValueError),
        ({"_end_idx": 4}, ValueError),
        ({"_active_idx": 3, "_end_idx": 2}, ValueError),
    ],
)
def test_earlier_fields_that_contradict_are_refused(fields, error):
    with pytest.raises(error):
        TextContext(**{"max_length": 9, "tokens": [1, 2, 3]} | fields)
