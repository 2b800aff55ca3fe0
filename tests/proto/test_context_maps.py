"""Whole contexts on the wire: between two processes, split, damaged, and recorded."""

import gc
import json
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto import (
    DecodeFailed,
    InputError,
    LimitExceeded,
    PixelContext,
    RequestID,
    SamplingParams,
    TextAndVisionContext,
    TextContext,
    TokenBuffer,
    TTSContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

from ..suite.short import examples
from . import sample_contexts as samples
from .sample_contexts import CONTEXTS

HERE = Path(__file__).parent


encode = msgpack_numpy_encoder().frames
decode = msgpack_numpy_decoder(TextContext | PixelContext, copy=False)
copied = msgpack_numpy_decoder(TextContext | PixelContext)


def sent(context):
    """Encode a context, and copy the frames, as a receiver has them."""
    return [bytes(frame) for frame in encode(context)]


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A socket to another process, which answers with the context it decoded."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('peer')}/echo"
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.bind(endpoint)
    socket.rcvtimeo = 30_000
    process = subprocess.Popen([sys.executable, HERE / "echo_contexts.py", endpoint])
    yield socket
    socket.send(b"end")
    socket.recv()
    process.wait()
    context.destroy()


@pytest.mark.parametrize("name", CONTEXTS)
def test_crosses_a_socket_between_two_processes_and_arrives_as_itself(peer, name):
    context = CONTEXTS[name]()
    peer.send_multipart(encode(context), copy=False)
    kind, *frames = peer.recv_multipart()
    arrived = decode(frames)
    assert kind.decode() == type(context).__name__ == type(arrived).__name__
    assert arrived == context
    if isinstance(arrived, TextContext):
        assert arrived.matcher is None


@pytest.mark.parametrize("name", CONTEXTS)
def test_crosses_as_one_buffer_with_large_arrays_in_shared_memory(peer, name):
    context = CONTEXTS[name]()
    message = msgpack_numpy_encoder(use_shared_memory=True, shared_memory_threshold=4000)(context)
    peer.send_multipart([b"map", message])
    kind, reply = peer.recv_multipart()
    assert kind.decode() == type(context).__name__
    assert msgpack_numpy_decoder(TextContext | PixelContext)(reply) == context


@pytest.mark.parametrize("name", CONTEXTS)
def test_continues_as_the_one_that_stayed(name):
    context = CONTEXTS[name]()
    arrived = decode(sent(context))
    for one in (context, arrived):
        if isinstance(one, PixelContext):
            one.update(np.ones(3))
            one.tokens.advance_with_token(9)
            continue
        if one.tokens[-1] == -999:
            one.realize_future_token(50, samples.entry(-9.0))
        one.update(51, samples.entry(-8.0))
        one.update(2)
    assert arrived == context
    if not isinstance(context, PixelContext):
        assert arrived.to_generation_output() == context.to_generation_output()


def test_tokens_are_widened_when_they_are_first_used():
    context = decode(sent(samples.text()))
    assert len(context.tokens) == 30
    assert sent(context) == sent(samples.text())
    with pytest.raises(AttributeError):
        object.__getattribute__(context.tokens, "_store")
    context.update(5)
    assert context.tokens.all.dtype == np.int64
    assert context.tokens.all.tolist() == [*range(100, 130), 5]


@pytest.mark.parametrize("token", [(1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1, 1 << 62])
def test_ids_travel_as_int32_where_they_fit(token):
    context = TextContext(max_length=9000, tokens=np.full(2000, token))
    frames = sent(context)
    fits = -(1 << 31) <= token < 1 << 31
    assert len(frames[1]) == 2000 * (4 if fits else 8)
    assert decode(frames) == context


def test_only_the_valid_part_of_a_buffer_travels():
    context = TextContext(max_length=9000, tokens=TokenBuffer(np.arange(2000)))
    context.update(1)
    assert context.tokens._capacity == 4000
    header, tokens = sent(context)
    assert len(tokens) == 4 * 2001
    assert len(header) < 500


def test_arrays_are_views_of_the_frames_and_copied_on_request():
    frames = sent(samples.vision())
    pixels = decode(frames).images[0].pixel_values
    assert any(np.shares_memory(pixels, np.frombuffer(frame, np.uint8)) for frame in frames[1:])
    assert not pixels.flags.writeable
    del frames
    gc.collect()
    assert pixels.sum() == 5 * pixels.size
    for name, make in CONTEXTS.items():
        original = make()
        context = copied(sent(original))
        assert context == original, name
        for value in arrays(context):
            assert value.flags.writeable


@pytest.mark.parametrize("copy", [False, True])
def test_tokens_are_independent_of_the_frames_once_used_or_copied(copy):
    """So the receive buffer can be reused."""
    context = TextContext(max_length=9000, tokens=np.arange(2000))
    frames = [bytearray(frame) for frame in sent(context)]
    arrived = (copied if copy else decode)(frames)
    if not copy:
        assert arrived.tokens[5] == 5
    frames[1][:] = bytes(len(frames[1]))
    assert sent(arrived) == sent(context)
    assert arrived == context


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint64, ">i8"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_context_of_ids_is_one_of_its_own(dtype, step):
    ids = np.repeat(np.arange(2000, dtype=dtype), step)
    context = TextContext(max_length=9000, tokens=ids[::step])
    ids[:] = 0
    assert context.tokens.all.tolist() == list(range(2000))
    assert context.tokens.all.dtype == np.int64
    context.update(7)
    frames = sent(context)
    context.rollback(1)
    context.update(8)
    assert decode(frames).tokens[-1] == 7
    assert decode(sent(context)) == context


@pytest.mark.parametrize("make", [list, np.array, lambda ids: np.array(ids, np.uint16)])
def test_ids_are_looked_at_when_they_are_copied_and_no_more(make):
    """So the first message of a context takes as long as later messages."""
    context = TextContext(max_length=9000, tokens=make(range(2000)))
    assert np.shares_memory(context.tokens.ids(), context.tokens.ids())
    with pytest.raises(AttributeError):
        object.__getattribute__(context.tokens, "_store")
    assert decode(sent(context)) == context
    assert context.tokens.all.tolist() == list(range(2000))


def arrays(value):
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from arrays(getattr(value, name))


def test_what_cannot_travel():
    with pytest.raises(InputError, match="logits_processors"):
        encode(
            TextContext(
                max_length=9, tokens=[1], sampling_params=SamplingParams(logits_processors=[print])
            )
        )

    class Other(TextContext):
        pass

    with pytest.raises(TypeError, match="Other"):
        encode(Other(max_length=9, tokens=[1]))


def changed(frames, **changes):
    """Replace fields of the context in the frames; ``tokens``: a map of changes to its tokens."""
    raw = msgspec.msgpack.decode(frames[0], strict=False)
    tokens = changes.pop("tokens", {})
    raw = {**raw, **changes, "tokens": {**raw["tokens"], **tokens} if tokens != 5 else tokens}
    return [msgspec.msgpack.encode(raw), *frames[1:]]


def window(start, end):
    return {"start": start, "end": end}


IMPOSSIBLE = [
    {"tokens": {"_processing_range": window(0, 31)}},
    {"tokens": {"_processing_range": window(5, 4)}},
    {"tokens": {"_processing_range": window(-1, 30)}},
    {"tokens": {"_processing_range": None}},
    {"tokens": {"_processing_offset": 31}},
    {"tokens": {"_current_length": 31}},
    {"tokens": {"_current_length": 0}},
    {"tokens": {"_prompt_length": 31}},
    {"tokens": {"_completion_range": window(30, 31)}},
    {"tokens": {"_completion_range": window(30, 1 << 63)}},
    {"tokens": {"_completion_range": window(2, 30)}},
    {"tokens": {"_completion_range": window(30, 29)}},
    {"tokens": {"_actively_chunked": True}},
    {"tokens": {"_processing_range": window(0, 9)}},
    {"_carried_start": 0, "_carried_end": 30},
    {"_carried_start": 30, "_carried_end": 40},
    {"_carried_start": 30, "_carried_end": 29},
    {"_prompt_length": 31},
    {"_prompt_length": 0},
    {"_prompt_length": -2},
    {"_log_probabilities_data": {30: samples.entry(-1.0)}},
    {"_log_probabilities_data": {-1: samples.entry(-1.0)}},
    {"_cache_seq_id": -1},
    {"_committed_idx": -1},
    {"status": "asleep"},
    {"request_id": 5},
    {"type": "OtherContext"},
    {"target_endpoint": "tcp://:"},
    {"max_length": "5"},
    {"eos_sequences": [[]]},
    {"tokens": 5},
    {"sampling_params": {"temperature": -1.0}},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_a_state_that_no_context_can_be_in_is_refused(changes):
    with pytest.raises(DecodeFailed):
        decode(changed(sent(samples.text()), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"_speech_token_size": 1 << 40},
        {"_speech_token_size": 4},
        {"_speech_token_end_idx": 204},
        {"decoded_index": 204},
        {"_block_counter": -1},
        {"_speech_tokens": {"__np__": True, "data": bytes(8), "shape": [2], "dtype": "<f4"}},
        {"audio_generation_status": "asleep"},
    ],
    ids=str,
)
def test_speech_that_contradicts_itself_is_refused(changes):
    frames = sent(CONTEXTS["speech speaking"]())
    decode(frames)
    with pytest.raises(DecodeFailed):
        decode(changed(frames, **changes))


def assert_possible(context):
    """Check the invariants of every context that its own methods can make."""
    if isinstance(context, PixelContext):
        return
    tokens, prompt = context.tokens, context.prompt_length
    length, delivered = len(tokens), tokens.completion_range.start
    if context._carried_start < context._carried_end:
        delivered = context._carried_start
    assert 1 <= prompt <= tokens.prompt_length <= length
    assert 0 <= tokens.processed_length <= tokens.processing_range.end <= length
    assert 0 <= tokens.processed_length + tokens._offset <= tokens.processing_range.end
    assert tokens.is_chunked == (tokens.processing_range.end < length)
    undelivered = context._undelivered()[1]
    assert undelivered == tokens.all[delivered : delivered + len(undelivered)].tolist()
    assert not undelivered or (delivered >= prompt and delivered + len(undelivered) <= length)
    assert all(0 <= position < length for position in context._log_probabilities_data)
    if isinstance(context, TTSContext):
        assert 0 <= context.decoded_index <= len(context.speech_tokens)
        assert len(context.speech_tokens) <= context._speech_token_size
        assert context._speech_token_size == len(context._speech_tokens)
    if isinstance(context, TextAndVisionContext):
        ends = [end for image in context.images for end in (image.start_idx, image.end_idx)]
        assert ends == sorted(ends) and all(end <= length for end in ends)


NUMBERS = st.one_of(st.integers(-1, 70), st.sampled_from([1 << 40, 1 << 62]))
STATE = {
    **{f"_{name}": NUMBERS for name in ("carried_start", "carried_end", "prompt_length")},
    **{f"_speech_token_{name}": NUMBERS for name in ("size", "end_idx")},
    "decoded_index": NUMBERS,
    "tokens": st.fixed_dictionaries(
        {},
        optional={
            "_processing_range": st.builds(window, NUMBERS, NUMBERS),
            "_completion_range": st.builds(window, NUMBERS, NUMBERS),
            "_processing_offset": NUMBERS,
            "_prompt_length": NUMBERS,
            "_current_length": NUMBERS,
            "_actively_chunked": st.booleans(),
        },
    ),
}


@settings(max_examples=examples(400, 1500))
@given(name=st.sampled_from(list(CONTEXTS)), changes=st.fixed_dictionaries({}, optional=STATE))
def test_what_decodes_is_a_possible_state(name, changes):
    frames = SENT[name]
    try:
        context = decode(changed(frames, **changes))
    except DecodeFailed:
        return
    assert_possible(context)
    assert decode(sent(context)) == context


SENT = {name: sent(make()) for name, make in CONTEXTS.items()}


def test_images_that_contradict_the_tokens_are_refused():
    frames = sent(samples.vision())
    decode(frames)
    with pytest.raises(DecodeFailed, match="filled"):
        decode(changed(frames, vision_token_ids=[11]))


def test_what_a_map_of_a_picture_leaves_out_has_the_default_of_the_class():
    whole = PixelContext(tokens=np.arange(5, dtype=np.int64), request_id=RequestID("r"))
    message = msgspec.msgpack.decode(msgpack_numpy_encoder()(whole))
    short = {name: message[name] for name in ("type", "tokens", "request_id")}
    assert msgpack_numpy_decoder(PixelContext)(msgspec.msgpack.encode(short)) == whole


def test_one_context_and_nothing_else():
    frames = sent(samples.vision())
    for bad in ([], [b""], [b"\x90"], [*frames, b"more"], frames[:-1], frames[:2] + frames[1:]):
        with pytest.raises((DecodeFailed, LimitExceeded)):
            decode(bad)
    with pytest.raises(LimitExceeded):
        decode([*frames, *[b""] * 65])


# ------------------------------------------------------------------ recorded bytes

GOLDEN = HERE / "golden" / "contexts.json"
ONE_BUFFER = msgpack_numpy_decoder(TextContext | PixelContext)
ARRIVAL = 1234.5


def recordable(name):
    context = CONTEXTS[name]()
    if hasattr(context, "_arrival_time"):
        context._arrival_time = ARRIVAL
    return context


def digests(name):
    """Digests of both forms of a context with large arrays."""
    frames, one_buffer = sent(recordable(name)), msgpack_numpy_encoder()(recordable(name))
    return [blake2b(part, digest_size=16).hexdigest() for part in (*frames, one_buffer)]


@pytest.fixture(scope="module")
def golden(request):
    if request.config.getoption("--write-golden", default=False):
        one_buffer = msgpack_numpy_encoder()
        recorded = {
            name: {
                "frames": [frame.hex() for frame in sent(recordable(name))],
                "one_buffer": one_buffer(recordable(name)).hex(),
            }
            for name in SMALL
        } | {name: {"digests": digests(name)} for name in CONTEXTS if name not in SMALL}
        GOLDEN.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return json.loads(GOLDEN.read_text())


SMALL = [name for name in CONTEXTS if name.split()[0] in ("text", "speech")] + ["pixel painting"]
SMALL.remove("text grown")


@pytest.mark.parametrize("name", SMALL)
def test_recorded_bytes_still_mean_and_make_the_same(golden, name):
    """Both forms of contexts without large arrays; test_golden.py describes how to record again."""
    frames = [bytes.fromhex(frame) for frame in golden[name]["frames"]]
    context = recordable(name)
    assert decode(frames) == context
    assert sent(context) == frames
    message = bytes.fromhex(golden[name]["one_buffer"])
    assert ONE_BUFFER(message) == context
    assert msgpack_numpy_encoder()(context) == message


@pytest.mark.parametrize("name", [name for name in CONTEXTS if name not in SMALL])
def test_recorded_digests_are_still_those_of_both_forms(golden, name):
    assert golden[name]["digests"] == digests(name)


def test_vision_fields_are_recorded_by_their_names():
    """The frames with pixels are too large to record, so their fields are compared here."""
    raw = msgspec.msgpack.decode(sent(samples.vision())[0], strict=False)
    assert raw["type"] == "TextAndVisionContext"
    places = [(image["start_idx"], image["end_idx"]) for image in raw["images"]]
    assert places == [(5, 15), (20, 30)]
    assert [image["pixel_values"]["frame"] for image in raw["images"]] == [1, 2]
    assert raw["images"][1]["image_hash"] == -(1 << 63)
    assert set(raw["extra_model_args"]) == {"grid", "empty"}
