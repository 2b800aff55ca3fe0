"""One decoder for all Llama-type models; architectures differ only in the config's options.

The forward pass calls only :class:`Backend` kernels. A row's arithmetic never
depends on other rows, and a layer's keys and values are complete before any row
attends to them. After the last layer's keys and values, only rows whose logits are wanted
are computed. So the chunks of a long prompt skip that layer's MLP and the LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import CheckpointError
from baton.proto.layout import KVLayout

from ..kernels.backend import Backend, PackedLinear
from ..kernels.memory import Allocate, aligned_zeros
from ..loading.checkpoint import Checkpoint
from ..loading.model_config import ModelConfig
from ..pipeline.model import (
    KVCacheMixin,
    KVManager,
    ModelInputs,
    ModelOutputs,
    PipelineModel,
    lay_out,
    lay_out_next,
    narrowed,
    uploaded,
)
from ..sampling.sampler import log_probs, prompt_log_probs
from ..scheduling.plan import Chunk
from .rope import cos_sin_table
from .weights import Progress, WeightLoader
from .workspace import Workspace

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
_HEAD = "lm_head.weight"


SCORED_ROWS = 32
"""Rows of a prompt whose logits are in memory at once."""


@dataclass(slots=True, frozen=True)
class Layer:
    """Weights of one layer; ``window`` 0 is full attention, ``halves``: qkv is bfloat16."""

    input_norm: F32
    qkv: PackedLinear
    q_norm: F32 | None
    k_norm: F32 | None
    o: PackedLinear
    post_norm: F32
    gate_up: PackedLinear
    down: PackedLinear
    window: int
    halves: bool


class Decoder(PipelineModel, KVCacheMixin):
    """A loaded model. Not thread-safe: all calls share the workspace.

    ``block_size``: tokens per KV block. ``head``: if False, the model returns hidden states
    instead of logits, and the checkpoint needs no head.
    """

    sees: ClassVar[bool] = False
    """Whether it has a tower for images, which ``vision=False`` leaves out."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        max_length: int,
        on_progress: Progress | None = None,
        *,
        block_size: int = 16,
        head: bool = True,
    ) -> None:
        config = checkpoint.config
        loader = WeightLoader(checkpoint, backend, on_progress, norms_added=self._norms_added())
        self.config = config
        self.backend = backend
        self.max_length = max_length
        self.vocab_size = config.vocab_size
        self.kv_layout = KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=backend.kv_dtype,
        )
        self._kv_rounding = backend.kv_rounding
        self._pool: F32 | None = None
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_length)
        if not np.isfinite(cos_sin).all():
            raise CheckpointError(f"{checkpoint.folder}: the rope settings give non-finite angles")
        self._cos_sin = backend.upload(cos_sin)
        base = self._prefix(checkpoint, head=head)
        self._tied = head and self._is_tied(loader, base)
        embedding = f"{base}embed_tokens.weight"
        if self._tied and embedding not in checkpoint.tensors and _HEAD in checkpoint.tensors:
            embedding = _HEAD
        self._table = loader.embedding(embedding, (config.vocab_size, config.hidden_size))
        self._layers = [
            self._load_layer(loader, config, f"{base}layers.{place}", index)
            for index, place in enumerate(self._places())
        ]
        self._final_norm = loader.norm(f"{base}norm.weight", config.hidden_size)
        self._head = self._load_head(loader, base) if head else None
        self._load_more(loader, checkpoint)
        self.weights_bytes = loader.packed_bytes + self._table.nbytes
        loader.finish(unused=(_HEAD,) if self._tied or not head else ())
        self._space = Workspace(backend)
        self._scale = config.head_dim**-0.5

    def _norms_added(self) -> float:
        """Return the number that is added to the weights of all norms."""
        return 0.0

    def _load_layer(
        self, loader: WeightLoader, config: ModelConfig, base: str, index: int
    ) -> Layer:
        """Load the weights of a layer; ``base``: the prefix of its tensors."""
        hidden, wide = config.hidden_size, config.intermediate_size
        gate_up = [(f"{base}.mlp.gate_proj", wide), (f"{base}.mlp.up_proj", wide)]
        down = [(f"{base}.mlp.down_proj", hidden)]
        return Layer(
            **attention_weights(loader, config, base, index),
            input_norm=loader.norm(f"{base}.input_layernorm.weight", hidden),
            post_norm=loader.norm(f"{base}.post_attention_layernorm.weight", hidden),
            gate_up=loader.linear(gate_up, hidden, bias=config.mlp_bias),
            down=loader.linear(down, wide, bias=config.mlp_bias),
        )

    def _prefix(self, checkpoint: Checkpoint, *, head: bool) -> str:
        """Return the prefix of the decoder's tensors."""
        # Embedding checkpoints are often saved without the wrapper class that adds the head.
        return "" if not head and "embed_tokens.weight" in checkpoint.tensors else "model."

    def _places(self) -> Sequence[int]:
        """Return the number that each layer has in the tensors' names."""
        return range(self.config.num_layers)

    def _load_head(self, loader: WeightLoader, prefix: str) -> PackedLinear:
        """Load the matrix that gives the logits; ``prefix``: of the decoder's tensors."""
        config = self.config
        tied = self._tied and f"{prefix}embed_tokens.weight" in loader.tensors
        name = f"{prefix}embed_tokens" if tied else _HEAD.removesuffix(".weight")
        return loader.linear([(name, config.vocab_size)], config.hidden_size, bias=False)

    def _is_tied(self, loader: WeightLoader, prefix: str) -> bool:
        """True if head and embedding are one matrix.

        As in transformers, a head that differs from the embedding counts, whatever config.json
        states: fine-tuned models may have trained one of the two.
        """
        names = (f"{prefix}embed_tokens.weight", _HEAD)
        if not self.config.tie_word_embeddings or not all(name in loader.tensors for name in names):
            return self.config.tie_word_embeddings
        shape = (self.config.vocab_size, self.config.hidden_size)
        return loader.equal(*names, shape)

    def _load_more(self, loader: WeightLoader, checkpoint: Checkpoint) -> None:
        """Load what a subclass has beside the decoder."""

    # ------------------------------------------------------------------ called by pipelines

    def load_kv_manager(
        self, session: Backend, available_cache_memory: int, allocate: Allocate = aligned_zeros
    ) -> KVManager:
        """Allocate the KV memory; inputs prepared later refer to its pool."""
        manager = super().load_kv_manager(session, available_cache_memory, allocate)
        self._pool = manager.pool
        return manager

    def prepare_initial_token_inputs(self, context_batch: Sequence[Chunk]) -> ModelInputs:
        """Lay the chunks out as rows over the loaded KV memory."""
        if self._pool is None:
            raise ValueError("KV memory must be loaded first")
        return lay_out(context_batch, self._pool)

    def prepare_next_token_inputs(
        self, next_tokens: I32, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """Lay out the next row of each sequence."""
        return lay_out_next(next_tokens, prev_model_inputs)

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Return the logits of the wanted rows, or their hidden states without a head."""
        wanted = narrowed(model_inputs)
        rows = uploaded(model_inputs, self.backend)
        every = wanted is model_inputs
        return self.forward(rows, rows if every else uploaded(wanted, self.backend))

    def forward(self, inputs: ModelInputs, wanted: ModelInputs) -> ModelOutputs:
        """Run :meth:`execute` on uploaded rows, without reading host arrays.

        ``wanted``: the uploaded :func:`narrowed` rows, or ``inputs`` itself if it wants all rows.
        """
        states = self._states(inputs, wanted)
        if self._head is None:
            return ModelOutputs(hidden_states=states)
        if inputs.scored:
            states = self._score(self._head, states, inputs)
        # On a GPU the head has up to three more rows than the vocabulary.
        width = self._head.out_features
        logits = self._space.rows("logits", len(states), width, logits=True)
        if len(states):
            self.backend.linear(states, self._head, logits)
        return ModelOutputs(next_token_logits=logits)

    def compute_log_probabilities(
        self,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Sequence[int],
        batch_top_n: Sequence[int],
        batch_echo: Sequence[bool],
    ) -> list[TokenLogProbs | None]:
        """Return the log-softmax of the logits as the sampler does; prompts are not supported."""
        logits = model_outputs.next_token_logits
        if logits is None or any(batch_echo):
            raise NotImplementedError("log-probabilities are available for drawn tokens only")
        rows = zip(logits, next_tokens, batch_top_n, strict=True)
        return [log_probs(row, token, top) if top else None for row, token, top in rows]

    # ------------------------------------------------------------------ known next tokens

    def _score(self, head: PackedLinear, states: F32, inputs: ModelInputs) -> F32:
        """Report log-probabilities of known tokens; return the states of the rows that sample.

        A few rows at a time: all logits of a prompt would take as much memory as its KV.
        """
        kernels, space, hidden = self.backend, self._space, states.shape[1]
        for group, scored in enumerate(inputs.scored):
            for first in range(0, len(scored.rows), SCORED_ROWS):
                part = slice(first, first + SCORED_ROWS)
                targets = scored.targets[part]
                some = space.rows("scored", len(targets), hidden)
                kernels.take_rows(states, kernels.upload(scored.rows[part]), some)
                logits = space.rows("scored_logits", len(targets), head.out_features, logits=True)
                kernels.linear(some, head, logits)
                known = kernels.download(logits)[:, : self.vocab_size]
                if inputs.score_done is not None:
                    inputs.score_done(group, first, prompt_log_probs(known, targets, scored.top))
                if inputs.layer_done is not None:
                    inputs.layer_done(0)
        if inputs.sample_rows is None:
            return states
        sampling = space.rows("sampling", len(inputs.sample_rows), hidden)
        kernels.take_rows(states, kernels.upload(inputs.sample_rows), sampling)
        return sampling

    # ------------------------------------------------------------------ the forward pass

    def _states(self, inputs: ModelInputs, wanted: ModelInputs) -> F32:
        """Return the normed hidden states ``[R, hidden]`` of the wanted rows."""
        return self._run_layers(inputs, wanted)[1]

    def _run_layers(self, inputs: ModelInputs, wanted: ModelInputs) -> tuple[F32, F32]:
        """Return the hidden states ``[R, hidden]`` of the wanted rows, before and after the norm.

        Writes keys and values at ``slots``. Raises ValueError for ids, positions or blocks out
        of range.
        """
        kernels, space, config, pool = self.backend, self._space, self.config, inputs.pool
        layer_done = inputs.layer_done
        hidden, rows = config.hidden_size, len(inputs.tokens)
        residual = space.rows("residual", rows, hidden)
        normed = space.rows("normed", rows, hidden)
        self._embed(inputs.tokens, residual)
        features = inputs.features
        for image in features:
            kernels.put_rows(image.features, image.rows, residual)
        kernels.rms_norm(residual, self._layers[0].input_norm, config.rms_norm_eps, normed)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q = self._append(layer, inputs, normed, pool[index])
            if layer_done is not None:
                layer_done(index + 1)
            if index == last and wanted is not inputs:
                q, residual = self._taken(q, residual, inputs.logit_rows)
                inputs, normed = wanted, normed[: len(residual)]
                if not len(normed):
                    return residual, normed
            self._attend(layer, inputs, q, pool[index], residual, normed)
            following = self._norm_after(index)
            deep: tuple[tuple[I32, F32], ...] = ()
            if features:
                deep = tuple((f.rows, f.deep[index]) for f in features if index < len(f.deep))
            self._mlp(layer, residual, normed, following, deep)
            self._add_layers(index, inputs, residual, normed)
        return residual, normed

    def _embed(self, tokens: I32, residual: F32) -> None:
        """Write the embeddings of tokens into ``residual``."""
        self.backend.embed(tokens, self._table, residual)

    def _rotation(self, layer: Layer, batch: ModelInputs) -> F32:
        """Return the cosines and sines by which a layer rotates queries and keys."""
        return self._cos_sin if batch.cos_sin is None else batch.cos_sin

    def _norm_after(self, index: int) -> F32:
        """Return the norm of what follows the layer ``index``."""
        last = index == len(self._layers) - 1
        return self._final_norm if last else self._layers[index + 1].input_norm

    def _add_layers(self, index: int, inputs: ModelInputs, residual: F32, normed: F32) -> None:
        """Compute the layers of a subclass that follow the layer ``index``."""

    def _append(self, layer: Layer, batch: ModelInputs, normed: F32, kv_layer: F32) -> F32:
        """Project to q, k, v and store k and v; return the rotated q ``[T, Hq, D]``."""
        config, rows = self.config, len(normed)
        qkv = self._space.rows("qkv", rows, layer.qkv.out_features)
        q = self._space.rows("q", rows, config.num_heads * config.head_dim)
        q = q.reshape(rows, config.num_heads, config.head_dim)
        self.backend.linear(normed, layer.qkv, qkv)
        self.backend.qk_norm_rope_append(
            qkv,
            batch.positions if batch.rope_positions is None else batch.rope_positions,
            batch.slots,
            self._rotation(layer, batch),
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
            kv_layer,
            q,
            self._kv_rounding,
        )
        return q

    def _attend(
        self, layer: Layer, batch: ModelInputs, q: F32, kv_layer: F32, residual: F32, normed: F32
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
            self._scale,
            layer.window,
            mixed,
            batch.plan,
            layer.halves,
        )
        delta = self._space.rows("delta", rows, config.hidden_size)
        self.backend.linear(mixed, layer.o, delta)
        self._add_attention(layer, delta, residual, normed)

    def _add_attention(self, layer: Layer, delta: F32, residual: F32, normed: F32) -> None:
        """Add the output of attention to ``residual``; ``normed`` becomes the MLP's input."""
        eps = self.config.rms_norm_eps
        self.backend.add_rms_norm(delta, residual, layer.post_norm, eps, normed)

    def _mlp(
        self,
        layer: Layer,
        residual: F32,
        normed: F32,
        following: F32,
        deep: Sequence[tuple[I32, F32]] = (),
    ) -> None:
        """Add the MLP to ``residual``; ``normed`` becomes the input of the next layer.

        ``deep``: rows, and features of images that are added to them.
        """
        rows, width = len(normed), self.config.intermediate_size
        gate_up = self._space.rows("gate_up", rows, 2 * width)
        active = self._space.rows("active", rows, width)
        delta = self._space.rows("delta", rows, self.config.hidden_size)
        self.backend.gated_mlp(normed, layer.gate_up, layer.down, gate_up, active, delta)
        for where, added in deep:
            self.backend.put_rows(added, where, delta, add=True)
        self.backend.add_rms_norm(delta, residual, following, self.config.rms_norm_eps, normed)

    def _taken(self, q: F32, residual: F32, rows: I32) -> tuple[F32, F32]:
        """Copy queries and residual of the given rows."""
        some_q = self._space.rows("some_q", len(rows), q.shape[1] * q.shape[2])
        some_q = some_q.reshape(len(rows), *q.shape[1:])
        some = self._space.rows("some", len(rows), residual.shape[1])
        self.backend.take_rows(q, rows, some_q)
        self.backend.take_rows(residual, rows, some)
        return some_q, some


class AttentionWeights(TypedDict):
    """The fields of :class:`Layer` that attention needs."""

    qkv: PackedLinear
    q_norm: F32 | None
    k_norm: F32 | None
    o: PackedLinear
    window: int
    halves: bool


def attention_weights(
    loader: WeightLoader, config: ModelConfig, base: str, index: int
) -> AttentionWeights:
    """Load the matrices and norms of a layer's attention."""
    hidden, dim, name = config.hidden_size, config.head_dim, f"{base}.self_attn"
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    qkv = [(f"{name}.q_proj", q), (f"{name}.k_proj", kv), (f"{name}.v_proj", kv)]
    return {
        "qkv": loader.linear(qkv, hidden, bias=config.qkv_bias),
        "q_norm": loader.norm(f"{name}.q_norm.weight", dim) if config.qk_norm else None,
        "k_norm": loader.norm(f"{name}.k_norm.weight", dim) if config.qk_norm else None,
        "o": loader.linear([(f"{name}.o_proj", hidden)], q, bias=config.o_bias),
        "window": config.windows[index],
        "halves": loader.halves(qkv),
    }
