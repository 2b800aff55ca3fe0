"""Philox4x32-10: random numbers as a pure function of (seed, position, lane, stream).

A sampled token depends only on the request's seed and the token's absolute position, so it is the
same on every worker, in every batch and on replay. The arithmetic uses Python integers and is
exact on every platform.
"""

from __future__ import annotations

Words4 = tuple[int, int, int, int]

_MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Run ten rounds of Philox on four 32-bit counter words with two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, lane: int = 0, stream: int = 0) -> float:
    """Return a multiple of 2**-53 in ``[0, 1)``.

    Key: low and high word of ``seed`` modulo 2**64. Counter: low word of ``position``,
    ``lane``, ``stream``, high word of ``position``. The result combines the upper 27 bits
    of the first word and the upper 26 bits of the second.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    counter = (position & _MASK, lane & _MASK, stream & _MASK, (position >> 32) & _MASK)
    first, second, _, _ = philox4x32(counter, key)
    return ((first >> 5) * (1 << 26) + (second >> 6)) / (1 << 53)
