"""The NumPy definition of ``sample.cu``: the CPU's reference sampler with the kernel's weights.

Scores and weights consist of fused multiply-adds. Here each is computed in extended precision
and rounded once more, which equals the kernel's bits except for about one value in 10^11.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...sampling.reference import sample_reference
from ...scheduling.plan import SampleSpec

F32 = npt.NDArray[np.float32]

_LEAST = np.float32(2.0**-126)
_POLYNOMIAL = tuple(
    np.float32(float.fromhex(c))
    for c in ("0x1.123b9ap-7", "0x1.5558fcp-5", "0x1.55549p-3", "0x1.fffffcp-2", "0x1p0", "0x1p0")
)


def sample(logits: F32, spec: SampleSpec) -> int:
    """Return the token that the kernels sample from ``logits[vocab]``."""
    return sample_reference(logits, spec, scores_and_weights)


def scores_and_weights(below: F32, temperature: np.float32) -> tuple[F32, F32]:
    """Return (logits - maximum) / temperature, and the exponential of it.

    The quotient is a product with the rounded inverse, corrected once. Temperatures are limited to
    2^-126 .. 2^126.
    """
    value = min(max(np.float32(temperature), _LEAST), 1 / _LEAST)
    inverse = np.float32(1) / value
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = _flushed(below * inverse)
        corrected = _fma(_fma(-quotient, value, below), inverse, quotient)
    scores = np.where(quotient < -128, quotient, corrected)
    return scores, weights(scores)


def weights(scores: F32) -> F32:
    """Return exp(scores) for ``scores <= 0``, 0 below -87: power of two times a polynomial."""
    x = np.where(scores < -87, np.float32(0), scores)
    magic = np.float32(12582912)
    shifted = _fma(x, np.float32(float.fromhex("0x1.715476p+0")), magic)
    power = shifted - magic
    rest = _fma(power, np.float32(float.fromhex("-0x1.62e4p-1")), x)
    rest = _fma(power, np.float32(float.fromhex("-0x1.7f7d1cp-20")), rest)
    result = np.full_like(x, float.fromhex("0x1.6a215ap-10"))
    for coefficient in _POLYNOMIAL:
        result = _fma(result, rest, coefficient)
    return np.where(scores < -87, np.float32(0), np.ldexp(result, power.astype(np.int32)))


def _fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    wide = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(
        c, np.longdouble
    )
    return _flushed(wide.astype(np.float32))


def _flushed(values: F32) -> F32:
    """Flush denormals to zero, as on the device."""
    return np.where(np.abs(values) < _LEAST, np.float32(0), values)
