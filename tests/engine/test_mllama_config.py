"""Which settings of mllama are read, and which are refused."""

import json
import shutil

import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.loading.loader import load_runner
from baton.engine.loading.model_config import load_model_config, parse_cross_config
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.tiled_config import MLLAMA
from baton.engine.models.tiled_tower import feature_order, row_groups
from baton.proto.errors import CheckpointError, ConfigError

from .mllama_cases import DATA

RAW = json.loads((DATA / "config.json").read_text())


def test_a_config_without_sizes_is_that_of_the_11b_model():
    config = parse_cross_config({"text_config": {}, "vision_config": {}}, MLLAMA)
    assert (config.num_layers, len(config.cross_layers), config.vocab_size) == (32, 8, 128264)
    assert (config.hidden_size, config.head_dim, config.num_kv_heads) == (4096, 128, 8)
    vision = config.vision
    assert (vision.tile_tokens, vision.tile_rows, vision.features) == (1025, 1032, 7680)
    assert config.self_layers[:5] == (0, 1, 2, 4, 5)
    real = parse_cross_config({"text_config": {}, "vision_config": {"image_size": 560}}, MLLAMA)
    assert (real.vision.image_tokens, real.image_positions) == (6404, 1601)


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("text_config", {"cross_attention_layers": [0, 3]}, "ascending layers from 1"),
        ("text_config", {"cross_attention_layers": [3, 2]}, "ascending"),
        ("text_config", {"cross_attention_layers": [2, 2]}, "ascending"),
        ("text_config", {"cross_attention_layers": [7]}, "to 6"),
        ("text_config", {"cross_attention_layers": []}, "ascending"),
        ("text_config", {"cross_attention_layers": [1, 2, 3, 4]}, "at most half"),
        ("text_config", {"tie_word_embeddings": True}, "tied"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act"),
        ("text_config", {"eos_token_id": 10**30}, "eos_token_id"),
        ("vision_config", {"hidden_act": "quick_gelu"}, "hidden_act"),
        ("vision_config", {"num_channels": 1}, "channels"),
        ("vision_config", {"attention_heads": 3}, "heads"),
        ("vision_config", {"image_size": 18}, "whole patches"),
        ("vision_config", {"supported_aspect_ratios": [[1, 1], [2, 1]]}, "supported_aspect_ratios"),
        ("vision_config", {"intermediate_layers_indices": [0, 3]}, "intermediate_layers"),
        ("vision_config", {"vision_output_dim": 32}, "vision_output_dim"),
        ("vision_config", {"max_num_tiles": 65}, "max_num_tiles"),
        (None, {"image_token_index": 255}, "image_token_index"),
        (None, {"image_token_index": 264}, "image_token_index"),
    ],
)
def test_other_settings_are_refused(tmp_path, part, changed, message):
    raw = {**RAW, **changed} if part is None else {**RAW, part: {**RAW[part], **changed}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"max_image_tiles": 2},
        {"size": {"height": 32, "width": 32}},
        {"do_rescale": False},
        {"rescale_factor": 0},
    ],
)
def test_image_settings_of_another_model_are_refused(tmp_path, changed):
    settings = json.loads((DATA / "preprocessor_config.json").read_text())
    shutil.copy(DATA / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, **changed}))
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        load_model_config(tmp_path)


def test_a_gpu_is_refused_in_one_sentence():
    class Device:
        """A backend whose arrays are elsewhere."""

        on_host = False

        def __getattr__(self, name):
            return getattr(load_backend("numpy"), name)

    with pytest.raises(ConfigError, match="runs on the CPU only: leave --device cuda out"):
        load_runner(RunnerConfig(model=str(DATA), num_blocks=8), backend=Device())


def test_features_of_layers_alternate_in_a_checkpoint():
    assert feature_order(3, 2).tolist() == [0, 1, 2, 3, 5, 7, 4, 6, 8]
    assert feature_order(3, 0).tolist() == [0, 1, 2]


def test_rows_of_an_image_are_its_own_first():
    vision = load_model_config(DATA).vision
    assert (vision.tile_tokens, vision.tile_rows) == (17, 24)
    groups = row_groups(vision, 2)
    assert sorted(groups.order.tolist()) == list(range(96))
    assert groups.order[:34].tolist() == [*range(17), *range(24, 41)]
    assert set(groups.ends[:34]) == {95}
    assert set(groups.ends[34:]) == {33}
    assert groups.order[groups.tokens].tolist() == [
        tile * 24 + row for tile in range(4) for row in range(17)
    ]
