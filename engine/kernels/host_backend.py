"""Kernels of text encoders and pictures, beside those of all models; their form for host memory.

Samples of a batch are passed to these kernels one at a time or row by row, so a sample's bits do
not depend on the other samples. Pictures are ``[height * width, channels]``, channels innermost:
a convolution is then a product of patches with a packed matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .audio import AudioBackend
from .backend import F32, U8, Backend, PackedLinear, Weights

AfterPart = Callable[[], object]
"""Called between the parts of a long call; an exception of it ends the call."""

PATCH_BYTES = 4 << 20
"""Patches that are multiplied at once; limits the memory of a convolution."""


class PictureBackend(Backend, Protocol):
    """A backend with the kernels of text encoders and picture models.

    Latents, noise and decoded images are float32 on every device. Other activations have the type
    of :meth:`~.backend.Backend.empty`.
    """

    def activations(self, x: F32) -> F32:
        """Return float32 rows ``[T, F]``, already uploaded, as activations."""
        ...

    def self_attention(
        self, qkv: F32, heads: int, scale: float, bias: F32 | None, out: F32
    ) -> None:
        """Attention of all rows of one sample to each other, without rotation.

        ``out[T, H * D] = softmax(scale * q @ k.T + bias) @ v``, with ``qkv[T, 3 * H * D]`` and the
        float32 ``bias[1 or H, T, T]``, uploaded, which may contain -inf.
        """
        ...

    def joint_attention(self, q: F32, kv: F32, keys: int, scale: float, out: F32) -> None:
        """``out[T, H * D] = softmax(scale * q[T, H, D] @ k.T) @ v`` over the first ``keys`` keys.

        ``kv[2, H, S, D]``: keys and values; ``S`` is ``keys``, rounded up to ``column_multiple``.
        """
        ...

    def modulated_norm(self, x: F32, shift: F32, scale: F32, eps: float, out: F32) -> None:
        """``out = (x - mean) / sqrt(variance + eps) * (1 + scale) + shift`` per row ``[T, H]``."""
        ...

    def add(self, x: F32, residual: F32) -> None:
        """``residual += x`` in place, ``[T, H]``."""
        ...

    def add_scaled(self, x: F32, scale: F32, residual: F32) -> None:
        """``residual[T, H] += x[T, H] * scale[H]`` in place."""
        ...

    def multiply(self, x: F32, out: F32) -> None:
        """``out *= x`` in place, ``[T, H]``."""
        ...

    def put_columns(self, x: F32, first: int, out: F32) -> None:
        """``out[:, first : first + F] = x`` of ``x[T, F]``."""
        ...

    def group_norm(
        self, x: F32, groups: int, weight: F32, bias: F32, eps: float, silu: bool, out: F32
    ) -> None:
        """Normalise ``x[P, C]`` over all rows and the channels of each group.

        ``out = (x - mean) / sqrt(variance + eps) * weight + bias``, then silu if requested; ``out``
        may be ``x``. One sample per call.
        """
        ...

    def conv2d(
        self, x: F32, weight: PackedLinear, kernel: int, out: F32, *, scale: int = 1
    ) -> None:
        """Convolve ``x[H, W, C]`` with stride 1 and zero padding into ``out[sH, sW, O]``.

        ``scale``: the input is enlarged by repeating each pixel ``scale`` times in both directions
        before the convolution. With scale 1 and a kernel above 1, ``out`` may begin at the first
        element of ``x`` if it has no more channels and ``on_host`` is True. ``weight`` is from
        :func:`pack_conv`. Raises ValueError for shapes that do not fit.
        """
        ...

    def mix(self, x: F32, base: F32 | None, y: F32, scale: float) -> F32:
        """Return ``y + scale * (x - base)``, float32 ``[T, F]``; without a base, of ``x``.

        The result may be in the memory of ``y``.
        """
        ...

    def all_finite(self, x: F32) -> bool:
        """True if no float32 value is infinite or NaN; waits for the device."""
        ...

    def to_pixels(self, image: F32) -> U8:
        """Return ``[h, w, 3]`` in host memory: -1 to 1 as 0 to 255, values outside clipped.

        ``image[h, w, C]`` is float32; its first three channels count.
        """
        ...


class HostBackend(PictureBackend, AudioBackend, Protocol):
    """A backend in host memory with the kernels of audio, text encoders and pictures."""

    computes: Backend | None
    """The device that computes, if these kernels only move blocks."""

    def group_norm(
        self,
        x: F32,
        groups: int,
        weight: F32,
        bias: F32,
        eps: float,
        silu: bool,
        out: F32,
        after_part: AfterPart | None = None,
    ) -> None:
        """Normalise as :meth:`PictureBackend.group_norm`."""
        ...

    def dense_attention(
        self,
        q: F32,
        kv: F32,
        bias: F32 | None,
        scale: float,
        out: F32,
        after_part: AfterPart | None = None,
    ) -> None:
        """Attention of all rows to all keys.

        ``out[T, H * D] = softmax(scale * q[T, H, D] @ k.T + bias) @ v``; ``kv[2, H, S, D]`` are
        keys and values; ``bias[1 or H, T, S]`` may contain -inf. One sample per call.
        """
        ...


class HostPictures:
    """The methods of :class:`PictureBackend` that are the same for all kernels in host memory."""

    def activations(self, x: F32) -> F32:
        """Return the rows themselves."""
        return x

    def self_attention(
        self: HostBackend, qkv: F32, heads: int, scale: float, bias: F32 | None, out: F32
    ) -> None:
        """Attention of all rows of one sample to each other, without rotation."""
        rows, dim = len(qkv), qkv.shape[1] // (3 * heads)
        q = np.empty((rows, heads, dim), np.float32)
        kv = np.empty((1, 2, heads, rows, dim), np.float32)
        zero, slots = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64)
        table = identity_rotation(dim)
        self.qk_norm_rope_append(qkv, zero, slots, table, None, None, 0.0, kv, q)
        self.dense_attention(q, kv[0], bias, scale, out)

    def joint_attention(
        self: HostBackend, q: F32, kv: F32, keys: int, scale: float, out: F32
    ) -> None:
        """Attention of rows to all keys of their sample."""
        if keys != kv.shape[2]:
            raise ValueError(f"kv has {kv.shape[2]} keys, not {keys}")
        self.dense_attention(q, kv, None, scale, out)

    def modulated_norm(
        self: HostBackend, x: F32, shift: F32, scale: F32, eps: float, out: F32
    ) -> None:
        """``out = layer_norm(x) * (1 + scale) + shift`` per row ``[T, H]``."""
        self.layer_norm(x, 1 + scale, shift, eps, out)

    def add(self, x: F32, residual: F32) -> None:
        """``residual += x`` in place."""
        residual += x

    def multiply(self, x: F32, out: F32) -> None:
        """``out *= x`` in place."""
        out *= x

    def put_columns(self, x: F32, first: int, out: F32) -> None:
        """``out[:, first : first + F] = x``."""
        out[:, first : first + x.shape[1]] = x

    def conv2d(
        self: HostBackend, x: F32, weight: PackedLinear, kernel: int, out: F32, *, scale: int = 1
    ) -> None:
        """Convolve ``x[H, W, C]`` into ``out``: patches of a band of rows, then their product."""
        conv2d(self, x, weight, kernel, out, scale=scale)

    def mix(self, x: F32, base: F32 | None, y: F32, scale: float) -> F32:
        """Return ``y + scale * (x - base)`` in new memory."""
        mixed = y + np.float32(scale) * (x if base is None else x - base)
        return mixed.astype(np.float32, copy=False)

    def all_finite(self, x: F32) -> bool:
        """True if no value is infinite or NaN."""
        return bool(np.isfinite(x).all())

    def to_pixels(self, image: F32) -> U8:
        """Round an image of floats from -1 to 1 to uint8; values outside are clipped."""
        return np.rint(np.clip(image[..., :3] / 2 + np.float32(0.5), 0, 1) * 255).astype(np.uint8)


def identity_rotation(dim: int) -> F32:
    """Return the rope table ``[1, dim]`` that changes nothing."""
    table = np.zeros((1, dim), np.float32)
    table[:, : dim // 2] = 1.0
    return table


def pack_conv(backend: Backend, weight: Weights, bias: F32) -> PackedLinear:
    """Pack convolution weights ``[out, in, k, k]`` for :meth:`PictureBackend.conv2d`.

    Channels are padded with zeros to the backend's ``column_multiple``.
    """
    made, taken = (-size % backend.column_multiple for size in weight.shape[:2])
    wide = np.pad(weight.transpose(0, 2, 3, 1), ((0, made), (0, 0), (0, 0), (0, taken)))
    rows = np.ascontiguousarray(wide).reshape(len(wide), -1)
    return backend.pack_linear([rows], np.pad(bias, (0, made)))


def conv2d(
    backend: Backend,
    x: F32,
    weight: PackedLinear,
    kernel: int,
    out: F32,
    *,
    scale: int = 1,
    after_band: AfterPart | None = None,
) -> None:
    """Convolve in host memory; see :meth:`PictureBackend.conv2d`.

    ``out`` may begin at the first element of ``x``: rows of ``x`` are read before they are
    replaced. ``after_band()`` is called between bands of rows; its exceptions end the call.
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
        if top and after_band is not None:
            after_band()
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
