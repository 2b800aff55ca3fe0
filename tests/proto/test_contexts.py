import dataclasses
import pickle

import numpy as np
import pytest

from baton.proto import (
    FUTURE_TOKEN,
    GenerationStatus,
    InputError,
    LogProbabilities,
    RequestID,
    SamplingParams,
    TextContext,
    TokenBuffer,
)
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.wire.context_maps import context_to_run, request_map

ACTIVE = GenerationStatus.ACTIVE
EOS = GenerationStatus.END_OF_SEQUENCE
MAXIMUM = GenerationStatus.MAXIMUM_LENGTH


def context(tokens=(1, 2, 3, 4), max_length=100, **fields):
    return TextContext(max_length=max_length, tokens=np.array(tokens), **fields)


def entry(value):
    return LogProbabilities([value], [{1: value}])


def drained(ctx):
    return ctx.to_generation_output().tokens


class TestConstruction:
    @pytest.mark.parametrize(
        "tokens", [[1, 2], np.array([1, 2], np.int32), np.array([1, 2], np.uint8), (1, 2)]
    )
    def test_tokens_are_wrapped_as_int64(self, tokens):
        ctx = TextContext(max_length=10, tokens=tokens)
        assert isinstance(ctx.tokens, TokenBuffer)
        assert ctx.tokens.all.dtype == np.int64
        assert ctx.tokens.all.tolist() == [1, 2]

    def test_a_buffer_is_taken_as_it_is_and_an_array_copied(self):
        tokens = TokenBuffer(np.array([1, 2]))
        assert TextContext(max_length=10, tokens=tokens).tokens is tokens
        array = np.array([1, 2])
        ctx = TextContext(max_length=10, tokens=array)
        ctx.tokens.overwrite_last_token(9)
        assert array.tolist() == [1, 2]

    @pytest.mark.parametrize("tokens", [[], [[1]], [1.5], ["a"], np.array([True])])
    def test_bad_tokens(self, tokens):
        with pytest.raises(ValueError):
            TextContext(max_length=10, tokens=tokens)

    def test_keyword_only(self):
        with pytest.raises(TypeError):
            TextContext(10, [1])

    def test_convenience_conversions(self):
        ctx = context(request_id="name", log_probabilities=None)
        assert ctx.request_id == RequestID("name")
        assert ctx.log_probabilities == 0

    def test_minimum_beyond_the_maximum(self):
        params = SamplingParams(min_new_tokens=7)
        assert context(max_length=11, sampling_params=params).min_tokens == 7
        with pytest.raises(InputError, match=r"7 .* 4 .* 10"):
            context(max_length=10, sampling_params=params)

    def test_a_prompt_longer_than_max_length_is_no_error_here(self):
        assert context(max_length=2).prompt_length == 4

    @pytest.mark.parametrize("endpoint", ["tcp://:", "ipc://", "inproc://x", "host:1", ""])
    def test_target_endpoint_follows_the_full_rule(self, endpoint):
        with pytest.raises(InputError):
            context(target_endpoint=endpoint)

    def test_nothing_is_shared_with_the_caller(self):
        ids = {5}
        one, two = context(eos_token_ids=ids), context(eos_token_ids=ids)
        one.eos_token_ids.add(6)
        assert ids == two.eos_token_ids == {5}

    def test_an_empty_sequence_cannot_stop(self):
        with pytest.raises(InputError, match="empty"):
            context(eos_sequences=[[1], []])

    def test_is_a_slotted_dataclass_with_value_equality(self):
        assert dataclasses.is_dataclass(TextContext)
        assert not hasattr(context(), "__dict__")
        params = SamplingParams(seed=1)
        one, two = (context(request_id="a", sampling_params=params) for _ in range(2))
        assert one == two
        one.update(5)
        assert one != two
        assert pickle.loads(pickle.dumps(one)) == one


class TestUpdate:
    def test_tokens_are_delivered_once_in_order(self):
        ctx = context()
        assert ctx.is_initial_prompt
        ctx.update(5)
        ctx.update(6)
        assert not ctx.is_initial_prompt
        assert drained(ctx) == [5, 6]
        assert drained(ctx) == []
        ctx.update(7)
        assert drained(ctx) == [7]
        assert ctx.tokens.active.tolist() == [7]

    def test_the_end_token_is_delivered_and_the_status_kept(self):
        ctx = context(eos_token_ids={9})
        ctx.update(5)
        ctx.update(9)
        output = ctx.to_generation_output()
        assert (output.tokens, output.final_status, output.is_done) == ([5, 9], EOS, True)
        assert ctx.to_generation_output().final_status is EOS

    def test_maximum_length_and_its_precedence(self):
        ctx = context(max_length=6, eos_token_ids={9})
        ctx.update(5)
        assert ctx.status is ACTIVE
        ctx.update(5)
        assert ctx.status is MAXIMUM
        ctx = context(max_length=5, eos_token_ids={9})
        ctx.update(9)
        assert ctx.status is EOS

    def test_an_ended_context_still_takes_tokens(self):
        ctx = context(eos_token_ids={9})
        for token in (9, 5):
            ctx.update(token)
        assert (drained(ctx), ctx.status) == ([9, 5], EOS)

    def test_ignore_eos_spares_the_ids_only(self):
        ctx = context(eos_token_ids={9}, eos_sequences=[[7], [8, 8]], ignore_eos=True)
        for token in (9, 8):
            ctx.update(token)
        assert ctx.status is ACTIVE
        ctx.update(8)
        assert ctx.status is EOS
        other = context(eos_token_ids={9}, eos_sequences=[[7]], ignore_eos=True)
        other.update(7)
        assert other.status is EOS

    def test_sequences_match_generated_tokens_only(self):
        ctx = context(tokens=(1, 2), eos_sequences=[[2, 3], [5, 6, 7]])
        ctx.update(3)
        assert ctx.status is ACTIVE
        for token in (5, 6, 5, 6):
            ctx.update(token)
        assert ctx.status is ACTIVE
        ctx.update(7)
        assert ctx.status is EOS

    def test_in_a_chunked_prompt_the_token_is_discarded(self):
        ctx = context(max_length=4, eos_token_ids={99})
        ctx.tokens.chunk(2)
        ctx.update(99, entry(-1.0))
        assert ctx.tokens.active.tolist() == [3, 4]
        assert (ctx.status, ctx.is_initial_prompt, drained(ctx)) == (ACTIVE, True, [])
        ctx.update(5)
        assert ctx.to_generation_output().log_probabilities is None

    def test_jump_ahead_widens_the_active_window(self):
        ctx = context(eos_sequences=[[6, 7]])
        ctx.update(5)
        ctx.jump_ahead(6)
        assert ctx.status is ACTIVE
        ctx.jump_ahead(7)
        assert ctx.status is EOS
        assert ctx.tokens.active.tolist() == [5, 6, 7]
        assert drained(ctx) == [5, 6, 7]

    def test_jump_ahead_checks_ids_and_length(self):
        ctx = context(eos_token_ids={9}, max_length=6)
        ctx.jump_ahead(9)
        assert ctx.status is EOS
        ctx = context(max_length=5)
        ctx.jump_ahead(9)
        assert ctx.status is MAXIMUM


class Grammar:
    def __init__(self, *allowed):
        self.allowed = list(allowed)

    def consume_token(self, token):
        if self.allowed and self.allowed[0] == token:
            self.allowed.pop(0)
            return True
        return False


class TestGrammar:
    def test_the_matcher_follows_and_refuses(self):
        ctx = context()
        ctx.set_matcher(Grammar(5, 6))
        ctx.update(5, entry(-1.0))
        with pytest.raises(ValueError, match="grammar"):
            ctx.update(9, entry(-2.0))
        assert ctx.to_generation_output().log_probabilities == [entry(-1.0)]
        ctx.jump_ahead(6)
        assert ctx.matcher.allowed == []
        with pytest.raises(ValueError, match="matcher is present"):
            ctx.update_with_future_token()


class TestFutureTokens:
    def test_a_placeholder_is_realised(self):
        ctx = context(eos_token_ids={9}, max_length=5)
        ctx.update_with_future_token()
        assert (ctx.tokens[-1], ctx.status) == (FUTURE_TOKEN, MAXIMUM)
        ctx.realize_future_token(9, entry(-1.0))
        assert ctx.status is EOS
        output = ctx.to_generation_output()
        assert (output.tokens, output.log_probabilities) == ([9], [entry(-1.0)])

    def test_a_failed_output_takes_nothing(self):
        ctx = context()
        ctx.update(5, entry(-5.0))
        ctx.update_with_future_token()
        with pytest.raises(ValueError, match="not yet realized"):
            ctx.to_generation_output()
        ctx.realize_future_token(6)
        output = ctx.to_generation_output()
        assert (output.tokens, output.log_probabilities) == ([5, 6], [entry(-5.0), None])

    def test_a_refused_update_leaves_no_log_probability(self):
        ctx = context()
        ctx.update_with_future_token()
        with pytest.raises(ValueError, match="after a future token"):
            ctx.update(5, entry(-1.0))
        with pytest.raises(ValueError, match="after a future token"):
            ctx.jump_ahead(5)
        with pytest.raises(ValueError, match="multiple future tokens"):
            ctx.update_with_future_token()
        ctx.realize_future_token(6)
        ctx.update(7)
        assert ctx.to_generation_output().log_probabilities is None

    def test_nothing_to_realise(self):
        ctx = context()
        with pytest.raises(ValueError, match="no generated tokens"):
            ctx.realize_future_token(5)
        ctx.update(5)
        with pytest.raises(ValueError, match="non-future token"):
            ctx.realize_future_token(5)


class TestOutput:
    def test_log_probabilities_are_aligned(self):
        ctx = context()
        ctx.update(5, entry(-5.0))
        ctx.update(6)
        ctx.update(7, TokenLogProbs.of(-7.0, {1: -7.0}))
        assert ctx.to_generation_output().log_probabilities == [entry(-5.0), None, entry(-7.0)]
        ctx.update(8)
        assert ctx.to_generation_output().log_probabilities is None

    def test_steps_left(self):
        ctx = context()
        assert ctx.compute_num_available_steps(10) == 10
        ctx.update(5)
        assert ctx.compute_num_available_steps(10) == 6

    def test_min_token_mask(self):
        ctx = context(eos_token_ids={9, 3}, sampling_params=SamplingParams(min_new_tokens=2))
        masks = ctx.get_min_token_logit_mask(3)
        assert [mask.tolist() for mask in masks] == [[[0, 3], [0, 9]]] * 2 + [[]]
        assert all(mask.dtype == np.int32 and mask.shape[1] == 2 for mask in masks)
        ctx.update(5)
        ctx.reset()
        assert [len(mask) for mask in ctx.get_min_token_logit_mask(2)] == [2, 0]

    def test_min_token_mask_without_ids(self):
        params = SamplingParams(min_new_tokens=2)
        for fields in ({}, {"eos_token_ids": {9}, "ignore_eos": True}):
            masks = context(sampling_params=params, **fields).get_min_token_logit_mask(2)
            assert [mask.shape for mask in masks] == [(0, 2), (0, 2)]


class TestReset:
    def test_the_request_survives_the_processing_reset(self):
        ctx = context(eos_sequences=[[6, 7]], sampling_params=SamplingParams(min_new_tokens=9))
        ctx.assign_to_cache(3)
        ctx.set_token_indices(committed_idx=2)
        ctx.update(5, entry(-5.0))
        ctx.update(6)
        ctx.reset()
        assert ctx.is_initial_prompt
        assert ctx.prompt_length == 4
        assert (ctx.tokens.prompt_length, ctx.tokens.active_length) == (6, 6)
        assert (ctx.is_assigned_to_cache, ctx.committed_idx) == (False, 0)
        ctx.update(7)
        assert ctx.status is EOS
        output = ctx.to_generation_output()
        assert (output.tokens, output.log_probabilities) == ([5, 6, 7], [entry(-5.0), None, None])
        assert drained(ctx) == []

    def test_delivered_tokens_are_not_delivered_again(self):
        ctx = context()
        ctx.update(5)
        assert drained(ctx) == [5]
        ctx.update(6)
        ctx.reset()
        ctx.reset()
        assert drained(ctx) == [6]
        ctx.update(7)
        assert drained(ctx) == [7]

    def test_a_trailing_placeholder_goes(self):
        for resets in (1, 2):
            ctx = context()
            ctx.update(5)
            if resets == 2:
                ctx.reset()
            ctx.update(FUTURE_TOKEN, entry(-1.0))
            ctx.reset()
            assert ctx.tokens.all.tolist() == [1, 2, 3, 4, 5]
            ctx.update(6)
            output = ctx.to_generation_output()
            assert (output.tokens, output.log_probabilities) == ([5, 6], None)


class TestRollback:
    @pytest.mark.parametrize(("last", "length"), [(9, 100), (6, 6)])
    def test_removing_the_end_makes_it_active_again(self, last, length):
        ctx = context(eos_token_ids={9}, max_length=length)
        ctx.update(5, entry(-5.0))
        ctx.update(last, entry(-9.0))
        assert ctx.is_done
        ctx.rollback(1)
        assert ctx.status is ACTIVE
        ctx.update(7)
        output = ctx.to_generation_output()
        assert (output.tokens, output.log_probabilities) == ([5, 7], [entry(-5.0), None])

    def test_an_end_that_stays_keeps_the_status(self):
        ctx = context(eos_token_ids={9})
        for token in (9, 5, 6):
            ctx.update(token)
        ctx.rollback(1)
        assert ctx.status is EOS
        cancelled = context()
        cancelled.update(5)
        cancelled.update_status(GenerationStatus.CANCELLED)
        cancelled.rollback(1)
        assert cancelled.status is GenerationStatus.CANCELLED

    def test_boundaries(self):
        ctx = context()
        ctx.update(5)
        assert drained(ctx) == [5]
        ctx.update(6)
        for n, message in [(2, "delivered"), (3, "prompt"), (6, "before the start"), (-1, "-1")]:
            with pytest.raises(ValueError, match=message):
                ctx.rollback(n)
        ctx.rollback(1)
        assert ctx.tokens.all.tolist() == [1, 2, 3, 4, 5]
        assert drained(ctx) == []

    def test_across_a_reset(self):
        ctx = context()
        for token in (5, 6):
            ctx.update(token)
        ctx.reset()
        ctx.rollback(1)
        ctx.update(7)
        assert drained(ctx) == [5, 7]

    def test_not_in_a_chunked_prompt(self):
        ctx = context()
        ctx.update(5)
        ctx.reset()
        ctx.tokens.chunk(2)
        with pytest.raises(ValueError, match="chunked"):
            ctx.rollback(1)


class TestWire:
    def test_round_trip(self):
        ctx = context(
            request_id="r",
            eos_token_ids={9, 3},
            eos_sequences=[[7]],
            log_probabilities=2,
            ignore_eos=True,
            sampling_params=SamplingParams(top_k=3, seed=1),
            model_name="m",
            target_endpoint="tcp://host:1",
            cache_salt="tenant",
        )
        wire = request_map(ctx)
        assert wire.tokens.array.dtype == np.int32
        assert context_to_run(wire, "r") == ctx

    def test_generated_tokens_do_not_travel_as_prompt(self):
        ctx = context()
        ctx.update(5)
        ctx.reset()
        assert request_map(ctx).tokens.array.tolist() == [1, 2, 3, 4]

    @pytest.mark.parametrize("token", [1 << 31, -(1 << 31) - 1, (1 << 32) + 5])
    def test_ids_that_are_not_int32_are_no_request(self, token):
        with pytest.raises(InputError, match="int32"):
            request_map(context(tokens=[1, token, 3]))
        ctx = context()
        ctx.update(token)
        assert request_map(ctx).tokens.array.tolist() == [1, 2, 3, 4]

    def test_emitted_tokens_count_as_generated_and_delivered(self):
        wire = request_map(context(eos_sequences=[[5, 6, 7]]))
        ctx = context_to_run(wire, RequestID("r"), emitted=[5, 6])
        assert (ctx.prompt_length, len(ctx.tokens), ctx.tokens.active_length) == (4, 6, 6)
        assert ctx.status is ACTIVE
        ctx.update(7)
        assert ctx.status is EOS
        assert drained(ctx) == [7]

    @pytest.mark.parametrize(
        ("fields", "emitted", "status"),
        [
            ({"eos_token_ids": {9}}, [5, 9], EOS),
            ({"eos_token_ids": {9}, "ignore_eos": True}, [5, 9], ACTIVE),
            ({"eos_sequences": [[5, 6]]}, [5, 6], EOS),
            ({"eos_sequences": [[4, 5]]}, [5], ACTIVE),
            ({"max_length": 6}, [5, 6], MAXIMUM),
            ({"sampling_params": SamplingParams(max_new_tokens=2)}, [5, 6], MAXIMUM),
            ({"sampling_params": SamplingParams(max_new_tokens=3)}, [5, 6], ACTIVE),
        ],
    )
    def test_status_comes_from_the_tokens(self, fields, emitted, status):
        wire = request_map(context(**fields))
        assert context_to_run(wire, emitted=emitted).status is status

    def test_a_read_only_prompt_is_copied(self):
        wire = request_map(context())
        wire.tokens.array.flags.writeable = False
        ctx = context_to_run(wire)
        ctx.tokens.overwrite_last_token(9)
        assert wire.tokens.array.tolist() == [1, 2, 3, 4]

    def test_lists_are_not_shared_with_the_message(self):
        wire = request_map(context(eos_sequences=[[7]]))
        one, two = context_to_run(wire), context_to_run(wire)
        one.eos_sequences[0].append(8)
        assert two.eos_sequences == wire.eos_sequences == [[7]]


def test_a_sequence_that_nothing_could_end_with_is_refused():
    with pytest.raises(InputError, match="is empty"):
        TextContext(max_length=9, tokens=[1], eos_sequences=[[1, 2], []])
