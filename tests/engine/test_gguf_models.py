"""Model folders made from GGUF files: settings, cache, and the logits of the weights' values."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.loading import gguf_folder
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.gguf_folder import local_folder
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.errors import CheckpointError
from baton.proto.ids import RequestID
from baton.proto.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer

from .gguf_cases import floats, gguf, random_tensor, write
from .gguf_models import DEMO, NORMAL, demo_tokenizer, quantized, sizes, write_file, write_reference
from .test_models import logits_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    gguf_folder._made.cache_clear()
    yield folder
    gguf_folder._made.cache_clear()


def greedy(model: Path, backend: str) -> list[list[int]]:
    runner = load_runner(RunnerConfig(model=str(model), backend=backend, num_blocks=64))
    engine = LLMEngine(runner)
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    contexts = [
        TextContext(
            request_id=RequestID(f"r{seed}"),
            max_length=200,
            tokens=np.random.default_rng(seed).integers(3, 1024, 5 + 9 * seed),
            sampling_params=params,
        )
        for seed in range(4)
    ]
    for context in contexts:
        engine.add(context)
    while engine.has_work:
        engine.step()
    return [context.tokens.all.tolist() for context in contexts]


def test_a_quantized_file_has_the_tokens_of_its_values_in_bfloat16(tmp_path):
    file = write_file(tmp_path)
    expected = greedy(write_reference(tmp_path / "reference"), "numpy")
    assert greedy(file, "numpy") == expected
    assert len({tuple(tokens) for tokens in expected}) == 4
    tensors = load_checkpoint(file).tensors
    assert tensors.entry("model.layers.1.mlp.down_proj.weight").dtype == "IQ4_NL"
    blocks = 256 * (144 + 176 + 110) + 128 * 210 + 1024 * 22 + 2048 * (34 + 18)  # of a layer
    floats = 4 * (1024 * 256 + 5 * 256) + 2 * 1024 * 256
    assert tensors.loaded_bytes == pytest.approx(floats + 2.2 * blocks, abs=14)


def test_a_swapped_half_of_a_byte_changes_the_tokens(tmp_path, monkeypatch):
    from baton.engine.loading import gguf_blocks

    expected = greedy(write_reference(tmp_path / "reference"), "numpy")
    nibbles = gguf_blocks._nibbles
    monkeypatch.setattr(gguf_blocks, "_nibbles", lambda packed: nibbles(packed << 4 | packed >> 4))
    assert greedy(write_file(tmp_path), "numpy") != expected


def test_the_folder_has_the_settings_of_the_file(tmp_path, cache):
    file = write_file(tmp_path, "Tiny-Q4.gguf")
    folder = Path(local_folder(file))
    assert folder.name == "Tiny-Q4"
    assert folder.is_relative_to(cache)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is False
    assert (folder / "Tiny-Q4.gguf").resolve() == file.resolve()
    assert load_checkpoint(folder).generation.eos_token_ids == (2, 0)
    # The paths of the file, of a folder with it, and of the made folder are one model.
    assert local_folder(tmp_path) == local_folder(folder.parent / folder.name) == str(folder)
    assert load_runner(RunnerConfig(model=str(file), num_blocks=8)).card.name == "Tiny-Q4"


def test_a_made_folder_is_used_until_the_file_changes(tmp_path, cache):
    file = write_file(tmp_path)
    folder = Path(local_folder(file))
    (folder / "mark").touch()
    gguf_folder._made.cache_clear()
    assert local_folder(file) == str(folder)
    assert (folder / "mark").exists()
    os.utime(file, (1, 1))
    other = Path(local_folder(file))
    assert other != folder
    assert not (other / "mark").exists()
    assert not list(cache.rglob("draft-*"))


def test_another_process_may_be_first(tmp_path, monkeypatch):
    file = write_file(tmp_path)
    write_files = gguf_folder._write

    def late(folder, files, parts):
        monkeypatch.setattr(gguf_folder, "_write", write_files)
        gguf_folder._made.cache_clear()
        assert Path(local_folder(file)).is_dir()
        write_files(folder, files, parts)

    monkeypatch.setattr(gguf_folder, "_write", late)
    assert load_checkpoint(local_folder(file)).config.hidden_size == 256


def test_a_cache_that_cannot_be_written_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "no-folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        local_folder(write_file(tmp_path))


def test_a_missing_file_is_one_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf: no such file"):
        load_checkpoint(tmp_path / "none.gguf")
    assert local_folder(tmp_path / "other") == str(tmp_path / "other")


def test_parts_of_a_split_file_are_linked(tmp_path):
    tensors = quantized(1)
    names = list(tensors)
    split = {"split.count": 2, "split.tensors.count": len(tensors)}
    first = {**sizes(), **demo_tokenizer(), "split.no": 0, **split}
    one = {name: tensors[name] for name in names[:5]}
    two = {name: tensors[name] for name in names[5:]}
    write(tmp_path, gguf(first, one), "m-00001-of-00002.gguf")
    second = write(tmp_path, gguf({"split.no": 1, **split}, two), "m-00002-of-00002.gguf")
    whole = tmp_path / "whole"
    whole.mkdir()
    assert greedy(second, "numpy") == greedy(write_file(whole), "numpy")
    assert local_folder(second) == local_folder(tmp_path)
    assert Path(local_folder(second)).name == "m"


def test_the_tokenizer_is_the_one_of_the_folder_that_was_converted(tmp_path):
    own, made = (
        Tokenizer.from_folder(DEMO),
        Tokenizer.from_folder(local_folder(write_file(tmp_path))),
    )
    text = (DEMO / "README.md").read_text() + "<|im_start|>user\n é 12345\t\n\n x<|im_end|>"
    np.testing.assert_array_equal(made.encode(text), own.encode(text))
    chat = [{"role": "user", "content": "Tell me a story."}]
    np.testing.assert_array_equal(made.encode_chat(chat), own.encode_chat(chat))
    ids = list(range(1024))
    assert made.decode(ids) == own.decode(ids)
    assert (made.vocab_size, made.special_ids) == (own.vocab_size, own.special_ids)
    assert made.special_tokens == own.special_tokens


def config_of(tmp_path, metadata, tensors):
    return load_checkpoint(write(tmp_path, gguf(metadata, tensors), "c.gguf")).config


def test_rope_settings(tmp_path):
    tensors, keys = quantized(1), {**sizes(), **demo_tokenizer()}
    plain = config_of(tmp_path, keys, tensors).rope
    assert (plain.rope_type, plain.rope_theta) == ("default", 10000)
    scaling = {
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 512,
    }  # fmt: skip
    yarn = config_of(tmp_path, keys | scaling, tensors).rope
    assert (yarn.rope_type, yarn.factor, yarn.original) == ("yarn", 4, 512)
    factors = np.linspace(1, 8, 32)
    rope = config_of(tmp_path, keys, tensors | {"rope_freqs.weight": floats(factors)}).rope
    assert rope.default_length() == 2048
    np.testing.assert_allclose(rope.short_factor, factors, rtol=1e-6)


PHI = Path(__file__).parents[1] / "data" / "checkpoints" / "phi3"
PHI_NAMES = {
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def phi_file(folder: Path, **changes: int) -> Path:
    """The checkpoint phi3 as a GGUF file, as llama.cpp's converter writes it, with other keys."""
    config = json.loads((PHI / "config.json").read_text())
    rope = config["rope_parameters"]
    store = load_checkpoint(PHI).tensors
    tensors = {
        "token_embd.weight": store.tensor("model.embed_tokens.weight"),
        "output.weight": store.tensor("lm_head.weight"),
        "output_norm.weight": store.tensor("model.norm.weight"),
        "rope_factors_short.weight": np.array(rope["short_factor"]),
        "rope_factors_long.weight": np.array(rope["long_factor"]),
    }
    for layer in range(config["num_hidden_layers"]):
        for usual, own in PHI_NAMES.items():
            tensor = store.tensor(f"model.layers.{layer}.{usual}.weight")
            tensors[f"blk.{layer}.{own}.weight"] = tensor
    scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
    keys = {
        "general.architecture": "phi3",
        "phi3.context_length": config["max_position_embeddings"],
        "phi3.embedding_length": config["hidden_size"],
        "phi3.feed_forward_length": config["intermediate_size"],
        "phi3.block_count": config["num_hidden_layers"],
        "phi3.attention.head_count": config["num_attention_heads"],
        "phi3.attention.head_count_kv": config["num_key_value_heads"],
        "phi3.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "phi3.attention.sliding_window": config["sliding_window"],
        "phi3.rope.dimension_count": 12,
        "phi3.rope.freq_base": rope["rope_theta"],
        "phi3.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "phi3.rope.scaling.attn_factor": float(np.sqrt(1 + np.log(scale) / np.log(2048))),
        **demo_tokenizer(),
        **{f"phi3.attention.{name}": value for name, value in changes.items()},
    }
    texts, kinds = (keys[f"tokenizer.ggml.{name}"][:255] for name in ("tokens", "token_type"))
    keys |= {
        "tokenizer.ggml.tokens": [*texts, "ab"],
        "tokenizer.ggml.token_type": [*kinds, NORMAL],
        "tokenizer.ggml.merges": ["a b"],
    }
    return write(folder, gguf(keys, {name: floats(tensor) for name, tensor in tensors.items()}))


@pytest.mark.parametrize("length", [1, 300, 1500])
def test_phi_computes_the_logits_of_transformers(length, tmp_path, cache):
    """Fused matrices, 12 of 16 channels that rotate, longrope factors, a sliding window of 40."""
    file = phi_file(tmp_path)
    config, own = load_checkpoint(file).config, load_checkpoint(PHI).config
    assert config.windows == own.windows == (40, 40, 40)
    np.testing.assert_allclose(config.rope.short_factor, own.rope.short_factor, rtol=1e-6)
    recorded = np.load(PHI / "reference.npz")
    index = next(i for i in range(8) if len(recorded[f"prompt_{i}"]) == length)
    runner = load_runner(RunnerConfig(model=str(file), num_blocks=100, max_length=2048))
    rows = recorded[f"rows_{index}"]
    found = logits_of(runner, recorded[f"prompt_{index}"], rows, 100)
    np.testing.assert_allclose(found, recorded[f"logits_{index}"], atol=2e-3)


@pytest.mark.parametrize("heads", [4, 8, 16])
def test_the_share_of_phi_that_rope_turns_is_of_the_stated_head_size(heads, tmp_path):
    file = phi_file(tmp_path, head_count=heads, key_length=16, value_length=16)
    assert load_checkpoint(file).config.rope.partial_rotary_factor == 12 / 16


@pytest.mark.parametrize(
    "changes",
    [
        {"head_count": 0}, {"head_count": 100_000}, {"head_count": -4},
        {"key_length": 0, "value_length": 0}, {"key_length": -2, "value_length": -2},
    ],
)  # fmt: skip
def test_heads_without_a_size_are_refused(changes, tmp_path):
    with pytest.raises(CheckpointError, match="both numbers must be positive"):
        load_checkpoint(phi_file(tmp_path, **changes))


def test_more_heads_of_phi_than_its_tensors_have_are_refused(tmp_path):
    file = phi_file(tmp_path, head_count=100_000, key_length=16, value_length=16)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight' .*requires"):
        load_runner(RunnerConfig(model=str(file), num_blocks=8))


REFUSED = {
    "architecture": ({"general.architecture": "mamba"}, "unsupported architecture 'mamba'"),
    "experts": ({"llama.expert_count": 8}, "mixtures of experts"),
    "partial rope": ({"llama.rope.dimension_count": 32}, "rope turns 32"),
    "rope scaling": ({"llama.rope.scaling.type": "su"}, r"scaling\.type 'su'"),
    "a float for a size": ({"llama.block_count": 2.0}, "'llama.block_count' is not an integer"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, r"model 'bert'; supported are gpt2"),
    "split of words": ({"tokenizer.ggml.pre": "default"}, r"pre 'default'; supported are llama"),
    "merges": ({"tokenizer.ggml.merges": ["a b c"]}, "is not a pair of tokens"),
    "types": ({"tokenizer.ggml.token_type": [1, 1]}, "1024 tokens have 2 types"),
    "texts": ({"tokenizer.ggml.tokens": ["a"] * 1024}, "two tokens have the same text"),
    "named token": ({"tokenizer.ggml.bos_token_id": 5000}, "outside the vocabulary of 1024"),
    "heads": ({"llama.attention.head_count_kv": 0}, "must be positive"),
    "NaN": ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "rms_epsilon' is not a finite"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "rms_norm_eps"),
    "base": ({"llama.rope.freq_base": -1.0}, "rope_theta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_with_the_key(case, tmp_path):
    changes, message = REFUSED[case]
    file = write(tmp_path, gguf({**sizes(), **demo_tokenizer(), **changes}, quantized(1)))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(file)


def test_impossible_factors_of_rope_are_refused(tmp_path):
    factors = floats(np.array([1.0] * 31 + [math.nan]))
    file = write(
        tmp_path,
        gguf({**sizes(), **demo_tokenizer()}, quantized(1) | {"rope_freqs.weight": factors}),
    )
    with pytest.raises(CheckpointError, match="short_factor"):
        load_checkpoint(file)


def test_types_that_are_not_computed_are_refused_before_the_folder_is_made(tmp_path, cache):
    tensors = quantized(1) | {"blk.1.ffn_up.weight": ("IQ1_S", (256, 256), bytes(256 * 50))}
    file = write(tmp_path, gguf({**sizes(), **demo_tokenizer()}, tensors))
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' is IQ1_S"):
        local_folder(file)
    assert not cache.exists()


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path):
    keys, tensors = {**sizes(), **demo_tokenizer()}, quantized(1)
    more = tensors | {"blk.0.other.weight": floats(np.zeros(3))}
    with pytest.raises(CheckpointError, match=r"'blk\.0\.other\.weight' is not used"):
        greedy(write(tmp_path, gguf(keys, more), "more.gguf"), "numpy")
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' is missing"):
        greedy(write(tmp_path, gguf(keys, tensors), "less.gguf"), "numpy")
    rng = np.random.default_rng(1)
    tensors["blk.1.ffn_up.weight"] = random_tensor("Q8_0", (256, 128), rng)
    with pytest.raises(CheckpointError, match=r"requires \[256, 256\]"):
        greedy(write(tmp_path, gguf(keys, tensors), "other.gguf"), "numpy")
