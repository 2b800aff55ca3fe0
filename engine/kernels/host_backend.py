"""Kernels of text encoders and pictures, which exist only for host memory so far.

Samples of a batch are passed to these kernels one at a time or row by row, so a sample's bits do
not depend on the other samples. Pictures are ``[height * width, channels]``, channels innermost:
a convolution is then a product of patches with a packed matrix.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .audio import AudioBackend
from .backend import F32, Backend, PackedLinear, Weights

PATCH_BYTES = 4 << 20
"""Patches that are multiplied at once; limits the memory of a convolution."""


class HostBackend(AudioBackend, Protocol):
    """A backend in host memory with the kernels of audio, text encoders and pictures."""

    def dense_attention(self, q: F32, kv: F32, bias: F32 | None, scale: float, out: F32) -> None:
        """Attention of all rows to all keys.

        ``out[T, H * D] = softmax(scale * q[T, H, D] @ k.T + bias) @ v``; ``kv[2, H, S, D]`` are
        keys and values; ``bias[1 or H, T, S]`` may contain -inf. One sample per call.
        """
        ...

    def add_scaled(self, x: F32, scale: F32, residual: F32) -> None:
        """``residual[T, H] += x[T, H] * scale[H]`` in place."""
        ...

    def group_norm(
        self, x: F32, groups: int, weight: F32, bias: F32, eps: float, silu: bool, out: F32
    ) -> None:
        """Normalise ``x[P, C]`` over all rows and the channels of each group.

        ``out = (x - mean) / sqrt(variance + eps) * weight + bias``, then silu if requested; ``out``
        may be ``x``. One sample per call.
        """
        ...


def pack_conv(backend: Backend, weight: Weights, bias: F32) -> PackedLinear:
    """Pack convolution weights ``[out, in, k, k]`` for :func:`conv2d`."""
    rows = np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).reshape(len(weight), -1)
    return backend.pack_linear([rows], bias)


def conv2d(
    backend: Backend, x: F32, weight: PackedLinear, kernel: int, out: F32, *, scale: int = 1
) -> None:
    """Convolve ``x[H, W, C]`` with stride 1 and zero padding into ``out[sH, sW, O]``.

    ``scale``: the input is enlarged by repeating each pixel ``scale`` times in both directions
    before the convolution. With scale 1 and a kernel above 1, ``out`` may begin at the first
    element of ``x`` if it has no more channels: rows of ``x`` are read before they are replaced.
    Raises ValueError for shapes that do not fit.
    """
    height, width, channels = x.shape
    columns = kernel * kernel * channels
    if weight.in_features != columns or kernel % 2 == 0:
        raise ValueError(f"a weight of {weight.in_features} columns is not one of {columns}")
    if out.shape != (height * scale, width * scale, weight.out_features):
        raise ValueError(f"out has shape {out.shape}")
    if kernel == 1 and scale == 1:
        backend.linear(x.reshape(-1, channels), weight, out.reshape(-1, weight.out_features))
        return
    margin, wide = kernel // 2, width * scale
    step = max(1, PATCH_BYTES // (4 * columns * wide))
    space = np.empty((min(step, len(out)) * wide, columns), np.float32)
    columns_of_x = np.arange(wide) // scale
    source = np.zeros((min(step, len(out)) + 2 * margin, wide + 2 * margin, channels), np.float32)
    for top in range(0, len(out), step):
        rows, known = min(step, len(out) - top), 0
        if top:  # the first rows of this band are the last ones of the band before
            known = 2 * margin
            source[:known] = source[step : step + known].copy()
        down = np.arange(top - margin + known, top + rows + margin)
        inside = (down >= 0) & (down < len(out))
        band = source[known : rows + 2 * margin]
        band[~inside] = 0
        band[inside, margin : margin + wide] = x[np.ix_(down[inside] // scale, columns_of_x)]
        used = source[: rows + 2 * margin]
        windows = sliding_window_view(used, (kernel, kernel), axis=(0, 1))
        patches = space[: rows * wide]
        patches.reshape(rows, wide, kernel, kernel, channels)[:] = windows.transpose(0, 1, 3, 4, 2)
        backend.linear(patches, weight, out[top : top + rows].reshape(rows * wide, -1))
