import numpy as np
import pytest

from baton.proto import TextContext


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
