"""Decoding the other messages of an envelope with an unreadable message."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.proto.errors import DecodeFailed, InputError
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import MAX_REFUSED, EnvelopeEncoder, SalvagingDecoder
from baton.proto.wire.messages import Cancel, ClientToRouter, Ping, Submit
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens

PREFIX = b"BT" + bytes([PROTOCOL_VERSION])


@pytest.fixture(scope="module")
def decoder():
    return SalvagingDecoder(ClientToRouter)


def submit(name, length=3, **sampling):
    tokens = np.arange(length, dtype=np.int32)
    context = WireContext(
        tokens=WireTokens(tokens), max_length=1 << 20, sampling=WireSampling(**sampling)
    )
    return Submit(request_id=name, context=context)


def refused(decoder, frames):
    with pytest.raises(DecodeFailed):
        decoder.decode(frames)
    return decoder.salvage(frames)


@pytest.mark.parametrize("length", [3, 5000], ids=["inline", "frames"])
def test_neighbours_of_an_unreadable_request_are_read(decoder, length):
    good, bad = submit("good", length), submit("bad", length, temperature="hot")
    last = submit("last", length, top_k=7)
    found = refused(decoder, EnvelopeEncoder().encode([good, bad, Ping(nonce=4), last]))
    assert found.messages == [good, Ping(nonce=4), last]
    (error,) = found.refused.values()
    assert found.refused.keys() == {"bad"} and isinstance(error, InputError)
    assert str(error).startswith("the Submit cannot be read: Expected `float`, got `str`")
    assert str(error).endswith("at `$.context.sampling_params.temperature`")


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 0.7}, {"seed": 1.5}, {"stop": [1]}, {"stop_token_ids": ["a"]}, {"top_k": 1 << 60}],
)
def test_the_field_is_named(decoder, sampling):
    found = refused(decoder, EnvelopeEncoder().encode([submit("r", **sampling)]))
    assert next(iter(sampling)) in str(found.refused["r"])


def envelope(*messages):
    return [PREFIX + msgspec.msgpack.encode(messages)]


GOOD = {"type": "Ping"}
NAMED = {"type": "Cancel", "request_id": "r", "serial": "x"}
UNNAMED = [
    [b"XX" + envelope(NAMED)[0][2:]],
    [PREFIX + b"\x91"],
    envelope(NAMED, 5),
    envelope(NAMED, {"type": "Cancel", "request_id": ""}, {"type": "Cancel", "request_id": 5}),
    envelope({"type": "Nothing"}),
    [*envelope(GOOD), b"an array nobody refers to"],
    [],
]


@pytest.mark.parametrize("frames", UNNAMED)
def test_without_a_name_for_every_unreadable_one_all_is_refused(decoder, frames):
    assert decoder.salvage(frames) is None


def test_answers_to_one_envelope_are_bounded(decoder):
    bad = [NAMED | {"request_id": str(n)} for n in range(MAX_REFUSED + 1)]
    assert decoder.salvage(envelope(*bad)) is None
    assert len(decoder.salvage(envelope(*bad[1:], GOOD)).refused) == MAX_REFUSED


def test_a_readable_cancel_beside_it_is_kept(decoder):
    found = refused(decoder, envelope(NAMED, {"type": "Cancel", "request_id": "other"}))
    assert found.messages == [Cancel(request_id="other")]
