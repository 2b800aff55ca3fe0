"""Random Llama checkpoints of the sizes the engine is measured with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Shape:
    """A Llama with untied head."""

    name: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    positions: int = 4096

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        kv = self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for layer in range(self.layers):
            base = f"model.layers.{layer}"
            shapes |= {
                f"{base}.input_layernorm.weight": (self.hidden,),
                f"{base}.post_attention_layernorm.weight": (self.hidden,),
                f"{base}.self_attn.q_proj.weight": (self.hidden, self.hidden),
                f"{base}.self_attn.k_proj.weight": (kv, self.hidden),
                f"{base}.self_attn.v_proj.weight": (kv, self.hidden),
                f"{base}.self_attn.o_proj.weight": (self.hidden, self.hidden),
                f"{base}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{base}.mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{base}.mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return shapes

    def config(self, dtype: str) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "eos_token_id": 2,
            "torch_dtype": "float32" if dtype == "F32" else "bfloat16",
        }

    def layer_parameters(self) -> int:
        """Weights every row of a prefill is multiplied with."""
        matrices = [s for n, s in self.tensors().items() if ".layers." in n and len(s) == 2]
        return sum(math.prod(s) for s in matrices)

    def decode_parameters(self) -> int:
        """Weights read for a decode step: layers and head."""
        return self.layer_parameters() + self.vocab * self.hidden

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt. After the last layer's keys and values, one row is computed."""
        tail = self.hidden * (self.hidden + 3 * self.intermediate)
        single = tail + self.vocab * self.hidden
        attention = 2 * (self.layers - 1) * self.hidden * tokens * (tokens + 1)
        return 2.0 * ((self.layer_parameters() - tail) * tokens + single) + attention


SHAPES = {
    "m25": Shape("m25", 8192, 512, 1408, 6, 8, 4),
    "m125": Shape("m125", 32000, 768, 2048, 12, 12, 4),
}


Sizes = Mapping[str, tuple[int, ...]]
Values = Callable[[str, tuple[int, ...]], Iterable[bytes | memoryview]]
"""The bytes of the tensor of a name and a shape, in pieces."""


def write_checkpoint(folder: Path, shape: Shape, dtype: str, seed: int = 0) -> Path:
    """Write a random checkpoint, ``dtype`` "F32" or "BF16"; the same numbers for both."""
    rng = np.random.default_rng(seed)
    write_config(folder, shape, dtype)
    write_tensors(
        folder / "model.safetensors", shape.tensors(), dtype,
        lambda _, size: [_random(rng, size, dtype).tobytes()],
    )  # fmt: skip
    return folder


def write_config(folder: Path, shape: Shape, dtype: str) -> None:
    """Make the folder of a checkpoint, with its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(dtype)))


def write_tensors(path: Path, tensors: Sizes, dtype: str, values: Values) -> None:
    """Write a safetensors file, ``dtype`` "F32" or "BF16"."""
    item, at, header = {"F32": 4, "BF16": 2}[dtype], 0, {}
    for name, size in tensors.items():
        end = at + item * math.prod(size)
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors.items():
            file.writelines(values(name, size))


def _random(rng: np.random.Generator, size: tuple[int, ...], dtype: str) -> np.ndarray:
    if len(size) == 1:
        values = np.ones(size, np.float32)
    else:
        values = rng.standard_normal(size, np.float32) * np.float32(size[1] ** -0.5)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else values
