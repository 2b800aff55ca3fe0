import importlib
import json
import math
import pkgutil
from pathlib import Path

import msgspec
import pytest

from baton.engine import audio, loading, models, pictures
from baton.engine.loading.checkpoint import load_checkpoint, require_tokenizer
from baton.engine.loading.generation_config import load_generation_config
from baton.engine.loading.model_config import SUPPORTED_ARCHITECTURES, load_model_config
from baton.engine.models.contexts import CONTEXTS
from baton.engine.models.registry import ARCHITECTURES
from baton.proto.errors import CheckpointError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def write(folder: Path, name="config.json", **changes) -> Path:
    (folder / name).write_text(json.dumps({**BASE, **changes}))
    return folder


def config_of(folder: Path, architecture="Llama", **changes):
    return load_model_config(write(folder, architectures=[f"{architecture}ForCausalLM"], **changes))


def test_old_and_new_layout_are_one_config(tmp_path):
    old = config_of(
        tmp_path,
        rope_theta=5e5,
        rope_scaling={"type": "linear", "factor": 2},
        torch_dtype="float16",
    )
    new = config_of(
        tmp_path,
        rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5},
        dtype="float16",
    )
    assert old == new
    assert (new.dtype, new.rope.rope_theta, new.rope.factor) == ("float16", 5e5, 2.0)


def test_left_out_keys_take_the_family_defaults(tmp_path):
    llama = config_of(tmp_path)
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 8, 1e-6)
    assert config_of(tmp_path, "Qwen3", num_key_value_heads=2).head_dim == 128
    assert config_of(tmp_path, "Mistral", num_key_value_heads=2).windows == (4096,) * 4


def test_a_file_without_end_tokens_has_the_familys(tmp_path):
    keys = {key: value for key, value in BASE.items() if key != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text(json.dumps({**keys, "vocab_size": 2}))
    assert load_model_config(tmp_path).eos_token_ids == ()


def test_options_of_the_families(tmp_path):
    heads = {"num_key_value_heads": 2}
    qwen2 = config_of(tmp_path, "Qwen2", **heads)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = config_of(tmp_path, "Qwen3", attention_bias=True, **heads)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    llama = config_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Llama", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("Mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (0, 0, 0, 0)),
        ("Qwen2", {"sliding_window": 8}, (0, 0, 0, 0)),
        (
            "Qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 8),
        ),
        ("Qwen3", {"sliding_window": 8, "use_sliding_window": True}, (0, 0, 0, 0)),
        (
            "Qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, 0, 8, 0),
        ),
    ],
)
def test_sliding_windows(tmp_path, architecture, changes, windows):
    config = config_of(tmp_path, architecture, num_key_value_heads=2, **changes)
    assert config.windows == windows


@pytest.mark.parametrize("window", [8, None])
def test_mistral_has_one_kind_of_layers(tmp_path, window):
    settings = {"num_key_value_heads": 2, "sliding_window": window}
    kind = "full_attention" if window is None else "sliding_attention"
    same = config_of(tmp_path, "Mistral", layer_types=[kind] * 4, **settings)
    assert same == config_of(tmp_path, "Mistral", **settings)
    mixed = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(CheckpointError, match="layer_types"):
        config_of(tmp_path, "Mistral", layer_types=mixed, **settings)


def test_unsupported_architecture_is_named_with_the_supported_ones(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        config_of(tmp_path, "Mamba")
    message = str(caught.value)
    assert "MambaForCausalLM" in message
    assert all(name in message for name in SUPPORTED_ARCHITECTURES)
    assert set(SUPPORTED_ARCHITECTURES) == set(ARCHITECTURES)
    assert set(CONTEXTS) <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "none given"),
        ({"architectures": [3]}, "unsupported architecture"),
        ({"vocab_size": "many"}, r"vocab_size"),
        ({"hidden_size": None}, r"hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 do not fit"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"num_attention_heads": 64}, "num_attention_heads 64, head_dim 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "unsupported quant_method"),
        ({"rope_scaling": {"type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"model_type": "qwen2"}, "model_type qwen2 does not fit LlamaForCausalLM"),
        ({"rope_scaling": 3}, "config.json"),
    ],
)
def test_bad_settings_are_one_clear_error(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model_config(write(tmp_path, **changes))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, -1.0])
@pytest.mark.parametrize(
    ("architecture", "key", "where"),
    [
        ("Llama", "rms_norm_eps", ""),
        ("Llama", "rope_theta", ""),
        ("Llama", "partial_rotary_factor", ""),
        ("Llama", "factor", "rope_scaling"),
        ("Llama", "low_freq_factor", "rope_scaling"),
        ("Llama", "high_freq_factor", "rope_scaling"),
        ("Llama", "attention_factor", "rope_parameters"),
        ("Llama", "beta_slow", "rope_parameters"),
        ("Gemma3", "query_pre_attn_scalar", ""),
        ("Gemma3", "rope_local_base_freq", ""),
        ("Qwen2_5_VL", "rope_theta", "vision_config.rope_parameters"),
        ("Mllama", "norm_eps", "vision_config"),
        ("Bert", "layer_norm_eps", ""),
    ],
)
def test_impossible_numbers_are_named(tmp_path, architecture, key, where, value):
    newer = {"rope_local_base_freq": "rope_theta"}
    full = {"Bert": "BertModel", "Llama": "LlamaForCausalLM", "Gemma3": "Gemma3ForCausalLM"}
    content = {key: value}
    if where.startswith("rope"):
        content |= {"rope_type": "llama3"} if "freq" in key else {"rope_type": "yarn"}
    for name in reversed(where.split(".") if where else []):
        content = {name: content}
    if architecture == "Qwen2_5_VL":
        content["num_key_value_heads"] = 2
    name = full.get(architecture, f"{architecture}ForConditionalGeneration")
    with pytest.raises(CheckpointError, match=rf"{newer.get(key, key)}\b"):
        load_model_config(write(tmp_path, architectures=[name], **content))


@pytest.mark.parametrize("factors", [[math.nan] * 4, [0.0] * 4, [1.0, 1.0, math.inf, 1.0]])
def test_impossible_factors_of_rope_are_named(tmp_path, factors):
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": [1.0] * 4}
    with pytest.raises(CheckpointError, match="short_factor"):
        config_of(tmp_path, rope_scaling=scaling)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 2, "rope_theta": 1},
        {"rope_type": "longrope", "factor": 2, "short_factor": [1.0] * 4,
         "long_factor": [1.0] * 4, "original_max_position_embeddings": 1},
        {"rope_type": "linear", "factor": 1e-30, "rope_theta": 1e-30},
    ],
)  # fmt: skip
def test_rope_settings_without_finite_frequencies_are_refused(tmp_path, rope):
    """Each number alone is possible."""
    with pytest.raises(
        CheckpointError, match=f"no finite frequencies.*rope_type {rope['rope_type']}"
    ):
        config_of(tmp_path, rope_parameters=rope)


RESULTS = {"ModelConfig", "VisionConfig", "TiledVisionConfig", "RunnerConfig"}
"""Structures that Baton makes, not those that it reads from files of a model."""


def structures() -> list[type[msgspec.Struct]]:
    """Return those of all modules that read files of a model."""
    packages = (loading, models, pictures, audio)
    modules = [
        importlib.import_module(f"{package.__name__}.{one.name}")
        for package in packages
        for one in pkgutil.iter_modules(package.__path__)
        if "cuda" not in one.name
    ]
    found = {
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, msgspec.Struct)
        and one.__module__.startswith("baton.engine")
    }
    return [one for one in found if not RESULTS & {kind.__name__ for kind in one.__mro__}]


def unbounded(kind: object) -> bool:
    """Return whether a type takes NaN or an infinity."""
    if isinstance(kind, msgspec.inspect.FloatType):
        return (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)
    inner = [getattr(kind, name, ()) for name in ("types", "item_types", "item_type")]
    flat = [one for part in inner for one in (part if isinstance(part, tuple) else (part,))]
    return any(unbounded(one) for one in flat)


def test_every_float_that_is_read_has_bounds():
    fields = {
        f"{structure.__module__}.{structure.__name__}.{field.name}": unbounded(field.type)
        for structure in structures()
        for field in msgspec.inspect.type_info(structure).fields
    }
    assert len(fields) > 100
    assert [name for name, wide in fields.items() if wide] == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xff", b"[" * 100_000])
def test_unreadable_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_missing_folder_config_weights_and_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="no such model folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        load_checkpoint(write(tmp_path))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        require_tokenizer(tmp_path)


def generation_of(folder: Path, content: dict | None):
    config = config_of(folder)
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps(content))
    return load_generation_config(folder, config)


def test_generation_config(tmp_path):
    assert generation_of(tmp_path, None).eos_token_ids == (7,)
    read = generation_of(
        tmp_path, {"eos_token_id": [5, 6, 5], "temperature": 0.6, "do_sample": True, "other": {}}
    )
    assert read.eos_token_ids == (5, 6)
    assert read.defaults.values_to_update == {"temperature": 0.6, "do_sample": True}
    assert generation_of(tmp_path, {"top_k": 20}).eos_token_ids == (7,)


def test_a_top_k_beyond_any_request_counts_as_the_largest(tmp_path):
    assert generation_of(tmp_path, {"top_k": 1000}).defaults.top_k == 255
    assert generation_of(tmp_path, {"top_k": 255}).defaults.top_k == 255


@pytest.mark.parametrize(
    "content",
    [
        {"eos_token_id": 100},
        {"eos_token_id": "x"},
        {"top_p": []},
        {"top_p": 1.5},
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"repetition_penalty": math.inf},
        {"top_k": -2},
    ],
)
def test_bad_generation_config(tmp_path, content):
    with pytest.raises(CheckpointError):
        generation_of(tmp_path, content)


@pytest.mark.parametrize(
    "name",
    ["num_hidden_layers", "vocab_size", "hidden_size", "head_dim", "max_position_embeddings"],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BertModel"])
def test_an_absurd_size_is_refused_before_anything_is_made_of_it(tmp_path, name, architecture):
    """A billion layers would make lists of a billion entries."""
    if architecture == "BertModel" and name == "head_dim":
        pytest.skip("a BERT has none")
    write(tmp_path, architectures=[architecture], **{name: 1 << 40})
    with pytest.raises(CheckpointError, match=name):
        load_model_config(tmp_path)
