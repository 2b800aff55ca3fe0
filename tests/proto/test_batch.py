import copy
import random

import numpy as np
import pytest

from baton.proto import (
    BatchType,
    TextContext,
    TextGenerationInputs,
    TTSContext,
    reserve_token_space_for_batch,
    update_batch,
)


def context(*tokens, **fields):
    return TextContext(max_length=100, tokens=np.array(tokens or (1, 2, 3, 4)), **fields)


class TestReserve:
    def test_room_is_zeroed_and_active_and_given_back(self):
        one, two = context(), context(5)
        two.update(6)
        with reserve_token_space_for_batch([one, two], 3):
            assert one.tokens.all.tolist() == one.tokens.active.tolist() == [1, 2, 3, 4, 0, 0, 0]
            assert (len(two.tokens), two.tokens.active_length) == (5, 4)
            one.tokens.all[-1] = 9
        assert one.tokens.all.tolist() == [1, 2, 3, 4]
        assert two.tokens.active.tolist() == [6]
        with reserve_token_space_for_batch([one], 3):
            assert one.tokens.all.tolist()[-1] == 0

    def test_given_back_after_an_error(self):
        ctx = context()
        with pytest.raises(KeyError), reserve_token_space_for_batch([ctx], 2):
            raise KeyError
        assert len(ctx.tokens) == ctx.tokens.current_position == 4

    def test_negative_room_hides_tokens(self):
        ctx = context()
        with reserve_token_space_for_batch([ctx], -2):
            assert ctx.tokens.all.tolist() == ctx.tokens.active.tolist() == [1, 2]
        assert ctx.tokens.all.tolist() == [1, 2, 3, 4]

    def test_too_negative_changes_nothing(self):
        fine, short = context(), context(7)
        with (
            pytest.raises(ValueError, match="reserve"),
            reserve_token_space_for_batch([fine, short], -1),
        ):
            pass
        assert (len(fine.tokens), len(short.tokens)) == (4, 1)


def test_inputs_of_a_step():
    inputs = TextGenerationInputs()
    assert not inputs
    assert not TextGenerationInputs([[], []])
    one, two = context(log_probabilities=3), context(5, log_probabilities_echo=True)
    inputs = TextGenerationInputs([[one], [two]], num_steps=4)
    assert inputs
    assert inputs.flat_batch == [one, two]
    assert (inputs.input_tokens, inputs.context_tokens) == (5, 0)
    assert inputs.batch_type is BatchType.CE
    one.update(1)
    assert inputs.batch_type is BatchType.CE
    two.update(1)
    assert inputs.batch_type is BatchType.TG
    assert (inputs.input_tokens, inputs.context_tokens) == (2, 5)
    assert (inputs.batch_top_log_probs, inputs.batch_echo) == ([3, 0], [False, True])


class Grammar:
    def consume_token(self, token):
        return True


def test_a_batch_is_updated_like_its_contexts_one_by_one():
    rng = random.Random(5)
    for _ in range(100):
        pairs = []
        for _ in range(8):
            cls = rng.choice([TextContext, TextContext, TTSContext])
            start = cls(
                max_length=rng.choice([6, 100]),
                tokens=[1, 2, 3],
                eos_token_ids={9} if rng.random() < 0.5 else set(),
                ignore_eos=rng.random() < 0.3,
                eos_sequences=[[7, 8]] if rng.random() < 0.3 else [],
            )
            if rng.random() < 0.2:
                start.tokens.chunk(2)
            if rng.random() < 0.2:
                start.set_matcher(Grammar())
            pairs.append((start, copy.deepcopy(start)))
        for _ in range(6):
            tokens = [rng.choice([7, 8, 9, 10]) for _ in pairs]
            for pair in pairs:
                if rng.random() < 0.2 and not pair[0].tokens.is_chunked:
                    for either in pair:
                        either.apply_processing_offset(-min(1, either.tokens.processed_length))
            update_batch([one for one, _ in pairs], tokens)
            for (_, two), token in zip(pairs, tokens, strict=True):
                two.update(token)
        for one, two in pairs:
            assert one == two
            assert one.to_generation_output() == two.to_generation_output()


def test_a_batch_with_a_placeholder_is_refused_at_it():
    one, two = context(), context()
    two.update_with_future_token()
    with pytest.raises(ValueError, match="after a future token"):
        update_batch([one, two], [5, 5])
    with pytest.raises(ValueError):
        update_batch([one], [1, 2])
