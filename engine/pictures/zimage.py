"""The Z-Image transformer: text and image are refined apart, then one stream attends jointly.

Text and image are padded to multiples of 32 rows with learned tokens, which take part in attention.
A layer scales the weights of its norms by the time of the sample: ``1 + scale`` before attention
and MLP, ``tanh(gate)`` after them. :mod:`.joint` has the order of rows and the form of the heads.

The columns of the patch embedding and the rows of the last layer are reordered at load time, so
that a latent token is ``[channels, 2, 2]``, as :func:`.sampler.unpack_latents` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.backend import F32, I32, PackedLinear
from ..kernels.host_backend import PictureBackend
from ..loading.safetensors import widened
from ..models.weights import Order, Progress, WeightLoader
from ..models.workspace import Workspace
from .configs import ModelPart, ZImageConfig, no_watch
from .family import StepInputs
from .joint import SINES, Heads, JointRows, Mlp, rope_table, sinusoid

ROW_MULTIPLE = 32
"""Text and image have a multiple of so many rows."""
_HEAD_EPS = 1e-5
_FINAL_EPS = 1e-6
_TIME_SIZE = 1024
_TRAIN_STEPS = np.float32(1000)
_SCALES, _GATES = (0, 2), (1, 3)
"""Which of the four norms of a layer have a scale, and which a gate."""


@dataclass(slots=True, frozen=True)
class _Layer:
    """Weights of a layer; ``norms`` ``[4, dim]``: around attention, then around the MLP.

    ``modulation``: from the time embedding to the factors of the norms; None in refiners of text.
    """

    modulation: PackedLinear | None
    norms: F32
    qkv: PackedLinear
    q_norm: F32 | None
    k_norm: F32 | None
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(slots=True, frozen=True)
class _Shape:
    """Rows of a batch: of the text, of the image, and of both together."""

    text: JointRows
    image: JointRows
    joint: JointRows


class ZImageTransformer:
    """A loaded transformer. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        part: ModelPart,
        config: ZImageConfig,
        backend: PictureBackend,
        on_progress: Progress | None = None,
    ) -> None:
        loader = WeightLoader(part, backend, on_progress)
        self.config, self._backend = config, backend
        self._after_layer: Callable[[], None] = no_watch
        self._space = Workspace(backend, exact=True)
        self._heads = Heads.of(config.n_heads, config.head_dim, backend)
        dim, time = config.dim, config.time_size
        names = ("t_embedder.mlp.0", "t_embedder.mlp.2")
        self._time = Mlp.load(loader, names, SINES, _TIME_SIZE, time)
        self._text_norm = loader.norm("cap_embedder.0.weight", config.cap_feat_dim)
        self._text = loader.linear([("cap_embedder.1", dim)], config.cap_feat_dim, bias=True)
        self._text_pad = _load_pad(loader, "cap_pad_token", dim)
        self._image_pad = _load_pad(loader, "x_pad_token", dim)
        width, order = 4 * config.in_channels, _channels_first(config.in_channels)
        patch = [("all_x_embedder.2-1", dim)]
        self._image = loader.linear(patch, width, bias=True, columns=order)
        refiners = range(config.n_refiner_layers)
        self._image_refiner = [self._layer(loader, f"noise_refiner.{i}") for i in refiners]
        self._text_refiner = [
            self._layer(loader, f"context_refiner.{i}", timed=False) for i in refiners
        ]
        self._layers = [self._layer(loader, f"layers.{i}") for i in range(config.n_layers)]
        final = "all_final_layer.2-1"
        self._final_scale = loader.linear([(f"{final}.adaLN_modulation.1", dim)], time, bias=True)
        self._final_shift = backend.parameters(np.zeros(dim, np.float32))
        self._out = loader.linear([(f"{final}.linear", width)], dim, bias=True, orders=(order,))
        loader.finish()
        self._shapes: dict[tuple[int, int, int, int], _Shape] = {}

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end a step."""
        self._after_layer = after_layer

    def release(self) -> None:
        """Free the arrays of the last call, as large as hundreds of megabytes."""
        self._space.clear()

    def conditions(self, inputs: StepInputs) -> list[F32]:
        """Return the sinusoid ``[B, 256]`` of times, which run from 0 (noise) to 1."""
        times = (_TRAIN_STEPS - inputs.timesteps) / _TRAIN_STEPS * np.float32(self.config.t_scale)
        return [sinusoid(times)]

    def execute(self, inputs: StepInputs) -> list[F32]:
        """Return the noise float32 ``[rows * columns, token_width]`` that each sample contains.

        Raises ValueError unless all prompts have the same number of rows after padding.
        """
        texts = {padded(len(prompt)) for prompt in inputs.prompts}
        if len(texts) != 1:
            raise ValueError(f"prompts of {sorted(texts)} rows are not of one shape")
        shape = self._shape(len(inputs.latents), texts.pop(), inputs.rows, inputs.columns)
        joint, cut = shape.joint, shape.joint.text_rows
        states = self._space.rows("states", joint.rows, self.config.dim)
        self._embed(inputs, states, joint)
        (sines,) = self.conditions(inputs)
        embedding = self._time(self._backend.parameters(sines), self._backend)
        for layer in self._image_refiner:
            self._run(layer, states[cut:], embedding, shape.image)
        for layer in self._text_refiner:
            self._run(layer, states[:cut], embedding, shape.text)
        for layer in self._layers:
            self._run(layer, states, embedding, joint)
        return self._finish(states[cut:], embedding, shape.image, inputs.rows * inputs.columns)

    # ------------------------------------------------------------------ inputs

    def _embed(self, inputs: StepInputs, states: F32, joint: JointRows) -> None:
        """Write the first states of all rows; rows without a token get the learned padding."""
        backend, config = self._backend, self.config
        parts = [part for _, part in joint.split(states)]
        for prompt, part in zip(inputs.prompts, parts[: joint.samples], strict=True):
            normed = self._space.rows("texts", len(prompt), config.cap_feat_dim)
            backend.rms_norm(prompt, self._text_norm, config.norm_eps, normed)
            self._embed_one(normed, self._text, self._text_pad, part)
        for latents, part in zip(inputs.latents, parts[joint.samples :], strict=True):
            self._embed_one(latents, self._image, self._image_pad, part)

    def _embed_one(self, source: F32, weight: PackedLinear, pad: F32, out: F32) -> None:
        count = len(source)
        self._backend.linear(source, weight, out[:count])
        if count < len(out):
            self._backend.put_columns(pad[: len(out) - count], 0, out[count:])

    # ------------------------------------------------------------------ layers

    def _factors(self, layer: _Layer, embedding: F32) -> list[F32]:
        """Return the weights ``[4, dim]`` of the layer's norms for each sample."""
        if layer.modulation is None:
            return [layer.norms] * len(embedding)
        backend, dim = self._backend, self.config.dim
        made = backend.empty(len(embedding), layer.modulation.out_features)
        backend.linear(embedding, layer.modulation, made)
        made = made.reshape(len(embedding), 4, dim)
        factors = [made[sample] for sample in range(len(embedding))]
        for own in factors:
            for gate in _GATES:
                backend.activate(own[gate : gate + 1], "tanh", own[gate : gate + 1])
            backend.multiply(layer.norms, own)
            for scale in _SCALES:  # norm * (1 + scale)
                backend.add(layer.norms[scale : scale + 1], own[scale : scale + 1])
        return factors

    def _run(self, layer: _Layer, states: F32, embedding: F32, rows: JointRows) -> None:
        """Compute a layer on ``states[rows, dim]`` in place."""
        backend, space, config = self._backend, self._space, self.config
        factors = self._factors(layer, embedding)
        normed = space.rows("normed", rows.rows, config.dim)
        delta = space.rows("delta", rows.rows, config.dim)
        self._norm(states, factors, 0, normed, rows)
        qkv = space.rows("qkv", rows.rows, layer.qkv.out_features)
        backend.linear(normed, layer.qkv, qkv)
        norms = ((slice(None), layer.q_norm, layer.k_norm),)
        mixed = self._heads.attend(backend, space, rows, qkv, norms, _HEAD_EPS)
        backend.linear(mixed, layer.o, delta)
        self._norm(delta, factors, 1, normed, rows)
        backend.add(normed, states)
        self._norm(states, factors, 2, normed, rows)
        products = space.rows("products", rows.rows, 2 * config.mlp_size)
        active = space.rows("active", rows.rows, config.mlp_size)
        backend.gated_mlp(normed, layer.gate_up, layer.down, products, active, delta)
        self._norm(delta, factors, 3, normed, rows)
        backend.add(normed, states)
        self._after_layer()

    def _norm(self, x: F32, factors: Sequence[F32], which: int, out: F32, rows: JointRows) -> None:
        """Compute the RMS norm of each sample's rows with its own weights."""
        for (sample, part), (_, result) in zip(rows.split(x), rows.split(out), strict=True):
            self._backend.rms_norm(part, factors[sample][which], self.config.norm_eps, result)

    def _finish(self, states: F32, embedding: F32, rows: JointRows, tokens: int) -> list[F32]:
        backend, dim = self._backend, self.config.dim
        backend.activate(embedding, "silu", embedding)
        scales = backend.empty(rows.samples, dim)
        backend.linear(embedding, self._final_scale, scales)
        noise = []
        for sample, part in rows.split(states):
            normed = self._space.rows("normed", tokens, dim)
            shift, scale = self._final_shift, scales[sample]
            backend.modulated_norm(part[:tokens], shift, scale, _FINAL_EPS, normed)
            found = backend.empty(tokens, self._out.out_features, logits=True)
            backend.linear(normed, self._out, found)
            # The model predicts image less noise: the change of rising times, not of levels.
            noise.append(backend.mix(found, None, found, -2.0))
        return noise

    # ------------------------------------------------------------------ shapes and weights

    def _shape(self, samples: int, text: int, rows: int, columns: int) -> _Shape:
        """Return the rows of a batch with their tables on the device; one is kept."""
        key = samples, text, rows, columns
        if key not in self._shapes:
            texts, images = text_ids(text), image_ids(text, rows, columns)
            made = _Shape(
                text=self._rows(samples, (texts, None)),
                image=self._rows(samples, (None, images)),
                joint=self._rows(samples, (texts, images)),
            )
            self._shapes = {key: made}
        return self._shapes[key]

    def _rows(self, samples: int, ids: tuple[I32 | None, I32 | None]) -> JointRows:
        text, image = (0 if one is None else len(one) for one in ids)
        joined = np.concatenate([one for one in ids if one is not None])
        table = rope_table(joined, self.config.axes_dims, self.config.rope_theta)
        return self._heads.rows(samples, text, image, table, self._backend)

    def _layer(self, loader: WeightLoader, base: str, *, timed: bool = True) -> _Layer:
        config, attention, mlp = self.config, f"{base}.attention", f"{base}.feed_forward"
        dim, wide, qk = config.dim, config.mlp_size, config.qk_norm
        norms = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
        weights = np.stack([loader.vector(f"{base}.{name}.weight", dim) for name in norms])
        names = (f"{attention}.to_q", f"{attention}.to_k", f"{attention}.to_v")
        modulation = [(f"{base}.adaLN_modulation.0", 4 * dim)]
        out = [(f"{attention}.to_out.0", dim)]
        gate_up = [(f"{mlp}.w1", wide), (f"{mlp}.w3", wide)]
        return _Layer(
            modulation=loader.linear(modulation, config.time_size, bias=True) if timed else None,
            norms=loader.backend.parameters(weights),
            qkv=self._heads.load_qkv(loader, names, dim, bias=False),
            q_norm=self._heads.load_norm(loader, f"{attention}.norm_q") if qk else None,
            k_norm=self._heads.load_norm(loader, f"{attention}.norm_k") if qk else None,
            o=loader.linear(out, dim, bias=False, columns=self._heads.columns),
            gate_up=loader.linear(gate_up, dim, bias=False),
            down=loader.linear([(f"{mlp}.w2", dim)], wide, bias=False),
        )


def padded(count: int) -> int:
    """Return the rows of so many tokens with their padding."""
    return count + -count % ROW_MULTIPLE


def text_ids(text: int) -> I32:
    """Return the positions ``[text, 3]`` of a padded prompt: (1 + place, 0, 0)."""
    ids = np.zeros((text, 3), np.int32)
    ids[:, 0] = np.arange(1, text + 1)
    return ids


def image_ids(text: int, rows: int, columns: int) -> I32:
    """Return the positions of a padded image: (text + 1, row, column), and zeros for padding.

    ``text``: rows of the padded prompt before it.
    """
    ids = np.zeros((padded(rows * columns), 3), np.int32)
    grid = ids[: rows * columns].reshape(rows, columns, 3)
    grid[..., 0] = text + 1
    grid[..., 1] = np.arange(rows)[:, None]
    grid[..., 2] = np.arange(columns)
    return ids


def _channels_first(channels: int) -> Order:
    """Return the order of the numbers of a token ``[2, 2, channels]`` as ``[channels, 2, 2]``."""
    order: Order = np.arange(4 * channels).reshape(4, channels).T.reshape(-1)
    return order


def _load_pad(loader: WeightLoader, name: str, dim: int) -> F32:
    """Return the learned token ``[1, dim]`` as often as padding can need it."""
    token = widened(loader.take(name, (1, dim)))
    return loader.backend.parameters(np.repeat(token, ROW_MULTIPLE - 1, axis=0))
