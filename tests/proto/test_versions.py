"""Neighbouring protocol versions are compatible; for others, the error names both versions."""

import pytest

from baton.proto.errors import VersionMismatch
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import (
    EnvelopeDecoder,
    EnvelopeEncoder,
    decode_kv_header,
    encode_kv_header,
)
from baton.proto.wire.messages import ClientToRouter, GrantRef, KVFrame, Ping, PrefillToDecode
from baton.proto.wire.versions import NEWEST_VERSION, OLDEST_VERSION, check_version

UNDERSTOOD = range(OLDEST_VERSION, NEWEST_VERSION + 1)
OTHERS = [0, OLDEST_VERSION - 1, NEWEST_VERSION + 1, 255]


def with_version(frame, version):
    return bytes(frame[:2]) + bytes([version]) + bytes(frame[3:])


def test_the_next_version_and_at_most_the_one_before_are_understood():
    assert PROTOCOL_VERSION - 1 <= OLDEST_VERSION <= PROTOCOL_VERSION
    assert NEWEST_VERSION == PROTOCOL_VERSION + 1


@pytest.mark.parametrize("version", UNDERSTOOD)
def test_what_a_neighbour_says_is_read(version):
    (frame,) = EnvelopeEncoder().encode([Ping(nonce=7)])
    decoder = EnvelopeDecoder(ClientToRouter)
    assert decoder.decode([with_version(frame, version)]) == [Ping(nonce=7)]


@pytest.mark.parametrize("version", UNDERSTOOD)
def test_what_a_neighbour_seals_is_read(version):
    (frame,) = EnvelopeEncoder(digest=lambda parts: 5).encode([Ping(nonce=7)])
    decoder = EnvelopeDecoder(PrefillToDecode, digest=lambda parts: 5)
    assert decoder.decode([with_version(frame, version)]) == [Ping(nonce=7)]


def test_a_field_that_a_newer_neighbour_added_is_skipped():
    decoder = EnvelopeDecoder(ClientToRouter)
    frame = (
        b"BT"
        + bytes([NEWEST_VERSION])
        + b"\x91\x83\xa4type\xa4Ping\xa5nonce\x07\xa3new\x92\x01\x02"
    )
    assert decoder.decode([frame]) == [Ping(nonce=7)]


@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_are_refused_with_both_named(version):
    (frame,) = EnvelopeEncoder().encode([Ping()])
    text = f"version {version}; this process has version {PROTOCOL_VERSION} and accepts"
    with pytest.raises(VersionMismatch, match=text):
        EnvelopeDecoder(ClientToRouter).decode([with_version(frame, version)])
    with pytest.raises(VersionMismatch, match=f"worker w has protocol {text}"):
        check_version(version, "worker w")


def test_headers_of_kv_frames_keep_the_rule():
    header = KVFrame(GrantRef(1, 2, 3), 0, 0, 1, 0, 1, 64, 9)
    frame = encode_kv_header(header)
    for version in UNDERSTOOD:
        assert decode_kv_header(with_version(frame, version)) == header
    with pytest.raises(VersionMismatch):
        decode_kv_header(with_version(frame, NEWEST_VERSION + 1))
