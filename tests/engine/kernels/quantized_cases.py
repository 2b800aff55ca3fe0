"""Random blocks of every kind, and small errors of a kernel, made in the blocks that it reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.backend import U8, QuantizedWeights
from baton.engine.kernels.quantized import KINDS

from ..gguf_cases import FLOAT16_AT

TWO = [kind for kind, places in FLOAT16_AT.items() if len(places) == 2]


def random_weights(
    rng: np.random.Generator, kind: str, rows: int, columns: int
) -> QuantizedWeights:
    """Random bits everywhere, except that scales are finite; some are subnormal, some zero."""
    sizes = KINDS[kind]
    blocks = rng.integers(0, 256, (rows * columns // sizes.items, sizes.nbytes), dtype=np.uint8)
    for at in FLOAT16_AT[kind]:
        scales = rng.standard_normal(len(blocks)) * 0.02
        scales[rng.random(len(blocks)) < 0.05] = 3e-6
        scales[rng.random(len(blocks)) < 0.05] = 0
        put_halves(blocks, at, scales)
    return QuantizedWeights(kind, blocks.reshape(rows, -1), columns)


def put_halves(blocks: U8, at: int, values: npt.NDArray[np.floating]) -> None:
    halves = values.astype(np.float16)
    blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)


def swapped_nibbles(kind: str, blocks: U8) -> None:
    at = {"Q4_K": 16, "Q5_K": 48, "Q6_K": 0, "Q4_0": 2, "Q5_0": 6}[kind]
    low = slice(at, at + 128)  # to the end, but for Q6_K
    blocks[:, low] = blocks[:, low] >> 4 | blocks[:, low] << 4


def scales_of_the_next_block(kind: str, blocks: U8) -> None:
    at = FLOAT16_AT[kind][0]
    blocks[:, at : at + 2] = np.roll(blocks[:, at : at + 2], 1, axis=0)


def minimum_with_the_other_sign(kind: str, blocks: U8) -> None:
    blocks[:, 3] ^= 0x80


def six_bits_in_another_order(kind: str, blocks: U8) -> None:
    blocks[:, 4:16] = blocks[:, [8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]]


def high_bits_shifted(kind: str, blocks: U8) -> None:
    blocks[:, 128:192] = blocks[:, 128:192] >> 2 | blocks[:, 128:192] << 6


def eight_bit_scales_in_another_order(kind: str, blocks: U8) -> None:
    blocks[:, 192:208] = blocks[:, 192:208].reshape(-1, 8, 2)[..., ::-1].reshape(-1, 16)


def fifth_bits_shifted(kind: str, blocks: U8) -> None:
    at = slice(16, 48) if kind == "Q5_K" else slice(2, 6)
    blocks[:, at] = blocks[:, at] >> 1 | blocks[:, at] << 7


Error = Callable[[str, U8], None]
ERRORS: list[tuple[str, Error]] = [
    *((kind, swapped_nibbles) for kind in ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0")),
    *((kind, scales_of_the_next_block) for kind in KINDS),
    *((kind, minimum_with_the_other_sign) for kind in TWO),
    *((kind, six_bits_in_another_order) for kind in ("Q4_K", "Q5_K")),
    ("Q6_K", high_bits_shifted),
    ("Q6_K", eight_bit_scales_in_another_order),
    *((kind, fifth_bits_shifted) for kind in ("Q5_K", "Q5_0")),
]


def with_error(weights: QuantizedWeights, error: Error) -> QuantizedWeights:
    """Return the weights as a kernel with the error would read them."""
    sizes = KINDS[weights.kind]
    blocks = weights.blocks.reshape(-1, sizes.nbytes).copy()
    error(weights.kind, blocks)
    return QuantizedWeights(weights.kind, blocks.reshape(weights.blocks.shape), weights.columns)
