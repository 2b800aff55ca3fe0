"""What the transformers of pictures share: rows of text and image that attend to each other.

Rows of a batch are ordered ``[text of all samples; image of all samples]``, so that the weights of
a stream of text, a stream of images or both are applied to contiguous rows.

The pairs of channels that rope rotates are neighbours in the checkpoints. The rows of the q and k
weights are reordered at load time, so that the kernel's rotate-half form rotates the same pairs.
The scores do not change, because q and k are reordered alike. On a device whose attention has few
head sizes, heads are padded with zeros; the weights and epsilon of their norms are scaled for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels.backend import F32, I32, I64, PackedLinear
from ..kernels.host_backend import PictureBackend
from ..loading.safetensors import widened
from ..models.vision_tower import padded_heads
from ..models.weights import Order, WeightLoader
from ..models.workspace import Workspace

SINES = 256
"""Numbers of a sinusoid."""
_PERIOD = 10000.0


@dataclass(slots=True, frozen=True)
class JointRows:
    """Rows of a batch: ``samples`` times ``text`` and ``image`` rows, and the joint rope table.

    ``places``, ``slots``: of all rows, in the table and in the keys. ``capacity``: of the keys of
    a sample.
    """

    samples: int
    text: int
    image: int
    capacity: int
    cos_sin: F32
    places: I32
    slots: I64

    @property
    def keys(self) -> int:
        """Keys of one sample."""
        return self.text + self.image

    @property
    def text_rows(self) -> int:
        """Rows of the text of all samples."""
        return self.samples * self.text

    @property
    def rows(self) -> int:
        """All rows."""
        return self.samples * self.keys

    def split(self, x: F32) -> Iterator[tuple[int, F32]]:
        """Yield each part of ``x[rows, ...]`` that belongs to one sample, with the sample.

        First come the texts, then the images; parts without rows are left out.
        """
        for rows, size in ((x[: self.text_rows], self.text), (x[self.text_rows :], self.image)):
            for sample in range(self.samples if size else 0):
                yield sample, rows[sample * size : (sample + 1) * size]


@dataclass(slots=True, frozen=True)
class Heads:
    """Attention heads: ``count`` of ``dim`` channels, padded to ``wide`` for the kernels."""

    count: int
    dim: int
    wide: int

    @classmethod
    def of(cls, count: int, dim: int, backend: PictureBackend) -> Heads:
        """Return heads that are padded to a size that the backend has."""
        wide = next((size for size in backend.head_sizes if size >= dim), dim)
        return cls(count, dim, wide)

    @property
    def columns(self) -> Order | None:
        """Order of the channels of all heads as they lie in memory, with -1 for zeros."""
        return padded_heads(self.count, self.dim, self.wide)

    def load_qkv(
        self, loader: WeightLoader, names: tuple[str, str, str], hidden: int, *, bias: bool
    ) -> PackedLinear:
        """Pack the projections to q, k and v, ordered for rotate-half rope."""
        whole, order = self.columns, halves_order(self.count, self.dim)
        if whole is not None:
            order = np.where(whole < 0, -1, order[whole])
        parts = [(name, self.count * self.dim) for name in names]
        return loader.linear(parts, hidden, bias=bias, orders=(order, order, whole))

    def load_norm(self, loader: WeightLoader, name: str) -> F32:
        """Return the weights of a norm of heads.

        The mean square over a padded head is smaller, and so is the weight.
        """
        weight = widened(loader.take(f"{name}.weight", (self.dim,)))[halves_order(1, self.dim)]
        order = padded_heads(1, self.dim, self.wide)
        if order is not None:
            weight = np.where(order < 0, np.float32(0), weight[order])
            weight = weight * np.float32((self.dim / self.wide) ** 0.5)
        return loader.backend.parameters(weight)

    def rows(
        self, samples: int, text: int, image: int, table: F32, backend: PictureBackend
    ) -> JointRows:
        """Return the rows of a batch. ``table[text + image, dim]``: angles of a sample's rows."""
        order = padded_heads(1, self.dim, self.wide)
        if order is not None:
            table = np.where(order < 0, np.float32(0), table[:, order])
        capacity = text + image + -(text + image) % backend.column_multiple
        parts = (
            np.arange(samples)[:, None] * capacity + np.arange(first, first + count)
            for first, count in ((0, text), (text, image))
        )
        slots = np.concatenate([part.reshape(-1) for part in parts])
        return JointRows(
            samples, text, image, capacity, backend.upload(np.ascontiguousarray(table)),
            backend.upload((slots % capacity).astype(np.int32)),
            backend.upload(slots.astype(np.int64)),
        )  # fmt: skip

    def attend(
        self,
        backend: PictureBackend,
        space: Workspace,
        rows: JointRows,
        qkv: F32,
        norms: Sequence[tuple[slice, F32 | None, F32 | None]],
        eps: float,
    ) -> F32:
        """Return the attention ``[rows, count * wide]`` of each sample's rows to each other.

        ``norms``: rows, and the weights of the norms of their q and k. ``eps``: of these norms.
        """
        heads, dim, capacity = self.count, self.wide, rows.capacity
        q = space.rows("q", rows.rows, heads * dim).reshape(rows.rows, heads, dim)
        kv = space.rows("kv", rows.samples * 2 * heads * capacity, dim)
        kv = kv.reshape(rows.samples, 2, heads, capacity, dim)
        mixed = space.rows("mixed", rows.rows, heads * dim)
        for part, q_norm, k_norm in norms:
            backend.qk_norm_rope_append(
                qkv[part], rows.places[part], rows.slots[part], rows.cos_sin, q_norm, k_norm,
                eps * self.dim / dim, kv, q[part],
            )  # fmt: skip
        for (sample, queries), (_, out) in zip(rows.split(q), rows.split(mixed), strict=True):
            backend.joint_attention(queries, kv[sample], rows.keys, self.dim**-0.5, out)
        return mixed


def halves_order(heads: int, dim: int) -> npt.NDArray[np.intp]:
    """Return the order of rows that moves each head's even channels before its odd ones."""
    one = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])
    order: npt.NDArray[np.intp] = np.arange(heads)[:, None] * dim + one
    return order.reshape(-1)


def rope_table(ids: I32, dims: tuple[int, ...], theta: float) -> F32:
    """Return cos and sin ``[T, dim]`` of the angles of all axes; ``ids[T, axes]`` are positions."""
    angles = [
        ids[:, axis : axis + 1] * theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        for axis, dim in enumerate(dims)
    ]
    joined = np.concatenate(angles, axis=1)
    return np.concatenate([np.cos(joined), np.sin(joined)], axis=1).astype(np.float32)


def sinusoid(values: npt.NDArray[np.floating]) -> F32:
    """Return cos and sin ``[B, 256]`` of values at 128 frequencies from 1 down to 1/10000.

    Computed in float64: at 1000, float32 arguments would lose 1e-4.
    """
    half = SINES // 2
    frequencies = np.exp(-np.log(_PERIOD) * np.arange(half) / half)
    angles = values.astype(np.float64)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@dataclass(slots=True, frozen=True)
class Mlp:
    """Two layers with silu between them."""

    first: PackedLinear
    second: PackedLinear

    @classmethod
    def load(
        cls, loader: WeightLoader, names: tuple[str, str], inner: int, middle: int, outer: int
    ) -> Mlp:
        """Load the layers from ``inner`` over ``middle`` to ``outer`` columns, with biases."""
        return cls(
            loader.linear([(names[0], middle)], inner, bias=True),
            loader.linear([(names[1], outer)], middle, bias=True),
        )

    def __call__(self, x: F32, backend: PictureBackend) -> F32:
        """Return the output for rows ``[B, inner]`` in new memory."""
        middle = backend.empty(len(x), self.first.out_features)
        out = backend.empty(len(x), self.second.out_features)
        backend.linear(x, self.first, middle)
        backend.activate(middle, "silu", middle)
        backend.linear(middle, self.second, out)
        return out
