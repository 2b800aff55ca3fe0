"""Whole GGUF files of small models, and the safetensors folders that they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from baton.deploy.config import demo_model_folder
from baton.engine.kernels.bfloat16 import bfloat16_bits

from .gguf_cases import Tensor, floats, gguf, random_tensor, values_of, write

DEMO = demo_model_folder()
_INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def demo_tokenizer() -> dict[str, object]:
    """The keys of the demo model's tokenizer, as llama.cpp's converter writes them."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    special = {token["id"] for token in content["added_tokens"]}
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [
            CONTROL if i in special else NORMAL for i in range(len(texts))
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (DEMO / "chat_template.jinja").read_text(),
    }


def sizes(heads: int = 4, kv_heads: int = 2, dim: int = 64, wide: int = 256) -> dict[str, object]:
    """The keys of a small llama of two layers with the demo model's vocabulary."""
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": heads * dim,
        "llama.feed_forward_length": wide,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": dim,
        "llama.rope.freq_base": 10000.0,
    }


def quantized(seed: int) -> dict[str, Tensor]:
    """Tensors of :func:`sizes`, of many types; their codes are random."""
    rng = np.random.default_rng(seed)
    table = 0.5 * rng.normal(size=(1024, 256))
    made: dict[str, Tensor] = {
        "token_embd.weight": floats(table),
        "output_norm.weight": floats(rng.uniform(0.5, 1.5, 256)),
        "output.weight": ("BF16", (1024, 256), bfloat16_bits(_normal(rng, 1024, 256)).tobytes()),
    }
    kinds = {
        "attn_q": ("Q4_K", 256), "attn_k": ("Q6_K", 128), "attn_v": ("Q5_0", 128),
        "attn_output": ("Q5_K", 256), "ffn_gate": ("Q3_K", 256), "ffn_up": ("Q8_0", 256),
        "ffn_down": ("IQ4_NL", 256),
    }  # fmt: skip
    scales = {"Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 4e-5, "Q3_K": 1e-3, "Q8_0": 1e-3,
              "Q5_0": 8e-3, "IQ4_NL": 1e-3}  # fmt: skip
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{name}.weight"] = floats(rng.uniform(0.5, 1.5, 256))
        for name, (kind, rows) in kinds.items():
            tensor = random_tensor(kind, (rows, 256), rng, scales[kind])
            made[f"blk.{layer}.{name}.weight"] = tensor
    return made


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) / 16).astype(np.float32)


def write_file(folder: Path, name: str = "tiny.gguf", seed: int = 1) -> Path:
    """Write the file of a quantized model."""
    return write(folder, gguf({**sizes(), **demo_tokenizer()}, quantized(seed)), name)


def write_reference(folder: Path, seed: int = 1, dtype: str = "BF16") -> Path:
    """Write the same model as config.json and tensors, rows of q and k in halves.

    ``dtype``: BF16 or F32, of the tensors that are quantized in the file.
    """
    folder.mkdir()
    tensors = {}
    for name, tensor in quantized(seed).items():
        block, _, inner = name.partition(".")[2].partition(".")
        usual = _OUTER.get(name) or f"model.layers.{block}.{_INNER[inner]}"
        values = _values(tensor)
        if inner in ("attn_q.weight", "attn_k.weight"):
            heads = 4 if "q" in inner else 2
            values = values.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(values.shape)
        wide = tensor[0] == "F32" or (dtype == "F32" and tensor[0] != "BF16")
        tensors[usual] = ("F32", values) if wide else ("BF16", bfloat16_bits(values))
    _write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((DEMO / "config.json").read_text())
    config |= {
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for other in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / other, folder)
    return folder


def _values(tensor: Tensor) -> np.ndarray:
    if tensor[0] != "BF16":
        return values_of(tensor)
    bits = np.frombuffer(tensor[2], np.uint16).reshape(tensor[1]).astype(np.uint32)
    return (bits << 16).view(np.float32)


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (kind, values) in tensors.items():
        content = np.ascontiguousarray(values).tobytes()
        place = [len(data), len(data) + len(content)]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": place}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
