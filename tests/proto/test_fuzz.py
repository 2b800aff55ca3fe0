"""Random and mutated bytes at every decoder: typed errors only, and bounded memory."""

import contextlib
import json
import random
import sys
import tracemalloc
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.checksums import envelope_digest
from baton.proto import TextContext, msgpack_numpy_decoder, msgpack_numpy_encoder
from baton.proto.errors import DecodeFailed, EnvelopeDamaged, LimitExceeded, VersionMismatch
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder, decode_kv_header
from baton.proto.wire.messages import (
    ClientToRouter,
    DecodeToPrefill,
    PrefillToDecode,
    RouterToClient,
    RouterToWorker,
    WorkerToRouter,
)

from ..suite.short import in_short

ALLOWED = (DecodeFailed, EnvelopeDamaged, LimitExceeded, VersionMismatch)
DECODERS = [
    EnvelopeDecoder(union)
    for union in (
        ClientToRouter,
        RouterToClient,
        WorkerToRouter,
        RouterToWorker,
        PrefillToDecode,
        DecodeToPrefill,
    )
]
DECODERS += [
    EnvelopeDecoder(union, digest=envelope_digest) for union in (PrefillToDecode, DecodeToPrefill)
]
MAPS = msgpack_numpy_decoder(TextContext)
CONTEXT = msgpack_numpy_encoder()(
    TextContext(max_length=9, tokens=[1, 2], eos_sequences=[[1]], target_endpoint="tcp://a:1")
)


def recorded():
    """Frames of all recorded messages, and KV headers."""
    path = Path(__file__).parent / "golden" / "envelopes.json"
    samples = json.loads(path.read_text())
    kv = bytes.fromhex(samples.pop("KVFrame"))
    envelopes = [
        [bytes.fromhex(frame) for frame in entry[kind]]
        for entry in samples.values()
        for kind in ("full", "least")
    ]
    return envelopes, kv


def feed(frames):
    """Decode the frames with all envelope decoders, and return how many succeeded."""
    understood = 0
    for decoder in DECODERS:
        try:
            decoder.decode(frames)
            understood += 1
        except ALLOWED:
            pass
    return understood


def feed_one(decode, data):
    with contextlib.suppress(ALLOWED):
        decode(data)


@settings(max_examples=500)
@given(st.lists(st.binary(max_size=200), max_size=3), st.binary(max_size=100))
def test_random_bytes(frames, body):
    feed(frames)
    feed([b"BT\x03" + body, *frames])
    feed([b"BS\x03" + body, *frames])
    sealed = b"BS\x03" + envelope_digest([body, *frames]).to_bytes(8, "little")
    feed([sealed + body, *frames])
    feed_one(decode_kv_header, body)
    feed_one(decode_kv_header, b"BK\x03" + body)
    feed_one(decode_kv_header, b"BK\x03" + crc32(body).to_bytes(4, "little") + body)
    feed_one(MAPS, body)


def mutated(rng, data):
    """Return the bytes with one or three random changes of different kinds."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 3))):
        at = rng.randrange(len(data) + 1)
        kind = rng.choice((0, 0, 0, 0, 1, 2, 3, 4))
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:  # another msgpack header, with a large length
            data[at : at + 1] = bytes([rng.randrange(0x80, 0x100)]) + b"\xff" * rng.randrange(5)
        else:
            other = rng.randrange(len(data) + 1)
            data[at:at] = data[other : other + rng.randint(1, 40)]
    return bytes(data)


def test_mutated_messages():
    rng = random.Random(7)
    envelopes, kv = recorded()
    understood = 0
    for _ in range(200):
        for frames in envelopes:
            at = 3 if rng.random() < 0.9 else 0  # mostly past the check of the prefix
            changed = [frames[0][:at] + mutated(rng, frames[0][at:]), *frames[1:]]
            if rng.random() < 0.1:
                changed.append(rng.randbytes(8))
            understood += feed(changed)
        feed_one(decode_kv_header, mutated(rng, kv))
        body = mutated(rng, kv[7:])
        feed_one(decode_kv_header, kv[:3] + crc32(body).to_bytes(4, "little") + body)
        for _ in range(20):
            feed_one(MAPS, mutated(rng, CONTEXT))
    assert understood > 1000, "the mutations should not all be caught at the door"


def test_truncated_messages():
    envelopes, kv = recorded()
    for frames in envelopes:
        for end in range(len(frames[0])):
            assert feed([frames[0][:end], *frames[1:]]) == 0
    for end in range(len(kv)):
        with pytest.raises(ALLOWED):
            decode_kv_header(kv[:end])


def text(value):
    return bytes([0xA0 + len(value)]) + value.encode()


def flood(kind, field, unit, count):
    """One message whose ``field`` is a list of ``count`` times ``unit``."""
    head = b"BT\x03\x91\x82" + text("type") + text(kind) + text(field)
    return head + b"\xdd" + count.to_bytes(4, "big") + unit * count


TOKENS = b"BT\x03\x91\x82" + text("type") + text("Tokens") + text("runs") + b"\x91\x95\xc4\0\1\0"
COUNT = 40_000
FLOODS = {
    "empty maps as messages": b"BT\x03\xdc\xff\xff" + b"\x80" * 65535,
    "empty maps as an unknown field": flood("Ping", "later", b"\x80", COUNT),
    "empty maps as stop sequences": flood("Submit", "context", b"\x80", COUNT),
    "smallest messages": b"BT\x03\xdc\xff\xff" + (b"\x81" + text("type") + text("Ping")) * 65535,
    "empty runs": flood("Tokens", "runs", b"\x94\xc4\0\1\0\x90", COUNT),
    "short runs": flood("Tokens", "runs", b"\x94\xc4\0\1\0\x92\xcd\1\1\xcd\1\1", COUNT),
    "file names": flood("Describe", "files", b"\xa2ab", COUNT),
    "acknowledged keys": flood("FinalAck", "requests", b"\xc4\2ab", COUNT),
    "acknowledged terminals": flood("TerminalAck", "requests", b"\x92\xc4\0\0", COUNT),
    "hashes": flood("Reserve", "hashes", b"\xc4\2ab", COUNT),
    "emitted tokens": flood("Resume", "emitted", b"\xcd\1\1", COUNT),
    "requests of a worker": flood("Hello", "requests", b"\x94\xc4\0\0\0\0", COUNT),
}


def peak_bytes(call):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(
        60.0
    )  # memory of other threads, such as that of pytest-xdist, would count
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("frame", FLOODS.values(), ids=FLOODS)
def test_memory_stays_within_a_small_multiple(frame):
    assert len(frame) > 35_000
    assert peak_bytes(lambda: feed([frame])) < 32 * len(frame) + (1 << 20)


UNITS = {
    "empty maps": b"\x80",
    "empty lists": b"\x90",
    "lists of one": b"\x91\0",
    "maps of one": b"\x81\0\0",
    "numbers": b"\0",
    "large numbers": b"\xcd\1\1",
    "empty texts": b"\xa0",
    "texts": b"\xa2ab",
    "wide texts": b"\xa2\xd0\xb0",
    "bytes": b"\xc4\2ab",
    "nothing": b"\xc0",
    "exts": b"\xd4\1\0",
}
UNITS_IN_SHORT = in_short(UNITS, "empty maps", "maps of one", "wide texts")


def floods(unit):
    """A list of the unit, and maps with it under one key, as its own key, and under many keys."""
    count = COUNT.to_bytes(4, "big")
    numbers = [b"\xcd" + key.to_bytes(2, "big") for key in range(COUNT)]
    names = [b"\xa3%c%c%c" % (key >> 14, key >> 7 & 127, key & 127) for key in range(COUNT)]
    return {
        "list": b"\xdd" + count + unit * COUNT,
        "one key": b"\xdf" + count + (b"\0" + unit) * COUNT,
        "itself as key": b"\xdf" + count + unit * (2 * COUNT),
        "numbers as keys": b"\xdf" + count + b"".join(key + unit for key in numbers),
        "names as keys": b"\xdf" + count + b"".join(key + unit for key in names),
    }


def places(value, at=()):
    """Paths of all values in a message, the message included."""
    yield at
    items = dict(enumerate(value)) if isinstance(value, list) else value
    for key, item in items.items() if isinstance(items, dict) else ():
        yield from places(item, (*at, key))


def placed(value, at, data):
    """The message with raw bytes in one place."""
    if not at:
        return msgspec.Raw(data)
    changed = value.copy()
    changed[at[0]] = placed(value[at[0]], at[1:], data)
    return changed


@pytest.mark.parametrize("unit", UNITS_IN_SHORT)
def test_memory_of_floods_in_every_place_of_every_message(unit):
    envelopes, _ = recorded()
    forms, seen = [], set()
    for frames in envelopes:
        if frames[0][:2] != b"BT":
            continue
        (raw,) = msgspec.msgpack.decode(frames[0][3:], strict=False)
        for at in places(raw):
            if (raw["type"], at) in seen:
                continue
            seen.add((raw["type"], at))
            forms.append((raw, at))
    assert len(forms) > 300
    for name, data in floods(unit).items():
        for raw, at in forms:
            body = b"BT\x03" + msgspec.msgpack.encode([placed(raw, at, data)])
            peak = peak_bytes(lambda body=body: feed([body]))
            assert peak < 32 * len(body) + (1 << 20), (raw["type"], at, name)


def test_memory_of_mutated_messages():
    """Few bytes that claim a large length take little memory too."""
    rng = random.Random(13)
    envelopes, kv = recorded()
    tracemalloc.start()
    try:
        for frames in envelopes * 4:
            changed = [frames[0][:3] + mutated(rng, frames[0][3:]), *frames[1:]]
            body = mutated(rng, kv[7:])
            for give in (
                lambda changed=changed: feed(changed),
                lambda: feed_one(MAPS, mutated(rng, CONTEXT)),
                lambda body=body: feed_one(
                    decode_kv_header, kv[:3] + crc32(body).to_bytes(4, "little") + body
                ),
            ):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                give()
                assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()


PAIRS = b"\0" * 12
ENTRIES = {
    "nothing": b"\x92\0\xc4\0",
    "one likely token": b"\x92\0\xc4\x0c" + PAIRS,
    "twenty likely tokens": b"\x92\0\xc4\xf0" + PAIRS * 20,
    "more than that": b"\x92\0\xc4\xfc" + PAIRS * 21,
    "a part of one": b"\x92\0\xc4\3" + bytes(3),
    "itself alone": b"\x91\0",
    "an empty map": b"\x92\0\x80",
    "a map of one": b"\x92\0\x81\0\0",
}


@pytest.mark.parametrize("name", ENTRIES)
def test_memory_of_log_probabilities(name):
    """Entries stay bytes: one map per token would take 72 times the size on the wire."""
    unit = ENTRIES[name]
    frame = TOKENS + b"\x90\xdd" + COUNT.to_bytes(4, "big") + unit * COUNT
    assert feed([frame]) == (2 if "likely" in name or name == "nothing" else 0)
    assert peak_bytes(lambda: feed([frame])) < 32 * len(frame) + (1 << 20)


def test_memory_of_claimed_sizes():
    """A length that is only claimed costs nothing."""

    def claim_of(kind, field, header):
        return b"BT\x03\x91\x82" + text("type") + text(kind) + text(field) + header

    claims = [
        TOKENS + b"\xdd\x7f\xff\xff\xff",
        claim_of("FinalAck", "requests", b"\xdd\xff\0\0\0"),
        claim_of("StatusReport", "report", b"\xc6\xff\0\0\0"),
        claim_of("Describe", "files", b"\x91\xdb\xff\0\0\0"),
    ]
    for claim in claims:
        assert peak_bytes(lambda claim=claim: feed([claim])) < 1 << 20


def test_memory_of_large_contexts():
    from baton.proto.wire.messages import Submit
    from baton.proto.wire.wire_context import WireContext, WireTokens

    context = WireContext(tokens=WireTokens(np.zeros(1 << 20, np.int32)), max_length=1 << 21)
    frames = [bytes(f) for f in EnvelopeEncoder().encode([Submit(request_id="r", context=context)])]
    assert peak_bytes(lambda: DECODERS[0].decode(frames)) < 1 << 16
