"""Gemma 3: its config.json in both layouts, what it refuses, and planted bugs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.models.gemma import GemmaDecoder
from baton.proto.errors import CheckpointError

from .folder_mutations import FOLDERS
from .gguf_cases import floats, gguf, write
from .gguf_models import demo_tokenizer
from .test_models import UNBOUNDED, load, logits_of

FOLDER = FOLDERS["gemma3"]
HF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def folder_with(tmp_path: Path, drop: tuple[str, ...] = (), **changes) -> Path:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop}
    path.write_text(json.dumps(config | changes))
    return folder


def differ() -> bool:
    """True if the logits of prompts of 16 and 100 tokens are not those of transformers."""
    with np.load(FOLDER / "reference.npz") as data:
        return not all(
            np.allclose(
                logits_of(load("gemma3"), data[f"prompt_{i}"], data[f"rows_{i}"], UNBOUNDED),
                data[f"logits_{i}"],
                atol=1e-4,
                rtol=0,
            )
            for i in (3, 5)
        )


def drop_the_added_one(patch):
    patch.setattr(GemmaDecoder, "_norms_added", lambda _: 0.0)


def rotate_all_layers_alike(patch):
    patch.setattr(GemmaDecoder, "_rotation", lambda self, _layer, _batch: self._cos_sin)


def drop_the_embeddings_scale(patch):
    embed = GemmaDecoder.__mro__[1]._embed
    patch.setattr(GemmaDecoder, "_embed", embed)


def drop_the_norm_of_what_is_added(patch):
    def plain(self, delta, norm, residual, following, normed):
        self.backend.add_rms_norm(delta, residual, following, self.config.rms_norm_eps, normed)

    patch.setattr(GemmaDecoder, "_add_normed", plain)


def scale_by_the_size_of_a_head(patch):
    make = GemmaDecoder.__init__

    def other(self, *args, **options):
        make(self, *args, **options)
        self._scale = self.config.head_dim**-0.5

    patch.setattr(GemmaDecoder, "__init__", other)


@pytest.mark.parametrize(
    "plant",
    [
        drop_the_added_one,
        rotate_all_layers_alike,
        drop_the_embeddings_scale,
        drop_the_norm_of_what_is_added,
        scale_by_the_size_of_a_head,
    ],
)
def test_a_planted_bug_is_seen(plant, monkeypatch):
    assert not differ()
    plant(monkeypatch)
    assert differ()


def test_the_older_layout_is_the_same_model(tmp_path):
    own = load_checkpoint(FOLDER).config
    older = folder_with(
        tmp_path,
        ("rope_parameters", "layer_types", "_sliding_window_pattern"),
        rope_theta=50000.0,
        rope_local_base_freq=1000.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        sliding_window_pattern=6,
    )
    assert load_checkpoint(older).config == own
    assert own.windows == (24,) * 5 + (0, 24)
    assert (own.rope.rope_type, own.rope.rope_theta) == ("linear", 50000)
    assert (own.local_rope.rope_type, own.local_rope.rope_theta) == ("default", 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "unsupported hidden_activation 'silu'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"sliding_window": None}, "layer_types"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
            "rope_scaling has no rope_type",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            },
            "rope_scaling changes rope_parameters.full_attention, which is missing",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder_with(tmp_path, **changes))


def test_a_length_outside_the_rope_settings_is_not_theirs(tmp_path):
    """transformers reads original_max_position_embeddings of Gemma 3 in the objects alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    found = load_checkpoint(
        folder_with(tmp_path, rope_scaling=yarn, original_max_position_embeddings=128)
    )
    assert found.config.rope.original_max_position_embeddings == 32


def gguf_file(tmp_path: Path) -> Path:
    """The checkpoint as llama.cpp's converter writes it: norms with 1 added."""
    tensors = load_checkpoint(FOLDER).tensors
    inner = {usual: own for own, usual in HF_NAMES.items()}
    made = {}
    for name in tensors:
        values = tensors.tensor(name) + np.float32(1 if "norm" in name else 0)
        module = name.removesuffix(".weight").removeprefix("model.")
        if module.startswith("layers."):
            _, block, rest = module.split(".", 2)
            made[f"blk.{block}.{inner[rest]}.weight"] = floats(values)
        else:
            outer = {"embed_tokens": "token_embd", "norm": "output_norm"}[module]
            made[f"{outer}.weight"] = floats(values)
    keys = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 7,
        "gemma3.context_length": 2048,
        "gemma3.embedding_length": 40,
        "gemma3.feed_forward_length": 56,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": 16,
        "gemma3.attention.value_length": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 24,
        "gemma3.rope.freq_base": 50000.0,
        "gemma3.rope.freq_base_swa": 1000.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 4.0,
    }
    return write(tmp_path, gguf(keys | demo_tokenizer(), made), "gemma.gguf")


def test_a_gguf_file_is_the_same_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, own = load_checkpoint(gguf_file(tmp_path)), load_checkpoint(FOLDER)
    assert made.config.query_pre_attn_scalar == 16  # the file has no key for the checkpoint's 10
    same = ("windows", "rope", "local_rope", "head_dim", "qk_norm", "tie_word_embeddings")
    assert [getattr(made.config, f) for f in same] == [getattr(own.config, f) for f in same]
    assert set(made.tensors) == set(own.tensors)
    for name in own.tensors:
        found, wanted = made.tensors.tensor(name), own.tensors.tensor(name)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-7)
