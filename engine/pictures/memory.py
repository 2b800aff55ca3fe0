"""Memory of the arrays that a picture needs besides weights and state, in bytes.

The steps of the transformer and the decoding of the latents follow each other, and the arrays of
one are freed before the other, so the larger of the two is the peak. A batch does not add to it:
the transformer computes as many samples together as the memory allows, and pictures are decoded one
by one. The formulas follow the allocations of :mod:`.flux`, :mod:`.zimage` and :mod:`.vae`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from baton.proto.limits import MAX_PICTURE_PIXELS, MAX_PICTURE_PROMPT_TOKENS, MAX_PICTURE_SIDE
from baton.proto.picture_requests import PICTURE_MULTIPLE

from ..kernels.host_backend import PATCH_BYTES
from .configs import VaeConfig
from .family import Family

_ROW_WIDTHS = 19
"""Floats of a row of the transformer, in hidden sizes: of its workspace."""
_ROPE_FLOATS = 12
"""Floats of a row's angles while the rope table is made, per channel of a head."""
_REST = 16 << 20
_SQUARE = PICTURE_MULTIPLE**2
USUAL_PIXELS = 256 * 256
"""Pixels of a picture for which the default memory suffices, however little is free."""


class Sizes(Protocol):
    """What decides the memory of a picture: an opened folder."""

    @property
    def family(self) -> Family:
        """The kind of model."""
        ...

    @property
    def vae(self) -> VaeConfig:
        """The config of the VAE."""
        ...

    @property
    def pixels_per_token(self) -> int:
        """Width and height of the square of pixels that one latent token stands for."""
        ...


def row_bytes(width: int, head_dim: int) -> int:
    """Return the bytes that a step of a transformer needs for each row, of text or image."""
    return 4 * (_ROW_WIDTHS * width + _ROPE_FLOATS * head_dim)


def decode_bytes(config: VaeConfig, pixels: int) -> int:
    """Return the bytes that the VAE needs to decode a picture of so many pixels."""
    widths, latents = config.block_out_channels[::-1], pixels // config.scale**2
    peak = 11 * widths[0] * latents if config.mid_block_add_attention else 0
    before = widths[0]
    for level, width in enumerate(widths):
        area = latents * 4**level
        # The input becomes the shortcut's memory, or is kept; a wider output needs its own.
        wider = width if width > before else 0
        peak = max(peak, area * (before + width + wider))
        if level < len(widths) - 1:
            peak = max(peak, 5 * area * width)
        before = width
    return 4 * peak + _band_bytes(max(widths), pixels) + _REST


def _band_bytes(channels: int, pixels: int) -> int:
    """Return the bytes of a convolution's band of rows: patches, the band, and a copy of it."""
    wide = min(MAX_PICTURE_SIDE, pixels // PICTURE_MULTIPLE) + 2
    row = 4 * 9 * channels * wide
    rows = max(1, PATCH_BYTES // row)
    return rows * row + 2 * 4 * (rows + 2) * channels * wide


def step_bytes(family: Family, tokens: int, texts: int) -> int:
    """Return the bytes that a step needs for so many tokens of a picture and of its prompt."""
    rows = sum(count + -count % family.row_multiple for count in (tokens, texts))
    return rows * family.row_bytes


def picture_bytes(folder: Sizes, pixels: int) -> int:
    """Return the bytes that a picture of so many pixels needs at most."""
    tokens = pixels // folder.pixels_per_token**2
    step = step_bytes(folder.family, tokens, MAX_PICTURE_PROMPT_TOKENS) + _REST
    return max(step, decode_bytes(folder.vae, pixels))


def largest_picture(folder: Sizes, nbytes: int) -> int:
    """Return the most pixels of a picture that needs at most ``nbytes``; 0 if none does."""
    squares = range(1, MAX_PICTURE_PIXELS // _SQUARE + 1)
    return _SQUARE * bisect_right(
        squares, nbytes, key=lambda count: picture_bytes(folder, count * _SQUARE)
    )
