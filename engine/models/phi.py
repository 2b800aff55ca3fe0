"""The decoder of Phi-3 and Phi-4: fused projections, and heads that rotate some of their channels.

Queries, keys and values are one matrix, gate and up another, in the order in which they are packed.
"""

from __future__ import annotations

import numpy as np

from ..loading.model_config import ModelConfig
from .decoder import Decoder, Layer
from .rope import paired_channels, rotated_channels
from .weights import Order, WeightLoader


class PhiDecoder(Decoder):
    """A loaded Phi-3 or Phi-4."""

    def _load_layer(
        self, loader: WeightLoader, config: ModelConfig, base: str, index: int
    ) -> Layer:
        hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
        query, kv = config.num_heads * dim, config.num_kv_heads * dim
        qkv = [(f"{base}.self_attn.qkv_proj", query + 2 * kv)]
        gate_up = [(f"{base}.mlp.gate_up_proj", 2 * wide)]
        return Layer(
            input_norm=loader.norm(f"{base}.input_layernorm.weight", hidden),
            qkv=loader.linear(qkv, hidden, bias=False, orders=[_paired(config)]),
            q_norm=None,
            k_norm=None,
            o=loader.linear([(f"{base}.self_attn.o_proj", hidden)], query, bias=False),
            post_norm=loader.norm(f"{base}.post_attention_layernorm.weight", hidden),
            gate_up=loader.linear(gate_up, hidden, bias=False),
            down=loader.linear([(f"{base}.mlp.down_proj", hidden)], wide, bias=False),
            window=config.windows[index],
            halves=loader.halves(qkv),
        )


def _paired(config: ModelConfig) -> Order | None:
    """Return the order of the rows of q, k and v for kernels; None for the order of the file."""
    dim, heads, kv = config.head_dim, config.num_heads, config.num_kv_heads
    rotated = rotated_channels(config.rope, dim)
    if rotated == dim:
        return None
    channels = np.array(paired_channels(rotated, dim), np.intp)
    starts = np.arange(heads + kv, dtype=np.intp) * dim
    values = np.arange((heads + kv) * dim, (heads + 2 * kv) * dim, dtype=np.intp)
    return np.concatenate([(starts[:, None] + channels).reshape(-1), values])
