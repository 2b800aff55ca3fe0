"""Kernels in host memory whose long calls are made in parts, for callers that may have to stop.

A layer of a large picture takes minutes on a CPU. Rows of its products and of its activations do
not depend on each other, so calls with parts of the rows write the same bits. Attention and group
norm read their other rows too; these kernels call ``after_part`` themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from .backend import F32, I32, I64, Activation, PackedLinear
from .host_backend import AfterPart, HostBackend, HostPictures, PictureBackend, conv2d

PART_PRODUCTS = 1 << 30
"""Products of two numbers in a part, if it has more than :data:`LEAST_ROWS` rows."""
PART_NUMBERS = 1 << 22
"""Numbers of a part of an elementwise kernel."""
LEAST_ROWS = 192
"""Fewest rows of a part: each one reads all weights again."""


def in_parts(backend: PictureBackend, after_part: AfterPart) -> PictureBackend:
    """Return the backend with ``after_part``, which long calls then call between their parts.

    The kernels of other devices are returned as they are: their calls return at once.
    """
    if not backend.on_host:
        return backend
    return cast(PictureBackend, KernelsInParts(cast(HostBackend, backend), after_part))


class KernelsInParts(HostPictures):
    """A :class:`~.host_backend.PictureBackend`; what is not written here is the backend's own."""

    def __init__(self, kernels: HostBackend, after_part: AfterPart) -> None:
        self._kernels, self._after_part = kernels, after_part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def _parts(self, rows: int, each: int) -> Iterator[slice]:
        """Yield slices of at most ``each`` rows; calls ``after_part`` between them."""
        for start in range(0, rows, each):
            if start:
                self._after_part()
            yield slice(start, min(start + each, rows))

    def _numbers(self, x: F32) -> Iterator[slice]:
        """Yield the parts of an elementwise kernel on ``x[T, F]``."""
        return self._parts(len(x), max(1, PART_NUMBERS // x.shape[1]))

    def linear(self, x: F32, weight: PackedLinear, out: F32) -> None:
        """``out[T, out] = x[T, in] @ weight.T + bias``."""
        for part in self._parts(len(x), _rows(weight.in_features * weight.out_features)):
            self._kernels.linear(x[part], weight, out[part])

    def gated_mlp(
        self,
        x: F32,
        gate_up: PackedLinear,
        down: PackedLinear,
        products: F32,
        active: F32,
        out: F32,
    ) -> None:
        """``out = (silu(x @ gate.T) * (x @ up.T)) @ down.T``."""
        each = gate_up.in_features * gate_up.out_features + down.in_features * down.out_features
        for part in self._parts(len(x), _rows(each)):
            self._kernels.gated_mlp(x[part], gate_up, down, products[part], active[part], out[part])

    def dense_attention(self, q: F32, kv: F32, bias: F32 | None, scale: float, out: F32) -> None:
        """Attention of all rows to all keys."""
        self._kernels.dense_attention(q, kv, bias, scale, out, self._after_part)

    def qk_norm_rope_append(
        self,
        qkv: F32,
        positions: I32,
        slots: I64,
        cos_sin: F32,
        q_norm: F32 | None,
        k_norm: F32 | None,
        eps: float,
        kv_layer: F32,
        q_out: F32,
        rounding: str = "",
    ) -> None:
        """Normalise and rotate q and k; write q to ``q_out``, k and v into ``kv_layer``."""
        for part in self._numbers(qkv):
            self._kernels.qk_norm_rope_append(
                qkv[part], positions[part], slots[part], cos_sin, q_norm, k_norm, eps, kv_layer,
                q_out[part], rounding,
            )  # fmt: skip

    def layer_norm(self, x: F32, weight: F32, bias: F32, eps: float, out: F32) -> None:
        """``out = (x - mean) / sqrt(variance + eps) * weight + bias`` per row ``[T, H]``."""
        for part in self._numbers(x):
            self._kernels.layer_norm(x[part], weight, bias, eps, out[part])

    def activate(self, x: F32, kind: Activation, out: F32) -> None:
        """Apply an activation to every element."""
        for part in self._numbers(x):
            self._kernels.activate(x[part], kind, out[part])

    def add(self, x: F32, residual: F32) -> None:
        """``residual += x`` in place."""
        for part in self._numbers(x):
            self._kernels.add(x[part], residual[part])

    def add_scaled(self, x: F32, scale: F32, residual: F32) -> None:
        """``residual[T, H] += x[T, H] * scale[H]`` in place."""
        for part in self._numbers(x):
            self._kernels.add_scaled(x[part], scale, residual[part])

    def put_columns(self, x: F32, first: int, out: F32) -> None:
        """``out[:, first : first + F] = x``."""
        for part in self._numbers(x):
            self._kernels.put_columns(x[part], first, out[part])

    def group_norm(
        self, x: F32, groups: int, weight: F32, bias: F32, eps: float, silu: bool, out: F32
    ) -> None:
        """Normalise ``x[P, C]`` over all rows and the channels of each group."""
        self._kernels.group_norm(x, groups, weight, bias, eps, silu, out, self._after_part)

    def conv2d(
        self, x: F32, weight: PackedLinear, kernel: int, out: F32, *, scale: int = 1
    ) -> None:
        """Convolve ``x[H, W, C]`` into ``out``; a part is a band of rows."""
        itself = cast(HostBackend, self)
        conv2d(itself, x, weight, kernel, out, scale=scale, after_band=self._after_part)


def _rows(products: int) -> int:
    """Return the rows of a part, if each one takes so many products."""
    return max(LEAST_ROWS, PART_PRODUCTS // max(1, products))
