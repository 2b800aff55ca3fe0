"""Flow matching with Euler steps, latents packed into tokens of 2x2, and the noise they start from.

The noise is a pure function of a seed, equal on every machine. Philox gives the words, and the
Box-Muller method makes normally distributed numbers of them. Logarithm, sine and cosine are series
of float64 sums and products, because those of the C library and of NumPy differ in the last bits
between processors.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..kernels.backend import F32
from ..sampling.philox import MULTIPLIERS, ROUNDS, WEYL
from .configs import SchedulerConfig

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_LOG_TERMS, _SINE_TERMS = 11, 9
_LN_2 = 0.6931471805599453
_PI = 3.141592653589793


def sigmas_of(steps: int, tokens: int, config: SchedulerConfig) -> F32:
    """Return the noise levels ``[steps + 1]``, falling from 1 to 0.

    ``tokens``: latent tokens of the picture. With dynamic shifting, larger pictures stay longer
    at high levels.
    """
    level = np.linspace(1.0, 1.0 / steps, steps)
    shift = config.shift
    if config.use_dynamic_shifting:
        span = config.max_image_seq_len - config.base_image_seq_len
        slope = (config.max_shift - config.base_shift) / span if span else 0.0
        shift = math.exp(config.base_shift + slope * (tokens - config.base_image_seq_len))
    shifted = shift * level / (1 + (shift - 1) * level)
    return np.append(shifted, 0.0).astype(np.float32)


def unpack_latents(packed: F32, rows: int, columns: int) -> F32:
    """Turn tokens ``[rows * columns, 4 C]`` into ``[2 rows, 2 columns, C]``.

    A token is ``[C, 2, 2]``: channels, row, column.
    """
    grid = packed.reshape(rows, columns, -1, 2, 2)
    return grid.transpose(0, 3, 1, 4, 2).reshape(2 * rows, 2 * columns, -1)


def reduced(latents: F32, factor: int) -> F32:
    """Return the means of squares of ``factor`` x ``factor`` latents ``[rows, columns, C]``.

    Rows and columns that fill no square are left out.
    """
    rows, columns = (size // factor * factor for size in latents.shape[:2])
    total = np.zeros((rows // factor, columns // factor, latents.shape[2]), np.float32)
    for down in range(factor):
        for across in range(factor):
            total += latents[down:rows:factor, across:columns:factor]
    total /= np.float32(factor**2)
    return total


# --------------------------------------------------------------------------- noise


def normals(seed: int, count: int, stream: int) -> npt.NDArray[np.float32]:
    """Return ``count`` numbers of mean 0 and variance 1, float32.

    Number ``i`` depends only on the low 64 bits of ``seed``, on ``stream`` and on ``i``.
    """
    groups = -(-count // 4)
    words = philox_words(seed, groups, stream)
    uniform = (words.astype(np.float64) + 0.5) / 2.0**32
    radius = np.sqrt(-2.0 * _log(uniform[:, :2]))
    cosine, sine = _turn(uniform[:, 2:])
    return np.stack([radius * cosine, radius * sine], axis=2).reshape(-1)[:count].astype(np.float32)


def philox_words(seed: int, groups: int, stream: int) -> U64:
    """Return the four 32-bit words of Philox for the positions ``0..groups-1``, ``[groups, 4]``."""
    position = np.arange(groups, dtype=np.uint64)
    c0, c1 = position & _LOW, np.zeros_like(position)
    c2, c3 = np.full_like(position, stream & 0xFFFFFFFF), position >> _HALF
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product_0 & _LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def _log(x: F64) -> F64:
    """Return the natural logarithm of positive numbers: a series in (m - 1) / (m + 1)."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, np.zeros_like(x)
    for n in range(_LOG_TERMS - 1, -1, -1):
        total = total * square + 1.0 / (2 * n + 1)
    return (exponent - small) * _LN_2 + 2.0 * s * total


def _turn(x: F64) -> tuple[F64, F64]:
    """Return cosine and sine of ``x`` full turns: Taylor series within an eighth of a turn."""
    quarter = np.rint(4.0 * x)
    angle = (4.0 * x - quarter) * (_PI / 2)
    square = angle * angle
    cosine, sine = np.ones_like(x), np.ones_like(x)
    for n in range(_SINE_TERMS, 0, -1):
        cosine = 1.0 - cosine * square / ((2 * n - 1) * (2 * n))
        sine = 1.0 - sine * square / ((2 * n) * (2 * n + 1))
    sine = sine * angle
    which = quarter.astype(np.int64) % 4
    return (
        np.choose(which, [cosine, -sine, -cosine, sine]),
        np.choose(which, [sine, cosine, -sine, -cosine]),
    )
