import dataclasses

import numpy as np
import pytest

from baton.proto import (
    GenerationStatus,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from baton.proto.contexts.equality import same
from baton.proto.wire.context_maps import context_to_run, request_map

ACTIVE, EOS = GenerationStatus.ACTIVE, GenerationStatus.END_OF_SEQUENCE


def context(**fields):
    return TTSContext(max_length=100, tokens=[1, 2, 3], **fields)


def filled(count, decoded=0):
    ctx = context()
    ctx.update_speech_tokens(np.arange(count, dtype=np.int32))
    ctx.set_decoded_index(decoded)
    return ctx


def test_defaults():
    ctx = context()
    assert (ctx.audio_prompt_tokens.dtype, ctx.audio_prompt_tokens.size) == (np.int32, 0)
    assert ctx.buffer_speech_tokens is ctx.audio_buffer is None
    assert (ctx.prev_samples_beyond_offset, ctx.streaming) == (0, False)
    assert (ctx._speech_tokens.dtype, ctx._speech_tokens.tolist()) == (np.int32, [0] * 128)
    assert (ctx.decoded_index, ctx.block_counter, ctx.speech_tokens.size) == (0, 0, 0)
    assert ctx._arrival_time > 0


def test_done_follows_the_audio_and_not_the_speech_tokens():
    ctx = context(eos_token_ids={9})
    ctx.update(9)
    assert (ctx.status, ctx.speech_token_status, ctx.is_done) == (EOS, EOS, False)
    ctx.update_audio_generation_status(EOS)
    assert ctx.is_done
    ctx.update_speech_token_status(ACTIVE)
    assert (ctx.status, ctx.is_done) == (ACTIVE, True)
    ctx.update_status(EOS)
    assert ctx.speech_token_status is EOS


@pytest.mark.parametrize(
    ("counts", "size"),
    [([127], 128), ([128], 256), ([100, 27], 128), ([100, 28], 256), ([300], 512), ([0], 128)],
)
def test_room_grows_in_steps_and_is_zeroed(counts, size):
    ctx = context()
    expected = []
    for count in counts:
        tokens = np.arange(1, count + 1)
        ctx.update_speech_tokens(tokens)
        expected += tokens.tolist()
    assert (ctx._speech_token_size, len(ctx._speech_tokens)) == (size, size)
    assert ctx.speech_tokens.tolist() == expected
    assert not ctx._speech_tokens[len(expected) :].any()
    assert ctx.block_counter == len(counts)


def test_undecoded_tokens():
    ctx = filled(10, decoded=7)
    assert [ctx.has_undecoded_speech_tokens(n) for n in (0, 2, 3, 4)] == [True, True, False, False]
    assert not context().has_undecoded_speech_tokens()


@pytest.mark.parametrize(
    ("decoded", "chunk", "buffer", "expected", "again"),
    [
        (0, None, None, range(10), 0),
        (4, None, None, range(4, 10), 0),
        (4, 3, None, range(4, 7), 0),
        (4, 100, None, range(4, 10), 0),
        (4, 3, 2, range(2, 7), 2),
        (4, 3, 9, range(7), 4),
        (0, 3, 9, range(3), 0),
        (4, None, 1, range(3, 10), 1),
        (10, 3, 2, range(8, 10), 2),
    ],
)
def test_next_speech_tokens(decoded, chunk, buffer, expected, again):
    ctx = filled(10, decoded)
    tokens, repeated = ctx.next_speech_tokens(chunk, buffer)
    assert (tokens.tolist(), repeated) == (list(expected), again)
    assert ctx.decoded_index == decoded


def test_a_read_only_buffer_is_copied():
    tokens = np.zeros(128, np.int32)
    tokens.flags.writeable = False
    ctx = context(_speech_tokens=tokens)
    ctx.update_speech_tokens(np.array([5]))
    assert (ctx.speech_tokens.tolist(), tokens[0]) == ([5], 0)


def test_an_end_behind_the_buffer_is_refused():
    for end in (-1, 129):
        with pytest.raises(ValueError, match="speech tokens"):
            context(_speech_token_end_idx=end)


def test_equality_is_by_value_without_the_room():
    params = context().sampling_params
    one, two = (
        context(request_id="r", sampling_params=params, _arrival_time=1.0) for _ in range(2)
    )
    assert one == two
    one.update_speech_tokens(np.arange(500, dtype=np.int32))
    assert one != two
    for at in range(0, 500, 100):
        two.update_speech_tokens(np.arange(at, at + 100, dtype=np.int32))
    assert one != two  # their block counters differ
    two._block_counter = 1
    assert (one._speech_token_size, two._speech_token_size) == (640, 512)
    assert one == two
    assert context_to_run(request_map(one), "r") == one


@pytest.mark.parametrize("count", [0, 3, 127, 128, 200])
def test_every_field_arrives_as_it_was_in_one_buffer(count):
    sent = context()
    for at in range(0, count, 100):
        sent.update_speech_tokens(np.arange(min(100, count - at), dtype=np.int32))
    got = msgpack_numpy_decoder(TTSContext)(msgpack_numpy_encoder()(sent))
    for item in dataclasses.fields(sent):
        assert same(getattr(got, item.name), getattr(sent, item.name)), item.name
    for ctx in (sent, got):
        ctx.update_speech_tokens(np.array([7, 8]))
    assert got == sent
    assert got.speech_tokens.tolist()[-2:] == [7, 8]
