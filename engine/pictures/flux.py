"""The Flux transformer: two streams of text and image that attend jointly, then one stream.

A sample's bits do not depend on the others: products are row by row, and attention and modulation
are sample by sample. :mod:`.joint` has the order of rows and the form of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..kernels.backend import F32, I32, PackedLinear
from ..kernels.host_backend import PictureBackend
from ..models.weights import Order, Progress, WeightLoader
from ..models.workspace import Workspace
from .configs import FluxConfig, ModelPart, no_watch
from .family import StepInputs
from .joint import SINES, Heads, JointRows, Mlp, rope_table, sinusoid

_EPS = 1e-6
_THETA = 10000.0


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
        hidden = config.hidden_size
        heads = Heads.of(config.num_attention_heads, config.attention_head_dim, backend)
        self._heads = heads
        self._time = _load_mlp(loader, "timestep_embedder", SINES, hidden)
        self._guidance = (
            _load_mlp(loader, "guidance_embedder", SINES, hidden)
            if config.guidance_embeds
            else None
        )
        self._pooled = _load_mlp(loader, "text_embedder", config.pooled_projection_dim, hidden)
        joint, channels = config.joint_attention_dim, config.in_channels
        self._context = loader.linear([("context_embedder", hidden)], joint, bias=True)
        self._latents = loader.linear([("x_embedder", hidden)], channels, bias=True)
        self._double = [_load_double(loader, hidden, heads, i) for i in range(config.num_layers)]
        self._single = [
            _load_single(loader, hidden, heads, i) for i in range(config.num_single_layers)
        ]
        self._norm_out = loader.linear([("norm_out.linear", 2 * hidden)], hidden, bias=True)
        self._out = loader.linear([("proj_out", channels)], hidden, bias=True)
        loader.finish()
        self._shapes: dict[tuple[int, int, int, int], JointRows] = {}

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end a step."""
        self.after_layer = after_layer

    def release(self) -> None:
        """Free the arrays of the last call, as large as hundreds of megabytes."""
        self._space.clear()

    def conditions(self, inputs: StepInputs) -> list[F32]:
        """Return the sinusoids ``[B, 256]`` of times and guidance that a call uploads, in order."""
        sines = [sinusoid(inputs.timesteps)]
        if self._guidance is not None:
            sines.append(sinusoid(inputs.guidance.astype(np.float64) * 1000))
        return sines

    def execute(self, inputs: StepInputs) -> list[F32]:
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

    def _embedding(self, inputs: StepInputs) -> F32:
        """Return ``silu`` of the joint embedding of time, guidance and pooled text ``[B, H]``."""
        backend = self._backend
        time, *guidance = (backend.parameters(sines) for sines in self.conditions(inputs))
        total = self._time(time, backend)
        if self._guidance is not None:
            backend.add(self._guidance(guidance[0], backend), total)
        pooled = backend.empty(len(total), self.config.pooled_projection_dim)
        for sample, vector in enumerate(inputs.pooled):
            backend.put_columns(vector, 0, pooled[sample : sample + 1])
        backend.add(self._pooled(pooled, backend), total)
        backend.activate(total, "silu", total)
        return total

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
        self, text: _Stream, image: _Stream, states: F32, embedding: F32, shape: JointRows
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
        self, chunks: list[F32], states: F32, out: F32, shape: JointRows
    ) -> Iterator[tuple[F32, Iterator[tuple[int, F32]], Iterator[F32]]]:
        """Yield for text, then image: its modulation, its parts of ``states`` and of ``out``."""
        parts, results = list(shape.split(states)), [part for _, part in shape.split(out)]
        for at, chunk in enumerate(chunks):
            own = slice(at * shape.samples, (at + 1) * shape.samples)
            yield chunk, iter(parts[own]), iter(results[own])

    def _add(self, chunks: list[F32], gate: int, delta: F32, states: F32, shape: JointRows) -> None:
        """Compute ``states += gate * delta`` with each stream's gates."""
        for chunk, parts, targets in self._by_stream(chunks, delta, states, shape):
            for (sample, part), target in zip(parts, targets, strict=True):
                self._backend.add_scaled(part, chunk[sample][gate], target)

    def _single_block(self, block: _Single, states: F32, embedding: F32, shape: JointRows) -> None:
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
        self, streams: tuple[_Stream | _Single, _Stream | _Single], qkv: F32, shape: JointRows
    ) -> F32:
        """Return the joint attention ``[rows, H]`` of both streams, ordered like ``qkv``."""
        text, image = streams
        cut = shape.text_rows
        norms = (
            (slice(0, cut), text.q_norm, text.k_norm),
            (slice(cut, shape.rows), image.q_norm, image.k_norm),
        )
        return self._heads.attend(self._backend, self._space, shape, qkv, norms, _EPS)

    def _finish(self, states: F32, embedding: F32, shape: JointRows) -> list[F32]:
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

    def _delta(self, shape: JointRows) -> F32:
        return self._space.rows("delta", shape.rows, self.config.hidden_size)

    def _shape(self, samples: int, text: int, rows: int, columns: int) -> JointRows:
        """Return the rows of a batch with their tables on the device; one is kept."""
        key = samples, text, rows, columns
        if key not in self._shapes:
            ids = np.concatenate([np.zeros((text, 3), np.int32), latent_image_ids(rows, columns)])
            table = rope_table(ids, self.config.axes_dims_rope, _THETA)
            made = self._heads.rows(samples, text, rows * columns, table, self._backend)
            self._shapes = {key: made}
        return self._shapes[key]


def latent_image_ids(rows: int, columns: int) -> I32:
    """Return the positions ``[rows * columns, 3]`` of latent tokens: (0, row, column)."""
    ids = np.zeros((rows, columns, 3), np.int32)
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)
    return ids.reshape(-1, 3)


def _load_mlp(loader: WeightLoader, name: str, inner: int, hidden: int) -> Mlp:
    base = f"time_text_embed.{name}"
    return Mlp.load(loader, (f"{base}.linear_1", f"{base}.linear_2"), inner, hidden, hidden)


def _load_double(
    loader: WeightLoader, hidden: int, heads: Heads, index: int
) -> tuple[_Stream, _Stream]:
    base, columns = f"transformer_blocks.{index}", heads.columns

    def stream(norm: str, qkv: tuple[str, str, str], added: str, out: str, mlp: str) -> _Stream:
        qkv = (f"{base}.attn.{qkv[0]}", f"{base}.attn.{qkv[1]}", f"{base}.attn.{qkv[2]}")
        attention = [(f"{base}.attn.{out}", hidden)]
        return _Stream(
            modulation=loader.linear([(f"{base}.{norm}.linear", 6 * hidden)], hidden, bias=True),
            qkv=heads.load_qkv(loader, qkv, hidden, bias=True),
            q_norm=heads.load_norm(loader, f"{base}.attn.norm_{added}q"),
            k_norm=heads.load_norm(loader, f"{base}.attn.norm_{added}k"),
            o=loader.linear(attention, hidden, bias=True, columns=columns),
            up=loader.linear([(f"{base}.{mlp}.net.0.proj", 4 * hidden)], hidden, bias=True),
            down=loader.linear([(f"{base}.{mlp}.net.2", hidden)], 4 * hidden, bias=True),
        )

    added = ("add_q_proj", "add_k_proj", "add_v_proj")
    text = stream("norm1_context", added, "added_", "to_add_out", "ff_context")
    return text, stream("norm1", ("to_q", "to_k", "to_v"), "", "to_out.0", "ff")


def _load_single(loader: WeightLoader, hidden: int, heads: Heads, index: int) -> _Single:
    base = f"single_transformer_blocks.{index}"
    qkv = (f"{base}.attn.to_q", f"{base}.attn.to_k", f"{base}.attn.to_v")
    columns: Order | None = heads.columns
    if columns is not None:  # after the heads come the channels of the MLP
        columns = np.concatenate([columns, np.arange(hidden, 5 * hidden)])
    return _Single(
        modulation=loader.linear([(f"{base}.norm.linear", 3 * hidden)], hidden, bias=True),
        qkv=heads.load_qkv(loader, qkv, hidden, bias=True),
        q_norm=heads.load_norm(loader, f"{base}.attn.norm_q"),
        k_norm=heads.load_norm(loader, f"{base}.attn.norm_k"),
        up=loader.linear([(f"{base}.proj_mlp", 4 * hidden)], hidden, bias=True),
        out=loader.linear([(f"{base}.proj_out", hidden)], 5 * hidden, bias=True, columns=columns),
    )
