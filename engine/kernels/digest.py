"""The digest of a payload packed or unpacked on a GPU: a sum over its words, in any order.

Each 64-bit word is mixed with its position and the results are added modulo 2^64. So threads may
process the words in any order, and partial sums can be combined (``docs/decisions/``, number 12):

    digest(payload) = mix(sum(mix(word[i] ^ (START + i * PLACE))) + len(payload) * LENGTH)

``mix`` is a bijection, so damage within one word is always detected; any other damage is detected
with probability 1 - 2^-64. ``csrc/digest.cuh`` is the same for CUDA.

Source: Bellare and Micciancio 1997 (randomize-then-combine, "AdHash"); mix and constants are the
final avalanche and the primes of XXH64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

PLACE = 0x9E3779B185EBCA87
START = 0x27D4EB2F165667C5
MIX_1 = 0xC2B2AE3D27D4EB4F
MIX_2 = 0x165667B19E3779F9
LENGTH = 0x85EBCA77C2B2AE63

_MASK = (1 << 64) - 1
_WORDS_AT_ONCE = 1 << 14  # fits into a core's private cache


def payload_digest(payload: U8) -> int:
    """Return the digest of a one-dimensional contiguous payload.

    An incomplete last word is padded with zeros. Raises ValueError unless the payload is
    contiguous uint8.
    """
    if payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous:
        raise ValueError("a payload must be a contiguous one-dimensional uint8 array")
    whole = len(payload) // 8 * 8
    total = words_sum(payload[:whole].view("<u8"))
    if whole < len(payload):
        last = np.zeros(8, np.uint8)
        last[: len(payload) - whole] = payload[whole:]
        total += words_sum(last.view("<u8"), whole // 8)
    return _mix(np.array([total + len(payload) * LENGTH & _MASK], np.uint64)).item()


def words_sum(words: U64, first: int = 0) -> int:
    """Return the sum of the mixed words ``[n]`` at positions ``first ..``, modulo 2^64."""
    total = 0
    places = np.arange(_WORDS_AT_ONCE, dtype=np.uint64) * np.uint64(PLACE)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        keys = places[: len(part)] + np.uint64(START + (first + start) * PLACE & _MASK)
        total += int(_mix(part ^ keys).sum(dtype=np.uint64))
    return total & _MASK


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(MIX_2)
    mixed: U64 = x ^ (x >> np.uint64(32))
    return mixed
