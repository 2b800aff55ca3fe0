"""The vision tower of Qwen2.5-VL and Qwen3-VL: pixels in, one feature per token of an image out.

In Qwen2.5-VL patches attend within windows, in some layers within their whole image. In Qwen3-VL
they always attend within their image, and some layers give more features, for the decoder's first
layers. Attention, rotation and matrix products are the decoder's kernels. Every window or image is
a sequence in a separate KV pool. Each row sees the whole sequence, so attention has no direction. A
row's table of angles holds its row and column in the image. So a patch's bits do not depend on the
other images of a call.

The patches of an image are in the order of its windows, and in a window in the order of its tokens,
of which each has ``merge_size ** 2`` patches.

A GPU's kernels have few head sizes and read rows in multiples of 8 channels. For them the weights
get rows and columns of zeros when they are loaded, which change no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..kernels.backend import Backend, PackedLinear
from ..kernels.memory import aligned_zeros
from ..loading.safetensors import widened
from ..loading.vision_config import VisionConfig
from .weights import Order, WeightLoader
from .workspace import Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Grid = tuple[int, int]
"""Rows and columns of an image, in patches."""

EPS = 1e-6
BLOCK = 64
"""Patches per block of the tower's KV pool."""
TOGETHER = 4096
"""Patches of a call of the tower; a larger image is computed alone."""


@dataclass(slots=True, frozen=True)
class Norm:
    """Weights of an RMSNorm, or of a LayerNorm if it has a bias."""

    weight: F32
    bias: F32 | None


@dataclass(slots=True, frozen=True)
class Block:
    """Weights of one layer; ``up``: gate and up stacked, if the MLP is gated."""

    input_norm: Norm
    qkv: PackedLinear
    o: PackedLinear
    post_norm: Norm
    up: PackedLinear
    down: PackedLinear


@dataclass(slots=True, frozen=True)
class Merger:
    """Weights that turn the patches of a token into one feature.

    ``wide``: the norm is over all channels of a token, not over those of a patch.
    """

    norm: Norm
    up: PackedLinear
    down: PackedLinear
    wide: bool


@dataclass(slots=True, frozen=True)
class Encoded:
    """Features of an image: ``[tokens, out_hidden_size]``, and as many for each deep layer.

    They are in the backend's memory, where the decoder reads them.
    """

    features: F32
    deep: tuple[F32, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.features.nbytes + sum(part.nbytes for part in self.deep)


@dataclass(slots=True, frozen=True)
class Segments:
    """Groups of rows that attend to each other, as sequences of a KV pool.

    ``offsets``: int32 ``[S+1]``. ``ends``: int32 ``[T]``, index of the last row of each row's
    group. ``slots``: int64 ``[T]``. ``tables``: int32 ``[S, N]``. ``blocks``: of the pool.
    ``plan``: the backend's attention plan.
    """

    offsets: I32
    ends: I32
    slots: I64
    tables: I32
    blocks: int
    plan: object


class VisionTower:
    """A loaded tower. Not thread-safe: all calls share the workspace and the KV pool.

    ``prefix``: of the tensors' names, ending with a dot.
    """

    def __init__(self, config: VisionConfig, loader: WeightLoader, backend: Backend, prefix: str):
        self.config = config
        dim, multiple = config.head_dim, backend.column_multiple
        self._dim = next((size for size in backend.head_sizes if size >= dim), dim)
        self._heads = padded_heads(config.num_heads, dim, self._dim)
        self._qkv = padded_heads(3 * config.num_heads, dim, self._dim)
        self._wide = padded(config.intermediate_size, multiple)
        self._backend = backend
        self._space = Workspace(backend)
        hidden, patch = config.hidden_size, config.patch_size
        shape = (hidden, 3, config.temporal_patch_size, patch, patch)
        kernel = widened(loader.take(f"{prefix}patch_embed.proj.weight", shape))
        # An image is the same picture at every time, and its pixels come as rows of RGB triples.
        flat = kernel.sum(axis=2).transpose(0, 2, 3, 1).reshape(hidden, -1)
        biased = config.layer_norm
        bias = loader.vector(f"{prefix}patch_embed.proj.bias", hidden) if biased else None
        self._missing = -flat.shape[1] % multiple  # columns of zeros of a patch
        flat = np.pad(flat, ((0, 0), (0, self._missing)))
        self._patch_embed = backend.pack_linear([flat], bias)
        self._positions: F32 | None = None
        if config.side:
            table = loader.take(f"{prefix}pos_embed.weight", (config.side**2, hidden))
            self._positions = widened(table)
        self._blocks = [
            self._load_block(loader, f"{prefix}blocks.{i}") for i in range(config.depth)
        ]
        self._merger = self._load_merger(loader, f"{prefix}merger", wide=False)
        self._deep = {
            layer: self._load_merger(loader, f"{prefix}deepstack_merger_list.{i}", wide=True)
            for i, layer in enumerate(config.deep_layers)
        }
        scale = np.float32(1 / config.rescale_factor)
        self._mean = np.tile(np.array(config.image_mean, np.float32) * scale, patch * patch)
        self._std = np.tile(np.array(config.image_std, np.float32) * scale, patch * patch)
        quarter = np.arange(0, config.head_dim // 2, 2, dtype=np.float32) / np.float32(
            config.head_dim // 2
        )
        powers = np.power(np.float64(config.rope_theta), quarter.astype(np.float64))
        self._frequencies = np.float32(1) / powers.astype(np.float32)
        self._pool: F32 | None = None

    def encode(
        self,
        images: Sequence[tuple[U8, Grid]],
        on_progress: Callable[[], None] | None = None,
    ) -> list[Encoded]:
        """Return the features of each image, its tokens in row-major order.

        ``images``: pixels ``[H, W, 3]`` and grid. ``on_progress``: called after each layer; its
        exceptions end the call.
        """
        features: list[Encoded] = []
        start = 0
        while start < len(images):
            end, patches = start, 0
            while end < len(images):
                rows, columns = images[end][1]
                if end > start and patches + rows * columns > TOGETHER:
                    break
                patches += rows * columns
                end += 1
            features += self._encode(images[start:end], on_progress)
            start = end
        return features

    # ------------------------------------------------------------------ one call

    def _encode(
        self, images: Sequence[tuple[U8, Grid]], on_progress: Callable[[], None] | None
    ) -> list[Encoded]:
        config, kernels, space = self.config, self._backend, self._space
        grids = [grid for _, grid in images]
        orders = [window_order(*grid, config) for grid in grids]
        patches = np.concatenate(
            [
                self._patches(pixels, order)
                for (pixels, _), (order, _) in zip(images, orders, strict=True)
            ]
        )
        if self._missing:
            patches = np.pad(patches, ((0, 0), (0, self._missing)))
        rows, hidden = len(patches), config.hidden_size
        whole = segments([a * b for a, b in grids], kernels)
        windows = whole
        if config.window_size:
            windows = segments([n for _, sizes in orders for n in sizes], kernels)
        angles = [self._angles(*g, order) for g, (order, _) in zip(grids, orders, strict=True)]
        cos_sin = kernels.upload(np.concatenate(angles))
        every = kernels.upload(np.arange(rows, dtype=np.int32))
        residual, normed = space.rows("residual", rows, hidden), space.rows("normed", rows, hidden)
        kernels.linear(kernels.parameters(patches), self._patch_embed, residual)
        if self._positions is not None:
            learned = [learned_positions(self._positions, *g, config) for g in grids]
            added = kernels.parameters(np.concatenate(learned))
            kernels.put_rows(added, every, residual, add=True)
        self._norm(residual, self._blocks[0].input_norm, normed)
        pool = self._kv_pool(max(windows.blocks, whole.blocks))
        last = len(self._blocks) - 1
        tokens = [order for order, _ in orders]
        deep: list[list[F32]] = []
        for index, block in enumerate(self._blocks):
            groups = whole if index in config.full_layers else windows
            self._attend(block, groups, every, cos_sin, pool, residual, normed)
            following = self._merger.norm if index == last else self._blocks[index + 1].input_norm
            self._mlp(block, residual, normed, following)
            if index in self._deep:
                deep.append(self._merge(residual, self._deep[index], tokens))
            if on_progress is not None:
                on_progress()
        parts = zip(*deep, strict=True) if deep else [()] * len(images)
        merged = self._merge(normed, self._merger, tokens)
        return [Encoded(f, tuple(d)) for f, d in zip(merged, parts, strict=True)]

    def _patches(self, pixels: U8, order: I64) -> F32:
        """Return the normalised patches of an image, float32 ``[n, patch * patch * 3]``."""
        side, merge = self.config.patch_size, self.config.merge_size
        height, width = pixels.shape[:2]
        cut = pixels.reshape(
            height // (side * merge), merge, side, width // (side * merge), merge, side * 3
        )
        cut = cut.transpose(0, 3, 1, 4, 2, 5).reshape(len(order), -1)[order]
        patches = cut.reshape(-1, side * side * 3).astype(np.float32)
        patches -= self._mean
        patches /= self._std
        return patches

    def _angles(self, rows: int, columns: int, order: I64) -> F32:
        """Return cosines and sines of each patch, float32 ``[n, D]``, D the padded head size."""
        at = patch_positions(rows, columns, self.config.merge_size, order)
        exact = (at[:, :, None].astype(np.float32) * self._frequencies).astype(np.float64)
        flat = exact.reshape(len(at), -1)  # the row's frequencies, then the column's
        angles = np.zeros((len(at), 2, self._dim // 2), np.float32)
        angles[:, 0, : flat.shape[1]] = np.cos(flat)
        angles[:, 1, : flat.shape[1]] = np.sin(flat)
        return angles.reshape(len(at), self._dim)

    def _attend(
        self,
        block: Block,
        groups: Segments,
        every: I32,
        cos_sin: F32,
        pool: F32,
        residual: F32,
        normed: F32,
    ) -> None:
        """Add attention to ``residual``; ``normed`` becomes the MLP's input."""
        config, kernels, space, rows = self.config, self._backend, self._space, len(normed)
        heads, wide = config.num_heads, config.num_heads * self._dim
        qkv = space.rows("qkv", rows, 3 * wide)
        q = space.rows("q", rows, wide).reshape(rows, heads, self._dim)
        kernels.linear(normed, block.qkv, qkv)
        kernels.qk_norm_rope_append(qkv, every, groups.slots, cos_sin, None, None, EPS, pool, q)
        mixed = space.rows("mixed", rows, wide)
        delta = space.rows("delta", rows, config.hidden_size)
        kernels.attention(
            q,
            pool,
            groups.tables,
            groups.offsets,
            groups.ends,
            config.head_dim**-0.5,
            0,
            mixed,
            groups.plan,
        )
        kernels.linear(mixed, block.o, delta)
        self._add_norm(delta, residual, block.post_norm, normed)

    def _mlp(self, block: Block, residual: F32, normed: F32, following: Norm) -> None:
        """Add the MLP to ``residual``; ``normed`` becomes the input of the next layer."""
        kernels, space, rows = self._backend, self._space, len(normed)
        active = space.rows("active", rows, block.down.in_features)
        delta = space.rows("delta", rows, self.config.hidden_size)
        up = space.rows("up", rows, block.up.out_features)
        if self.config.layer_norm:
            kernels.linear(normed, block.up, up)
            kernels.activate(up, "gelu_tanh", active)
            kernels.linear(active, block.down, delta)
        else:
            kernels.gated_mlp(normed, block.up, block.down, up, active, delta)
        self._add_norm(delta, residual, following, normed)

    def _norm(self, x: F32, norm: Norm, out: F32) -> None:
        if norm.bias is None:
            self._backend.rms_norm(x, norm.weight, EPS, out)
        else:
            self._backend.layer_norm(x, norm.weight, norm.bias, EPS, out)

    def _add_norm(self, x: F32, residual: F32, norm: Norm, out: F32) -> None:
        if norm.bias is None:
            self._backend.add_rms_norm(x, residual, norm.weight, EPS, out)
        else:
            self._backend.add_layer_norm(x, residual, norm.weight, norm.bias, EPS, out)

    def _merge(self, states: F32, merger: Merger, orders: Sequence[I64]) -> list[F32]:
        """Return the features of each image, its tokens back in row-major order.

        ``states``: ``[patches, hidden]``, normed already unless the merger's norm is ``wide``.
        """
        kernels, space, config = self._backend, self._space, self.config
        wide = config.hidden_size * config.merge_size**2
        tokens = states.reshape(-1, wide)
        if merger.wide:
            normed = space.rows("merged", len(tokens), wide)
            self._norm(tokens, merger.norm, normed)
            tokens = normed
        up, active = space.rows("to_merge", len(tokens), wide), space.rows("act", len(tokens), wide)
        out = space.rows("features", len(tokens), config.out_hidden_size)
        kernels.linear(tokens, merger.up, up)
        kernels.activate(up, "gelu", active)
        kernels.linear(active, merger.down, out)
        found, start = [], 0
        for order in orders:
            features = kernels.empty(len(order), config.out_hidden_size)
            back = np.argsort(order).astype(np.int32) + np.int32(start)
            kernels.take_rows(out, kernels.upload(back), features)
            found.append(features)
            start += len(order)
        return found

    def _kv_pool(self, blocks: int) -> F32:
        """Return one layer of KV memory; all layers share it."""
        pool = self._pool
        if pool is None or len(pool) < blocks:
            config = self.config
            shape = (1, blocks, 2, config.num_heads, BLOCK, self._dim)
            pool = self._pool = self._backend.kv_pool(shape, aligned_zeros)[0]
        return pool

    def _load_block(self, loader: WeightLoader, name: str) -> Block:
        config = self.config
        hidden, wide, mlp = config.hidden_size, config.intermediate_size, f"{name}.mlp"
        up = [(f"{mlp}.gate_proj", wide), (f"{mlp}.up_proj", wide)]
        down = f"{mlp}.down_proj"
        if config.layer_norm:
            up, down = [(f"{mlp}.linear_fc1", wide)], f"{mlp}.linear_fc2"
        return Block(
            input_norm=self._load_norm(loader, f"{name}.norm1", hidden),
            qkv=loader.linear(
                [(f"{name}.attn.qkv", 3 * hidden)], hidden, bias=True, orders=(self._qkv,)
            ),
            o=loader.linear(
                [(f"{name}.attn.proj", hidden)], hidden, bias=True, columns=self._heads
            ),
            post_norm=self._load_norm(loader, f"{name}.norm2", hidden),
            up=loader.linear(up, hidden, bias=True, orders=[self._wide] * len(up)),
            down=loader.linear([(down, hidden)], wide, bias=True, columns=self._wide),
        )

    def _load_merger(self, loader: WeightLoader, name: str, *, wide: bool) -> Merger:
        config = self.config
        merged = config.hidden_size * config.merge_size**2
        norm, up, down = f"{name}.ln_q", f"{name}.mlp.0", f"{name}.mlp.2"
        if config.layer_norm:
            norm, up, down = f"{name}.norm", f"{name}.linear_fc1", f"{name}.linear_fc2"
        return Merger(
            norm=self._load_norm(loader, norm, merged if wide else config.hidden_size),
            up=loader.linear([(up, merged)], merged, bias=True),
            down=loader.linear([(down, config.out_hidden_size)], merged, bias=True),
            wide=wide,
        )

    def _load_norm(self, loader: WeightLoader, name: str, size: int) -> Norm:
        bias = loader.norm(f"{name}.bias", size) if self.config.layer_norm else None
        return Norm(loader.norm(f"{name}.weight", size), bias)


def padded_heads(heads: int, dim: int, to: int) -> Order | None:
    """Return the channels of heads of ``dim`` as heads of ``to``, -1 for zeros; None if equal.

    Both halves are padded, because rotation pairs a channel of one with a channel of the other.
    """
    if dim == to:
        return None
    order = np.full((heads, 2, to // 2), -1, np.intp)
    order[:, :, : dim // 2] = np.arange(heads * dim).reshape(heads, 2, dim // 2)
    return order.reshape(-1)


def padded(width: int, multiple: int) -> Order | None:
    """Return the indices of ``width`` channels, then -1 up to a multiple; None if it is one."""
    missing = -width % multiple
    return np.pad(np.arange(width), (0, missing), constant_values=-1) if missing else None


def window_order(rows: int, columns: int, config: VisionConfig) -> tuple[I64, list[int]]:
    """Return an image's tokens in the order of its windows, and the patches of each window."""
    merge = config.merge_size
    side = config.window_size // merge // config.patch_size or max(rows, columns)
    return _window_order(rows // merge, columns // merge, side, merge * merge)


@lru_cache(maxsize=256)
def _window_order(rows: int, columns: int, side: int, unit: int) -> tuple[I64, list[int]]:
    tokens = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    windows = [
        tokens[row : row + side, column : column + side].ravel()
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    ]
    return np.concatenate(windows), [len(window) * unit for window in windows]


def patch_positions(rows: int, columns: int, merge: int, order: I64) -> I64:
    """Return row and column of each patch, int64 ``[n, 2]``, for tokens in ``order``."""
    at = np.indices((rows, columns), np.int64).transpose(1, 2, 0)
    at = at.reshape(rows // merge, merge, columns // merge, merge, 2)
    tokens = at.transpose(0, 2, 1, 3, 4).reshape(len(order), merge * merge, 2)
    ordered: I64 = tokens[order].reshape(-1, 2)
    return ordered


def learned_positions(table: F32, rows: int, columns: int, config: VisionConfig) -> F32:
    """Return the learned position of each patch of an image without windows, ``[n, hidden]``.

    ``table``: ``[side * side, hidden]``, interpolated so that the image's corners are its corners.
    """
    order = np.arange(rows * columns // config.merge_size**2, dtype=np.int64)
    at = patch_positions(rows, columns, config.merge_size, order)
    row, row_share = _between(at[:, 0], rows, config.side)
    column, column_share = _between(at[:, 1], columns, config.side)
    learned = np.zeros((len(at), table.shape[1]), np.float32)
    for down in (0, 1):
        for right in (0, 1):
            share = np.abs(1 - down - row_share) * np.abs(1 - right - column_share)
            below = np.minimum(row + down, config.side - 1)
            beside = np.minimum(column + right, config.side - 1)
            learned += table[below * config.side + beside] * share[:, None]
    return learned


def _between(index: I64, size: int, side: int) -> tuple[I64, F32]:
    """Return the place before each index of an axis in a table, and the share of the next place."""
    place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(place)
    return floor.astype(np.int64), place - floor


def segments(sizes: Sequence[int], backend: Backend) -> Segments:
    """Lay out groups of rows, each in its own blocks, in the backend's memory."""
    lengths = np.array(sizes, np.int64)
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    counts = -(-lengths // BLOCK)
    firsts = np.cumsum(counts) - counts
    tables = np.minimum(
        firsts[:, None] + np.arange(counts.max()), (firsts + counts - 1)[:, None]
    ).astype(np.int32)
    group = np.repeat(np.arange(len(sizes)), lengths)
    within = np.arange(offsets[-1]) - offsets[:-1][group]
    ends = (lengths[group] - 1).astype(np.int32)
    return Segments(
        offsets=backend.upload(offsets),
        ends=backend.upload(ends),
        slots=backend.upload(firsts[group] * BLOCK + within),
        tables=backend.upload(tables),
        blocks=int(counts.sum()),
        plan=backend.plan_attention(offsets, ends),
    )
