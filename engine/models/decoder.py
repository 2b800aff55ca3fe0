"""One decoder for all Llama-type models; architectures differ in the config's options only.

The forward pass calls nothing but :class:`Backend` kernels. A row's arithmetic never
depends on other rows, and the keys and values of a layer are complete before any row
attends to them. Behind the last layer's keys and values only rows whose logits are wanted
are computed, so the chunks of a long prompt skip that layer's MLP and the LM head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...proto.errors import CheckpointError
from ..checkpoint import Checkpoint
from ..kernels.backend import Backend, PackedLinear
from ..model_config import ModelConfig
from .rope import cos_sin_table
from .weights import WeightLoader
from .workspace import Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
LayerDone = Callable[[int], None]
Progress = Callable[[int, int], None]


@dataclass(slots=True, frozen=True)
class Batch:
    """Rows of one forward pass, grouped by sequence.

    ``tokens``, ``positions``: int32 ``[T]``. ``slots``: int64 ``[T]``, cache slot of each
    row. ``block_tables``: int32 ``[S, N]``, padded with 0. ``row_offsets``: int32 ``[S+1]``.
    ``logit_rows``: int64 ``[R]``, ascending, rows whose logits are wanted.
    """

    tokens: I32
    positions: I32
    slots: npt.NDArray[np.int64]
    block_tables: I32
    row_offsets: I32
    logit_rows: npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class Layer:
    """Weights of one layer; ``window`` 0 is full attention."""

    input_norm: F32
    qkv: PackedLinear
    q_norm: F32 | None
    k_norm: F32 | None
    o: PackedLinear
    post_norm: F32
    gate_up: PackedLinear
    down: PackedLinear
    window: int


class Decoder:
    """A loaded model. Not thread-safe: the workspace is shared by all calls."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        max_length: int,
        on_progress: Progress | None = None,
    ) -> None:
        config = checkpoint.config
        loader = WeightLoader(checkpoint, backend, on_progress)
        self.config = config
        self.backend = backend
        self.max_length = max_length
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, max_length)
        if not np.isfinite(self.cos_sin).all():
            raise CheckpointError(f"{checkpoint.folder}: rope settings give no finite angles")
        embedding = (config.vocab_size, config.hidden_size)
        self._table = loader.take("model.embed_tokens.weight", embedding)
        self._layers = [_load_layer(loader, config, i) for i in range(config.num_layers)]
        self._final_norm = loader.vector("model.norm.weight", config.hidden_size)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = loader.linear([(head, config.vocab_size)], config.hidden_size, bias=False)
        self.weights_bytes = loader.packed_bytes + self._table.nbytes
        loader.finish()
        self._space = Workspace()

    def forward(self, batch: Batch, pool: F32, layer_done: LayerDone | None = None) -> F32:
        """Run a batch; returns logits ``[R, vocab]``, valid until the next call.

        ``pool``: KV pool ``[L, NB, 2, Hk, BS, D]``, written at ``slots``, read through the
        block tables. ``layer_done(n)``: keys and values of layers ``0 .. n`` are final.
        Raises ValueError for ids, positions or blocks out of range.
        """
        kernels, space, config = self.backend, self._space, self.config
        hidden, rows = config.hidden_size, len(batch.tokens)
        residual = space.rows("residual", rows, hidden)
        normed = space.rows("normed", rows, hidden)
        kernels.embed(batch.tokens, self._table, residual)
        kernels.rms_norm(residual, self._layers[0].input_norm, config.rms_norm_eps, normed)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q = self._append(layer, batch, normed, pool[index])
            if layer_done is not None:
                layer_done(index + 1)
            if index == last:
                batch, q, residual = self._narrow(batch, q, residual)
                if not len(batch.tokens):
                    return np.empty((0, config.vocab_size), np.float32)
                normed = normed[: len(batch.tokens)]
            self._attend(layer, batch, q, pool[index], residual, normed)
            following = self._final_norm if index == last else self._layers[index + 1].input_norm
            self._mlp(layer, residual, normed, following)
        logits = space.rows("logits", len(batch.tokens), config.vocab_size)
        kernels.linear(normed, self._head, logits)
        return logits

    def _append(self, layer: Layer, batch: Batch, normed: F32, kv_layer: F32) -> F32:
        """Project to q, k, v; store k and v; returns rotated q ``[T, Hq, D]``."""
        config, rows = self.config, len(normed)
        qkv = self._space.rows("qkv", rows, layer.qkv.out_features)
        q = self._space.rows("q", rows, config.num_heads * config.head_dim)
        q = q.reshape(rows, config.num_heads, config.head_dim)
        self.backend.linear(normed, layer.qkv, qkv)
        self.backend.qk_norm_rope_append(
            qkv,
            batch.positions,
            batch.slots,
            self.cos_sin,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            kv_layer,
            q,
        )
        return q

    def _attend(
        self, layer: Layer, batch: Batch, q: F32, kv_layer: F32, residual: F32, normed: F32
    ) -> None:
        """Add attention to ``residual``; ``normed`` becomes the MLP's input."""
        config, rows = self.config, len(q)
        mixed = self._space.rows("mixed", rows, config.num_heads * config.head_dim)
        self.backend.attention(
            q,
            kv_layer,
            batch.block_tables,
            batch.row_offsets,
            batch.positions,
            config.head_dim**-0.5,
            layer.window,
            mixed,
        )
        delta = self._space.rows("delta", rows, config.hidden_size)
        self.backend.linear(mixed, layer.o, delta)
        self.backend.add_rms_norm(delta, residual, layer.post_norm, config.rms_norm_eps, normed)

    def _mlp(self, layer: Layer, residual: F32, normed: F32, following: F32) -> None:
        """Add the MLP to ``residual``; ``normed`` becomes the input of what follows."""
        rows, width = len(normed), self.config.intermediate_size
        gate_up = self._space.rows("gate_up", rows, 2 * width)
        active = self._space.rows("active", rows, width)
        delta = self._space.rows("delta", rows, self.config.hidden_size)
        self.backend.linear(normed, layer.gate_up, gate_up)
        self.backend.silu_mul(gate_up, active)
        self.backend.linear(active, layer.down, delta)
        self.backend.add_rms_norm(delta, residual, following, self.config.rms_norm_eps, normed)

    def _narrow(self, batch: Batch, q: F32, residual: F32) -> tuple[Batch, F32, F32]:
        """Keep only the rows whose logits are wanted."""
        rows = batch.logit_rows
        if len(rows) == len(batch.tokens):
            return batch, q, residual
        kept = Batch(
            tokens=batch.tokens[rows],
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            block_tables=batch.block_tables,
            row_offsets=np.searchsorted(rows, batch.row_offsets).astype(np.int32),
            logit_rows=np.arange(len(rows)),
        )
        return kept, q[rows], residual[rows]


def _load_layer(loader: WeightLoader, config: ModelConfig, index: int) -> Layer:
    base = f"model.layers.{index}"
    hidden, dim, wide = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    attention, mlp = f"{base}.self_attn", f"{base}.mlp"
    qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
    gate_up = [(f"{mlp}.gate_proj", wide), (f"{mlp}.up_proj", wide)]
    return Layer(
        input_norm=loader.vector(f"{base}.input_layernorm.weight", hidden),
        qkv=loader.linear(qkv, hidden, bias=config.qkv_bias),
        q_norm=loader.vector(f"{attention}.q_norm.weight", dim) if config.qk_norm else None,
        k_norm=loader.vector(f"{attention}.k_norm.weight", dim) if config.qk_norm else None,
        o=loader.linear([(f"{attention}.o_proj", hidden)], q, bias=config.o_bias),
        post_norm=loader.vector(f"{base}.post_attention_layernorm.weight", hidden),
        gate_up=loader.linear(gate_up, hidden, bias=config.mlp_bias),
        down=loader.linear([(f"{mlp}.down_proj", hidden)], wide, bias=config.mlp_bias),
        window=config.windows[index],
    )
