import pickle
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from baton.proto import (
    DecodeFailed,
    ImageMetadata,
    LimitExceeded,
    LogProbabilities,
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

encode = msgpack_numpy_encoder()


def array_map(data=bytes(8), shape=(2,), dtype="<f4", mark=True):
    return msgspec.msgpack.encode({"__np__": mark, "data": data, "shape": shape, "dtype": dtype})


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
        np.array(5, np.int16),
        np.zeros((3, 0), np.uint8),
        np.array([True, False]),
        np.arange(4, dtype=">i4"),
        np.arange(4, dtype=np.float16),
    ],
    ids=str,
)
def test_arrays_round_trip(array, copy):
    result = msgpack_numpy_decoder(np.ndarray, copy=copy)(encode(array))
    assert np.array_equal(result, array)
    assert (result.shape, result.dtype) == (array.shape, array.dtype)
    assert result.flags.writeable == copy


def test_the_form_on_the_wire():
    assert msgspec.msgpack.decode(encode(np.array([1, 2], np.int32))) == {
        "__np__": True,
        "data": b"\1\0\0\0\2\0\0\0",
        "shape": [2],
        "dtype": "<i4",
    }


@pytest.mark.parametrize("before", range(5))
def test_a_large_array_is_not_copied_unless_asked_for(before):
    """At any address: in a message, bytes are seldom aligned."""
    array = np.arange(100_000, dtype=np.float64)
    message = msgpack_numpy_encoder()({"x" * before: array})
    bytes_of = np.frombuffer(message, np.uint8)
    view = msgpack_numpy_decoder(dict[str, np.ndarray], copy=False)(message)["x" * before]
    assert np.shares_memory(view, bytes_of)
    assert not view.flags.writeable
    own = msgpack_numpy_decoder(dict[str, np.ndarray])(message)["x" * before]
    assert own.flags.aligned
    assert own.flags.writeable
    np.testing.assert_array_equal(own, view)


def test_a_view_outlives_the_message():
    message = bytearray(encode(np.arange(1000)))
    array = msgpack_numpy_decoder(np.ndarray, copy=False)(message)
    del message
    assert array.sum() == 499500


@dataclass
class Holder:
    name: str
    array: npt.NDArray[np.int64]
    more: dict[str, npt.NDArray[np.float32]] | None = None


def test_arrays_inside_declared_types():
    held = Holder("a", np.arange(3), {"x": np.ones(2, np.float32)})
    result = msgpack_numpy_decoder(Holder)(encode(held))
    assert result.array.tolist() == [0, 1, 2]
    assert result.more["x"].tolist() == [1, 1]


def test_numpy_scalars_are_numbers_and_other_types_a_clear_error():
    assert msgspec.msgpack.decode(encode([np.int64(3), np.float32(0.5), np.bool_(True)])) == [
        3,
        0.5,
        True,
    ]
    with pytest.raises(TypeError, match="object cannot be encoded"):
        encode(object())
    for array in (np.array([object()]), np.zeros(1, "i4,i4"), np.zeros(1, complex)):
        with pytest.raises(TypeError, match="cannot be encoded"):
            encode(array)


def test_a_context_in_any_state_round_trips():
    ctx = TextContext(
        max_length=50,
        tokens=[1, 2, 3],
        request_id=RequestID("r"),
        eos_token_ids={9},
        eos_sequences=[[5, 6]],
        sampling_params=SamplingParams(stop=["x"]),
    )
    decode = msgpack_numpy_decoder(TextContext)
    for step in (
        lambda: ctx.tokens.chunk(2),
        lambda: ctx.update(0),
        lambda: ctx.update(5, LogProbabilities([-1.0], [{5: -1.0, 7: -2.0}])),
        lambda: ctx.update(4),
        lambda: ctx.to_generation_output(),
        lambda: ctx.update(8),
        lambda: ctx.reset(),
        lambda: ctx.update(9),
    ):
        step()
        again = decode(encode(ctx))
        assert again == ctx
        assert len(msgspec.msgpack.decode(encode(ctx))["tokens"]["array"]["data"]) == 4 * len(
            ctx.tokens
        )
    again.update(7)
    assert again.to_generation_output().tokens == [8, 9, 7]


@pytest.mark.parametrize("name", ["int32", "<i4", ">i4", "bool", "float16", "uint8", "|u1"])
def test_element_types_have_two_names(name):
    array = np.ones(3, name)
    result = msgpack_numpy_decoder(np.ndarray)(array_map(array.tobytes(), [3], name))
    assert (result.dtype, result.tolist()) == (array.dtype, [1, 1, 1])


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x80",
        b"\xc1",
        array_map(mark=False),
        array_map(dtype="|O"),
        array_map(dtype="<c8"),
        array_map(dtype="nonsense"),
        array_map(dtype=5),
        array_map(shape=[3]),
        array_map(shape=[-1, -2]),
        array_map(shape=[1 << 62, 4]),
        array_map(shape=["2"]),
        array_map(shape=[2.0]),
        array_map(shape=[True, 2]),
        array_map(shape=2),
        array_map(data="text"),
        array_map()[:-1],
        b"\x91" * 100_000,
    ],
)
def test_bad_messages(message):
    with pytest.raises((DecodeFailed, LimitExceeded)):
        msgpack_numpy_decoder(np.ndarray)(message)


def test_many_dimensions():
    with pytest.raises(LimitExceeded):
        msgpack_numpy_decoder(np.ndarray)(array_map(shape=[1] * 9 + [2]))


def test_contradictory_token_windows():
    raw = msgspec.msgpack.decode(encode(TextContext(max_length=9, tokens=[1, 2])))
    for change in (
        {"_processing_range": {"start": 0, "end": 3}},
        {"_processing_range": {"start": 2, "end": 1}},
        {"_processing_range": None},
        {"_completion_range": {"start": -1, "end": 1}},
        {"_current_length": 5},
        {"_processing_offset": 9},
        {"_prompt_length": 7},
    ):
        bad = {**raw, "tokens": {**raw["tokens"], **change}}
        with pytest.raises(DecodeFailed):
            msgpack_numpy_decoder(TextContext)(msgspec.msgpack.encode(bad))


def test_encoder_and_decoder_show_their_parameters_and_pickle():
    encoder = pickle.loads(pickle.dumps(msgpack_numpy_encoder(shared_memory_threshold=5)))
    assert (encoder._use_shared_memory, encoder._shared_memory_threshold) == (False, 5)
    decoder = pickle.loads(pickle.dumps(msgpack_numpy_decoder(Holder, copy=False)))
    assert (decoder._type, decoder._copy) == (Holder, False)
    assert decoder(encoder(Holder("a", np.arange(2)))).name == "a"


def vision():
    pixels = np.arange(4, dtype=np.float32).reshape(2, 2)
    return TextAndVisionContext(
        max_length=50,
        tokens=[1, 9, 9, 2],
        vision_token_ids=[9],
        images=[ImageMetadata(start_idx=1, end_idx=3, pixel_values=pixels, image_hash=-5)],
        extra_model_args={"grid": np.arange(3)},
    )


def speech():
    ctx = TTSContext(max_length=50, tokens=[1, 2], audio_prompt_tokens=np.arange(3, dtype=np.int32))
    ctx.update_speech_tokens(np.arange(5, dtype=np.int32))
    return ctx


def pixel():
    return PixelContext(
        tokens=[1, 2], negative_tokens=TokenBuffer(np.array([3])), latents=np.ones(2)
    )


DECODE_SPEECH = msgpack_numpy_decoder(TTSContext)


class Asked(msgspec.Struct, frozen=True):
    """A message with contexts in it."""

    name: str
    contexts: list[TTSContext]


@dataclass
class Job:
    """A base class declared inside a type of another project."""

    context: TextContext
    others: list[PixelContext | None]


class TestRoomForSpeechTokens:
    """It is not sent, wherever the context is in the message, and is rebuilt when needed."""

    @pytest.mark.parametrize(
        ("wrap", "at"),
        [
            (lambda ctx: ctx, []),
            (lambda ctx: [vision(), ctx], [1]),
            (lambda ctx: {"a": 1, "b": (ctx,)}, ["b", 0]),
            (lambda ctx: Job(ctx, []), ["context"]),
            (lambda ctx: Asked("id", [ctx]), ["contexts", 0]),
        ],
    )
    def test_is_not_sent(self, wrap, at):
        ctx = speech()
        raw = msgspec.msgpack.decode(encode(wrap(ctx)))
        for key in at:
            raw = raw[key]
        assert raw["_speech_tokens"]["shape"] == [5]
        assert "_speech_token_size" not in raw
        assert (len(ctx._speech_tokens), ctx._speech_token_size) == (128, 128)

    def test_is_made_anew_for_the_next_tokens(self):
        stayed, arrived = speech(), DECODE_SPEECH(encode(speech()))
        for count in (3, 0, 121, 2, 300):
            for ctx in (stayed, arrived):
                ctx.update_speech_tokens(np.arange(count, dtype=np.int32))
        assert arrived.speech_tokens.tolist() == stayed.speech_tokens.tolist()
        assert not arrived._speech_tokens[arrived._speech_token_end_idx :].any()

    def test_is_read_where_others_send_it(self):
        ctx = speech()
        raw = msgspec.msgpack.decode(encode(ctx))
        padded = np.arange(128, dtype=np.int32)
        raw["_speech_tokens"] = {
            "__np__": True, "data": padded.tobytes(), "shape": [128], "dtype": "<i4"
        }  # fmt: skip
        raw |= {"_speech_token_size": 128, "_speech_token_end_idx": 5}
        arrived = DECODE_SPEECH(msgspec.msgpack.encode(raw))
        ctx._arrival_time = arrived._arrival_time
        assert arrived == ctx and len(arrived._speech_tokens) == 128


class TestContextsArriveAsThemselves:
    @pytest.mark.parametrize("make", [vision, speech])
    @pytest.mark.parametrize(
        "declared",
        [TextContext, TextContext | TextAndVisionContext | TTSContext, TextContext | None],
        ids=str,
    )
    def test_where_their_base_or_a_union_is_declared(self, make, declared):
        ctx = make()
        result = msgpack_numpy_decoder(declared)(encode(ctx))
        assert type(result) is type(ctx)
        assert result == ctx

    def test_inside_containers_and_foreign_types(self):
        job = Job(vision(), [pixel(), None])
        result = msgpack_numpy_decoder(tuple[str, dict[str, Job]])(encode(("a", {"b": job})))
        assert result == ("a", {"b": job})
        assert type(result[1]["b"].context) is TextAndVisionContext

    def test_a_class_that_is_not_declared_is_refused(self):
        with pytest.raises(DecodeFailed, match="Invalid value"):
            msgpack_numpy_decoder(TextContext)(encode(pixel()))
        with pytest.raises(DecodeFailed, match="Invalid value"):
            msgpack_numpy_decoder(TTSContext)(encode(vision()))

    def test_without_a_type_it_is_what_was_declared(self):
        raw = msgspec.msgpack.decode(encode(vision()))
        del raw["type"]
        message = msgspec.msgpack.encode(raw)
        assert msgpack_numpy_decoder(TextAndVisionContext)(message) == vision_like(raw)
        with pytest.raises(DecodeFailed):
            msgpack_numpy_decoder(TextContext | TextAndVisionContext)(message)

    def test_grammar_state_stays_behind(self):
        class Grammar:
            def consume_token(self, token):
                return True

        ctx = vision()
        ctx.set_matcher(Grammar())
        result = msgpack_numpy_decoder(TextContext)(encode(ctx))
        assert result.matcher is None
        assert result == ctx


def vision_like(raw):
    ctx = vision()
    ctx.request_id = RequestID(raw["request_id"]["value"])
    ctx.sampling_params = SamplingParams(seed=raw["sampling_params"]["seed"])
    return ctx


def test_the_form_of_a_token_buffer():
    """Names and nesting of the later page, without free room and defaults."""
    ctx = TextContext(max_length=50, tokens=[1, 2, 3])
    ctx.update(4)
    raw = msgspec.msgpack.decode(encode(ctx))
    assert raw["type"] == "TextContext"
    assert raw["tokens"] == {
        "array": msgspec.msgpack.decode(encode(np.array([1, 2, 3, 4], np.int32))),
        "_processing_range": {"start": 3, "end": 4},
        "_completion_range": {"start": 3, "end": 4},
        "_prompt_length": 3,
    }


def test_capacity_behind_the_tokens_is_read_too():
    raw = msgspec.msgpack.decode(encode(TextContext(max_length=50, tokens=[1, 2, 3])))
    array = {"__np__": True, "data": np.arange(1, 9).tobytes(), "shape": [8], "dtype": "<i8"}
    raw["tokens"] = {
        "array": array,
        "_processing_range": {"start": 0, "end": 3},
        "_processing_offset": 0,
        "_completion_range": {"start": 3, "end": 3},
        "_prompt_length": 3,
        "_current_length": 3,
        "_actively_chunked": False,
    }
    ctx = msgpack_numpy_decoder(TextContext)(msgspec.msgpack.encode(raw))
    assert ctx.tokens.all.tolist() == [1, 2, 3]
    ctx.update(7)
    assert ctx.tokens.all.tolist() == [1, 2, 3, 7]


def test_an_array_under_any_stays_a_map():
    assert msgpack_numpy_decoder(dict[str, Any])(encode({"a": np.zeros(1, np.int8)}))["a"] == {
        "__np__": True, "data": b"\0", "shape": [1], "dtype": "|i1",
    }  # fmt: skip


# ------------------------------------------------------------------ log-probabilities


def queued(**entries):
    context = TextContext(max_length=1 << 30, tokens=[1] * 10_000)
    context._log_probabilities_data = {
        i: LogProbabilities(*entry) for i, entry in enumerate(entries.values())
    }
    return context


def test_log_probabilities_of_any_length_are_read():
    context = queued(
        nothing=([], []),
        no_likely_ones=([-1.5] * 20_000, [{}] * 20_000),
        one=([-1.5] * 20_000, [{i: -1.5} for i in range(20_000)]),
        twenty=([-1.5], [{i << 14: -i / 7 for i in range(20)}]),
        uneven=([], [{7: -1.5}, {}]),
        many=([-1.5], [{i: -i / 7 for i in range(100_000)}]),
    )
    assert msgpack_numpy_decoder(TextContext)(encode(context)) == context


@pytest.mark.parametrize("number", [b"\xca\xbf\0\0\0", b"\xcb\xbf\xe0" + bytes(6)])
def test_log_probabilities_of_other_writers_are_read(number):
    """Single precision; whole numbers stay whole numbers."""
    one = msgspec.msgpack.encode(
        {"token_log_probabilities": [-1], "top_log_probabilities": [{7: 0}]}
    )
    read = msgpack_numpy_decoder(LogProbabilities)
    assert read(one) == LogProbabilities([-1.0], [{7: 0.0}])
    raw = msgspec.Raw(number)
    many = {
        "token_log_probabilities": [raw] * 5000,
        "top_log_probabilities": [dict.fromkeys(range(1000, 1000 + n), raw) for n in (0, 1, 5, 20)]
        * 1250,
    }
    entry = read(msgspec.msgpack.encode(many))
    assert entry.token_log_probabilities == [-0.5] * 5000
    assert entry.top_log_probabilities[3] == dict.fromkeys(range(1000, 1020), -0.5)


@pytest.mark.parametrize(
    "lists",
    [
        (None, []),
        ([], None),
        ({}, []),
        ([], {}),
        ([], [[]]),
        ([], [None]),
        ([], [{"7": 0.5}]),
        ([], [{7: "x"}]),
        (["x"], []),
        ([None], []),
    ],
    ids=str,
)
def test_other_log_probabilities_are_refused(lists):
    names = ("token_log_probabilities", "top_log_probabilities")
    message = msgspec.msgpack.encode(dict(zip(names, lists, strict=True)))
    with pytest.raises(DecodeFailed):
        msgpack_numpy_decoder(LogProbabilities)(message)


@pytest.mark.parametrize("lists", [([], [{}] * 1000), ([0] * 1000, []), ([], [{7: 0}] * 1000)])
def test_log_probabilities_much_larger_than_their_bytes_are_refused(lists):
    names = ("token_log_probabilities", "top_log_probabilities")
    message = msgspec.msgpack.encode(dict(zip(names, lists, strict=True)))
    with pytest.raises(LimitExceeded, match="larger than their bytes"):
        msgpack_numpy_decoder(LogProbabilities)(message)
