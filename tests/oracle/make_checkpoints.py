"""Write the tiny checkpoints under tests/data/checkpoints with transformers' results.

Run with a Python that has torch and transformers::

    python tests/oracle/make_checkpoints.py [FOLDER]

Every folder is a normal Hugging Face checkpoint beside ``reference.npz``: prompts
(``prompt_0 ...``), the logits of some of their rows (``rows_0``, ``logits_0``), the greedy
continuation (``greedy_0``) and its margins, the gap between the two best logits
(``margins_0``). ``rope.npz`` beside the folders holds tables of all rope scalings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
PROMPT_LENGTHS = (1, 2, 7, 16, 33, 100, 300, 1500)
NEW_TOKENS = 64
LOGIT_ROWS = 5

COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, tuple[str, dict]] = {
    "llama": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_plain": ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 12, "tie_word_embeddings": False}),
    "qwen2": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "hidden_size": 40,
            "query_pre_attn_scalar": 10,
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "phi3": (
        "Phi3",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "sliding_window": 40,
            "tie_word_embeddings": False,
            "original_max_position_embeddings": 2048,
            "max_position_embeddings": 8192,
            "partial_rotary_factor": 0.75,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
            },
        },
    ),
}

ROPES: dict[str, dict] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.3},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 7.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_small_base": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2000,
    },
    "yarn_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.9,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.0],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0],
    },
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
ROPE_HEAD_DIM = 16
ROPE_POSITIONS = (0, 1, 2, 3, 10, 63, 64, 255, 256, 511, 512, 1000, 1023, 1500, 2047)


def make_model(family: str, overrides: dict, seed: int) -> torch.nn.Module:
    """Random model whose logits are peaked: fan-in scaled matrices, uneven norms and biases."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **overrides})
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                stored = 0 if "Gemma" in family else 1  # Gemma adds 1 itself
                parameter.copy_(stored + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "embed_tokens" in name:
                # Gemma multiplies embeddings by the root of the size: else they drown the layers.
                size = parameter.shape[1] ** -0.5 if "Gemma" in family else 1.0
                parameter.copy_(size * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    model.generation_config.eos_token_id = [2, 3]
    return model


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits ``[n, vocab]`` of a whole sequence, without a cache."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0].float().numpy()


@torch.no_grad()
def greedy_of(
    model: torch.nn.Module, prompt: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy continuation and the gap between the two best logits at each step."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    cache = transformers.DynamicCache(config=model.config)
    tokens, margins = [], []
    for _ in range(count):
        best = model(input_ids=ids, past_key_values=cache).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = best.indices[None, :1]
    return np.array(tokens, np.int32), np.array(margins, np.float32)


def reference_of(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """What transformers computes for prompts of all lengths."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = rng.integers(4, model.config.vocab_size, length).astype(np.int32)
        rows = np.unique(np.linspace(0, length - 1, LOGIT_ROWS).astype(np.int32))
        greedy, margins = greedy_of(model, prompt, NEW_TOKENS)
        arrays |= {
            f"prompt_{i}": prompt,
            f"rows_{i}": rows,
            f"logits_{i}": logits_of(model, prompt)[rows],
            f"greedy_{i}": greedy,
            f"margins_{i}": margins,
        }
    return arrays


def rope_table(parameters: dict, positions: np.ndarray) -> np.ndarray:
    """transformers' cosines and sines ``[n, head_dim]`` for a sequence that ends at the last
    of ``positions``.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        **{**COMMON, "head_dim": ROPE_HEAD_DIM, "rope_parameters": dict(parameters)}
    )
    ids = torch.from_numpy(positions.astype(np.int64))[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), ids)
    half = ROPE_HEAD_DIM // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1).numpy()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for seed, (name, (family, overrides)) in enumerate(MODELS.items()):
        model = make_model(family, overrides, seed)
        target = folder / name
        model.save_pretrained(target)
        np.savez_compressed(target / "reference.npz", **reference_of(model, seed))
        size = sum(f.stat().st_size for f in target.iterdir())
        print(f"{name}: {size / 1024:.0f} KiB, transformers {transformers.__version__}")
    positions = np.array(ROPE_POSITIONS)
    tables = {}
    for name, parameters in ROPES.items():
        short = positions[positions < parameters.get("original_max_position_embeddings", 2048)]
        tables[f"{name}_short"] = rope_table(parameters, short)
        tables[f"{name}_long"] = rope_table(parameters, positions)
    np.savez_compressed(folder / "rope.npz", positions=positions, **tables)
    (folder / "rope.json").write_text(json.dumps(ROPES, indent=1) + "\n")


if __name__ == "__main__":
    main()
