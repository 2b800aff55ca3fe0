"""A key that config.json leaves out has the default of transformers' own config class."""

import pytest

from baton.engine.loading.embedding_config import load_embedding_settings
from baton.engine.loading.family_defaults import FAMILY_DEFAULTS
from baton.engine.loading.gemma_config import GEMMA3
from baton.engine.loading.model_config import (
    parse_bert_config,
    parse_cross_config,
    parse_gemma_config,
    parse_model_config,
    parse_vision_language_config,
)
from baton.engine.loading.tiled_config import MLLAMA
from baton.engine.loading.vision_config import QWEN2_5_VL, QWEN3_VL
from baton.proto.errors import CheckpointError

PARSERS = {
    "BertModel": parse_bert_config,
    GEMMA3: parse_gemma_config,
    MLLAMA: parse_cross_config,
    QWEN2_5_VL: parse_vision_language_config,
    QWEN3_VL: parse_vision_language_config,
}
OTHERS = {
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "layer_types": ["sliding_attention"],
    "cross_attention_layers": [2],
    "eos_token_id": 5,
    "head_dim": 6,
    "num_key_value_heads": 1,
    "vocab_size": 200_000,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [1],
    "intermediate_layers_indices": [1],
    "supported_aspect_ratios": [[1, 1]],
    "num_position_embeddings": 4,
    "out_hidden_size": 8,
    "image_token_id": 151_000,
    "image_token_index": 128_257,
    "is_decoder": True,
    "max_window_layers": 1,
}
"""Another value of each key that is no plain number."""
UNREAD = {("BertModel", "eos_token_id"), ("BertModel", "tie_word_embeddings")}
NEEDED = {
    QWEN2_5_VL: {"vision_config": {"out_hidden_size": 8192}},
    QWEN3_VL: {"vision_config": {"out_hidden_size": 4096}},
}
"""Settings without which the defaults of a family contradict each other."""
SLIDING = {"use_sliding_window": True, "max_window_layers": 0}


def parsed(architecture, raw):
    return PARSERS.get(architecture, parse_model_config)(raw, architecture)


def settings(architecture, part, **more):
    """A config.json with what the family needs, and ``more`` in one of its objects."""
    raw = {name: dict(values) for name, values in NEEDED.get(architecture, {}).items()}
    for name in FAMILY_DEFAULTS[architecture]:
        if name:
            raw.setdefault(name, {})
    (raw[part] if part else raw).update(more)
    return raw


def other(key, value):
    if key in OTHERS:
        return OTHERS[key]
    if value is None:
        return 64
    return not value if isinstance(value, bool) else 2 * value


CASES = [
    (architecture, part, key)
    for architecture, parts in FAMILY_DEFAULTS.items()
    for part, keys in parts.items()
    for key in keys
]


@pytest.mark.parametrize(("architecture", "part", "key"), CASES)
def test_each_default(architecture, part, key):
    """Left out, a key counts as its default, and another value is read or refused."""
    default = FAMILY_DEFAULTS[architecture][part][key]
    more = dict(SLIDING) if "use_sliding_window" in FAMILY_DEFAULTS[architecture][part] else {}
    more.pop(key, None)
    without = parsed(architecture, settings(architecture, part, **more))
    needed = NEEDED.get(architecture, {}).get(part, {}).get(key, default)
    assert parsed(architecture, settings(architecture, part, **more, **{key: needed})) == without
    if (architecture, key) in UNREAD:
        return
    try:
        changed = parsed(
            architecture, settings(architecture, part, **more, **{key: other(key, needed)})
        )
    except Exception as error:
        assert "config.json" in str(error) or key in str(error)
    else:
        assert changed != without


@pytest.mark.parametrize(("positions", "side"), [(1, 1), (49, 7), (48, None), (50, None)])
def test_the_positions_of_a_tower_are_a_square(positions, side):
    raw = settings(QWEN3_VL, "vision_config", num_position_embeddings=positions)
    if side is None:
        with pytest.raises(CheckpointError, match="num_position_embeddings must be a square"):
            parsed(QWEN3_VL, raw)
    else:
        assert parsed(QWEN3_VL, raw).vision.side == side


def test_a_window_without_a_size_is_the_familys():
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        config = parse_model_config(SLIDING, architecture)
        assert set(config.windows) == {4096}


def test_a_text_without_a_limit_file_has_the_tokenizers(tmp_path):
    (tmp_path / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Pooling"}]')
    (tmp_path / "config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    assert load_embedding_settings(tmp_path).max_length == 100
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert load_embedding_settings(tmp_path).max_length == 0
