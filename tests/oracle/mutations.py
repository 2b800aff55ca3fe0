"""The mutations of a model folder's settings and tensors that are tried, by family."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"type": "linear", "factor": 2.0}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
TEXT_VALUES: dict[str, list[Any]] = {
    "vocab_size": [255, 257],
    "hidden_size": [16, 64, "32"],
    "intermediate_size": [28],
    "num_hidden_layers": [2, 4, 0],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4, 3],
    "head_dim": [4, 8, 16],
    "max_position_embeddings": [70, 4096],
    "rms_norm_eps": [1e-3],
    "hidden_act": ["gelu", "swish", "silu", "relu"],
    "hidden_activation": ["gelu"],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "sliding_window": [8, 0, -1],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "layer_types": [LAYERS, LAYERS[:2], ["full_attention"] * 3, ["chunked_attention"] * 3],
    "eos_token_id": [5, [5, 6], [], -1, 1000, "2"],
    "bos_token_id": [0, 7],
    "pad_token_id": [7, -1, 1000],
    "dtype": ["float16", "bfloat16", "float64", "int8"],
    "torch_dtype": ["float16", "bfloat16"],
    "rope_theta": [500.0, 1000000, 0, "x"],
    "rope_scaling": [{}, LINEAR, YARN, LLAMA_3, {"rope_type": "default"}, {"factor": 2.0}],
    "rope_parameters": [
        {},
        {"rope_theta": 500.0},
        {**LINEAR, "rope_theta": 500.0},
        {**YARN, "rope_theta": 500.0},
        {"rope_type": "default", "rope_theta": 500.0, "factor": 4.0},
        {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    "rope_local_base_freq": [500.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [128],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "nothing"],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "is_decoder": [True, False],
    "attention_dropout": [0.5],
    "use_cache": [False],
    "pretraining_tp": [2],
    "logit_scale": [2.0],
    "logits_scaling": [2.0],
    "attention_multiplier": [2.0],
    "embedding_multiplier": [2.0],
    "residual_multiplier": [2.0],
    "final_logit_softcapping": [3.0],
    "attn_logit_softcapping": [3.0],
    "query_pre_attn_scalar": [64],
    "per_layer_config": [{"0": {"sliding_window": 4}}],
    "tie_last_hidden_states": [False],
    "cross_attention_layers": [[1]],
    "num_experts": [4],
    "use_qk_norm": [True],
    "chunk_size_feed_forward": [8],
    "output_hidden_states": [True],
    "return_dict": [False],
    "text_config": [{"hidden_size": 64}],
    "vision_config": [{}],
    "is_encoder_decoder": [True],
    "mrope_section": [[1, 1, 2]],
}
TOGETHER: list[dict[str, Any]] = [
    {"rope_theta": 500.0, "rope_scaling": LINEAR, "rope_parameters": None},
    {"rope_theta": 500.0, "rope_scaling": YARN},
    {"rope_theta": 10000.0, "rope_scaling": YARN},
    {"rope_scaling": {**YARN, "rope_theta": 500.0}},
    {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_scaling": YARN, "rope_parameters": {**LLAMA_3, "rope_theta": 10000.0}},
    {"rope_theta": 300.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {**YARN, "attention_factor": 0.5}},
    {"rope_scaling": {**YARN, "mscale": 0.7}},
    {"rope_scaling": {**LLAMA_3, "high_freq_factor": None}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
    {"rope_scaling": YARN, "original_max_position_embeddings": 128},
    {"rope_scaling": YARN, "max_position_embeddings": 70},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 70},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    {"rope_parameters": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0},
    {"rope_parameters": None, "rope_theta": 500.0},
    {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default"}},
    {"dtype": "float32", "torch_dtype": "float16"},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": LAYERS},
    {"use_sliding_window": False, "sliding_window": 8, "layer_types": LAYERS},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
    {"num_key_value_heads": None, "num_attention_heads": 4},
    {"hidden_size": 32, "n_embd": 64},
    {"num_attention_heads": 4, "n_head": 2},
    {"text_config": {"rms_norm_eps": 1e-3}, "rms_norm_eps": 1e-6},
    {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
]
GENERATION: list[dict[str, Any]] = [
    {"eos_token_id": value} for value in (None, 7, [7, 8], [], -1, 1000, "7")
] + [{"bos_token_id": 9}, {"pad_token_id": 9}, {"do_sample": True}, {"max_new_tokens": 3}]

VISION_VALUES: dict[str, dict[str, list[Any]]] = {
    "qwen2_5_vl": {
        "depth": [2, 4], "hidden_size": [16], "intermediate_size": [20], "num_heads": [1, 4],
        "num_attention_heads": [1, 4], "num_hidden_layers": [2],
        "patch_size": [2], "temporal_patch_size": [1], "spatial_merge_size": [1, 4],
        "out_hidden_size": [16], "window_size": [8, 32, 4], "fullatt_block_indexes": [[0], [], [9]],
        "hidden_act": ["gelu", "swish"], "in_channels": [1], "tokens_per_second": [2],
        "rope_parameters": [{"rope_theta": 500.0}, {"rope_type": "axial", "rope_theta": 500.0}],
        "rope_theta": [500.0], "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
        "model_type": ["qwen2_5_vl_vision", "qwen2_vl"], "rms_norm_eps": [1e-3],
        "in_chans": [1], "spatial_patch_size": [2],
    },
    "qwen3_vl": {
        "depth": [2, 4], "hidden_size": [16], "intermediate_size": [20], "num_heads": [1, 4],
        "num_attention_heads": [1, 4], "num_hidden_layers": [2],
        "patch_size": [2], "temporal_patch_size": [1], "spatial_merge_size": [1, 4],
        "out_hidden_size": [16], "num_position_embeddings": [16, 24],
        "deepstack_visual_indexes": [[0], [], [0, 9], [2, 0]],
        "hidden_act": ["gelu", "gelu_new", "silu"], "in_channels": [1],
        "rope_parameters": [{"rope_theta": 500.0}], "rope_theta": [500.0],
        "layer_norm_eps": [1e-3],
    },
    "mllama": {
        "hidden_size": [8], "intermediate_size": [12], "num_hidden_layers": [2, 4],
        "num_global_layers": [1, 3], "attention_heads": [1, 4], "num_attention_heads": [1, 4],
        "num_channels": [1], "image_size": [8, 32], "patch_size": [2, 8],
        "intermediate_layers_indices": [[0, 1], [2, 0], []], "vision_output_dim": [32],
        "max_num_tiles": [2, 9], "norm_eps": [1e-2], "hidden_act": ["gelu_new", "silu"],
        "supported_aspect_ratios": [[[1, 1]]],
    },
}  # fmt: skip
SEEING_TEXT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "use_sliding_window", "sliding_window",
    "max_window_layers", "layer_types", "eos_token_id", "rope_theta", "rope_scaling",
    "rope_parameters", "model_type", "tie_word_embeddings", "cross_attention_layers",
)  # fmt: skip
SEEING_TOP: dict[str, list[Any]] = {
    "image_token_id": [249, 1000],
    "image_token_index": [249, 256, 257],
    "video_token_id": [249],
    "vision_start_token_id": [249],
    "tie_word_embeddings": [True],
    "hidden_size": [64],
    "rms_norm_eps": [1e-3],
    "rope_theta": [500.0],
    "rope_scaling": [{"type": "mrope", "mrope_section": [1, 2, 1]}],
    "eos_token_id": [7],
    "model_type": ["llama", "qwen2_vl"],
    "text_config": [{}],
    "vision_config": [{}],
    "dtype": ["float16"],
    "torch_dtype": ["float16"],
}
BERT_VALUES: dict[str, list[Any]] = {
    "vocab_size": [95], "hidden_size": [16], "intermediate_size": [30],
    "num_hidden_layers": [1, 3], "num_attention_heads": [2, 8, 3],
    "max_position_embeddings": [64, 256], "type_vocab_size": [1, 3], "layer_norm_eps": [1e-3],
    "hidden_act": ["gelu_new", "relu", "gelu"], "position_embedding_type": ["relative_key"],
    "is_decoder": [True, False], "add_cross_attention": [True], "pad_token_id": [7],
    "tie_word_embeddings": [False], "chunk_size_feed_forward": [4], "model_type": ["roberta"],
    "dtype": ["float16"], "torch_dtype": ["float16"], "rms_norm_eps": [1e-3],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}], "embedding_size": [16],
}  # fmt: skip

ADDED_TENSORS = (
    "lm_head.weight",
    "lm_head.bias",
    "score.weight",
    "model.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.o_proj.bias",
    "model.layers.3.mlp.up_proj.weight",
    "embeddings.position_ids",
    "pooler.dense.weight",
)
Mutation = dict[str, Any]


def mutations_of(family: str, config: dict[str, Any], tensors: dict[str, Any]) -> list[Mutation]:
    """Return all mutations of a folder."""
    found = list(
        itertools.chain(
            _at(config, (), _top_values(family)),
            *(
                _at(config[part], (part,), values)
                for part, values in _nested_values(family).items()
                if part in config
            ),
            _together(family),
            _generation(family),
            _tensors(tensors),
        )
    )
    return [{"family": family, **mutation} for mutation in found]


VARIANTS = {
    "llama_plain": ("tie_word_embeddings", "rope_scaling", "eos_token_id", "head_dim"),
    "qwen3_embedder": ("tie_word_embeddings", "head_dim", "rope_scaling", "sliding_window"),
}
"""Folders of families that another folder covers, with the keys that matter in them."""


def _top_values(family: str) -> dict[str, list[Any]]:
    if family == "bert":
        return BERT_VALUES
    if family in VARIANTS:
        return {key: TEXT_VALUES[key] for key in VARIANTS[family]}
    return SEEING_TOP if family in VISION_VALUES else TEXT_VALUES


def _nested_values(family: str) -> dict[str, dict[str, list[Any]]]:
    if family not in VISION_VALUES:
        return {}
    text = {name: TEXT_VALUES[name] for name in SEEING_TEXT}
    return {"text_config": text, "vision_config": VISION_VALUES[family]}


def _at(
    settings: dict[str, Any], where: tuple[str, ...], values: dict[str, list[Any]]
) -> Iterator[Mutation]:
    """Drop each key that is there, set each known key to null and to other values."""
    for key in settings:
        if key not in ("transformers_version", "architectures"):
            yield {"drop": [("config.json", [*where, key])]}
    for key in {**settings, **values}:
        if key in ("transformers_version", "architectures", "text_config", "vision_config"):
            continue
        yield {"set": [("config.json", [*where, key], None)]}
    for key, options in values.items():
        for value in options:
            if settings.get(key) != value:
                yield {"set": [("config.json", [*where, key], value)]}


def _together(family: str) -> Iterator[Mutation]:
    if family == "bert":
        return
    where = ["text_config"] if family in VISION_VALUES else []
    for settings in TOGETHER:
        yield {"set": [("config.json", [*where, key], value) for key, value in settings.items()]}


def _generation(family: str) -> Iterator[Mutation]:
    if family == "bert" or family.endswith("embedder"):
        return
    yield {"drop": [("generation_config.json", ["eos_token_id"])]}
    for settings in GENERATION:
        pairs = [("generation_config.json", [key], value) for key, value in settings.items()]
        yield {"set": pairs}
    where = ["text_config"] if family in VISION_VALUES else []
    yield {
        "set": [("config.json", [*where, "eos_token_id"], 9)],
        "drop": [("generation_config.json", ["eos_token_id"])],
    }
    yield {
        "drop": [
            ("generation_config.json", ["eos_token_id"]),
            ("config.json", [*where, "eos_token_id"]),
        ]
    }


def _tensors(tensors: dict[str, Any]) -> Iterator[Mutation]:
    embedding = next(
        name for name in tensors if name.endswith(("embed_tokens.weight", "word_embeddings.weight"))
    )
    rows, width = tensors[embedding]
    for name in [name for name in tensors if ".1." in name or ".layers." not in name][:24]:
        yield {"tensor": [(name, "drop")]}
        yield {"tensor": [(name, "cut")]}
    some = [
        name for name in tensors if "norm" in name.lower() or "q_proj" in name or "query" in name
    ]
    for name in [embedding, *some[:3]]:
        yield {"tensor": [(name, "half")]}
        yield {"tensor": [(name, "double")]}
    for name in ADDED_TENSORS:
        shape = f"{rows}x{width}" if name == "lm_head.weight" else "8" if width % 8 == 0 else "4"
        yield {"tensor": [(name, f"random {shape}")]}
    yield {"tensor": [("lm_head.weight", f"copy {embedding}")]}
    tied = [("config.json", ["tie_word_embeddings"], True)]
    yield {"set": tied, "tensor": [("lm_head.weight", f"copy {embedding}")]}
    yield {"set": tied, "tensor": [("lm_head.weight", f"random {rows}x{width}")]}
    yield {"set": tied, "tensor": [(embedding, "rename lm_head.weight")]}
    yield {
        "set": tied,
        "tensor": [("lm_head.weight", f"random {rows}x{width}"), (embedding, "drop")],
    }
    yield {"tensor": [("model.", "prefix ")]}
    yield {"tensor": [("model.", "prefix model.model.")]}
    yield {"tensor": [("", "prefix model.")]}
    yield {"tensor": [("", "prefix bert.")]}
