"""The digest of payloads from a GPU: its definition, and that it shows all damage."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from baton.engine.kernels.digest import (
    LENGTH,
    MIX_1,
    MIX_2,
    PLACE,
    START,
    payload_digest,
    words_sum,
)

MASK = 2**64 - 1


def mix(x):
    x = (x ^ x >> 33) * MIX_1 & MASK
    x = (x ^ x >> 29) * MIX_2 & MASK
    return x ^ x >> 32


def defined(payload):
    """The digest in Python's own integers."""
    data = payload.tobytes()
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = sum(mix(word ^ (START + i * PLACE & MASK)) for i, word in enumerate(words))
    return mix(total + len(data) * LENGTH & MASK)


@pytest.fixture
def rng(request):
    seed = int.from_bytes(np.random.default_rng().bytes(4), "little")
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 1000, 131072, 131080, 262151])
def test_it_is_its_definition(rng, nbytes):
    payload = rng.integers(0, 256, nbytes, np.uint8)
    assert payload_digest(payload) == defined(payload)


def test_every_backend_has_it(backend, rng):
    room = rng.integers(0, 256, 5000, np.uint8)
    for nbytes in [*range(70), 1000, 4096, 4990]:
        payload = room[nbytes % 8 :][:nbytes]
        assert backend.payload_digest(payload) == defined(payload)
    for wrong in (room[::2], room.view(np.int8), room.reshape(2, -1)):
        with pytest.raises(ValueError, match="payload"):
            backend.payload_digest(wrong)


def test_its_bits_are_fixed():
    """The two workers of a handoff may be different builds."""
    assert payload_digest(np.arange(256, dtype=np.uint8)) == 0xEB62CB50C2F97FAC
    assert payload_digest(np.zeros(8, np.uint8)) == 0x166359FAD7B24EAA


def test_parts_may_be_summed_anywhere(rng):
    payload = rng.integers(0, 2**64, 5000, np.uint64)
    cuts = [0, *sorted(rng.integers(0, 5000, 6).tolist()), 5000]
    parts = [words_sum(payload[a:b], a) for a, b in pairwise(cuts)]
    assert sum(rng.permutation(np.array(parts, object))) & MASK == words_sum(payload)


def test_every_flipped_bit_and_every_swap_is_seen(rng):
    payload = rng.integers(0, 256, 208, np.uint8)
    digest = payload_digest(payload)
    seen = {digest}
    for bit in range(8 * len(payload)):
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        seen.add(payload_digest(damaged))
    words = payload.view(np.uint64)
    for i in range(len(words)):
        for j in range(i):
            swapped = words.copy()
            swapped[[i, j]] = swapped[[j, i]]
            seen.add(payload_digest(swapped.view(np.uint8)))
    assert len(seen) == 1 + 8 * 208 + 26 * 25 // 2


def test_lengths_and_gaps_are_seen(rng):
    """Zeros appended, removed, or written over other bytes; words moved by some places."""
    payload = rng.integers(0, 256, 4096, np.uint8)
    zeros = np.zeros(4096, np.uint8)
    digests = [payload_digest(zeros[:n]) for n in range(300)]
    digests += [payload_digest(np.roll(payload, 8 * n)) for n in range(512)]
    for n in range(1, 512):
        cut, blank = payload[: -8 * n], payload.copy()
        blank[-8 * n :] = 0
        digests += [payload_digest(cut), payload_digest(blank)]
    assert len(set(digests)) == len(digests)


def test_a_bit_changes_half_of_the_others(rng):
    words = rng.integers(0, 2**64, 64, np.uint64)
    changes = np.zeros((64, 64))
    for bit in range(64):
        for place, word in enumerate(words):
            flipped = np.array([word ^ np.uint64(1 << bit)])
            difference = words_sum(words[place : place + 1], place) ^ words_sum(flipped, place)
            changes[bit] += [difference >> i & 1 for i in range(64)]
    assert abs(changes.mean() / 64 - 0.5) < 0.02
    assert abs(changes / 64 - 0.5).max() < 0.4


def test_small_damages_collide_as_often_as_chance_has_it(rng):
    """2^17 payloads of one or two set bits each: 32 bits of their sums should collide 2 times."""
    count, words = 2**17, 64
    places = rng.integers(0, words, (2, count))
    bits = np.uint64(1) << rng.integers(0, 64, (2, count)).astype(np.uint64)
    zero = [words_sum(np.zeros(1, np.uint64), i) for i in range(words)]
    terms = {}
    for place in range(words):
        for bit in range(64):
            term = words_sum(np.array([1 << bit], np.uint64), place)
            terms[place, 1 << bit] = (term - zero[place]) & MASK
    sums = {
        frozenset(((int(p), int(b)), (int(q), int(c)))): terms[p, b] + terms[q, c] & MASK
        for p, b, q, c in zip(places[0], bits[0], places[1], bits[1], strict=True)
        if p != q
    }
    expected = len(sums) ** 2 / 2**33
    for shift in (0, 16, 32):
        halves = {value >> shift & 0xFFFFFFFF for value in sums.values()}
        assert len(sums) - len(halves) < expected + 12
    assert len(set(sums.values())) == len(sums)


@pytest.mark.parametrize(
    "payload", [np.zeros(4, np.int8), np.zeros((2, 4), np.uint8), np.zeros(8, np.uint8)[::2]]
)
def test_what_is_no_payload_is_refused(payload):
    with pytest.raises(ValueError, match="contiguous"):
        payload_digest(payload)
