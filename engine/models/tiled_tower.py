"""The vision tower of mllama: an image of tiles in, one feature per vision token out.

An image has one to ``max_tiles`` tiles on a canvas. The tower always computes all tiles: those that
the image does not have are zeros. A tile has a row per patch, a row for the tile before them, and
rows of padding after them. Two encoders follow each other, the second with gated layers, and some
layers of the first give further features.

All rows of the image's own tiles attend to all rows, also to padding. Rows of padding and of other
tiles attend to the image's own rows only. So the rows are computed in two groups over the same keys
and values: first the image's own rows, then all others. Images are computed one at a time, so an
image's bits do not depend on other images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.tiled_images import aspect_ratios

from ..kernels.backend import Backend, PackedLinear
from ..kernels.host_backend import identity_rotation
from ..kernels.memory import aligned_zeros
from ..loading.safetensors import widened
from ..loading.tiled_config import TiledVisionConfig
from .weights import Order, WeightLoader
from .workspace import Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Canvas = tuple[int, int]
"""Rows and columns of an image, in tiles."""

NORM_EPS = 1e-5
"""Of the norms before and after the first encoder."""
BLOCK = 64
"""Rows per block of the tower's KV pool."""


@dataclass(slots=True, frozen=True)
class Norm:
    """Weights of a LayerNorm."""

    weight: F32
    bias: F32


@dataclass(slots=True, frozen=True)
class Block:
    """Weights of one layer. The gates of the second encoder scale what the layer adds."""

    input_norm: Norm
    qkv: PackedLinear
    o: PackedLinear
    post_norm: Norm
    up: PackedLinear
    down: PackedLinear
    attention_gate: np.float32 | None
    mlp_gate: np.float32 | None


@dataclass(slots=True, frozen=True)
class Groups:
    """The rows of an image, own rows first, as two sequences over the same blocks of a KV pool.

    ``order``: int64 ``[T]``, row of each place among all tiles' rows. ``tokens``: int64 ``[N]``,
    place of each vision token, those of the image's own tiles first. ``offsets``: int32 ``[3]``.
    ``ends``: int32 ``[T]``, last place that each place attends to. ``tables``: int32 ``[2, B]``.
    """

    order: I64
    tokens: I64
    offsets: I32
    ends: I32
    tables: I32


class TiledTower:
    """A loaded tower. Not thread-safe: all calls share the workspace and the KV pool.

    ``prefix``, ``projector``: of the tensors' names, ending with a dot. ``out_features``: channels
    of a feature.
    """

    def __init__(
        self,
        config: TiledVisionConfig,
        loader: WeightLoader,
        prefix: str,
        projector: str,
        out_features: int,
    ) -> None:
        self.config = config
        self._backend: Backend = loader.backend
        self._space = Workspace(loader.backend)
        hidden, patch = config.hidden_size, config.patch_size
        kernel = widened(loader.take(f"{prefix}patch_embedding.weight", (hidden, 3, patch, patch)))
        flat = np.ascontiguousarray(kernel.transpose(0, 2, 3, 1)).reshape(hidden, -1)
        self._patch_embed = loader.backend.pack_linear([flat])
        self._class = loader.vector(f"{prefix}class_embedding", hidden)
        self._load_positions(loader, prefix)
        self._norm_pre = self._load_norm(loader, f"{prefix}layernorm_pre")
        self._norm_post = self._load_norm(loader, f"{prefix}layernorm_post")
        self._first = [
            self._load_block(loader, f"{prefix}transformer.layers.{i}", gated=False)
            for i in range(config.layers)
        ]
        self._second = [
            self._load_block(loader, f"{prefix}global_transformer.layers.{i}", gated=True)
            for i in range(config.global_layers)
        ]
        self._projector = loader.linear(
            [(projector.removesuffix("."), out_features)],
            config.features,
            bias=True,
            columns=feature_order(hidden, len(config.deep_layers)),
        )
        scale = np.float32(1 / config.rescale_factor)
        self._mean = np.array(config.image_mean, np.float32) * scale
        self._std = np.array(config.image_std, np.float32) * scale
        rows = config.max_tiles * config.tile_rows
        self._zero = np.zeros(rows, np.int32)
        self._slots = np.arange(rows, dtype=np.int64)
        self._turn = identity_rotation(config.head_dim)
        shape = (1, -(-rows // BLOCK), 2, config.num_heads, BLOCK, config.head_dim)
        self._pool = loader.backend.kv_pool(shape, aligned_zeros)[0]

    def encode(
        self, pixels: U8, canvas: Canvas, on_progress: Callable[[], None] | None = None
    ) -> F32:
        """Return the features of an image, ``[image_tokens, out_features]``.

        Tokens of the image's own tiles come first, tile by tile in rows of the canvas. ``pixels``:
        ``[H, W, 3]``, at most as large as the canvas. ``on_progress``: called after each layer; its
        exceptions end the call.
        """
        config, kernels, space = self.config, self._backend, self._space
        hidden, groups = config.hidden_size, row_groups(config, canvas[0] * canvas[1])
        features = np.empty((config.image_tokens, config.features), np.float32)
        rows = len(groups.order)
        residual = space.rows("residual", rows, hidden)
        normed = space.rows("normed", rows, hidden)
        residual[:] = self._embedded(pixels, canvas)[groups.order]
        following = [*(block.input_norm for block in self._first[1:]), self._norm_post]
        self._norm(residual, self._first[0].input_norm, normed)
        for index, (block, norm) in enumerate(zip(self._first, following, strict=True)):
            self._layer(block, groups, residual, normed, norm)
            for part, layer in enumerate(config.deep_layers, 1):
                if layer == index:
                    columns = slice(part * hidden, (part + 1) * hidden)
                    features[:, columns] = residual[groups.tokens]
            if on_progress is not None:
                on_progress()
        residual[:] = normed
        residual += self._after[self.ratio_id(canvas), groups.order // config.tile_rows]
        self._norm(residual, self._second[0].input_norm, normed)
        # The norm after the last layer has no reader.
        following = [*(block.input_norm for block in self._second[1:]), self._norm_post]
        for block, norm in zip(self._second, following, strict=True):
            self._layer(block, groups, residual, normed, norm)
            if on_progress is not None:
                on_progress()
        features[:, :hidden] = residual[groups.tokens]
        out = kernels.empty(len(features), self._projector.out_features)
        kernels.linear(features, self._projector, out)
        return out

    # ------------------------------------------------------------------ rows before the first layer

    def _embedded(self, pixels: U8, canvas: Canvas) -> F32:
        """Return the rows of all tiles before the first layer, ``[tiles * tile_rows, hidden]``."""
        config, kernels = self.config, self._backend
        tiles, tokens = canvas[0] * canvas[1], config.tile_tokens
        ratio = self.ratio_id(canvas)
        patches = self.patches(pixels, canvas)
        embedded = kernels.empty(len(patches), config.hidden_size)
        kernels.linear(patches, self._patch_embed, embedded)
        rows = np.zeros((config.max_tiles, tokens, config.hidden_size), np.float32)
        rows[:tiles, 1:] = embedded.reshape(tiles, tokens - 1, -1)
        rows[:, 1:] += self._before[ratio][:, None]
        rows[:, 0] = self._class
        rows += self._position
        rows += self._tile_positions[ratio].reshape(rows.shape)
        whole = np.zeros((config.max_tiles, config.tile_rows, config.hidden_size), np.float32)
        normed = np.empty_like(rows)
        self._norm(
            rows.reshape(-1, rows.shape[2]), self._norm_pre, normed.reshape(-1, rows.shape[2])
        )
        whole[:, :tokens] = normed
        return whole.reshape(-1, config.hidden_size)

    def patches(self, pixels: U8, canvas: Canvas) -> F32:
        """Return the normalised patches of an image's tiles, float32 ``[n, patch * patch * 3]``."""
        config = self.config
        side, patch, (down, right) = config.tile_size, config.patch_size, canvas
        whole = np.zeros((down * side, right * side, 3), np.uint8)
        whole[: pixels.shape[0], : pixels.shape[1]] = pixels
        scaled = whole.astype(np.float32)
        scaled -= self._mean
        scaled /= self._std
        grid = side // patch
        cut = scaled.reshape(down, grid, patch, right, grid, patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 2, 5, 6)
        return np.ascontiguousarray(cut).reshape(-1, patch * patch * 3)

    def ratio_id(self, canvas: Canvas) -> int:
        """Return the aspect ratio id of a canvas."""
        return aspect_ratios(self.config.max_tiles).index(canvas) + 1

    # ------------------------------------------------------------------ layers

    def _layer(
        self, block: Block, groups: Groups, residual: F32, normed: F32, following: Norm
    ) -> None:
        """Compute one layer; ``normed``: its input, and after it ``following`` of the residual."""
        config, kernels, space, rows = self.config, self._backend, self._space, len(normed)
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        qkv = space.rows("qkv", rows, 3 * hidden)
        q = space.rows("q", rows, hidden).reshape(rows, heads, dim)
        mixed, delta = space.rows("mixed", rows, hidden), space.rows("delta", rows, hidden)
        kernels.linear(normed, block.qkv, qkv)
        kernels.qk_norm_rope_append(
            qkv, self._zero, self._slots, self._turn, None, None, NORM_EPS, self._pool, q
        )
        kernels.attention(
            q, self._pool, groups.tables, groups.offsets, groups.ends, dim**-0.5, 0, mixed
        )
        kernels.linear(mixed, block.o, delta)
        if block.attention_gate is not None:
            delta *= block.attention_gate
        self._add_norm(delta, residual, block.post_norm, normed)
        up = space.rows("up", rows, config.intermediate_size)
        active = space.rows("active", rows, config.intermediate_size)
        kernels.linear(normed, block.up, up)
        kernels.activate(up, "gelu", active)
        kernels.linear(active, block.down, delta)
        if block.mlp_gate is not None:
            delta *= block.mlp_gate
        eps = NORM_EPS if following is self._norm_post else config.norm_eps
        kernels.add_layer_norm(delta, residual, following.weight, following.bias, eps, normed)

    def _add_norm(self, x: F32, residual: F32, norm: Norm, out: F32) -> None:
        eps = self.config.norm_eps
        self._backend.add_layer_norm(x, residual, norm.weight, norm.bias, eps, out)

    def _norm(self, x: F32, norm: Norm, out: F32) -> None:
        eps = NORM_EPS if norm is self._norm_pre else self.config.norm_eps
        self._backend.layer_norm(x, norm.weight, norm.bias, eps, out)

    # ------------------------------------------------------------------ loading

    def _load_positions(self, loader: WeightLoader, prefix: str) -> None:
        """Load the tables of positions and tiles, scaled by their gates."""
        config = self.config
        hidden, tokens, tiles = config.hidden_size, config.tile_tokens, config.max_tiles
        ratios = len(aspect_ratios(tiles)) + 1
        name = f"{prefix}gated_positional_embedding."
        gate = self._gate(loader, f"{name}gate")
        position = widened(loader.take(f"{name}embedding", (tokens, hidden)))
        self._position = (1 - gate) * position
        wide = tiles * tokens * hidden
        table = widened(loader.take(f"{name}tile_embedding.weight", (ratios, wide)))
        self._tile_positions = table * gate
        self._before = self._load_tiles(loader, f"{prefix}pre_tile_positional_embedding.")
        self._after = self._load_tiles(loader, f"{prefix}post_tile_positional_embedding.")

    def _load_tiles(self, loader: WeightLoader, name: str) -> F32:
        """Load a table ``[ratios, max_tiles, hidden]``, scaled by its gate."""
        tiles, hidden = self.config.max_tiles, self.config.hidden_size
        ratios = len(aspect_ratios(tiles)) + 1
        table = widened(loader.take(f"{name}embedding.weight", (ratios, tiles * hidden)))
        return (table * self._gate(loader, f"{name}gate")).reshape(ratios, tiles, hidden)

    def _gate(self, loader: WeightLoader, name: str) -> np.float32:
        return np.float32(np.tanh(loader.vector(name, 1)[0]))

    def _load_block(self, loader: WeightLoader, name: str, *, gated: bool) -> Block:
        hidden, wide = self.config.hidden_size, self.config.intermediate_size
        attention = f"{name}.self_attn"
        qkv = [(f"{attention}.{part}_proj", hidden) for part in "qkv"]
        return Block(
            input_norm=self._load_norm(loader, f"{name}.input_layernorm"),
            qkv=loader.linear(qkv, hidden, bias=False),
            o=loader.linear([(f"{attention}.o_proj", hidden)], hidden, bias=False),
            post_norm=self._load_norm(loader, f"{name}.post_attention_layernorm"),
            up=loader.linear([(f"{name}.mlp.fc1", wide)], hidden, bias=True),
            down=loader.linear([(f"{name}.mlp.fc2", hidden)], wide, bias=True),
            attention_gate=self._gate(loader, f"{name}.gate_attn") if gated else None,
            mlp_gate=self._gate(loader, f"{name}.gate_ffn") if gated else None,
        )

    def _load_norm(self, loader: WeightLoader, name: str) -> Norm:
        hidden = self.config.hidden_size
        return Norm(loader.norm(f"{name}.weight", hidden), loader.norm(f"{name}.bias", hidden))


def feature_order(hidden: int, deep: int) -> Order:
    """Return where each channel of a feature is in the checkpoint.

    There, the channels of the ``deep`` layers alternate after the last layer's channels.
    """
    alternating = hidden + np.arange(hidden * deep).reshape(hidden, deep).T
    return np.concatenate([np.arange(hidden), alternating.reshape(-1)]).astype(np.intp)


@lru_cache(maxsize=64)
def row_groups(config: TiledVisionConfig, tiles: int) -> Groups:
    """Return the rows of an image with this number of tiles."""
    rows, tokens = config.tile_rows, config.tile_tokens
    every = np.arange(config.max_tiles * rows, dtype=np.int64)
    filled = every % rows < tokens
    own = filled & (every < tiles * rows)
    order = np.concatenate([every[own], every[~own]])
    count = int(own.sum())
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ends = np.full(len(order), len(order) - 1, np.int32)
    ends[count:] = count - 1
    table = np.arange(-(-len(order) // BLOCK), dtype=np.int32)
    return Groups(
        order=order,
        tokens=place[every[filled]],
        offsets=np.array([0, count, len(order)], np.int32),
        ends=ends,
        tables=np.stack([table, table]),
    )
