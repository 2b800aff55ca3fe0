"""Makes the objects of config.json and generation_config.json from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from baton.proto.errors import CheckpointError

from .family_defaults import PHI3
from .gemma_config import GEMMA3
from .gguf import GgufFile, Metadata
from .gguf_blocks import BLOCKS
from .gguf_tensors import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT

FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": (GEMMA3, "gemma3_text"),
    "phi3": (PHI3, "phi3"),
}
"""Architecture and model_type of config.json by ``general.architecture``. Mistral is a llama."""
_LARGEST_GEMMA = 62
"""Layers of the Gemma 3 of 27B, which alone scales attention by another size than a head's."""
_TABLE, _HEAD = "token_embd.weight", "output.weight"
_END_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
        "<end_of_turn>", "<EOT>",
    )
)  # fmt: skip
"""Control tokens that end an answer, whether the file names them as such or not."""
_CONTROL = 3
"""Type of control tokens in ``tokenizer.ggml.token_type``."""


def config_json(parts: list[GgufFile]) -> dict[str, Any]:
    """Return the object of config.json. Raises CheckpointError if the model is not supported."""
    metadata = parts[0].metadata
    family = metadata.text("general.architecture")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{metadata.path}: unsupported architecture '{family}'; supported in GGUF files are "
            f"{', '.join(FAMILIES)}"
        )
    architecture, model_type = FAMILIES[family]
    tables = [part.entries[_TABLE] for part in parts if _TABLE in part.entries]
    if not tables:
        raise CheckpointError(f"{metadata.path}: tensor '{_TABLE}' is missing")
    names = {name for part in parts for name in part.entries}
    sizes = _sizes(metadata, family)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": tables[0].shape[0],
        "tie_word_embeddings": _HEAD not in names,
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in names,
        "dtype": "bfloat16" if tables[0].dtype in (*BLOCKS, "BF16") else "float32",
        "eos_token_id": end_tokens(metadata) or None,
        **sizes,
        **_rope(parts, family),
        **(_gemma(metadata) if family == "gemma3" else {}),
        **(_phi(metadata, sizes["head_dim"]) if family == "phi3" else {}),
    }


def _sizes(metadata: Metadata, family: str) -> dict[str, Any]:
    heads = metadata.integer(f"{family}.attention.head_count")
    hidden = metadata.integer(f"{family}.embedding_length")
    if metadata.integer(f"{family}.expert_count", 0):
        raise CheckpointError(f"{metadata.path}: mixtures of experts are not supported")
    head_dim = 0
    if heads > 0:
        head_dim = metadata.integer(f"{family}.attention.key_length", hidden // heads)
    if head_dim < 1:
        raise CheckpointError(
            f"{metadata.path}: {heads} heads of {head_dim}: both numbers must be positive"
        )
    turned = metadata.integer(f"{family}.rope.dimension_count", head_dim)
    values = metadata.integer(f"{family}.attention.value_length", head_dim)
    partly = family == "phi3" and 0 < turned <= head_dim
    if values != head_dim or (turned != head_dim and not partly):
        raise CheckpointError(
            f"{metadata.path}: heads of {head_dim} with {values} values, of which rope turns "
            f"{turned}, are not supported: the three must be equal"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{family}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{family}.context_length"),
        "rms_norm_eps": _short(metadata.number(f"{family}.attention.layer_norm_rms_epsilon")),
    }


def _gemma(metadata: Metadata) -> dict[str, Any]:
    """Return the settings that only Gemma 3 has."""
    heads, layers = "gemma3.attention.head_count", metadata.integer("gemma3.block_count")
    hidden, scalar = metadata.integer("gemma3.embedding_length"), None
    if layers == _LARGEST_GEMMA:
        scalar = hidden // metadata.integer(heads)
    return {
        "query_pre_attn_scalar": scalar or metadata.integer("gemma3.attention.key_length", 256),
        "sliding_window": metadata.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": metadata.integer("gemma3.attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.number("gemma3.rope.freq_base_swa", 10000.0),
    }


def _phi(metadata: Metadata, head: int) -> dict[str, Any]:
    """Return the settings that only Phi-3 and Phi-4 have. ``head``: size of a head."""
    turned = metadata.integer("phi3.rope.dimension_count", head)
    length = metadata.integer("phi3.context_length")
    return {
        "partial_rotary_factor": turned / head,
        "sliding_window": metadata.integer("phi3.attention.sliding_window", 0) or None,
        "original_max_position_embeddings": metadata.integer(
            "phi3.rope.scaling.original_context_length", length
        ),
    }


def _rope(parts: list[GgufFile], family: str) -> dict[str, Any]:
    """Return the rope settings in the layout of ``rope_scaling``.

    Files have the factors of Llama 3 as a tensor; ``longrope`` divides frequencies in the same way.
    """
    metadata = parts[0].metadata
    prefix = f"{family}.rope.scaling"
    theta = metadata.number(f"{family}.rope.freq_base", 10000.0)
    length = metadata.integer(f"{family}.context_length")
    kind = metadata.text(f"{prefix}.type", "none")
    factors = [part for part in parts if ROPE_FACTORS in part.entries]
    if factors:
        divisors = _factors(factors[0], ROPE_FACTORS)
        original = {"original_max_position_embeddings": length}
        return {"rope_theta": theta, "rope_scaling": _divided(divisors, divisors, 1.0) | original}
    both = [part for part in parts if ROPE_SHORT in part.entries and ROPE_LONG in part.entries]
    if both:
        short, long = (_factors(both[0], name) for name in (ROPE_SHORT, ROPE_LONG))
        scale = metadata.number(f"{prefix}.attn_factor", 1.0)
        return {"rope_theta": theta, "rope_scaling": _divided(short, long, _short(scale))}
    if kind == "none":
        return {"rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{metadata.path}: unsupported {prefix}.type '{kind}'")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(f"{prefix}.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.integer(
            f"{prefix}.original_context_length", length
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _divided(short: list[float], long: list[float], attention: float) -> dict[str, Any]:
    """Return the scaling that divides each frequency by a factor."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
    }


def _factors(part: GgufFile, name: str) -> list[float]:
    """Return the numbers of a tensor."""
    entry = part.entries[name]
    if entry.dtype != "F32" or len(entry.shape) != 1:
        raise CheckpointError(f"{part.path}: tensor '{name}' is not a row of F32")
    numbers: list[float] = np.frombuffer(part.raw(name), "<f4").tolist()
    return numbers


def end_tokens(metadata: Metadata) -> list[int]:
    """Return the ids that end an answer, without repetition."""
    stated = [
        metadata.integer(key)
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        if key in metadata
    ]
    if "tokenizer.ggml.token_type" not in metadata:
        return list(dict.fromkeys(stated))
    kinds = metadata.numbers("tokenizer.ggml.token_type").tolist()
    texts = metadata.texts("tokenizer.ggml.tokens")
    return list(dict.fromkeys([*stated, *_ends(texts, kinds)]))


def _ends(texts: list[str], kinds: list[int]) -> Iterable[int]:
    for index, (text, kind) in enumerate(zip(texts, kinds, strict=False)):
        if kind == _CONTROL and text in _END_TEXTS:
            yield index


def _short(value: float) -> float:
    """Return the shortest decimal number with this float32 value."""
    return float(str(np.float32(value)))
