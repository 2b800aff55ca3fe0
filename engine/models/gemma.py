"""The decoder of Gemma 3: four norms per layer, a gated MLP with gelu, two ropes.

Each norm's weights are stored minus 1. A layer normalises the inputs and the outputs of
attention and MLP. Layers with a sliding window have a separate base for the rope.
Embeddings are multiplied by the root of the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError

from ..kernels.backend import Backend, PackedLinear
from ..loading.checkpoint import Checkpoint
from ..loading.model_config import GemmaConfig, ModelConfig
from ..pipeline.model import ModelInputs
from .decoder import Decoder, Layer, attention_weights
from .rope import cos_sin_table
from .weights import Progress, WeightLoader

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class GemmaLayer(Layer):
    """``post_norm`` and ``last_norm`` apply to what attention and MLP add; ``gate_up``: gate."""

    mlp_norm: F32
    last_norm: F32
    up: PackedLinear


class GemmaDecoder(Decoder):
    """A loaded Gemma 3, in host memory."""

    config: GemmaConfig

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
        if not isinstance(config, GemmaConfig):
            raise CheckpointError(f"{checkpoint.folder}: not the config of a Gemma 3")
        local = cos_sin_table(config.local_rope, config.head_dim, max_length)
        self._local_cos_sin = backend.upload(local)
        super().__init__(
            checkpoint, backend, max_length, on_progress, block_size=block_size, head=head
        )
        self._scale = config.query_pre_attn_scalar**-0.5
        self._embedding_scale = np.float32(config.hidden_size**0.5)

    def _load_layer(
        self, loader: WeightLoader, config: ModelConfig, base: str, index: int
    ) -> GemmaLayer:
        hidden, wide = config.hidden_size, config.intermediate_size

        def norm(name: str) -> F32:
            return loader.norm(f"{base}.{name}.weight", hidden)

        return GemmaLayer(
            **attention_weights(loader, config, base, index),
            input_norm=norm("input_layernorm"),
            post_norm=norm("post_attention_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            last_norm=norm("post_feedforward_layernorm"),
            gate_up=loader.linear([(f"{base}.mlp.gate_proj", wide)], hidden, bias=False),
            up=loader.linear([(f"{base}.mlp.up_proj", wide)], hidden, bias=False),
            down=loader.linear([(f"{base}.mlp.down_proj", hidden)], wide, bias=False),
        )

    def _norms_added(self) -> float:
        return 1.0

    def _embed(self, tokens: I32, residual: F32) -> None:
        super()._embed(tokens, residual)
        residual *= self._embedding_scale

    def _rotation(self, layer: Layer, batch: ModelInputs) -> F32:
        return self._local_cos_sin if layer.window else super()._rotation(layer, batch)

    def _add_attention(self, layer: Layer, delta: F32, residual: F32, normed: F32) -> None:
        self._add_normed(delta, layer.post_norm, residual, _gemma(layer).mlp_norm, normed)

    def _mlp(
        self,
        layer: Layer,
        residual: F32,
        normed: F32,
        following: F32,
        deep: Sequence[tuple[I32, F32]] = (),
    ) -> None:
        own, kernels, rows = _gemma(layer), self.backend, len(normed)
        gate = self._space.rows("gate", rows, self.config.intermediate_size)
        up = self._space.rows("up", rows, self.config.intermediate_size)
        kernels.linear(normed, own.gate_up, gate)
        kernels.linear(normed, own.up, up)
        kernels.activate(gate, "gelu_tanh", gate)
        gate *= up
        delta = self._space.rows("delta", rows, self.config.hidden_size)
        kernels.linear(gate, own.down, delta)
        self._add_normed(delta, own.last_norm, residual, following, normed)

    def _add_normed(
        self, delta: F32, norm: F32, residual: F32, following: F32, normed: F32
    ) -> None:
        """Add the normed ``delta`` to ``residual``; ``normed`` becomes its norm."""
        eps = self.config.rms_norm_eps
        added = self._space.rows("added", len(delta), delta.shape[1])
        self.backend.rms_norm(delta, norm, eps, added)
        self.backend.add_rms_norm(added, residual, following, eps, normed)


def _gemma(layer: Layer) -> GemmaLayer:
    if not isinstance(layer, GemmaLayer):
        raise TypeError(type(layer).__name__)
    return layer
