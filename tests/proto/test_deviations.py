"""Deliberate differences from the reference, one test per line of the table.

docs/compatibility.md gives the reasons and names these tests.
"""

import copy

import msgspec
import numpy as np
import pytest

from baton.proto import (
    FUTURE_TOKEN,
    AudioGenerationMetadata,
    DecodeFailed,
    GenerationStatus,
    InputError,
    LogProbabilities,
    OutputImageContent,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    TextAndVisionContext,
    TextContext,
    TTSContext,
    build_wire_context,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
    reserve_token_space_for_batch,
)
from baton.proto.wire.context_maps import context_to_run

from ..model_cards import model_card

EOS, ACTIVE = GenerationStatus.END_OF_SEQUENCE, GenerationStatus.ACTIVE
CARD = model_card()


def context(**fields):
    return TextContext(max_length=100, tokens=np.array([1, 2, 3, 4]), **fields)


def entry(value):
    return LogProbabilities([value], [{1: value}])


def test_v1_reserving_nothing_is_nothing_and_duplicates_are_safe():
    ctx = context()
    before = copy.deepcopy(ctx)
    with reserve_token_space_for_batch([ctx], 0):
        assert ctx == before
    with reserve_token_space_for_batch([ctx, context(), ctx], 3):
        assert len(ctx.tokens) == 10
    assert ctx == before


def test_v2_a_refused_output_loses_no_token():
    ctx = context()
    ctx.update(5)
    ctx.update_with_future_token()
    for _ in range(2):
        with pytest.raises(ValueError, match="future token is not yet realized"):
            ctx.to_generation_output()
    ctx.realize_future_token(6)
    assert ctx.to_generation_output().tokens == [5, 6]


def test_v3_reset_keeps_the_request():
    params = SamplingParams(min_new_tokens=3)
    ctx = context(eos_token_ids={9}, eos_sequences=[[5, 6]], sampling_params=params)
    ctx.assign_to_cache(1)
    ctx.set_token_indices(committed_idx=4)
    ctx.update(5)
    ctx.tokens.advance_with_token(FUTURE_TOKEN)
    ctx.reset()
    assert ctx.tokens.all.tolist() == [1, 2, 3, 4, 5]
    assert (ctx.tokens.prompt_length, ctx.prompt_length) == (5, 4)
    assert (ctx.is_assigned_to_cache, ctx.committed_idx, ctx.is_initial_prompt) == (False, 0, True)
    assert [len(mask) for mask in ctx.get_min_token_logit_mask(3)] == [1, 1, 0]
    ctx.update(6)
    assert ctx.status is EOS
    assert ctx.to_generation_output().tokens == [5, 6]


def test_v4_log_probabilities_are_one_per_token():
    ctx = context()
    ctx.update(5)
    ctx.update(6, entry(-1.0))
    assert ctx.to_generation_output().log_probabilities == [None, entry(-1.0)]
    ctx.update(7)
    assert ctx.to_generation_output().log_probabilities is None


def test_v5_numpy_numbers_are_numbers_and_other_objects_one_clear_error():
    encode = msgpack_numpy_encoder()
    values = [np.int64(-3), np.uint8(3), np.float64(0.5), np.bool_(True)]
    assert msgspec.msgpack.decode(encode(values)) == [-3, 3, 0.5, True]
    ctx = context()
    ctx.max_length = np.int64(100)
    assert msgpack_numpy_decoder(TextContext)(encode(ctx)) == ctx
    with pytest.raises(TypeError, match="object cannot be encoded"):
        encode({"a": [object()]})


def test_v6_shared_memory_is_leased_and_read_any_number_of_times():
    """Killed owners and sweeping are tested in test_shared_memory.py."""
    message = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=1)(np.arange(9))
    decode = msgpack_numpy_decoder(np.ndarray)
    assert decode(message).tolist() == decode(message).tolist() == list(range(9))


@pytest.mark.parametrize("declared", [TextContext, TextContext | TextAndVisionContext | TTSContext])
def test_v7_a_subclass_survives_its_base_and_a_union(declared):
    ctx = TextAndVisionContext(
        max_length=9, tokens=[1], vision_token_ids=[7], extra_model_args={"a": np.ones(2)}
    )
    result = msgpack_numpy_decoder(declared)(msgpack_numpy_encoder()(ctx))
    assert type(result) is TextAndVisionContext
    assert result == ctx


def test_v8_rollback_of_the_end_makes_active_and_stops_at_what_was_delivered():
    ctx = context(eos_token_ids={9})
    ctx.update(5)
    ctx.to_generation_output()
    ctx.update(9, entry(-1.0))
    ctx.rollback(1)
    assert ctx.status is ACTIVE
    ctx.update(6)
    assert ctx.to_generation_output().log_probabilities is None
    before = copy.deepcopy(ctx)
    for n in (1, 3, 6):
        with pytest.raises(ValueError, match="roll back"):
            ctx.rollback(n)
    assert ctx == before


def test_v9_stop_ids_of_one_request_stay_with_it():
    ids = {9}
    one, two = context(eos_token_ids=ids), context(eos_token_ids=ids)
    one.eos_token_ids.add(5)
    assert two.eos_token_ids == ids == {9}
    params = SamplingParams(stop_token_ids=[5])
    build_wire_context([1, 2], CARD, params)
    assert build_wire_context([1, 2], CARD, SamplingParams()).eos_sequences == []
    assert CARD.eos_token_ids == [2]
    given = SamplingParamsInput(stop_token_ids=[5])
    merged = SamplingParams.from_input_and_generation_config(
        given, SamplingParamsGenerationConfigDefaults()
    )
    merged.stop_token_ids.append(6)
    assert given.stop_token_ids == [5]


@pytest.mark.parametrize(
    "endpoint", ["tcp://:", "ipc://", "tcp://a:0", "tcp://a:65536", "inproc://a"]
)
def test_v10_endpoints_that_name_nothing_are_refused(endpoint):
    with pytest.raises(InputError):
        context(target_endpoint=endpoint)


def test_v11_a_refused_update_queues_nothing():
    ctx = context()
    ctx.update_with_future_token()
    with pytest.raises(ValueError, match="after a future token"):
        ctx.update(5, entry(-1.0))
    ctx.realize_future_token(6)
    ctx.update(7)
    assert ctx.to_generation_output().log_probabilities is None


def test_v12_ignore_eos_is_obeyed_by_the_context():
    params = SamplingParams(min_new_tokens=2)
    ctx = context(eos_token_ids={9}, eos_sequences=[[8]], ignore_eos=True, sampling_params=params)
    assert [mask.shape for mask in ctx.get_min_token_logit_mask(1)] == [(0, 2)]
    ctx.update(9)
    assert ctx.status is ACTIVE
    ctx.update(8)
    assert ctx.status is EOS


def test_v13_masks_have_two_columns_and_ids_ascend():
    params = SamplingParams(min_new_tokens=2)
    assert context(sampling_params=params).get_min_token_logit_mask(1)[0].shape == (0, 2)
    ctx = context(eos_token_ids={90, 5, 33, 7}, sampling_params=params)
    assert ctx.get_min_token_logit_mask(1)[0].tolist() == [[0, 5], [0, 7], [0, 33], [0, 90]]


def test_v14_slack_is_zeroed_and_never_sent():
    ctx = context()
    ctx.update(5)
    slack = len(ctx.tokens._store) - 5
    assert ctx.tokens._store[5:].tolist() == [0] * slack != []
    ctx.rollback(1)
    assert ctx.tokens._store[4:].tolist() == [0] * (slack + 1)
    raw = msgspec.msgpack.decode(msgpack_numpy_encoder()(ctx))
    assert raw["tokens"]["array"]["shape"] == [4]
    speech = TTSContext(max_length=9, tokens=[1])
    speech.update_speech_tokens(np.arange(1, 200))
    assert not speech._speech_tokens[199:].any()
    raw = msgspec.msgpack.decode(msgpack_numpy_encoder()(speech))
    assert raw["_speech_tokens"]["shape"] == [199]


def test_v15_metadata_drops_none_only():
    metadata = AudioGenerationMetadata(chunk_id=0, final_chunk=False, duration=0.0, echo="")
    assert metadata.to_dict() == {"chunk_id": 0, "final_chunk": False, "duration": 0.0, "echo": ""}


@pytest.mark.parametrize("top_k", [-1, 0, 1, 40])
def test_v17_min_p_combines_with_any_top_k(top_k):
    assert SamplingParams(min_p=0.2, top_k=top_k).min_p == 0.2
    with pytest.raises(InputError):
        SamplingParams(min_p=1.2, top_k=top_k)


def test_v18_ignore_eos_hides_the_models_ids_and_not_the_users():
    params = SamplingParams(ignore_eos=True, stop_token_ids=[5])
    ctx = context_to_run(build_wire_context([1, 3], CARD, params, stop_sequences=[[6, 7]]))
    assert (ctx.eos_token_ids, ctx.eos_sequences) == ({2}, [[5], [6, 7]])
    ctx.update(2)
    assert ctx.status is ACTIVE
    other = copy.deepcopy(ctx)
    ctx.update(5)
    assert ctx.status is EOS
    other.update(6)
    other.update(7)
    assert other.status is EOS


def test_v19_a_matcher_is_rolled_back_with_its_tokens_or_refuses():
    class Matcher:
        def __init__(self):
            self.seen = []

        def consume_token(self, token):
            self.seen.append(token)
            return True

    class Revocable(Matcher):
        def rollback(self, count):
            if count > len(self.seen):
                raise ValueError("too many")
            del self.seen[len(self.seen) - count :]

    ctx = context(eos_token_ids={9})
    ctx.set_matcher(Revocable())
    for token in (5, 6, 9):
        ctx.update(token)
    ctx.rollback(0)
    ctx.rollback(2)
    assert (ctx.matcher.seen, ctx.status, ctx.tokens.all.tolist()) == ([5], ACTIVE, [1, 2, 3, 4, 5])
    ctx.update(7)
    assert ctx.matcher.seen == [5, 7]
    before = copy.deepcopy(ctx)
    with pytest.raises(ValueError, match="prompt"):
        ctx.rollback(3)
    assert (ctx, ctx.matcher.seen) == (before, [5, 7])
    ctx.matcher.seen.clear()
    with pytest.raises(ValueError, match="too many"):
        ctx.rollback(1)
    assert ctx == before
    ctx.set_matcher(Matcher())
    ctx.rollback(0)
    with pytest.raises(InputError, match="matcher has no rollback"):
        ctx.rollback(1)
    assert ctx == before


def test_v19_a_placeholder_was_never_seen_by_the_matcher():
    class Matcher:
        def consume_token(self, token):
            raise AssertionError("not asked")

    ctx = context()
    ctx.update_with_future_token()
    ctx.set_matcher(Matcher())
    ctx.rollback(1)
    assert ctx.tokens.all.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, bool])
def test_v20_pixels_are_uint8_alone(kind):
    with pytest.raises(ValueError, match=f"uint8, not {np.dtype(kind)}"):
        OutputImageContent.from_numpy(np.ones((2, 2, 3), kind))
    content = OutputImageContent.from_numpy(np.ones((2, 2, 3), np.uint8))
    assert content.image_data


@pytest.mark.parametrize("kind", ["M8[D]", "m8[s]", "c8", "g", "U3", "S3", "O"])
def test_v21_arrays_hold_numbers_of_at_most_64_bits(kind):
    array = np.zeros(2, kind)
    with pytest.raises(TypeError, match="cannot be encoded"):
        msgpack_numpy_encoder()(array)
    raw = {"__np__": True, "data": bytes(array.nbytes), "shape": [2], "dtype": array.dtype.str}
    with pytest.raises(DecodeFailed, match="dtype"):
        msgpack_numpy_decoder(np.ndarray)(msgspec.msgpack.encode(raw))
