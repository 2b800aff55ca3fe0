"""The Flux transformer: two streams of text and image that attend jointly, then one stream.

Rows of a batch are ordered ``[text of all samples; image of all samples]``, so that the weights of
both streams and of the single stream are applied to contiguous rows. A sample's bits do not depend
on the others: products are row by row, and attention and modulation are sample by sample.

The pairs of channels that rope rotates are neighbours in the checkpoint. The rows of the q and k
weights are reordered at load time, so that the kernel's rotate-half form rotates the same pairs.
The scores do not change, because q and k are reordered alike. On a device whose attention has few
head sizes, heads are padded with zeros; the weights and epsilon of their norms are scaled for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels.backend import F32, I32, I64, PackedLinear
from ..kernels.host_backend import PictureBackend
from ..models.vision_tower import padded_heads
from ..models.weights import Order, Progress, WeightLoader, widened
from ..models.workspace import Workspace
from .folder import FluxConfig, ModelPart, no_watch

_EPS = 1e-6
_SINES = 256
_THETA = 10000.0


@dataclass(slots=True, frozen=True, kw_only=True)
class FluxInputs:
    """A batch of samples of one shape.

    Per sample, activations of the backend: ``latents`` ``[rows * columns, in_channels]``, packed
    2x2 latents; ``prompts`` ``[T, joint_attention_dim]`` and ``pooled``
    ``[1, pooled_projection_dim]``, encoded texts. ``timesteps`` ``[B]``: 1000 sigma. ``guidance``
    ``[B]``: ignored by models without guidance embedding. ``rows``, ``columns``: of latent tokens.
    """

    latents: Sequence[F32]
    prompts: Sequence[F32]
    pooled: Sequence[F32]
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
        backend: PictureBackend,
        on_progress: Progress | None = None,
    ) -> None:
        loader = WeightLoader(part, backend, on_progress)
        self.after_layer: Callable[[], None] = no_watch
        self.config, self._backend = config, backend
        self._space = Workspace(backend, exact=True)
        hidden, dim = config.hidden_size, config.attention_head_dim
        self._dim = next((size for size in backend.head_sizes if size >= dim), dim)
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
        self._double = [
            _load_double(loader, config, i, self._dim) for i in range(config.num_layers)
        ]
        self._single = [
            _load_single(loader, config, i, self._dim) for i in range(config.num_single_layers)
        ]
        self._norm_out = loader.linear([("norm_out.linear", 2 * hidden)], hidden, bias=True)
        self._out = loader.linear([("proj_out", channels)], hidden, bias=True)
        loader.finish()
        self._shapes: dict[tuple[int, int, int, int], _Shape] = {}

    def release(self) -> None:
        """Free the arrays of the last call, as large as hundreds of megabytes."""
        self._space.clear()

    def conditions(self, inputs: FluxInputs) -> list[F32]:
        """Return the sinusoids ``[B, 256]`` of times and guidance that a call uploads, in order."""
        sines = [sinusoid(inputs.timesteps)]
        if self._guidance is not None:
            sines.append(sinusoid(inputs.guidance.astype(np.float64) * 1000))
        return sines

    def execute(self, inputs: FluxInputs) -> list[F32]:
        """Return the noise float32 ``[rows * columns, in_channels]`` that each sample contains."""
        hidden, backend, space = self.config.hidden_size, self._backend, self._space
        shape = self._shape(
            len(inputs.latents), len(inputs.prompts[0]), inputs.rows, inputs.columns
        )
        states = space.rows("states", shape.rows, hidden)
        sources = [(text, self._context) for text in inputs.prompts]
        sources += [(latents, self._latents) for latents in inputs.latents]
        for (source, weight), (_, part) in zip(sources, shape.split(states), strict=True):
            backend.linear(source, weight, part)
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
        backend = self._backend
        time, *guidance = (backend.parameters(sines) for sines in self.conditions(inputs))
        total = self._mlp(self._time, time)
        if self._guidance is not None:
            backend.add(self._mlp(self._guidance, guidance[0]), total)
        pooled = backend.empty(len(total), self.config.pooled_projection_dim)
        for sample, vector in enumerate(inputs.pooled):
            backend.put_columns(vector, 0, pooled[sample : sample + 1])
        backend.add(self._mlp(self._pooled, pooled), total)
        backend.activate(total, "silu", total)
        return total

    def _mlp(self, mlp: _Mlp, x: F32) -> F32:
        inner = self._backend.empty(len(x), mlp.first.out_features)
        out = self._backend.empty(len(x), mlp.second.out_features)
        self._backend.linear(x, mlp.first, inner)
        self._backend.activate(inner, "silu", inner)
        self._backend.linear(inner, mlp.second, out)
        return out

    def _modulation(self, weight: PackedLinear, embedding: F32) -> F32:
        """Return the modulation ``[B, chunks, H]``."""
        samples, hidden = embedding.shape
        out = self._backend.empty(samples, weight.out_features)
        self._backend.linear(embedding, weight, out)
        return out.reshape(samples, -1, hidden)

    def _norm(
        self,
        parts: Iterator[tuple[int, F32]],
        modulation: F32,
        shift: int,
        scale: int,
        out: Iterator[F32],
    ) -> None:
        """Compute ``layer_norm(x) * (1 + scale) + shift`` with chunks of each sample."""
        for (sample, x), y in zip(parts, out, strict=True):
            own = modulation[sample]
            self._backend.modulated_norm(x, own[shift], own[scale], _EPS, y)

    def _double_block(
        self, text: _Stream, image: _Stream, states: F32, embedding: F32, shape: _Shape
    ) -> None:
        backend, space, cut = self._backend, self._space, shape.text_rows
        hidden = self.config.hidden_size
        normed, delta = space.rows("normed", shape.rows, hidden), self._delta(shape)
        qkv = space.rows("qkv", shape.rows, text.qkv.out_features)
        streams = (text, slice(0, cut)), (image, slice(cut, shape.rows))
        chunks = [self._modulation(stream.modulation, embedding) for stream, _ in streams]
        # A stream's chunks are (shift, scale, gate) of attention, then of the MLP.
        for chunk, parts, out in self._by_stream(chunks, states, normed, shape):
            self._norm(parts, chunk, 0, 1, out)
        for stream, rows in streams:
            backend.linear(normed[rows], stream.qkv, qkv[rows])
        mixed = self._attend((text, image), qkv, shape)
        for stream, rows in streams:
            backend.linear(mixed[rows], stream.o, delta[rows])
        self._add(chunks, 2, delta, states, shape)
        for chunk, parts, out in self._by_stream(chunks, states, normed, shape):
            self._norm(parts, chunk, 3, 4, out)
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
                self._backend.add_scaled(part, chunk[sample][gate], target)

    def _single_block(self, block: _Single, states: F32, embedding: F32, shape: _Shape) -> None:
        backend, space, hidden = self._backend, self._space, self.config.hidden_size
        normed, delta = space.rows("normed", shape.rows, hidden), self._delta(shape)
        qkv = space.rows("qkv", shape.rows, block.qkv.out_features)
        modulation = self._modulation(block.modulation, embedding)
        results = (part for _, part in shape.split(normed))
        self._norm(shape.split(states), modulation, 0, 1, results)
        backend.linear(normed, block.qkv, qkv)
        wide = block.up.out_features
        active, joined = (
            space.rows("active", shape.rows, wide),
            space.rows("joined", shape.rows, block.out.in_features),
        )
        backend.linear(normed, block.up, active)
        backend.activate(active, "gelu_tanh", active)
        backend.put_columns(self._attend((block, block), qkv, shape), 0, joined)
        backend.put_columns(active, block.out.in_features - wide, joined)
        backend.linear(joined, block.out, delta)
        for (sample, part), (_, target) in zip(
            shape.split(delta), shape.split(states), strict=True
        ):
            backend.add_scaled(part, modulation[sample][2], target)

    def _attend(
        self, streams: tuple[_Stream | _Single, _Stream | _Single], qkv: F32, shape: _Shape
    ) -> F32:
        """Return the joint attention ``[rows, H]`` of both streams, ordered like ``qkv``."""
        heads, dim, capacity = self.config.num_attention_heads, self._dim, shape.capacity
        backend, space, samples = self._backend, self._space, shape.samples
        q = space.rows("q", shape.rows, heads * dim).reshape(shape.rows, heads, dim)
        kv = space.rows("kv", samples * 2 * heads * capacity, dim)
        kv = kv.reshape(samples, 2, heads, capacity, dim)
        mixed = space.rows("mixed", shape.rows, heads * dim)
        true_dim, cut = self.config.attention_head_dim, shape.text_rows
        parts = slice(0, cut), slice(cut, shape.rows)
        for stream, rows in zip(streams, parts, strict=True):
            norms = stream.q_norm, stream.k_norm
            backend.qk_norm_rope_append(
                qkv[rows], shape.places[rows], shape.slots[rows], shape.cos_sin, *norms,
                _EPS * true_dim / dim, kv, q[rows],
            )  # fmt: skip
        for (sample, queries), (_, out) in zip(shape.split(q), shape.split(mixed), strict=True):
            backend.joint_attention(queries, kv[sample], shape.keys, true_dim**-0.5, out)
        return mixed

    def _finish(self, states: F32, embedding: F32, shape: _Shape) -> list[F32]:
        hidden, backend = self.config.hidden_size, self._backend
        modulation = self._modulation(self._norm_out, embedding)
        parts = list(shape.split(states))[shape.samples :]
        normed = self._space.rows("normed", shape.samples * shape.image, hidden)
        results = [
            normed[at : at + shape.image] for at in range(0, max(1, len(normed)), shape.image)
        ]
        # Unlike in the blocks, the scale comes before the shift.
        self._norm(iter(parts), modulation, 1, 0, iter(results))
        noise = []
        for part in results:
            found = backend.empty(len(part), self.config.in_channels, logits=True)
            backend.linear(part, self._out, found)
            noise.append(found)
        return noise

    def _delta(self, shape: _Shape) -> F32:
        return self._space.rows("delta", shape.rows, self.config.hidden_size)

    def _shape(self, samples: int, text: int, rows: int, columns: int) -> _Shape:
        """Return the rows of a batch with their tables on the device; one is kept."""
        key = samples, text, rows, columns
        if key not in self._shapes:
            backend, image = self._backend, rows * columns
            ids = np.concatenate([np.zeros((text, 3), np.int32), latent_image_ids(rows, columns)])
            table = rope_table(ids, self.config.axes_dims_rope)
            order = padded_heads(1, self.config.attention_head_dim, self._dim)
            if order is not None:
                table = np.where(order < 0, np.float32(0), table[:, order])
            capacity = text + image + -(text + image) % backend.column_multiple
            parts = (
                np.arange(samples)[:, None] * capacity + np.arange(first, first + count)
                for first, count in ((0, text), (text, image))
            )
            slots = np.concatenate([part.reshape(-1) for part in parts])
            self._shapes = {
                key: _Shape(
                    samples, text, image, capacity, backend.upload(np.ascontiguousarray(table)),
                    backend.upload((slots % capacity).astype(np.int32)),
                    backend.upload(slots.astype(np.int64)),
                )
            }  # fmt: skip
        return self._shapes[key]


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
    loader: WeightLoader, names: tuple[str, str, str], config: FluxConfig, dim: int
) -> PackedLinear:
    hidden, heads = config.hidden_size, config.num_attention_heads
    whole = padded_heads(heads, config.attention_head_dim, dim)
    order = _halves_order(heads, config.attention_head_dim)
    if whole is not None:
        order = np.where(whole < 0, -1, order[whole])
    parts = [(name, hidden) for name in names]
    return loader.linear(parts, hidden, bias=True, orders=(order, order, whole))


def _load_norm(loader: WeightLoader, name: str, config: FluxConfig, dim: int) -> F32:
    """Return the weights of a norm of heads that are padded to ``dim``.

    The mean square over a padded head is smaller, and so is the weight.
    """
    true_dim = config.attention_head_dim
    weight = widened(loader.take(f"{name}.weight", (true_dim,)))[_halves_order(1, true_dim)]
    order = padded_heads(1, true_dim, dim)
    if order is not None:
        weight = np.where(order < 0, np.float32(0), weight[order]) * np.float32(
            (true_dim / dim) ** 0.5
        )
    return loader.backend.parameters(weight)


def _load_double(
    loader: WeightLoader, config: FluxConfig, index: int, dim: int
) -> tuple[_Stream, _Stream]:
    base, hidden = f"transformer_blocks.{index}", config.hidden_size
    columns = padded_heads(config.num_attention_heads, config.attention_head_dim, dim)

    def stream(norm: str, qkv: tuple[str, str, str], added: str, out: str, mlp: str) -> _Stream:
        qkv = (f"{base}.attn.{qkv[0]}", f"{base}.attn.{qkv[1]}", f"{base}.attn.{qkv[2]}")
        attention = [(f"{base}.attn.{out}", hidden)]
        return _Stream(
            modulation=loader.linear([(f"{base}.{norm}.linear", 6 * hidden)], hidden, bias=True),
            qkv=_load_qkv(loader, qkv, config, dim),
            q_norm=_load_norm(loader, f"{base}.attn.norm_{added}q", config, dim),
            k_norm=_load_norm(loader, f"{base}.attn.norm_{added}k", config, dim),
            o=loader.linear(attention, hidden, bias=True, columns=columns),
            up=loader.linear([(f"{base}.{mlp}.net.0.proj", 4 * hidden)], hidden, bias=True),
            down=loader.linear([(f"{base}.{mlp}.net.2", hidden)], 4 * hidden, bias=True),
        )

    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    text = stream("norm1_context", added, "added_", "to_add_out", "ff_context")
    return text, stream("norm1", ("to_q", "to_k", "to_v"), "", "to_out.0", "ff")


def _load_single(loader: WeightLoader, config: FluxConfig, index: int, dim: int) -> _Single:
    base, hidden = f"single_transformer_blocks.{index}", config.hidden_size
    qkv = (f"{base}.attn.to_q", f"{base}.attn.to_k", f"{base}.attn.to_v")
    columns: Order | None = padded_heads(config.num_attention_heads, config.attention_head_dim, dim)
    if columns is not None:  # after the heads come the channels of the MLP
        columns = np.concatenate([columns, np.arange(hidden, 5 * hidden)])
    return _Single(
        modulation=loader.linear([(f"{base}.norm.linear", 3 * hidden)], hidden, bias=True),
        qkv=_load_qkv(loader, qkv, config, dim),
        q_norm=_load_norm(loader, f"{base}.attn.norm_q", config, dim),
        k_norm=_load_norm(loader, f"{base}.attn.norm_k", config, dim),
        up=loader.linear([(f"{base}.proj_mlp", 4 * hidden)], hidden, bias=True),
        out=loader.linear([(f"{base}.proj_out", hidden)], 5 * hidden, bias=True, columns=columns),
    )
