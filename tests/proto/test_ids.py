import numpy as np
import pytest

from baton.proto import RequestID
from baton.proto.ids import (
    new_incarnation,
    new_nonce,
    request_key,
    resume_secret,
    worker_incarnation,
)
from baton.proto.wire.map_bytes import context_digest
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens


def wire(tokens=(1, 2, 3), **changes):
    return WireContext(tokens=WireTokens(np.array(tokens, np.int32)), max_length=100, **changes)


def test_request_id_is_a_frozen_hashable_value():
    assert str(RequestID("a")) == "a"
    assert RequestID("a") == RequestID("a")
    assert len({RequestID(), RequestID(), RequestID("a"), RequestID("a")}) == 3
    assert len(RequestID().value) == 32
    assert "-" not in RequestID().value
    with pytest.raises(AttributeError):
        RequestID("a").value = "b"


def test_request_key_separates_client_and_id():
    keys = {
        request_key(b"ab", "c"),
        request_key(b"a", "bc"),
        request_key(b"", "abc"),
        request_key(b"ab", "d"),
        request_key(b"ab", "c", 1),
        request_key(b"ab", "c", 2),
    }
    assert len(keys) == 6
    assert all(len(key) == 16 for key in keys)
    assert request_key(b"ab", "c") in keys


def test_request_key_takes_any_text():
    assert request_key(b"", "\ud800") != request_key(b"", "é")


def test_incarnation_is_never_zero_and_reproducible_on_demand():
    assert new_incarnation(bytes(8)) == 1
    assert new_incarnation(b"\xff" * 8) == (1 << 64) - 1
    assert new_incarnation() != new_incarnation()
    with pytest.raises(ValueError, match="8 random bytes"):
        new_incarnation(b"short")


def test_resume_secret_depends_on_key_and_request():
    secrets = {
        resume_secret(key, request) for key in (b"k", b"K" * 100) for request in (b"1", b"2")
    }
    assert len(secrets) == 4
    assert resume_secret(b"k", b"1") == resume_secret(b"k", b"1")


def test_context_digest_sees_every_difference():
    base = context_digest(wire())
    assert base == context_digest(wire(np.array([1, 2, 3])))
    others = [
        context_digest(wire((1, 2, 4))),
        context_digest(wire((1, 2))),
        context_digest(wire(sampling=WireSampling(seed=1))),
        context_digest(wire(cache_salt="tenant")),
        context_digest(wire(), "pool"),
        context_digest(wire(), None),
        context_digest(
            WireContext(tokens=WireTokens(np.array([1, 2, 3], np.int64)), max_length=100)
        ),
    ]
    assert len({base, *others}) == 8


def test_a_workers_incarnation_is_made_of_its_key_and_a_nonce():
    nonce = new_nonce()
    mine = worker_incarnation(b"a" * 40, nonce)
    assert worker_incarnation(b"a" * 40, nonce) == mine
    assert worker_incarnation(b"b" * 40, nonce) != mine
    assert worker_incarnation(b"a" * 40, new_nonce()) != mine
    assert worker_incarnation(b"", b"a" * 40 + nonce) != mine  # the parts cannot be shifted
    assert 0 < mine < 1 << 64
    assert len(nonce) == 16
