"""BERT as an encoder: absolute positions, LayerNorm after every sum, GELU, bidirectional attention.

Keys and values use the decoder's paged kernels, unrotated. Every row is given the position of its
text's last token, so it attends to the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError
from baton.proto.layout import KVLayout

from ..kernels.backend import Backend, PackedLinear
from ..loading.checkpoint import Checkpoint
from ..loading.model_config import BertConfig
from ..loading.safetensors import widened
from ..pipeline.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
from ..scheduling.plan import Chunk
from .weights import Progress, WeightLoader
from .workspace import Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class Norm:
    """Weight and bias of a LayerNorm."""

    weight: F32
    bias: F32


@dataclass(slots=True, frozen=True)
class Layer:
    """Weights of one layer."""

    qkv: PackedLinear
    o: PackedLinear
    attention_norm: Norm
    up: PackedLinear
    down: PackedLinear
    output_norm: Norm


class BertModel(PipelineModel, KVCacheMixin):
    """A loaded encoder. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        max_length: int,
        on_progress: Progress | None = None,
        *,
        block_size: int = 16,
    ) -> None:
        config = checkpoint.config
        if not isinstance(config, BertConfig):
            raise CheckpointError(f"{checkpoint.folder}: config.json is not a BERT config")
        loader = WeightLoader(checkpoint, backend, on_progress)
        self.config = config
        self.backend = backend
        self.max_length = max_length
        self.vocab_size = config.vocab_size
        self.kv_layout = KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
        )
        hidden, base = config.hidden_size, "embeddings"
        places = (config.rope.max_position_embeddings, hidden)
        kinds = loader.take(
            f"{base}.token_type_embeddings.weight", (config.type_vocab_size, hidden)
        )
        positions = loader.take(f"{base}.position_embeddings.weight", places)
        self._words = loader.take(f"{base}.word_embeddings.weight", (config.vocab_size, hidden))
        # All tokens have token type 0, so its embedding is added to every position's.
        self._positions = widened(positions) + widened(kinds)[0]
        self._norm = _norm(loader, f"{base}.LayerNorm", hidden)
        self._layers = [_load_layer(loader, config, i) for i in range(config.num_layers)]
        self.weights_bytes = loader.packed_bytes + self._words.nbytes + self._positions.nbytes
        loader.finish(unused=("pooler.dense.weight", "pooler.dense.bias"))
        self._unrotated = np.zeros((1, config.head_dim), np.float32)
        self._unrotated[:, : config.head_dim // 2] = 1.0
        self._space = Workspace(backend)

    def prepare_initial_token_inputs(self, context_batch: Sequence[Chunk]) -> ModelInputs:
        """Raise: the pipeline of an encoder lays texts out over its own memory."""
        raise NotImplementedError("an encoder has no KV memory that outlives a batch")

    def prepare_next_token_inputs(
        self, next_tokens: I32, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """Raise: an encoder generates no tokens."""
        raise NotImplementedError("an encoder has no next token")

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Return the hidden states ``[R, hidden]`` of the wanted rows after the last layer."""
        inputs = model_inputs
        space, config = self._space, self.config
        rows, hidden = len(inputs.tokens), config.hidden_size
        words, places = space.rows("words", rows, hidden), space.rows("delta", rows, hidden)
        states, other = space.rows("states", rows, hidden), space.rows("other", rows, hidden)
        self.backend.embed(inputs.tokens, self._words, words)
        self.backend.embed(inputs.positions, self._positions, places)
        self._add_norm(places, words, self._norm, states)
        seen = _ends(inputs)
        for index, layer in enumerate(self._layers):
            self._attend(layer, inputs, seen, inputs.pool[index], states, other)
            self._feed_forward(layer, other, states)
            if inputs.layer_done is not None:
                inputs.layer_done(index + 1)
        return ModelOutputs(hidden_states=states[inputs.logit_rows])

    def _attend(
        self, layer: Layer, inputs: ModelInputs, seen: I32, kv_layer: F32, states: F32, out: F32
    ) -> None:
        """Compute ``out = norm(states + attention(states))``; overwrites ``states``."""
        config, space, rows = self.config, self._space, len(states)
        heads, dim, hidden = config.num_heads, config.head_dim, config.hidden_size
        qkv = space.rows("qkv", rows, 3 * hidden)
        q = space.rows("q", rows, hidden).reshape(rows, heads, dim)
        self.backend.linear(states, layer.qkv, qkv)
        unrotated = np.zeros(rows, np.int32)
        self.backend.qk_norm_rope_append(
            qkv, unrotated, inputs.slots, self._unrotated, None, None, 0.0, kv_layer, q
        )
        mixed, delta = space.rows("mixed", rows, hidden), space.rows("delta", rows, hidden)
        self.backend.attention(
            q, kv_layer, inputs.block_tables, inputs.row_offsets, seen, dim**-0.5, 0, mixed
        )
        self.backend.linear(mixed, layer.o, delta)
        self._add_norm(delta, states, layer.attention_norm, out)

    def _feed_forward(self, layer: Layer, states: F32, out: F32) -> None:
        """Compute ``out = norm(states + mlp(states))``; overwrites ``states``."""
        space, rows, wide = self._space, len(states), self.config.intermediate_size
        up, active = space.rows("up", rows, wide), space.rows("active", rows, wide)
        delta = space.rows("delta", rows, self.config.hidden_size)
        self.backend.linear(states, layer.up, up)
        self.backend.activate(up, "gelu", active)
        self.backend.linear(active, layer.down, delta)
        self._add_norm(delta, states, layer.output_norm, out)

    def _add_norm(self, x: F32, residual: F32, norm: Norm, out: F32) -> None:
        eps = self.config.layer_norm_eps
        self.backend.add_layer_norm(x, residual, norm.weight, norm.bias, eps, out)


def _ends(inputs: ModelInputs) -> I32:
    """Return the last position of each row's text."""
    offsets = inputs.row_offsets
    last = inputs.positions[offsets[1:] - 1]
    return np.repeat(last, np.diff(offsets))


def _norm(loader: WeightLoader, name: str, size: int) -> Norm:
    return Norm(loader.vector(f"{name}.weight", size), loader.vector(f"{name}.bias", size))


def _load_layer(loader: WeightLoader, config: BertConfig, index: int) -> Layer:
    base = f"encoder.layer.{index}"
    hidden, wide = config.hidden_size, config.intermediate_size
    attention = f"{base}.attention"
    qkv = [(f"{attention}.self.{part}", hidden) for part in ("query", "key", "value")]
    return Layer(
        qkv=loader.linear(qkv, hidden, bias=True),
        o=loader.linear([(f"{attention}.output.dense", hidden)], hidden, bias=True),
        attention_norm=_norm(loader, f"{attention}.output.LayerNorm", hidden),
        up=loader.linear([(f"{base}.intermediate.dense", wide)], hidden, bias=True),
        down=loader.linear([(f"{base}.output.dense", hidden)], wide, bias=True),
        output_norm=_norm(loader, f"{base}.output.LayerNorm", hidden),
    )
