import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.engine.models.rope import cos_sin_table, parse_rope
from baton.proto.errors import CheckpointError

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
ROPES = json.loads((DATA / "rope.json").read_text())
MAX_POSITION = 2048
HEAD_DIM = 16


def rope_of(parameters: dict, **raw):
    return parse_rope(
        {"max_position_embeddings": MAX_POSITION, "rope_parameters": parameters, **raw}
    )


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", ["short", "long"])
def test_tables_equal_transformers(name, length):
    """The served length is the sequence's length, as in transformers."""
    config = rope_of(ROPES[name])
    with np.load(DATA / "rope.npz") as data:
        expected, positions = (
            data[f"{name}_{length}"],
            data["positions"][: len(data[f"{name}_{length}"])],
        )
    table = cos_sin_table(config, HEAD_DIM, int(positions[-1]) + 1)
    np.testing.assert_allclose(table[positions], expected, atol=2e-7, rtol=0)


def test_old_layout_means_the_same():
    new = rope_of(ROPES["llama3"])
    scaling = {k: v for k, v in ROPES["llama3"].items() if k not in ("rope_theta", "rope_type")}
    old = parse_rope(
        {
            "max_position_embeddings": MAX_POSITION,
            "rope_theta": 500000.0,
            "rope_scaling": {**scaling, "type": "llama3"},
        }
    )
    assert old == new


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


def test_scaling_added_to_a_new_file_counts():
    """Cards of models tell users to add rope_scaling; transformers 5 then ignores the new key."""
    config = rope_of(PLAIN, rope_scaling=YARN, rope_theta=1e6)
    assert config == rope_of({**YARN, "rope_theta": 1e6})
    assert rope_of(PLAIN, rope_scaling={**YARN, "rope_theta": 1e6}) == config
    assert rope_of(PLAIN, rope_scaling=None).rope_type == "default"


def test_scaling_that_would_replace_the_base_is_refused():
    with pytest.raises(CheckpointError, match="rope_scaling replaces rope_parameters"):
        rope_of(PLAIN, rope_scaling=YARN)


def test_no_settings_at_all_is_the_default():
    config = parse_rope({"max_position_embeddings": 128, "rope_scaling": None})
    assert (config.rope_type, config.rope_theta) == ("default", 10000.0)


def test_original_length_beside_the_rope_settings_wins():
    config = rope_of(ROPES["longrope"], original_max_position_embeddings=300)
    assert config.original == 300


@pytest.mark.parametrize(
    ("name", "default", "ceiling"),
    [("default", 2048, 2048), ("dynamic", 2048, 4096), ("longrope", 512, 2048)],
)
def test_lengths_that_can_be_served(name, default, ceiling):
    config = rope_of(ROPES[name])
    assert (config.default_length(), config.ceiling()) == (default, ceiling)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "spiral"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
)
def test_unknown_settings_are_refused(parameters):
    with pytest.raises(CheckpointError):
        rope_of(parameters)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 0.0),
        ("factor", 0.0),
        ("low_freq_factor", 0.0),
        ("high_freq_factor", -1.0),
        ("beta_fast", 0.0),
        ("original_max_position_embeddings", -8),
        ("original_max_position_embeddings", 10**30),
    ],
)
def test_numbers_that_are_divided_by_are_positive(field, value):
    with pytest.raises(msgspec.ValidationError, match=field):
        rope_of({**ROPES["llama3"], field: value})


def test_missing_factor_is_named():
    with pytest.raises(CheckpointError, match="'linear' needs 'factor'"):
        cos_sin_table(rope_of({"rope_type": "linear"}), HEAD_DIM, 8)


def test_wrong_number_of_longrope_factors_is_refused():
    with pytest.raises(CheckpointError, match="needs 4 factors"):
        cos_sin_table(rope_of(ROPES["longrope"]), 8, 8)


def test_wrong_type_is_a_validation_error():
    with pytest.raises(msgspec.ValidationError, match="rope_theta"):
        rope_of({"rope_theta": "big"})
