import struct
import zlib
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import (
    DecodeFailed,
    EnvelopeDamaged,
    LimitExceeded,
    ProtocolError,
    VersionMismatch,
)
from baton.proto.limits import MAX_EMBEDDING_SIZE
from baton.proto.wire import messages
from baton.proto.wire.arrays import DTYPES, ArrayMap, ArrayReader, array_map
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.envelope import (
    EnvelopeDecoder,
    EnvelopeEncoder,
    decode_kv_header,
    encode_kv_header,
)
from baton.proto.wire.map_bytes import MapEncoder
from baton.proto.wire.messages import (
    Assign,
    ClientToRouter,
    Commit,
    DecodeToPrefill,
    ExtensionCounts,
    Fence,
    GrantRef,
    Heartbeat,
    KVFrame,
    Ping,
    PrefillToDecode,
    Probe,
    RouterToClient,
    RouterToSupervisor,
    RouterToWorker,
    Submit,
    Terminal,
    WorkerToRouter,
)
from baton.proto.wire.wire_context import (
    WireContext,
    WireImage,
    WireSampling,
    WireTokens,
    WireVisionContext,
)

UNIONS = [
    ClientToRouter,
    RouterToClient,
    WorkerToRouter,
    RouterToWorker,
    RouterToSupervisor,
    PrefillToDecode,
    DecodeToPrefill,
]
encoder = EnvelopeEncoder()


def submit(count, request_id="r", dtype=np.int32):
    context = WireContext(tokens=WireTokens(np.arange(count).astype(dtype)), max_length=count + 10)
    return Submit(request_id=request_id, context=context)


def decode(frames, union=ClientToRouter, **options):
    return EnvelopeDecoder(union, **options).decode([bytes(frame) for frame in frames])


# ------------------------------------------------------------------ every message, any value


def values(info):
    """Strategy for values of an inspected type."""
    if isinstance(info, inspect.StructType):
        return struct_values(info.cls)
    if isinstance(info, inspect.UnionType):
        return st.one_of([values(member) for member in info.types])
    if isinstance(info, inspect.ListType):
        return st.lists(values(info.item_type), max_size=min(3, info.max_length or 3))
    if isinstance(info, inspect.TupleType):
        return st.tuples(*[values(item) for item in info.item_types])
    if isinstance(info, inspect.DictType):
        return st.dictionaries(values(info.key_type), values(info.value_type), max_size=3)
    return {
        inspect.IntType: st.integers(getattr(info, "ge", None) or 0, _largest(info)),
        inspect.FloatType: st.floats(
            getattr(info, "ge", None), getattr(info, "le", None), allow_nan=False
        ),
        inspect.BoolType: st.booleans(),
        inspect.StrType: st.text(max_size=5),
        inspect.BytesType: st.binary(max_size=20),
        inspect.NoneType: st.none(),
    }[type(info)]


def contexts():
    """Strategy for maps of requests and of partly generated contexts."""
    fresh = st.builds(
        WireContext,
        tokens=st.sampled_from([1, 1023, 1024, 5000]).map(
            lambda n: WireTokens(np.arange(n, dtype=np.int32))
        ),
        max_length=st.integers(0, 1 << 53),
        sampling=struct_values(WireSampling),
        model_name=st.text(max_size=5),
        eos_sequences=st.lists(st.lists(st.integers(0, 9), min_size=1), max_size=3),
        cache_salt=st.text(max_size=5),
    )
    generated = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5)
    return st.one_of(fresh, st.builds(grown_map, fresh, generated))


def struct_values(cls):
    known = inspect.type_info(cls).fields
    fields = {f.name: values(f.type) for f in known if not isinstance(f.type, inspect.RawType)}
    fields |= {f.name: None for f in known if isinstance(f.type, inspect.RawType)}
    fields.pop("arrays", None)  # the encoder's own
    if "context" in fields:
        fields["context"] = contexts()
    if "embedding" in fields:
        fields["embedding"] = st.sampled_from([None, 0, 1, 255, 384, 4096]).map(
            lambda size: None if size is None else np.arange(size, dtype=np.float32)
        )
    if cls is TokenLogProbs:
        tokens = st.integers(-(1 << 31), (1 << 31) - 1)
        top = st.dictionaries(tokens, fields["logprob"], max_size=20)
        return st.builds(TokenLogProbs.of, fields["logprob"], top)
    return st.builds(cls, **fields)


def _largest(info):
    if getattr(info, "lt", None) is not None:
        return info.lt - 1
    return (1 << 64) - 1 if getattr(info, "le", None) is None else info.le


@pytest.mark.parametrize("union", UNIONS, ids=range(len(UNIONS)))
def test_every_message_round_trips(union):
    @settings(max_examples=60)
    @given(st.lists(st.one_of([struct_values(cls) for cls in get_args(union)]), max_size=4))
    def check(batch):
        frames = encoder.encode(batch)
        assert frames[0][:3] == b"BT\x03"
        assert decode(frames, union) == batch

    check()


def test_every_message_belongs_to_a_direction():
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Message)
    }
    used = {cls for union in UNIONS for cls in get_args(union)}
    assert declared - used == {messages.Message}


@settings(max_examples=60)
@given(struct_values(KVFrame).filter(lambda header: header.nbytes <= 16 << 20))
def test_kv_headers_round_trip(header):
    assert decode_kv_header(encode_kv_header(header)) == header
    named = msgspec.structs.replace(header, shared=True, nbytes=1 << 30)
    assert decode_kv_header(encode_kv_header(named)) == named


# ------------------------------------------------------------------ arrays


def test_large_arrays_are_not_copied():
    batch = [submit(5000), Ping(), submit(5), submit(1024)]
    frames = encoder.encode(batch)
    assert [len(frame) for frame in frames[1:]] == [20000, 4096]
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), batch[0].context.tokens.array)
    received = [bytes(frame) for frame in frames]
    tokens = EnvelopeDecoder(ClientToRouter).decode(received)[0].context.tokens.array
    assert np.shares_memory(tokens, np.frombuffer(received[1], np.int32))
    assert not tokens.flags.writeable


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(3, np.int32),
        np.zeros(3, np.float64),
        np.zeros((3, 1), np.float32),
        np.zeros(MAX_EMBEDDING_SIZE + 1, np.float32),
    ],
)
def test_a_vector_is_what_it_should_be(vector):
    frames = encoder.encode([Terminal(request=b"r", embedding=vector)])
    with pytest.raises(DecodeFailed, match="expected float32"):
        decode(frames, RouterToClient)


def test_a_large_vector_is_a_frame_of_its_own():
    vector = np.arange(MAX_EMBEDDING_SIZE, dtype=np.float32)
    frames = encoder.encode([Terminal(request=b"r", embedding=vector), Ping()])
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), vector)
    terminal, _ = decode(frames, RouterToClient)
    assert np.array_equal(terminal.embedding, vector)
    assert not terminal.embedding.flags.writeable


def test_arrays_are_read_only_whatever_the_frame_is():
    frames = [bytearray(frame) for frame in encoder.encode([submit(5000), submit(5)])]
    for message in EnvelopeDecoder(ClientToRouter).decode(frames):
        assert not message.context.tokens.array.flags.writeable
        assert message.context.tokens.array.flags.aligned


def test_a_short_context_keeps_no_envelope_alive():
    """A router keeps the array until the request ends, and the envelope may have megabytes."""
    received = bytes(encoder.encode([submit(20, f"{i:09}") for i in range(8)])[0])
    for message in EnvelopeDecoder(ClientToRouter).decode([received]):
        raw = MapEncoder().inline(message.context)
        for part in (raw, message.context.tokens.array):
            own = np.frombuffer(part, np.uint8)
            assert not np.shares_memory(own, np.frombuffer(received, np.uint8))


def test_a_context_is_forwarded_as_it_came():
    """Unknown fields pass too; arrays keep their numbers."""
    tokens = {"__np__": True, "frame": 1, "shape": [2], "dtype": "<i4"}
    context = {"later": [1], "type": "TextContext", "tokens": {"array": tokens}, "max_length": 9}
    raw = msgspec.msgpack.encode(context)
    message = {"type": "Submit", "request_id": "r", "context": msgspec.Raw(raw), "arrays": 1}
    body = msgspec.msgpack.encode([message, message])
    pair = decode([b"BT\x03" + body, struct.pack("<2i", 5, 6), struct.pack("<2i", 7, 8)])
    assert [m.context.tokens.array.tolist() for m in pair] == [[5, 6], [7, 8]]
    assigned = [
        Assign(request=b"r", attempt=1, context=m.context, deadline=1.0) for m in reversed(pair)
    ]
    frames = encoder.encode(assigned)
    assert [bytes(frame) for frame in frames[1:]] == [
        struct.pack("<2i", 7, 8), struct.pack("<2i", 5, 6)
    ]  # fmt: skip
    assert bytes(frames[0]).count(raw) == 2


def test_array_frames_follow_the_order_of_the_messages_however_each_is_encoded():
    """Contexts made here, contexts that came before, and vectors, short and long."""
    (came,) = decode(encoder.encode([submit(3000, "came")]))
    vector = Terminal(request=b"v", embedding=np.arange(2048, dtype=np.float32))
    image = WireVisionContext(
        tokens=WireTokens(np.arange(1500, dtype=np.int32)),
        max_length=2000,
        extra_model_args={"grid": np.arange(1000), "few": np.arange(3)},
    )
    batch = [
        submit(5000, "made"),
        came,
        submit(9, "short"),
        vector,
        Submit(request_id="image", context=image),
        submit(4000, "last"),
        Terminal(request=b"end"),
    ]
    frames = encoder.encode(batch)
    sizes = [memoryview(frame).nbytes for frame in frames[1:]]
    assert sizes == [20000, 12000, 8192, 6000, 8000, 16000]
    assert decode(frames, ClientToRouter | Terminal) == batch


def test_other_kinds_are_passed_on_without_a_copy():
    """As in a router: decode and encode without copying pixels."""
    image = WireImage(4, 9, np.arange(5000, dtype=np.float32).reshape(2, 2500), -7)
    context = WireVisionContext(
        tokens=WireTokens(np.arange(2000, dtype=np.int32)),
        max_length=3000,
        vision_token_ids=[4],
        images=[image, WireImage(20, 21, np.zeros((0, 3), np.uint16))],
        extra_model_args={"grid": np.arange(3000)},
    )
    batch = [Submit(request_id="r", context=context), submit(5000)]
    received = [bytes(frame) for frame in encoder.encode(batch)]
    messages = EnvelopeDecoder(ClientToRouter).decode(received)
    assert messages == batch
    assert type(messages[0].context) is WireVisionContext
    again = encoder.encode(messages)
    assert [bytes(frame) for frame in again] == received
    for sent, came in zip(again[1:], received[1:], strict=True):
        assert np.shares_memory(np.frombuffer(sent, np.uint8), np.frombuffer(came, np.uint8))


def test_more_large_arrays_than_frames_travel_inline():
    batch = [submit(1024, str(i)) for i in range(70)]
    frames = encoder.encode(batch)
    assert len(frames) == 65
    assert decode(frames) == batch


@pytest.mark.parametrize("dtype", dict.fromkeys(DTYPES.values()), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (1,) * 8])
def test_all_element_types_and_shapes(dtype, shape):
    array = np.ones(shape, dtype)
    packed = msgspec.msgpack.encode(array_map(array))
    result = ArrayReader().read(msgspec.msgpack.decode(packed, type=ArrayMap))
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert np.array_equal(result, array)


def test_arrays_with_gaps_are_sent_without_them():
    strided = submit(20)
    every_second = strided.context.tokens.array[::2]
    context = msgspec.structs.replace(strided.context, tokens=WireTokens(every_second))
    batch = [msgspec.structs.replace(strided, context=context)]
    assert decode(encoder.encode(batch)) == batch


@pytest.mark.parametrize("dtype", [object, "i4,i4", "M8[s]", complex, np.longdouble, "U3"])
def test_other_element_types_are_not_sent(dtype):
    with pytest.raises(TypeError, match="cannot be encoded"):
        array_map(np.zeros(2, dtype))


def test_objects_are_not_sent_and_numpy_numbers_are():
    with pytest.raises(TypeError, match="object cannot be part"):
        encoder.encode([Ping(nonce=object())])
    assert decode(encoder.encode([Ping(nonce=np.int64(7))])) == [Ping(nonce=7)]


# ------------------------------------------------------------------ damage


def replaced(data, extra=(), **more):
    """A Submit whose tokens are an array of two int32, in this place, with changes."""
    place = {"data": data} if isinstance(data, bytes) else {"frame": data}
    array = {"__np__": True, "shape": [2], "dtype": "<i4", **place, **more}
    context = {"type": "TextContext", "tokens": {"array": array}, "max_length": 10}
    message = {"type": "Submit", "request_id": "r", "context": context, "arrays": len(extra)}
    return [b"BT\x03" + msgspec.msgpack.encode([message]), *extra]


def test_the_documented_array_form_is_enough():
    frames = replaced(struct.pack("<2i", 5, -6))
    assert decode(frames)[0].context.tokens.array.tolist() == [5, -6]


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (replaced(b""), DecodeFailed),
        (replaced(bytes(7)), DecodeFailed),
        (replaced(bytes(9)), DecodeFailed),
        (replaced(bytes(8), dtype="|O"), DecodeFailed),
        (replaced(bytes(8), dtype="?" * 99), DecodeFailed),
        (replaced(bytes(8), shape=[-1, -2]), DecodeFailed),
        (replaced(bytes(8), shape=[1] * 9 + [2]), LimitExceeded),
        (replaced(bytes(8), shape=[1 << 31] * 4), LimitExceeded),
        (replaced(bytes(8), shape=[1 << 30]), LimitExceeded),
        (replaced(bytes(8), __shm__=True), DecodeFailed),
        (replaced(b"", __np__=False, __shm__=True, name="baton"), DecodeFailed),
        (replaced(1), DecodeFailed),
        (replaced(2, [bytes(8)]), DecodeFailed),
        (replaced(2, [bytes(8), bytes(8)]), DecodeFailed),
        (replaced(65, [bytes(8)]), DecodeFailed),
        (replaced(1, [bytes(4)]), DecodeFailed),
        (replaced(bytes(8), [bytes(8)]), DecodeFailed),
        (replaced(1, [bytes(8), bytes(8)]), DecodeFailed),
        (replaced(1, [bytes(8)] * 65), LimitExceeded),
        ([], DecodeFailed),
        ([b""], DecodeFailed),
        ([b"BT\x03"], DecodeFailed),
        ([b"XT\x03\x90"], DecodeFailed),
        ([b"BK\x03\x90"], DecodeFailed),
        ([b"BT\x02\x90"], VersionMismatch),
        ([b"BT\x03\x90\x90"], DecodeFailed),
        ([b"BT\x03\x90", b"extra"], DecodeFailed),
        ([b"BT\x03\x80"], DecodeFailed),
        ([b"BT\x03\x91\x80"], DecodeFailed),
        ([b"BT\x03\x91\x81\xa4type\xa9Described"], DecodeFailed),
        ([b"BT\x03\x91\x81\xa4type\xa1\xff"], DecodeFailed),
        ([b"BT\x03\x91\x82\xa4type\xa4Ping\xa1z" + b"\x91" * 100_000], LimitExceeded),
        ([b"BT\x03" + b"\x91" * 100_000], DecodeFailed),
        ([b"BT\x03\xdd\x00\x01\x00\x01"], LimitExceeded),
        ([b"BT\x03\xdd\x00\x00\x00\x01"], DecodeFailed),
        ([b"BT\x03\xdd"], DecodeFailed),
        ([bytes((16 << 20) + 1)], LimitExceeded),
    ],
)
def test_damage_gives_a_typed_error(frames, error):
    with pytest.raises(error) as caught:
        decode(frames)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 300


def test_a_generic_value_in_place_of_an_array_is_refused_unbuilt():
    for value in ([], {}, [[[]]], b"bytes", 5, None, msgspec.msgpack.Ext(2, bytes(16))):
        context = {"type": "TextContext", "tokens": value, "max_length": 5}
        body = msgspec.msgpack.encode([{"type": "Submit", "request_id": "r", "context": context}])
        with pytest.raises(DecodeFailed):
            decode([b"BT\x03" + body])


def test_unknown_fields_of_a_newer_peer_are_skipped():
    body = [{"type": "Ping", "nonce": 3, "later": {"a": [1, {"b": 2}]}}]
    assert decode([b"BT\x03" + msgspec.msgpack.encode(body)]) == [Ping(nonce=3)]


def test_the_size_limit_is_the_decoders_own():
    frames = encoder.encode([Ping(nonce=1 << 40)])
    with pytest.raises(LimitExceeded):
        decode(frames, max_bytes=10)


def test_what_a_receiver_would_refuse_is_not_sent():
    with pytest.raises(LimitExceeded):
        encoder.encode([Ping()] * 65_537)
    with pytest.raises(LimitExceeded):
        encoder.encode([Submit(request_id="x" * (17 << 20), context=submit(1).context)])


@pytest.mark.parametrize("field", ["point", "name", "error"])
def test_long_texts_of_a_users_class_are_refused(field):
    for length in (256, 257):
        counts = ExtensionCounts(**{"point": "policy", "name": "own:C", field: "x" * length})
        frames = encoder.encode([Heartbeat(incarnation=1, progress=1, extensions=[counts])])
        if length == 256:
            assert decode(frames, WorkerToRouter)[0].extensions == [counts]
        else:
            with pytest.raises(DecodeFailed, match="256"):
                decode(frames, WorkerToRouter)


def test_long_lists_of_stops_are_refused_before_they_are_built():
    for name, value in [("eos_sequences", [[]] * 81), ("eos_sequences", [[1] * 129])]:
        context = msgspec.structs.replace(submit(1).context, **{name: value})
        with pytest.raises(DecodeFailed, match="length"):
            decode(encoder.encode([Submit(request_id="r", context=context)]))


KV = KVFrame(
    grant=GrantRef(1, 2, 3),
    index=0,
    layer_start=0,
    layer_count=1,
    block_start=0,
    block_count=1,
    nbytes=100,
    checksum=(1 << 64) - 1,
)


def kv_header(body):
    return b"BK\x03" + zlib.crc32(body).to_bytes(4, "little") + body


def test_every_flipped_bit_of_a_kv_header_is_noticed():
    header = encode_kv_header(KV)
    for bit in range(24, 8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EnvelopeDamaged):
            decode_kv_header(bytes(damaged))


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"", DecodeFailed),
        (b"BT\x03" + encode_kv_header(KV)[3:], DecodeFailed),
        (b"BK\x07" + encode_kv_header(KV)[3:], VersionMismatch),
        (encode_kv_header(KV)[:-1], EnvelopeDamaged),
        (encode_kv_header(KV) + b"\0", EnvelopeDamaged),
        (b"BK\x03" + bytes(3), DecodeFailed),
        (kv_header(b"\x90"), DecodeFailed),
        (kv_header(encode_kv_header(KV)[7:] + b"\0"), DecodeFailed),
        (encode_kv_header(msgspec.structs.replace(KV, nbytes=(16 << 20) + 1)), LimitExceeded),
        (encode_kv_header(msgspec.structs.replace(KV, shared=True, nbytes=1 << 41)), LimitExceeded),
        (encode_kv_header(msgspec.structs.replace(KV, nbytes=-1)), DecodeFailed),
        (encode_kv_header(msgspec.structs.replace(KV, block_count=-1)), DecodeFailed),
        (encode_kv_header(KV) + bytes(300), LimitExceeded),
    ],
)
def test_damaged_kv_headers(frame, error):
    with pytest.raises(error):
        decode_kv_header(frame)


KEY = b"k" * 16
OUT_OF_BOUNDS = {
    "attempt": (RouterToWorker, {"type": "Abort", "request": KEY, "attempt": 1 << 32}),
    "negative attempt": (RouterToWorker, {"type": "Abort", "request": KEY, "attempt": -1}),
    "long key": (RouterToWorker, {"type": "Abort", "request": KEY * 5, "attempt": 1}),
    "negative position": (RouterToWorker, {"type": "Adopt", "request": KEY, "position": -1}),
    "negative identity": (RouterToWorker, {"type": "PeerDead", "incarnation": -1}),
    "token": (WorkerToRouter, {"type": "Tokens", "runs": [[KEY, 1, 4, [1 << 31]]]}),
    "key in a list": (ClientToRouter, {"type": "FinalAck", "requests": [KEY * 5]}),
    "worker": (ClientToRouter, {"type": "Drain", "worker": "w" * 5000}),
    "nan": (
        WorkerToRouter,
        {"type": "Busy", "request": KEY, "attempt": 1, "retry_after": float("nan")},
    ),
    "endless": (
        WorkerToRouter,
        {"type": "Busy", "request": KEY, "attempt": 1, "retry_after": float("inf")},
    ),
    "negative tokens": (
        PrefillToDecode,
        {
            "type": "Reserve", "request": KEY, "attempt": 1, "incarnation": 3, "hashes": [],
            "num_tokens": -17, "growth": 0, "deadline": 1.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_numbers_and_lengths_out_of_bounds_are_refused(name):
    union, message = OUT_OF_BOUNDS[name]
    frame = b"BT\x03" + msgspec.msgpack.encode([message])
    with pytest.raises(DecodeFailed, match="Expected"):
        EnvelopeDecoder(union).decode([frame])


# ------------------------------------------------------------------ seals


def digest(parts):
    return zlib.crc32(b"".join(parts))


sealing = EnvelopeEncoder(digest=digest)


def sealed_decoder():
    return EnvelopeDecoder(PrefillToDecode, digest=digest)


def large_commit():
    context = grown_map(submit(2000).context, [5, 6])
    grant = GrantRef(7, 1, 2)
    return Commit(
        request=b"r", attempt=1, grant=grant, frames=1, bytes=9, digest=3, context=context,
        router="r", deadline=1.0,
    )  # fmt: skip


def test_a_sealed_envelope_is_read_as_it_was_sealed():
    messages = [large_commit(), Ping(nonce=3)]
    frames = sealing.encode(messages)
    assert len(frames) == 2
    assert bytes(frames[0][:3]) == b"BS\x03"
    assert int.from_bytes(frames[0][3:11], "little") == digest([frames[0][11:], frames[1]])
    decoder = sealed_decoder()
    assert decoder.decode(frames) == messages
    assert decoder.damaged == 0


def test_every_flipped_bit_of_a_sealed_envelope_is_noticed():
    frames = [bytes(frame) for frame in sealing.encode([large_commit()])]
    decoder, flips = sealed_decoder(), 0
    for which, frame in enumerate(frames):
        for at in range(0, len(frame), 1 if which == 0 else 97):
            damaged = bytearray(frame)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(EnvelopeDamaged if which or at > 2 else ProtocolError):
                decoder.decode([*frames[:which], bytes(damaged), *frames[which + 1 :]])
            flips += 1
    assert decoder.damaged == flips - 3


def test_without_a_seal_only_harmless_messages_are_heard():
    decoder = sealed_decoder()
    harmless = [Ping(nonce=1), Probe(nonce=2)]
    assert decoder.decode(EnvelopeEncoder().encode(harmless)) == harmless
    for message in (large_commit(), Fence(grant=GrantRef(1, 2, 3))):
        with pytest.raises(DecodeFailed, match="sealed envelope"):
            decoder.decode(EnvelopeEncoder().encode([Ping(nonce=1), message]))


def test_a_seal_means_nothing_where_none_is_asked_for():
    with pytest.raises(DecodeFailed):
        decode(sealing.encode([Ping(nonce=1)]))


@pytest.mark.parametrize(
    "frame", [b"BS", b"BS\x03" + bytes(8), b"BS\x03\x90", b"BS\x03" + b"\xdd" * 8]
)
def test_a_sealed_envelope_cut_short(frame):
    with pytest.raises(DecodeFailed):
        sealed_decoder().decode([frame])


def test_the_size_limit_counts_the_seal():
    size = len(sealing.encode([Ping(nonce=1)])[0])
    EnvelopeEncoder(size, digest).encode([Ping(nonce=1)])
    with pytest.raises(LimitExceeded):
        EnvelopeEncoder(size - 1, digest).encode([Ping(nonce=1)])


@pytest.mark.parametrize("field", ["compute_seconds", "histograms"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e16])
def test_a_total_is_finite_and_bounded(field, value):
    wrong = value if field == "compute_seconds" else {"step_seconds": [[1], value]}
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({field: wrong}), type=messages.WorkerLoad)
