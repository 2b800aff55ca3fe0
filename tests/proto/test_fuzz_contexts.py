"""Hostile bytes at the decoders of whole contexts: typed errors and little memory.

How long they take, the codec's benchmark says.
"""

import importlib.util
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto import (
    ContextDecoder,
    ContextEncoder,
    DecodeFailed,
    GenerationOutput,
    LimitExceeded,
    LogProbabilities,
    PixelContext,
    TextContext,
    TextGenerationOutput,
    VersionMismatch,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)


def _load(name):
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTEXTS = _load("sample_contexts").CONTEXTS
_fuzz = _load("test_fuzz")
floods, mutated, peak_bytes = _fuzz.floods, _fuzz.mutated, _fuzz.peak_bytes
ALLOWED = (DecodeFailed, LimitExceeded, VersionMismatch)
encode, decode = ContextEncoder(), ContextDecoder(copy=True)
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


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=3), st.binary(max_size=100))
def test_random_bytes(frames, body):
    feed(frames)
    feed([b"BT\x02" + body, *frames])
    feed_map(body)


def test_mutated_contexts():
    rng = random.Random(11)
    wires = [[bytes(frame) for frame in encode(make())] for make in CONTEXTS.values()]
    maps = [msgpack_numpy_encoder()(make()) for make in CONTEXTS.values()]
    understood = 0
    for _ in range(150):
        for frames, message in zip(wires, maps, strict=True):
            at = 3 if rng.random() < 0.9 else 0
            changed = [frames[0][:at] + mutated(rng, frames[0][at:]), *frames[1:]]
            if rng.random() < 0.1:
                changed.append(rng.randbytes(8))
            head = message[: rng.choice([200, 600, 3000, len(message)])]
            understood += feed(changed)
            understood += feed_map(mutated(rng, head) + message[len(head) :])
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


COUNT, UNITS = _fuzz.COUNT, _fuzz.UNITS


def fields_of(raw, path=()):
    """Paths of all fields of a message."""
    for key, value in raw.items():
        yield (*path, key)
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            yield from fields_of(value, (*path, key))


def at_end(path, data):
    """A map with the data at the end of ``path``."""
    for key in reversed(path):
        data = b"\x81" + text(key) + data
    return data


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_memory_of_floods_in_every_field(unit):
    """No field of a context, in either form, becomes much larger than its bytes."""
    forms, seen = [], {("type",)}
    for name in ("text under_way", "vision under_way", "speech speaking", "pixel painting"):
        raw = msgspec.msgpack.decode(msgpack_numpy_encoder()(CONTEXTS[name]()), strict=False)
        kind = b"\x82" + text("type") + text(raw["type"])
        for path in fields_of(raw):
            if path not in seen:
                forms.append((kind, path, feed_map))
                seen.add(path)
        (raw,) = msgspec.msgpack.decode(bytes(encode(CONTEXTS[name]())[0])[3:], strict=False)
        outer = b"BT\x02\x91\x82" + text("type") + text("ContextSnapshot")
        tagged = outer + text("context") + b"\x82" + text("type") + text(raw["context"]["type"])
        for path in fields_of(raw):
            if ("frames", *path) in seen:
                continue
            seen.add(("frames", *path))
            inside = path[0] == "context" and len(path) > 1
            forms.append((tagged if inside else outer, path[inside:], lambda data: feed([data])))
    for name, flood in floods(unit).items():
        for kind, path, give in forms:
            data = kind + at_end(path, flood)[1:]
            peak = peak_bytes(lambda give=give, data=data: give(data))
            assert peak < FACTOR * len(data) + MARGIN, (path, name)


def test_memory_of_queued_log_probabilities():
    """As numbers, in the frames of a whole context."""
    context = TextContext(max_length=1 << 30, tokens=[1])
    for tops in ([{1: -1.0}, {}], [{}] * 50, [dict.fromkeys(range(20), -1.0)]):
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


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
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
    """What the numbers of the one may take, the maps of the other do not take as well."""
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
