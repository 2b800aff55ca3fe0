"""Hostile bytes at the decoders of whole contexts: typed errors and little memory.

The codec's benchmark measures the time that hostile contexts take.
"""

import contextlib
import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto import (
    DecodeFailed,
    GenerationOutput,
    LimitExceeded,
    LogProbabilities,
    PixelContext,
    RequestID,
    SamplingParams,
    TextContext,
    TextGenerationOutput,
    TokenBuffer,
    VersionMismatch,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from baton.proto.wire.wire_context import AnyWireContext

from ..suite.short import in_short
from .sample_contexts import CONTEXTS
from .test_fuzz import COUNT, UNITS_IN_SHORT, floods, mutated, peak_bytes

ALLOWED = (DecodeFailed, LimitExceeded, VersionMismatch)
encode = msgpack_numpy_encoder().frames
decode = msgpack_numpy_decoder(TextContext | PixelContext)
MAPS = [
    msgpack_numpy_decoder(kind, copy=copy)
    for kind in (TextContext | PixelContext, np.ndarray, GenerationOutput, TextGenerationOutput)
    for copy in (True, False)
]
MARGIN = 1 << 20
FACTOR = 32


def feed(frames):
    try:
        context = decode(frames)
        if isinstance(context, TextContext):
            assert len(context.tokens.all)
        return 1
    except ALLOWED:
        return 0


def feed_map(message):
    understood = 0
    for one in MAPS:
        try:
            one(message)
            understood += 1
        except ALLOWED:
            pass
    return understood


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=100), max_size=3), st.binary(max_size=100))
def test_random_bytes(frames, body):
    feed(frames)
    feed([body, *frames])
    feed_map(body)


def test_mutated_contexts():
    """Mutations of maps and arrays: whatever decodes is a context that can continue."""
    rng = random.Random(11)
    wires = [[bytes(frame) for frame in encode(make())] for make in CONTEXTS.values()]
    understood = 0
    for _ in range(300):
        for frames in wires:
            head = frames[0][: rng.choice([200, 600, 3000, len(frames[0])])]
            changed = [mutated(rng, head) + frames[0][len(head) :], *frames[1:]]
            if rng.random() < 0.1:
                changed.append(rng.randbytes(8))
            understood += feed(changed)
            understood += feed_map(changed[0])
    assert understood > 100, "the mutations should not all be caught at the door"


def test_truncated_contexts():
    for name in ("text under_way", "speech speaking", "pixel painting"):
        frames = [bytes(frame) for frame in encode(CONTEXTS[name]())]
        message = msgpack_numpy_encoder()(CONTEXTS[name]())
        for end in range(len(frames[0])):
            assert feed([frames[0][:end], *frames[1:]]) == 0
        for end in range(0, len(message), 7):
            assert feed_map(message[:end]) == 0


def text(value):
    return (
        bytes([0xA0 + len(value)]) + value.encode()
        if len(value) < 32
        else (bytes([0xD9, len(value)]) + value.encode())
    )


def paths(kind, path=()):
    """Paths of all fields of a struct, through the structs in it."""
    for field in msgspec.structs.fields(kind):
        at = (*path, field.encode_name)
        yield at
        for part in (field.type, *get_args(field.type)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from paths(part, at)


def at_end(path, data):
    """Make a map with the data at ``path``."""
    for key in reversed(path):
        data = b"\x81" + text(key) + data
    return data


@pytest.mark.parametrize("unit", UNITS_IN_SHORT)
def test_memory_of_floods_in_every_field(unit):
    """No field of a context becomes much larger than its bytes."""
    forms, seen = [], set()
    for form in get_args(AnyWireContext):
        kind = b"\x82" + text("type") + text(form.__struct_config__.tag)
        forms += [(kind, path) for path in paths(form) if path not in seen]
        seen |= set(paths(form))
    assert {("tokens", "array", "shape"), ("sampling_params", "stop")} < seen
    for name, flood in floods(unit).items():
        for kind, path in forms:
            data = kind + at_end(path, flood)[1:]
            peak = peak_bytes(lambda data=data: feed_map(data))
            assert peak < FACTOR * len(data) + MARGIN, (path, name)


def test_memory_of_queued_log_probabilities():
    context = TextContext(max_length=1 << 30, tokens=[1] * 10_000)
    for tops in ([{1: -1.0}, {}], [dict.fromkeys(range(20), -1.0)]):
        context._log_probabilities_data = {i: LogProbabilities([-1.0], tops) for i in range(9000)}
        frames = [bytes(frame) for frame in encode(context)]
        assert decode(frames) == context
        assert (
            peak_bytes(lambda frames=frames: feed(frames)) < FACTOR * sum(map(len, frames)) + MARGIN
        )


CHOSEN, TOP = text("token_log_probabilities"), text("top_log_probabilities")
NUMBERS = [-1.0, -2.5]


def one_entry(chosen, top):
    """Raw lists as one entry's log-probabilities, in a context and in an output."""
    entry = b"\x82" + CHOSEN + chosen + TOP + top
    context = b"\x82" + text("type") + text("TextContext") + text("_log_probabilities_data")
    output = b"\x82" + text("request_id") + b"\x81" + text("value") + text("r")
    return [context + b"\x81\0" + entry, output + text("log_probabilities") + b"\x91" + entry]


@pytest.mark.parametrize("unit", UNITS_IN_SHORT)
def test_memory_of_log_probabilities_in_one_buffer(unit):
    """The lists of an entry, the likely tokens of one token, and whole entries."""
    packed = msgspec.msgpack.encode
    for name, flood in floods(unit).items():
        messages = one_entry(flood, b"\x90") + one_entry(b"\x90", flood) + one_entry(flood, flood)
        messages += one_entry(packed(NUMBERS), b"\x92" + flood + flood)
        messages += one_entry(packed([0.5] * COUNT), flood)
        for message in messages:
            peak = peak_bytes(lambda message=message: feed_map(message))
            assert peak < FACTOR * len(message) + MARGIN, name


@pytest.mark.parametrize("maps", [1000, 10_000, 20_000, 25_000, 100_000])
def test_memory_of_both_lists_together(maps):
    """Numbers and maps share one limit on memory."""
    numbers = 4 * COUNT
    top = b"\xdd" + maps.to_bytes(4, "big") + b"\x81\0\0" * maps
    for message in one_entry(b"\xdd" + numbers.to_bytes(4, "big") + bytes(numbers), top):
        assert (
            peak_bytes(lambda message=message: feed_map(message)) < FACTOR * len(message) + MARGIN
        )


def test_memory_of_many_small_entries_in_one_buffer():
    for chosen, top in (
        (b"\x90", b"\x90"),
        (b"\x90", b"\x97" + b"\x80" * 7),
        (b"\x90", b"\xdc\0\x38" + b"\x80" * 56),
        (b"\x91\0", b"\x91\x81\0\0"),
        (b"\x90", b"\x91\x89" + b"".join(bytes([i, 0]) for i in range(9))),
        (b"\x9f" + bytes(15), b"\x90"),
    ):
        entry = b"\x82" + CHOSEN + chosen + TOP + top
        head = b"\x82" + text("type") + text("TextContext") + text("_log_probabilities_data")
        keys = [b"\xcd" + key.to_bytes(2, "big") for key in range(COUNT)]
        message = head + b"\xde" + COUNT.to_bytes(2, "big") + b"".join(key + entry for key in keys)
        assert (
            peak_bytes(lambda message=message: feed_map(message)) < FACTOR * len(message) + MARGIN
        )


@pytest.mark.parametrize(
    "dtype", ["|O", "|V8", "<U3", "<c8", "<M8[s]", "[('a','<i4')]", "<f16", "f4"]
)
@pytest.mark.parametrize("shape", [[1], [1 << 50]])
def test_other_element_types_are_refused_before_anything_is_made(dtype, shape):
    message = msgspec.msgpack.encode(
        {"__np__": True, "data": bytes(16), "shape": shape, "dtype": dtype}
    )

    def refuse():
        with pytest.raises(DecodeFailed):
            MAPS[2](message)

    assert peak_bytes(refuse) < 100_000


@pytest.mark.parametrize("shape", [[1 << 31], [1 << 20, 1 << 20], [0, 1 << 62], [5]])
def test_sizes_that_are_only_claimed_cost_nothing(shape):
    for more in ({"__np__": True, "data": bytes(16)}, {"__shm__": True, "name": "nothing"}):
        message = msgspec.msgpack.encode({"shape": shape, "dtype": "<f4", **more})
        assert peak_bytes(lambda message=message: feed_map(message)) < 100_000


@pytest.mark.parametrize("unit", [b"\x80", b"\x81\xa4seed\x05"], ids=["empty", "a seed"])
@pytest.mark.parametrize("kind", [np.ndarray, SamplingParams])
def test_memory_of_declared_lists(kind, unit):
    decoders = [msgpack_numpy_decoder(form) for form in (list[kind], list[list[kind]])]
    for count in (30_000, 1_000_000):
        flat = b"\xdd" + count.to_bytes(4, "big") + unit * count
        nested = b"\xdd" + (count // 2).to_bytes(4, "big") + (b"\x92" + 2 * unit) * (count // 2)
        for one, message in zip(decoders, (flat, nested), strict=True):

            def give(one=one, message=message):
                with pytest.raises((DecodeFailed, LimitExceeded)):
                    one(message)

            assert peak_bytes(give) < FACTOR * len(message) + MARGIN


@dataclasses.dataclass
class Plain:
    """A class of another project, with a default for every field."""

    number: int = 0
    numbers: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class WithArray:
    array: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(100))
    plain: Plain | None = None


class Struct(msgspec.Struct):
    number: int = 0
    numbers: list[int] = []


@dataclasses.dataclass
class Holder:
    plain: dict[int, Plain]
    ids: list[RequestID] = dataclasses.field(default_factory=list)


T = TypeVar("T")

DECLARED = (
    list[RequestID], dict[RequestID, int], set[RequestID], tuple[RequestID, ...],
    list[Plain], dict[int, Plain], list[tuple[int, Plain]], list[Plain | None],
    list[WithArray], list[Struct], dict[str, Struct], list[Holder], Holder,
    list[SamplingParams], list[np.ndarray], list[TextContext], list[TokenBuffer],
    list[int], list[str], dict[int, int],
)  # fmt: skip
SOME = (list[Plain], Holder, list[SamplingParams], list[int])


def record_floods(size):
    """Messages of about ``size`` bytes with as many values as fit, mostly records."""
    pack = msgspec.msgpack.encode
    values = [b"\x80", b"\0", b"\x92\0\x80", pack({"plain": {}}), pack({"value": ""})]
    values += [pack({"numbers": []}), pack({"plain": {}, "ids": []})]
    for value in values:
        count, pairs = size // len(value), size // (len(value) + 5)
        keyed = b"".join(b"\xce" + key.to_bytes(4, "big") + value for key in range(pairs))
        row = b"\xdd" + count.to_bytes(4, "big") + value * count
        table = b"\xdf" + pairs.to_bytes(4, "big") + keyed
        yield from (row, table, b"\x81" + text("plain") + table)
        yield b"\x82" + text("plain") + b"\x80" + text("ids") + row


@pytest.mark.parametrize(
    "declared", in_short({str(kind): kind for kind in DECLARED}, *map(str, SOME))
)
def test_memory_and_time_of_declared_types(declared):
    decode = msgpack_numpy_decoder(declared)

    def give(message):
        with contextlib.suppress(DecodeFailed, LimitExceeded):
            decode(message)

    # A decoder whose work grows with the square of the records would take the test's time.
    for message in record_floods(1_000_000):
        give(message)
    for message in record_floods(100_000):
        peak = peak_bytes(lambda message=message: give(message))
        assert peak < FACTOR * len(message) + MARGIN


PLAIN = [
    list[int],
    list[list[int]],
    list[set[int]],
    dict[int, list[int]],
    list[dict[str, Any]],
    Any,
]


def plain_floods(size):
    """Messages of about ``size`` bytes whose values take much more than their bytes."""
    pack = msgspec.msgpack.encode
    units = [b"\x90", b"\x80", b"\xf0", b"\xd0\x80", b"\x91\xf0", b"\x95\0\1\2\3\4", b"\x81\0\xf0"]
    units += [pack("ab"), pack(["ab"]), pack({"a": {}}), pack("\u20ac\U0001f600"), pack(-70_000)]
    units += [pack(2.5), b"\0\xf0", b"\xf0\xcc\xff"]
    for unit in units:
        count = size // len(unit)
        yield b"\xdd" + count.to_bytes(4, "big") + unit * count
        if len(unit) > 1:
            continue
        pairs = size // 6
        keyed = b"".join(b"\xce" + key.to_bytes(4, "big") + unit for key in range(pairs))
        yield b"\xdf" + pairs.to_bytes(4, "big") + keyed
    yield pack([-20] * 150_000)
    for count in (4915, 19_661):
        yield pack(list(range(count)))
        yield pack({f"k{key}": key for key in range(count)})


@pytest.mark.parametrize("declared", PLAIN, ids=str)
def test_memory_of_plain_values(declared):
    decode = msgpack_numpy_decoder(declared)

    def give(message):
        with contextlib.suppress(DecodeFailed, LimitExceeded):
            decode(message)

    for message in (*plain_floods(4000), *plain_floods(45_000)):
        peak = peak_bytes(lambda message=message: give(message))
        assert peak < FACTOR * len(message) + MARGIN, message[:40]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (list[int], list(range(-100, 200_000))),
        (list[int], [-100] * 20_000),
        (list[list[int]], [[1, 2, 3, 500]] * 50_000),
        (set[int], set(range(100_000))),
        (list[dict[str, Any]], [{"id": 70_000, "name": "prompt", "score": 0.5}] * 20_000),
        (Any, {"texts": ["a text of some words"] * 10_000, "ids": [[5, 6, 7_000]] * 10_000}),
    ],
    ids=["ints", "negative", "nested", "set", "records", "any"],
)
def test_usual_plain_values_are_read_at_any_length(declared, value):
    assert msgpack_numpy_decoder(declared)(msgspec.msgpack.encode(value)) == value


@dataclasses.dataclass
class Result(Generic[T]):
    result: T


def test_records_are_read_in_every_kind_of_container():
    ids = [RequestID("a"), RequestID("b")]
    encoded = msgpack_numpy_encoder()(ids)
    assert msgpack_numpy_decoder(set[RequestID])(encoded) == set(ids)
    assert msgpack_numpy_decoder(Sequence[RequestID])(encoded) == ids
    assert msgpack_numpy_decoder(tuple[RequestID, ...])(encoded) == tuple(ids)
    results = {"a": Result(ids[0]), "b": Result(ids[1])}
    for declared in (dict[str, Result[RequestID]], Mapping[str, Result[RequestID]]):
        assert msgpack_numpy_decoder(declared)(msgpack_numpy_encoder()(results)) == results


def test_long_lists_of_records_are_read():
    asked = {n: Holder({n: Plain(n, [n])}, [RequestID(), RequestID("a")]) for n in range(300)}
    assert msgpack_numpy_decoder(dict[int, Holder])(msgpack_numpy_encoder()(asked)) == asked
    ids = [RequestID() for _ in range(20_000)]
    assert msgpack_numpy_decoder(list[RequestID])(msgpack_numpy_encoder()(ids)) == ids
    sent = [Struct(n, [n]) for n in range(2000)]
    assert msgpack_numpy_decoder(list[Struct])(msgpack_numpy_encoder()(sent)) == sent


def test_long_lists_of_sampling_parameters_are_read():
    asked = [SamplingParams(seed=seed, max_new_tokens=9) for seed in range(3000)]
    assert msgpack_numpy_decoder(list[SamplingParams])(msgpack_numpy_encoder()(asked)) == asked
