"""The tensors of a GGUF model under the names, and in the row order, of safetensors files.

The files name tensors by the block (``blk.3.attn_q``), and hold the norms of Gemma with 1 added. Of
the architecture ``llama``, they hold the rows of queries and keys in pairs for a rotation of
neighbours. Here all of this is undone, so models need no case for GGUF files.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError

from .gguf import READABLE_TYPES, GgufFile, Metadata
from .gguf_blocks import BLOCKS, dequantize
from .safetensors import TensorEntry, widened

Weights = npt.NDArray[np.generic]
Order = npt.NDArray[np.intp]

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_INNER = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI_INNER = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
"""Fused matrices."""
_OWN_INNER = {"gemma3": _GEMMA_INNER, "phi3": _PHI_INNER}
ROPE_FACTORS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_SETTINGS = frozenset((ROPE_FACTORS, ROPE_SHORT, ROPE_LONG))
"""Divisors of the rope frequencies, of which config.json is made (:mod:`.gguf_config`)."""
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_FLOATS: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class GgufTensors:
    """The tensors of one file. ``metadata``: of the model's first file."""

    def __init__(self, file: GgufFile, metadata: Metadata) -> None:
        self.path = file.path
        self._file = file
        self._family = metadata.text("general.architecture")
        self._sources = {
            _usual_name(name, self._family): name for name in file.entries if name not in _SETTINGS
        }
        if len(self._sources) != len(set(file.entries) - _SETTINGS):
            raise CheckpointError(f"{self.path}: two tensors have one meaning")
        self.entries: dict[str, TensorEntry] = {}
        for usual, name in self._sources.items():
            entry = file.entries[name]
            if entry.dtype not in READABLE_TYPES:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' is {entry.dtype}; supported are "
                    f"{', '.join(READABLE_TYPES)}"
                )
            self.entries[usual] = entry
        self._heads = _rope_heads(metadata) if self._family == "llama" else {}

    def tensor(self, name: str) -> Weights:
        """Return a tensor: float32 if quantized or float32, float16, or uint16 bfloat16 bits.

        Raises CheckpointError for an unknown name.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor '{name}' is missing")
        values = _values(entry, self._file.raw(self._sources[name]))
        order = self._order(name)
        if order is not None:
            return values[order]
        return widened(values) - np.float32(1) if self._is_raised(name) else values

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor of any type; rows are in the order of :meth:`tensor`."""
        entry = self.entries[name]
        raw = self._file.raw(self._sources[name])
        order = self._order(name)
        if order is not None:
            rows = np.frombuffer(raw, np.uint8).reshape(entry.shape[0], -1)
            return memoryview(rows[order].tobytes())
        if self._is_raised(name):
            return memoryview(self.tensor(name).tobytes())
        return raw

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; a view maps them again."""
        self._file.release_pages()

    def _order(self, name: str) -> Order | None:
        """Return the order in which the rows of a tensor are read, None for the file's order."""
        heads = next((n for part, n in self._heads.items() if f".{part}." in name), 0)
        if not heads:
            return None
        rows = self.entries[name].shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.path}: tensor '{self._sources[name]}' has {rows} rows, which are not "
                f"{heads} heads of rotary pairs"
            )
        pairs = np.arange(rows).reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def _is_raised(self, name: str) -> bool:
        """True if the file holds the tensor with 1 added."""
        return self._family == "gemma3" and name.endswith("norm.weight")


def _values(entry: TensorEntry, raw: memoryview) -> Weights:
    if entry.dtype in BLOCKS:
        out = np.empty(entry.shape, np.float32)
        dequantize(entry.dtype, raw, out.reshape(-1))
        return out
    values: Weights = np.frombuffer(raw, _FLOATS[entry.dtype]).reshape(entry.shape)
    return values if values.flags.aligned else values.copy()


def _usual_name(name: str, family: str) -> str:
    """Return a tensor's name in safetensors files; a name without an equivalent stays."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        module, _, kind = name.rpartition(".")
        return f"{_OUTER[module]}.{kind}" if module in _OUTER else name
    inner = _INNER | _OWN_INNER.get(family, {})
    known = inner.get(block[2])
    return f"model.layers.{int(block[1])}.{known}.{block[3]}" if known else name


def _rope_heads(metadata: Metadata) -> dict[str, int]:
    """Return the heads of the modules whose rows are in pairs."""
    query = metadata.integer("llama.attention.head_count")
    key = metadata.integer("llama.attention.head_count_kv", query)
    if min(query, key) < 1:
        raise CheckpointError(f"{metadata.path}: the numbers of heads must be positive")
    return {"q_proj": query, "k_proj": key}
