"""Write engine/loading/family_defaults.json from the config classes of the installed transformers.

Run with a Python that has transformers::

    python tests/oracle/make_defaults.py [FILE]

For each supported architecture the table has the default of every setting that can change a
result, at the top level and in the nested objects (``text_config``, ``vision_config``).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import transformers

FILE = Path(__file__).resolve().parents[2] / "engine" / "loading" / "family_defaults.json"

CLASSES = {
    "LlamaForCausalLM": ("llama", {"": "LlamaConfig"}),
    "MistralForCausalLM": ("mistral", {"": "MistralConfig"}),
    "Qwen2ForCausalLM": ("qwen2", {"": "Qwen2Config"}),
    "Qwen3ForCausalLM": ("qwen3", {"": "Qwen3Config"}),
    "Phi3ForCausalLM": ("phi3", {"": "Phi3Config"}),
    "Gemma3ForCausalLM": ("gemma3", {"": "Gemma3TextConfig"}),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        {
            "": "Qwen2_5_VLConfig",
            "text_config": "Qwen2_5_VLTextConfig",
            "vision_config": "Qwen2_5_VLVisionConfig",
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3_vl",
        {
            "": "Qwen3VLConfig",
            "text_config": "Qwen3VLTextConfig",
            "vision_config": "Qwen3VLVisionConfig",
        },
    ),
    "MllamaForConditionalGeneration": (
        "mllama",
        {
            "": "MllamaConfig",
            "text_config": "MllamaTextConfig",
            "vision_config": "MllamaVisionConfig",
        },
    ),
    "BertModel": ("bert", {"": "BertConfig"}),
}
WITHOUT_EFFECT = {
    "attention_dropout", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
    "hidden_dropout_prob", "initializer_range", "pad_token_id", "pretraining_tp", "use_cache",
    "text_config", "vision_config", "add_cross_attention", "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "bos_token_id", "tokens_per_second",
    "rope_parameters", "embd_pdrop", "resid_pdrop",
}  # fmt: skip
"""Settings of training, of generation that nothing here does, and nested objects."""


def defaults_of(family: str, name: str) -> dict:
    """The defaults of a config class, by key, with the base of its rotary positions."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    kind = getattr(module, name)
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    found = {
        field.name: _plain(field.default)
        for field in dataclasses.fields(kind)
        if field.name not in common | WITHOUT_EFFECT
    }
    if any(field.name == "rope_parameters" for field in dataclasses.fields(kind)):
        base = kind.default_theta
        found["rope_theta"] = base["global"] if isinstance(base, dict) else base
        if isinstance(base, dict):
            found["rope_local_base_freq"] = base["local"]
    return dict(sorted(found.items()))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def table() -> dict:
    """The whole table."""
    return {
        architecture: {part: defaults_of(family, name) for part, name in parts.items()}
        for architecture, (family, parts) in CLASSES.items()
    }


def text() -> str:
    """The content of the file."""
    made = {"transformers": transformers.__version__, "defaults": table()}
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(text())
