"""The T5 encoder: relative position bias, RMSNorm, gated GELU, attention without scaling.

Flux passes no mask: padding is attended to like text, so every prompt has the same length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.proto.errors import InputError

from ..kernels.backend import F32, I32, PackedLinear
from ..kernels.host_backend import PictureBackend
from ..loading.safetensors import widened
from ..models.weights import Progress, WeightLoader
from ..models.workspace import Workspace
from .clip import check_vocabulary, head_order
from .configs import ModelPart, T5Config, no_watch


@dataclass(slots=True, frozen=True)
class _Layer:
    attention_norm: F32
    qkv: PackedLinear
    o: PackedLinear
    mlp_norm: F32
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear


class T5Encoder:
    """A loaded encoder. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        part: ModelPart,
        config: T5Config,
        backend: PictureBackend,
        on_progress: Progress | None = None,
    ) -> None:
        loader = WeightLoader(part, backend, on_progress)
        self.after_layer: Callable[[], None] = no_watch
        self.config, self._backend, self._space = config, backend, Workspace(backend)
        words = (config.vocab_size, config.d_model)
        self._words = backend.parameters(loader.take("shared.weight", words))
        first = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (config.relative_attention_num_buckets, config.num_heads)
        self._bias_table = widened(loader.take(first, shape))
        self._layers = [_load_layer(loader, config, i) for i in range(config.num_layers)]
        self._final = loader.norm("encoder.final_layer_norm.weight", config.d_model)
        self._bias: tuple[int, F32 | None] = (0, None)
        loader.finish(unused=("encoder.embed_tokens.weight",))

    def encode(self, text: I32) -> F32:
        """Return the states ``[T, d_model]`` of one text, int32 ``[T]``, after the last layer.

        Raises InputError for an empty text and for a token outside the vocabulary.
        """
        if not len(text):
            raise InputError("a prompt for T5 is empty")
        config, backend, space = self.config, self._backend, self._space
        check_vocabulary(text, config.vocab_size)
        rows, hidden = len(text), config.d_model
        states, normed = space.rows("states", rows, hidden), backend.empty(rows, hidden)
        backend.embed(backend.upload(text), self._words, states)
        bias = self._position_bias(rows)
        for layer in self._layers:
            self._attend(layer, states, bias)
            self._feed_forward(layer, states)
            self.after_layer()
        backend.rms_norm(states, self._final, config.layer_norm_epsilon, normed)
        return backend.download(normed)

    def _position_bias(self, rows: int) -> F32:
        """Return the bias ``[heads, rows, rows]``, kept for the next text of this length."""
        known, bias = self._bias
        if bias is None or known != rows:
            table = self._bias_table[relative_buckets(rows, self.config)]
            bias = self._backend.upload(np.ascontiguousarray(table.transpose(2, 0, 1)))
            self._bias = rows, bias
        return bias

    def _attend(self, layer: _Layer, states: F32, bias: F32) -> None:
        backend, space, config = self._backend, self._space, self.config
        rows, inner = len(states), layer.o.in_features
        normed = space.rows("normed", rows, config.d_model)
        delta, qkv = space.rows("delta", rows, config.d_model), space.rows("qkv", rows, 3 * inner)
        backend.rms_norm(states, layer.attention_norm, config.layer_norm_epsilon, normed)
        backend.linear(normed, layer.qkv, qkv)
        mixed = space.rows("mixed", rows, inner)
        backend.self_attention(qkv, config.num_heads, 1.0, bias, mixed)
        backend.linear(mixed, layer.o, delta)
        backend.add(delta, states)

    def _feed_forward(self, layer: _Layer, states: F32) -> None:
        backend, space, config = self._backend, self._space, self.config
        rows = len(states)
        normed = space.rows("normed", rows, config.d_model)
        delta = space.rows("delta", rows, config.d_model)
        gate, up = space.rows("gate", rows, config.d_ff), space.rows("up", rows, config.d_ff)
        backend.rms_norm(states, layer.mlp_norm, config.layer_norm_epsilon, normed)
        backend.linear(normed, layer.gate, gate)
        backend.linear(normed, layer.up, up)
        backend.activate(gate, "gelu_tanh", gate)
        backend.multiply(up, gate)
        backend.linear(gate, layer.down, delta)
        backend.add(delta, states)


def relative_buckets(length: int, config: T5Config) -> I32:
    """Return the bucket of every (query, key) pair, int32 ``[length, length]``.

    Half of the buckets are for keys after the query. Of each half, the first half holds one
    distance each; further distances share buckets whose width grows exponentially.
    """
    half = config.relative_attention_num_buckets // 2
    exact = half // 2
    place = np.arange(length)
    ahead = place[None, :] - place[:, None]
    distance = np.abs(ahead)
    grown = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    grown = grown / np.float32(math.log(config.relative_attention_max_distance / exact))
    far = np.minimum(exact + (grown * np.float32(half - exact)).astype(np.int32), half - 1)
    buckets: I32 = np.where(distance < exact, distance, far).astype(np.int32)
    buckets += np.where(ahead > 0, half, 0).astype(np.int32)
    return buckets


def _load_layer(loader: WeightLoader, config: T5Config, index: int) -> _Layer:
    base = f"encoder.block.{index}.layer"
    hidden, inner, wide = config.d_model, config.num_heads * config.d_kv, config.d_ff
    attention, mlp = f"{base}.0.SelfAttention", f"{base}.1.DenseReluDense"
    order = head_order(config.num_heads, config.d_kv, loader.backend)
    parts = [(f"{attention}.{name}", inner) for name in "qkv"]
    return _Layer(
        attention_norm=loader.norm(f"{base}.0.layer_norm.weight", hidden),
        qkv=loader.linear(parts, hidden, bias=False, orders=(order,) * 3),
        o=loader.linear([(f"{attention}.o", hidden)], inner, bias=False, columns=order),
        mlp_norm=loader.norm(f"{base}.1.layer_norm.weight", hidden),
        gate=loader.linear([(f"{mlp}.wi_0", wide)], hidden, bias=False),
        up=loader.linear([(f"{mlp}.wi_1", wide)], hidden, bias=False),
        down=loader.linear([(f"{mlp}.wo", hidden)], wide, bias=False),
    )
