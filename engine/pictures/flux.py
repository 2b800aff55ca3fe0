"""The Flux transformer: two streams of text and image that attend jointly, then one stream.

Rows of a batch are ordered ``[text of all samples; image of all samples]``, so that the weights of
both streams and of the single stream are applied to contiguous rows. A sample's bits do not depend
on the others: products are row by row, and attention and modulation are sample by sample.

The pairs of channels that rope rotates are neighbours in the checkpoint. The rows of the q and k
weights are reordered at load time, so that the kernel's rotate-half form rotates the same pairs.
The scores do not change, because q and k are reordered alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels.backend import F32, I32, PackedLinear
from ..kernels.host_backend import HostBackend
from ..models.weights import Progress, WeightLoader, widened
from ..models.workspace import Workspace
from .folder import FluxConfig, ModelPart, no_watch

_EPS = 1e-6
_SINES = 256
_THETA = 10000.0


@dataclass(slots=True, frozen=True, kw_only=True)
class FluxInputs:
    """A batch of samples of one shape.

    ``latents`` ``[B, rows * columns, in_channels]``: packed 2x2 latents. ``prompts``
    ``[B, T, joint_attention_dim]``, ``pooled`` ``[B, pooled_projection_dim]``: encoded texts.
    ``timesteps`` ``[B]``: 1000 sigma. ``guidance`` ``[B]``: ignored by models without guidance
    embedding. ``rows``, ``columns``: of latent tokens.
    """

    latents: F32
    prompts: F32
    pooled: F32
    timesteps: F32
    guidance: F32
    rows: int
    columns: int


@dataclass(slots=True, frozen=True)
class _Stream:
    """Weights of one stream of a double block."""

    modulation: PackedLinear
    qkv: PackedLinear
    q_norm: F32
    k_norm: F32
    o: PackedLinear
    up: PackedLinear
    down: PackedLinear


@dataclass(slots=True, frozen=True)
class _Single:
    """Weights of a single block."""

    modulation: PackedLinear
    qkv: PackedLinear
    q_norm: F32
    k_norm: F32
    up: PackedLinear
    out: PackedLinear


@dataclass(slots=True, frozen=True)
class _Mlp:
    first: PackedLinear
    second: PackedLinear


@dataclass(slots=True, frozen=True)
class _Shape:
    """Rows of a batch: ``samples`` times ``text`` and ``image`` rows, and the joint rope table."""

    samples: int
    text: int
    image: int
    cos_sin: F32

    @property
    def keys(self) -> int:
        """Keys of one sample."""
        return self.text + self.image

    @property
    def text_rows(self) -> int:
        """Rows of the text stream."""
        return self.samples * self.text

    @property
    def rows(self) -> int:
        """All rows."""
        return self.samples * self.keys

    def split(self, x: F32) -> Iterator[tuple[int, F32]]:
        """Yield each part of ``x[rows, ...]`` that belongs to one sample, with the sample."""
        for sample in range(self.samples):
            yield sample, x[sample * self.text : (sample + 1) * self.text]
        images = x[self.text_rows :]
        for sample in range(self.samples):
            yield sample, images[sample * self.image : (sample + 1) * self.image]


class FluxTransformer:
    """A loaded transformer. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        part: ModelPart,
        config: FluxConfig,
        backend: HostBackend,
        on_progress: Progress | None = None,
    ) -> None:
        loader = WeightLoader(part, backend, on_progress)
        self.after_layer: Callable[[], None] = no_watch
        self.config, self._backend = config, backend
        self._space = Workspace(backend, exact=True)
        hidden = config.hidden_size
        time = "time_text_embed"
        self._time = _load_mlp(loader, f"{time}.timestep_embedder", _SINES, hidden)
        self._guidance = (
            _load_mlp(loader, f"{time}.guidance_embedder", _SINES, hidden)
            if config.guidance_embeds
            else None
        )
        pooled = config.pooled_projection_dim
        self._pooled = _load_mlp(loader, f"{time}.text_embedder", pooled, hidden)
        joint, channels = config.joint_attention_dim, config.in_channels
        self._context = loader.linear([("context_embedder", hidden)], joint, bias=True)
        self._latents = loader.linear([("x_embedder", hidden)], channels, bias=True)
        self._double = [_load_double(loader, config, i) for i in range(config.num_layers)]
        self._single = [_load_single(loader, config, i) for i in range(config.num_single_layers)]
        self._norm_out = loader.linear([("norm_out.linear", 2 * hidden)], hidden, bias=True)
        self._out = loader.linear([("proj_out", channels)], hidden, bias=True)
        loader.finish()
        self._tables: dict[tuple[int, int, int], F32] = {}

    def release(self) -> None:
        """Free the arrays of the last call, as large as hundreds of megabytes."""
        self._space.clear()

    def execute(self, inputs: FluxInputs) -> F32:
        """Return the noise ``[B, rows * columns, in_channels]`` that the samples contain."""
        samples, image, channels = inputs.latents.shape
        text, joint = inputs.prompts.shape[1:]
        hidden, backend, space = self.config.hidden_size, self._backend, self._space
        table = self._rope_table(text, inputs.rows, inputs.columns)
        shape = _Shape(samples, text, image, table)
        states = space.rows("states", shape.rows, hidden)
        texts = np.ascontiguousarray(inputs.prompts).reshape(-1, joint)
        latents = np.ascontiguousarray(inputs.latents).reshape(-1, channels)
        backend.linear(texts, self._context, states[: shape.text_rows])
        backend.linear(latents, self._latents, states[shape.text_rows :])
        embedding = self._embedding(inputs)
        for text_stream, image_stream in self._double:
            self._double_block(text_stream, image_stream, states, embedding, shape)
            self.after_layer()
        for block in self._single:
            self._single_block(block, states, embedding, shape)
            self.after_layer()
        return self._finish(states, embedding, shape)

    def _embedding(self, inputs: FluxInputs) -> F32:
        """Return ``silu`` of the joint embedding of time, guidance and pooled text ``[B, H]``."""
        total = self._mlp(self._time, sinusoid(inputs.timesteps))
        if self._guidance is not None:
            total += self._mlp(self._guidance, sinusoid(inputs.guidance.astype(np.float64) * 1000))
        total += self._mlp(self._pooled, np.ascontiguousarray(inputs.pooled))
        self._backend.activate(total, "silu", total)
        return total

    def _mlp(self, mlp: _Mlp, x: F32) -> F32:
        inner = np.empty((len(x), mlp.first.out_features), np.float32)
        out = np.empty((len(x), mlp.second.out_features), np.float32)
        self._backend.linear(x, mlp.first, inner)
        self._backend.activate(inner, "silu", inner)
        self._backend.linear(inner, mlp.second, out)
        return out

    def _modulation(self, weight: PackedLinear, embedding: F32) -> F32:
        """Return the modulation ``[chunks, B, H]``."""
        samples, hidden = embedding.shape
        out = np.empty((samples, weight.out_features), np.float32)
        self._backend.linear(embedding, weight, out)
        return np.ascontiguousarray(out.reshape(samples, -1, hidden).transpose(1, 0, 2))

    def _norm(
        self, parts: Iterator[tuple[int, F32]], shift: F32, scale: F32, out: Iterator[F32]
    ) -> None:
        """Compute ``layer_norm(x) * (1 + scale) + shift`` with each sample's own vectors."""
        for (sample, x), y in zip(parts, out, strict=True):
            self._backend.layer_norm(x, 1 + scale[sample], shift[sample], _EPS, y)

    def _double_block(
        self, text: _Stream, image: _Stream, states: F32, embedding: F32, shape: _Shape
    ) -> None:
        backend, space, cut = self._backend, self._space, shape.text_rows
        hidden = self.config.hidden_size
        normed, delta = space.rows("normed", shape.rows, hidden), self._delta(shape)
        qkv = space.rows("qkv", shape.rows, 3 * hidden)
        streams = (text, slice(0, cut)), (image, slice(cut, shape.rows))
        chunks = [self._modulation(stream.modulation, embedding) for stream, _ in streams]
        # A stream's chunks are (shift, scale, gate) of attention, then of the MLP.
        for chunk, parts, out in self._by_stream(chunks, states, normed, shape):
            self._norm(parts, chunk[0], chunk[1], out)
        for stream, rows in streams:
            backend.linear(normed[rows], stream.qkv, qkv[rows])
        mixed = self._attend((text, image), qkv, shape)
        for stream, rows in streams:
            backend.linear(mixed[rows], stream.o, delta[rows])
        self._add(chunks, 2, delta, states, shape)
        for chunk, parts, out in self._by_stream(chunks, states, normed, shape):
            self._norm(parts, chunk[3], chunk[4], out)
        wide = text.up.out_features
        active = space.rows("active", shape.rows, wide)
        for stream, rows in streams:
            backend.linear(normed[rows], stream.up, active[rows])
            backend.activate(active[rows], "gelu_tanh", active[rows])
            backend.linear(active[rows], stream.down, delta[rows])
        self._add(chunks, 5, delta, states, shape)

    def _by_stream(
        self, chunks: list[F32], states: F32, out: F32, shape: _Shape
    ) -> Iterator[tuple[F32, Iterator[tuple[int, F32]], Iterator[F32]]]:
        """Yield for text, then image: its modulation, its parts of ``states`` and of ``out``."""
        parts, results = list(shape.split(states)), [part for _, part in shape.split(out)]
        for at, chunk in enumerate(chunks):
            own = slice(at * shape.samples, (at + 1) * shape.samples)
            yield chunk, iter(parts[own]), iter(results[own])

    def _add(self, chunks: list[F32], gate: int, delta: F32, states: F32, shape: _Shape) -> None:
        """Compute ``states += gate * delta`` with each stream's gates."""
        for chunk, parts, targets in self._by_stream(chunks, delta, states, shape):
            for (sample, part), target in zip(parts, targets, strict=True):
                self._backend.add_scaled(part, chunk[gate][sample], target)

    def _single_block(self, block: _Single, states: F32, embedding: F32, shape: _Shape) -> None:
        backend, space, hidden = self._backend, self._space, self.config.hidden_size
        normed, delta = space.rows("normed", shape.rows, hidden), self._delta(shape)
        qkv = space.rows("qkv", shape.rows, 3 * hidden)
        shift, scale, gate = self._modulation(block.modulation, embedding)
        results = (part for _, part in shape.split(normed))
        self._norm(shape.split(states), shift, scale, results)
        backend.linear(normed, block.qkv, qkv)
        wide = block.up.out_features
        active, joined = (
            space.rows("active", shape.rows, wide),
            space.rows("joined", shape.rows, hidden + wide),
        )
        backend.linear(normed, block.up, active)
        backend.activate(active, "gelu_tanh", active)
        joined[:, :hidden] = self._attend((block, block), qkv, shape)
        joined[:, hidden:] = active
        backend.linear(joined, block.out, delta)
        for (sample, part), (_, target) in zip(
            shape.split(delta), shape.split(states), strict=True
        ):
            backend.add_scaled(part, gate[sample], target)

    def _attend(
        self, streams: tuple[_Stream | _Single, _Stream | _Single], qkv: F32, shape: _Shape
    ) -> F32:
        """Return the joint attention ``[rows, H]`` of both streams, ordered like ``qkv``."""
        heads, dim = self.config.num_attention_heads, self.config.attention_head_dim
        backend, space, samples = self._backend, self._space, shape.samples
        hidden = heads * dim
        q = space.rows("q", shape.rows, hidden).reshape(shape.rows, heads, dim)
        kv = space.rows("kv", samples * 2 * heads * shape.keys, dim)
        kv = kv.reshape(samples, 2, heads, shape.keys, dim)
        mixed = space.rows("mixed", shape.rows, hidden)
        parts = ((0, shape.text, 0), (shape.text_rows, shape.image, shape.text))
        for stream, (start, count, first) in zip(streams, parts, strict=True):
            rows = slice(start, start + samples * count)
            places = np.tile(np.arange(first, first + count, dtype=np.int32), samples)
            starts = np.repeat(np.arange(samples, dtype=np.int64) * shape.keys, count)
            slots = starts + places.astype(np.int64)
            norms = stream.q_norm, stream.k_norm
            backend.qk_norm_rope_append(
                qkv[rows], places, slots, shape.cos_sin, *norms, _EPS, kv, q[rows]
            )
        for (sample, queries), (_, out) in zip(shape.split(q), shape.split(mixed), strict=True):
            backend.dense_attention(queries, kv[sample], None, dim**-0.5, out)
        return mixed

    def _finish(self, states: F32, embedding: F32, shape: _Shape) -> F32:
        hidden = self.config.hidden_size
        # Unlike in the blocks, the scale comes before the shift.
        scale, shift = self._modulation(self._norm_out, embedding)
        images = states[shape.text_rows :]
        normed = self._space.rows("normed", len(images), hidden)
        per_sample = images.reshape(shape.samples, shape.image, hidden)
        results = normed.reshape(per_sample.shape)
        self._norm(iter(enumerate(per_sample)), shift, scale, iter(results))
        noise = np.empty((len(images), self.config.in_channels), np.float32)
        self._backend.linear(normed, self._out, noise)
        return noise.reshape(shape.samples, shape.image, -1)

    def _delta(self, shape: _Shape) -> F32:
        return self._space.rows("delta", shape.rows, self.config.hidden_size)

    def _rope_table(self, text: int, rows: int, columns: int) -> F32:
        """Return ``[text + rows * columns, dim]``, first half cos, second half sin; one is kept."""
        key = (text, rows, columns)
        if key not in self._tables:
            ids = np.concatenate([np.zeros((text, 3), np.int32), latent_image_ids(rows, columns)])
            self._tables = {key: rope_table(ids, self.config.axes_dims_rope)}
        return self._tables[key]


def latent_image_ids(rows: int, columns: int) -> I32:
    """Return the positions ``[rows * columns, 3]`` of latent tokens: (0, row, column)."""
    ids = np.zeros((rows, columns, 3), np.int32)
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)
    return ids.reshape(-1, 3)


def rope_table(ids: I32, dims: tuple[int, ...]) -> F32:
    """Return cos and sin ``[T, dim]`` of the angles of all axes; ``ids[T, axes]`` are positions."""
    angles = [
        ids[:, axis : axis + 1] * _THETA ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        for axis, dim in enumerate(dims)
    ]
    joined = np.concatenate(angles, axis=1)
    return np.concatenate([np.cos(joined), np.sin(joined)], axis=1).astype(np.float32)


def sinusoid(values: npt.NDArray[np.floating]) -> F32:
    """Return cos and sin ``[B, 256]`` of values at 128 frequencies from 1 down to 1/10000.

    Computed in float64: at 1000, float32 arguments would lose 1e-4.
    """
    half = _SINES // 2
    frequencies = np.exp(-np.log(_THETA) * np.arange(half) / half)
    angles = values.astype(np.float64)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _halves_order(heads: int, dim: int) -> npt.NDArray[np.intp]:
    """Return the order of rows that moves each head's even channels before its odd ones."""
    one = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])
    order: npt.NDArray[np.intp] = np.arange(heads)[:, None] * dim + one
    return order.reshape(-1)


def _load_mlp(loader: WeightLoader, name: str, inner: int, hidden: int) -> _Mlp:
    return _Mlp(
        loader.linear([(f"{name}.linear_1", hidden)], inner, bias=True),
        loader.linear([(f"{name}.linear_2", hidden)], hidden, bias=True),
    )


def _load_qkv(
    loader: WeightLoader, names: tuple[str, str, str], config: FluxConfig
) -> PackedLinear:
    hidden = config.hidden_size
    order = _halves_order(config.num_attention_heads, config.attention_head_dim)
    parts = [(name, hidden) for name in names]
    return loader.linear(parts, hidden, bias=True, orders=(order, order, None))


def _load_norm(loader: WeightLoader, name: str, config: FluxConfig) -> F32:
    dim = config.attention_head_dim
    return widened(loader.take(f"{name}.weight", (dim,)))[_halves_order(1, dim)]


def _load_double(loader: WeightLoader, config: FluxConfig, index: int) -> tuple[_Stream, _Stream]:
    base, hidden = f"transformer_blocks.{index}", config.hidden_size

    def stream(norm: str, qkv: tuple[str, str, str], added: str, out: str, mlp: str) -> _Stream:
        qkv = (f"{base}.attn.{qkv[0]}", f"{base}.attn.{qkv[1]}", f"{base}.attn.{qkv[2]}")
        return _Stream(
            modulation=loader.linear([(f"{base}.{norm}.linear", 6 * hidden)], hidden, bias=True),
            qkv=_load_qkv(loader, qkv, config),
            q_norm=_load_norm(loader, f"{base}.attn.norm_{added}q", config),
            k_norm=_load_norm(loader, f"{base}.attn.norm_{added}k", config),
            o=loader.linear([(f"{base}.attn.{out}", hidden)], hidden, bias=True),
            up=loader.linear([(f"{base}.{mlp}.net.0.proj", 4 * hidden)], hidden, bias=True),
            down=loader.linear([(f"{base}.{mlp}.net.2", hidden)], 4 * hidden, bias=True),
        )

    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    text = stream("norm1_context", added, "added_", "to_add_out", "ff_context")
    return text, stream("norm1", ("to_q", "to_k", "to_v"), "", "to_out.0", "ff")


def _load_single(loader: WeightLoader, config: FluxConfig, index: int) -> _Single:
    base, hidden = f"single_transformer_blocks.{index}", config.hidden_size
    qkv = (f"{base}.attn.to_q", f"{base}.attn.to_k", f"{base}.attn.to_v")
    return _Single(
        modulation=loader.linear([(f"{base}.norm.linear", 3 * hidden)], hidden, bias=True),
        qkv=_load_qkv(loader, qkv, config),
        q_norm=_load_norm(loader, f"{base}.attn.norm_q", config),
        k_norm=_load_norm(loader, f"{base}.attn.norm_k", config),
        up=loader.linear([(f"{base}.proj_mlp", 4 * hidden)], hidden, bias=True),
        out=loader.linear([(f"{base}.proj_out", hidden)], 5 * hidden, bias=True),
    )
