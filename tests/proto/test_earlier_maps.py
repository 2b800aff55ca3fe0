"""The earlier form of a context as one buffer: an array of tokens, and indices as numbers."""

import contextlib
import random

import msgspec
import numpy as np
import pytest

from baton.proto import (
    DecodeFailed,
    GenerationStatus,
    LimitExceeded,
    LogProbabilities,
    TextAndVisionContext,
    TextContext,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

from .test_fuzz import UNITS_IN_SHORT, floods, mutated, peak_bytes

ACTIVE, EOS = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE
pack = msgspec.msgpack.encode


def array(values, dtype=np.int64, size=None):
    """An array as the earlier encoder writes it; free room after the tokens repeats them."""
    data = np.array(values, dtype)
    data = data if size is None else np.resize(data, size)
    return {"__np__": True, "data": data.tobytes(), "shape": data.shape, "dtype": str(data.dtype)}


def text(**more):
    """Five tokens in an array of 128: two generated, the last undelivered; without defaults."""
    return {
        "type": "TextContext",
        "request_id": "q-1",
        "max_length": 50,
        "tokens": array([5, 6, 7, 8, 9], size=128),
        "eos_token_ids": [2],
        "sampling_params": {"top_k": 1, "seed": 0},
        "_size": 128,
        "_start_idx": 4,
        "_active_idx": 5,
        "_end_idx": 5,
        "_completion_start_idx": 4,
        "_completion_end_idx": 5,
        "_prompt_len": 3,
        "_is_initial_prompt": False,
        **more,
    }


def vision(**more):
    pixels = {"pixel_values": [array([[1.0, 2.0]], np.float32)]}
    return text(type="TextAndVisionContext", **pixels, **more)


def speech(**more):
    spoken = {"_speech_tokens": array([1, 2, 3], np.int32, 128), "_speech_token_end_idx": 3}
    return text(type="TTSContext", _speech_token_size=128, **spoken, **more)


def read(raw, kind=TextContext, copy=True):
    return msgpack_numpy_decoder(kind, copy=copy)(pack(raw))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("kind", [TextContext, TextContext | TextAndVisionContext | None])
def test_a_context_under_way(kind, copy):
    ctx = read(text(_committed_idx=1, _draft_offset=2, lora_name="l"), kind, copy)
    assert type(ctx) is TextContext
    assert (str(ctx.request_id), ctx.eos_token_ids, ctx.sampling_params.seed) == ("q-1", {2}, 0)
    assert (ctx.start_idx, ctx.active_idx, ctx.end_idx, ctx.committed_idx) == (4, 5, 5, 1)
    assert (ctx.prompt_tokens.tolist(), ctx.generated_tokens.tolist()) == ([5, 6, 7], [8, 9])
    assert (ctx._draft_offset, ctx.lora_name, ctx.is_initial_prompt) == (2, "l", False)
    assert ctx.log_probabilities == 0
    ctx.update(2)
    assert ctx.outstanding_completion_tokens() == [(9, None), (2, None)]
    assert ctx.status is EOS


def test_a_fresh_context_says_only_what_it_must():
    raw = {"type": "TextContext", "request_id": "r", "max_length": 9, "tokens": array([4, 5])}
    ctx = read(raw)
    assert (ctx.tokens.prompt_length, ctx.tokens.active_length, ctx.status) == (2, 2, ACTIVE)
    assert not ctx.tokens.has_outstanding_generated_tokens
    made = TextContext(max_length=9, tokens=[4, 5], request_id="r")
    made.sampling_params = ctx.sampling_params
    assert ctx == made


def test_a_chunk_is_going_on():
    raw = text(_start_idx=0, _active_idx=2, _prompt_len=5, _is_initial_prompt=True)
    raw |= {"_completion_start_idx": 5}
    ctx = read(raw)
    assert (ctx.tokens.is_chunked, ctx.next_tokens.tolist()) == (True, [5, 6])
    ctx.update(99)
    assert (ctx.next_tokens.tolist(), ctx.is_initial_prompt) == ([7, 8, 9], True)


def test_status_and_queued_log_probabilities():
    entry = {"token_log_probabilities": [-0.5], "top_log_probabilities": [{9: -0.5}]}
    ctx = read(text(_status="end_of_sequence", log_probabilities=1) | {
        "_log_probabilities_data": {4: entry}
    })  # fmt: skip
    assert ctx.status is EOS
    assert ctx.outstanding_completion_tokens() == [(9, LogProbabilities([-0.5], [{9: -0.5}]))]


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ">i8"])
def test_any_integers(dtype):
    assert read(text(tokens=array([5, 6, 7, 8, 9], dtype))).tokens.all.tolist() == [5, 6, 7, 8, 9]


def test_pixels_wait_for_the_encoder_as_they_did():
    ctx = read(vision(extra_model_args={"mask": array([1])}), TextContext)
    assert type(ctx) is TextAndVisionContext
    assert (ctx.pixel_values[0].tolist(), ctx.extra_model_args["mask"].tolist()) == ([[1, 2]], [1])
    assert ctx.needs_vision_encoding
    assert not read(vision(_needs_vision_encoding=False)).needs_vision_encoding


def test_speech_tokens():
    ctx = read(speech(_decoded_index=1, _block_counter=2, _audio_generation_status="cancelled"))
    assert type(ctx) is TTSContext
    assert (ctx.speech_tokens.tolist(), ctx.decoded_index, ctx.block_counter) == ([1, 2, 3], 1, 2)
    assert ctx.is_done
    ctx.update_speech_tokens(np.array([4]))
    assert ctx.speech_tokens.tolist() == [1, 2, 3, 4]


def test_deep_inside_and_written_again_in_the_later_form():
    decode = msgpack_numpy_decoder(dict[str, list[TextContext]])
    got = decode(pack({"a": [text(), vision(), speech()]}))["a"]
    assert [type(ctx) for ctx in got] == [TextContext, TextAndVisionContext, TTSContext]
    assert decode(msgpack_numpy_encoder()({"a": got})) == {"a": got}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_end_idx": 129}, "contradict"),
        ({"_start_idx": 6}, "contradict"),
        ({"_prompt_len": 6}, "contradict"),
        ({"tokens": array([1.0], np.float32)}, "integers"),
        ({"tokens": array([[1, 2]])}, "one-dimensional"),
        ({"max_length": "9"}, "Expected"),
        ({"type": "PixelContext"}, "Invalid value"),
        ({"pixel_values": 1, "type": "TextAndVisionContext"}, "Expected"),
        ({"target_endpoint": "tcp://:"}, "endpoint"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(change, reason):
    with pytest.raises(DecodeFailed, match=reason):
        read({**text(), **change})


def test_two_pictures_are_refused():
    with pytest.raises(DecodeFailed):
        read(vision() | {"pixel_values": [array([1])] * 2})


def test_mutated_messages_end_in_a_documented_error():
    rng, understood = random.Random(3), 0
    decoders = [msgpack_numpy_decoder(TextContext, copy=copy) for copy in (True, False)]
    messages = [pack(make()) for make in (text, vision, speech)]
    for _ in range(400):
        for message in messages:
            head = message[: rng.choice([60, 150, len(message)])]
            for decode in decoders:
                try:
                    ctx = decode(mutated(rng, head) + message[len(head) :])
                    assert len(ctx.tokens.all)
                    understood += 1
                except (DecodeFailed, LimitExceeded):
                    pass
    assert understood > 50


@pytest.mark.parametrize("unit", UNITS_IN_SHORT)
def test_floods_cost_little_memory(unit):
    decode = msgpack_numpy_decoder(TextContext, copy=False)
    decode(pack(speech()))  # fills the caches
    seen = {"type"}
    for raw in (text(_log_probabilities_data={}, eos_sequences=[]), vision(), speech()):
        for name in set(raw) - seen:
            seen.add(name)
            kept = [pack(key) + pack(value) for key, value in raw.items() if key != name]
            head = b"\xde" + len(raw).to_bytes(2, "big") + b"".join(kept) + pack(name)
            for flood in floods(unit).values():
                message = head + flood
                peak = peak_bytes(lambda message=message: _quiet(decode, message))
                assert peak < 32 * len(message) + (1 << 20), name


def _quiet(decode, message):
    with contextlib.suppress(DecodeFailed, LimitExceeded):
        decode(message)
