"""The CLIP text encoder: absolute positions, causal attention, norms before each part.

Only the pooled vector is needed: the last state of the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.proto.errors import InputError

from ..kernels.backend import F32, I32, Backend, PackedLinear
from ..kernels.host_backend import PictureBackend
from ..models.vision_tower import padded_heads
from ..models.weights import Order, Progress, WeightLoader
from ..models.workspace import Workspace
from .configs import ClipConfig, ModelPart, no_watch

Norm = tuple[F32, F32]


@dataclass(slots=True, frozen=True)
class _Layer:
    first_norm: Norm
    qkv: PackedLinear
    o: PackedLinear
    second_norm: Norm
    up: PackedLinear
    down: PackedLinear


class ClipTextEncoder:
    """A loaded encoder. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        part: ModelPart,
        config: ClipConfig,
        backend: PictureBackend,
        on_progress: Progress | None = None,
    ) -> None:
        loader = WeightLoader(part, backend, on_progress)
        self.after_layer: Callable[[], None] = no_watch
        self.config, self._backend, self._space = config, backend, Workspace(backend)
        hidden = config.hidden_size
        # transformers 5 writes no prefix, earlier versions do.
        base = "text_model." if "text_model.final_layer_norm.weight" in part.tensors else ""
        places = (config.max_position_embeddings, hidden)
        words = (config.vocab_size, hidden)
        self._words = backend.parameters(
            loader.take(f"{base}embeddings.token_embedding.weight", words)
        )
        self._places = backend.parameters(
            loader.take(f"{base}embeddings.position_embedding.weight", places)
        )
        self._layers = [
            _load_layer(loader, config, f"{base}encoder.layers.{i}")
            for i in range(config.num_hidden_layers)
        ]
        self._final = _norm(loader, f"{base}final_layer_norm", hidden)
        loader.finish(unused=("text_projection.weight",))

    def pooled(self, texts: Sequence[I32]) -> F32:
        """Return the pooled vectors ``[n, hidden]`` of texts, each int32 ``[T]``.

        Tokens after the end token change nothing, because attention is causal. Raises InputError
        for an empty or long text, and for a token outside the vocabulary.
        """
        return np.stack([self._pooled(text) for text in texts])

    def _pooled(self, text: I32) -> F32:
        config, limit = self.config, self.config.max_position_embeddings
        if not 0 < len(text) <= limit:
            raise InputError(f"a prompt for CLIP has 1 to {limit} tokens, not {len(text)}")
        check_vocabulary(text, config.vocab_size)
        end = _end(text, config.eos_token_id)
        states = self._states(text[: end + 1])
        pooled: F32 = self._backend.download(states[end : end + 1])[0].copy()
        return pooled

    def _states(self, text: I32) -> F32:
        backend, space, hidden = self._backend, self._space, self.config.hidden_size
        rows = len(text)
        states, other = space.rows("states", rows, hidden), space.rows("other", rows, hidden)
        backend.embed(backend.upload(text), self._words, states)
        backend.embed(backend.upload(np.arange(rows, dtype=np.int32)), self._places, other)
        backend.add(other, states)
        causal = backend.upload(np.triu(np.full((1, rows, rows), -np.inf, np.float32), 1))
        for layer in self._layers:
            self._layer(layer, states, causal)
            self.after_layer()
        backend.layer_norm(states, *self._final, self.config.layer_norm_eps, other)
        return other

    def _layer(self, layer: _Layer, states: F32, causal: F32) -> None:
        backend, space, config = self._backend, self._space, self.config
        rows, hidden, wide = len(states), config.hidden_size, config.intermediate_size
        normed, delta = space.rows("normed", rows, hidden), space.rows("delta", rows, hidden)
        up, active = space.rows("up", rows, wide), space.rows("active", rows, wide)
        heads, inner = config.num_attention_heads, layer.o.in_features
        qkv, mixed = space.rows("qkv", rows, 3 * inner), space.rows("mixed", rows, inner)
        backend.layer_norm(states, *layer.first_norm, config.layer_norm_eps, normed)
        backend.linear(normed, layer.qkv, qkv)
        backend.self_attention(qkv, heads, (hidden // heads) ** -0.5, causal, mixed)
        backend.linear(mixed, layer.o, delta)
        backend.add_layer_norm(delta, states, *layer.second_norm, config.layer_norm_eps, normed)
        backend.linear(normed, layer.up, up)
        backend.activate(up, "gelu" if config.hidden_act == "gelu" else "quick_gelu", active)
        backend.linear(active, layer.down, delta)
        backend.add(delta, states)


def check_vocabulary(text: I32, size: int) -> None:
    """Raise InputError for a token id outside ``0..size-1``."""
    if text.min() < 0 or text.max() >= size:
        raise InputError(f"token ids must be in 0..{size - 1}, not {text.min()} .. {text.max()}")


def _end(text: I32, eos: int) -> int:
    """Return the place of the first end token, or of the highest id if the config is an old one.

    Configs that name token 2 as the end were wrong; in their vocabulary the end has the highest id.
    Without an end token the first token is taken, as transformers does.
    """
    return int(np.argmax(text)) if eos == 2 else int(np.argmax(text == eos))


def head_order(heads: int, dim: int, backend: Backend) -> Order | None:
    """Return the order of channels whose heads the kernels can read, with -1 for zeros."""
    return padded_heads(heads, dim, dim + -dim % backend.column_multiple)


def _norm(loader: WeightLoader, name: str, size: int) -> Norm:
    return loader.norm(f"{name}.weight", size), loader.norm(f"{name}.bias", size)


def _load_layer(loader: WeightLoader, config: ClipConfig, base: str) -> _Layer:
    hidden, wide = config.hidden_size, config.intermediate_size
    qkv = [(f"{base}.self_attn.{name}_proj", hidden) for name in "qkv"]
    heads = config.num_attention_heads
    order = head_order(heads, hidden // heads, loader.backend)
    return _Layer(
        first_norm=_norm(loader, f"{base}.layer_norm1", hidden),
        qkv=loader.linear(qkv, hidden, bias=True, orders=(order,) * 3),
        o=loader.linear([(f"{base}.self_attn.out_proj", hidden)], hidden, bias=True, columns=order),
        second_norm=_norm(loader, f"{base}.layer_norm2", hidden),
        up=loader.linear([(f"{base}.mlp.fc1", wide)], hidden, bias=True),
        down=loader.linear([(f"{base}.mlp.fc2", hidden)], wide, bias=True),
    )
