"""The table of kernel variants: only what a card can run, and no variant changes a bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from baton.engine.kernels.cuda.tuning import (
    Card,
    Tuning,
    read_table,
    table_path,
    tuning_of,
    write_card,
)
from baton.proto.errors import ConfigError

from .attention_cases import assert_rounds_to, decode_case, expected_decode, run_decode

TUNED = Tuning(decode_stages=2, decode_bounds=3, decode_chunk=512, skinny_tiles=((0, 1), (64, 2)))
VARIANTS = [
    Tuning(combine_warps=1),
    Tuning(combine_warps=2),
    Tuning(decode_bounds=3, decode_stages=2),
    Tuning(decode_bounds=1, decode_stages=6),
]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tuning", VARIANTS)
def test_variants_of_decode_attention_give_the_same_bits(device, rng, tuning, dim):
    case = decode_case(rng, [900, 64, 65, 0, 333], dim=dim, kv_heads=1, group=5)
    usual = run_decode(device, case, 64)[0]
    assert_rounds_to(usual, expected_decode(case))
    np.testing.assert_array_equal(run_decode(device.tuned(tuning), case, 64)[0], usual)


def test_variants_under_shuffled_schedules(device, schedules, rng):
    case = decode_case(rng, [200, 130], kv_heads=1)
    for tuning in VARIANTS[1:3]:
        tuned = device.tuned(tuning)
        schedules(lambda tuned=tuned: run_decode(tuned, case, 64, blocks=2)[:1])


def test_the_table_that_is_installed_is_valid():
    for card in read_table(table_path()).cards:
        assert tuning_of(card.name, card.capability) == card.tuning


def test_a_card_finds_its_entry_and_others_the_defaults(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text('{"cards": []}')
    for name in ("NVIDIA H200", "NVIDIA H100", "NVIDIA H200"):
        write_card(path, Card(name=name, capability="90", commit="0123abc", tuning=TUNED))
    assert [card["name"] for card in json.loads(path.read_text())["cards"]] == [
        "NVIDIA H100", "NVIDIA H200",
    ]  # fmt: skip
    assert tuning_of("NVIDIA H200", "90", path) == TUNED
    assert tuning_of("NVIDIA H200", "100", path) == tuning_of("NVIDIA A100", "80", path) == Tuning()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode_bounds": 0}, ">= 1"),
        ({"decode_bounds": 3}, "3 blocks of 3 stages take"),
        ({"decode_stages": 2.5}, "int"),
        ({"fuse_from": -1}, ">= 0"),
        ({"decode_chunk": 100}, "Invalid enum value 100"),
        ({"combine_warps": 3}, "Invalid enum value 3"),
        ({"skinny_tiles": [[0, 3]]}, "Invalid enum value 3"),
        ({"skinny_tiles": [[64, 2]]}, "must start at 0"),
        ({"skinny_tiles": [[0, 1], [0, 2]]}, "rise"),
        ({"skinny_ring": [[0, 3]]}, "Invalid enum value 3"),
        ({"skinny_ring": [[64, 4], [64, 2]]}, "skinny_ring must start at 0"),
        ({"stages": 3}, "unknown field"),
    ],
)
def test_a_bad_table_is_one_sentence(tmp_path, change, said):
    path = tmp_path / "tuning.json"
    card = {"name": "NVIDIA H200", "capability": "90", "commit": "0123abc", "tuning": change}
    path.write_text(json.dumps({"cards": [card]}))
    with pytest.raises(ConfigError, match=said) as refused:
        tuning_of("NVIDIA H200", "90", path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_or_broken_table_is_one_sentence(tmp_path):
    for text in (None, "{", "[]"):
        path = tmp_path / "tuning.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r'write \{"cards": \[\]\}'):
            tuning_of("NVIDIA H200", "90", path)


def test_what_changes_bits_is_part_of_the_numerics():
    assert Tuning().numerics == "" and not Tuning().defines
    assert TUNED.numerics == "-chunk512"
    assert TUNED.defines == ("BATON_DECODE_BOUNDS=3", "BATON_DECODE_STAGES=2")
    assert Tuning().decode_shared_bytes == 96 << 10
    assert TUNED.decode_shared_bytes == 64 << 10


@pytest.mark.parametrize(
    ("tuning", "width", "wide"),
    [(Tuning(), 6144, False), (Tuning(), 8447, False), (Tuning(), 8448, True), (TUNED, 64, True)],
)
def test_blocks_of_two_tiles_must_still_fill_the_card(tuning, width, wide):
    assert tuning.wide(width, multiprocessors=132) == wide


@pytest.mark.parametrize(
    ("tuning", "width", "fused"),
    [
        (Tuning(), 4223, False), (Tuning(), 4224, True), (TUNED, 32, True),
        (Tuning(fuse_from=0), 8, True), (Tuning(fuse_from=9728), 9720, False),
        (Tuning(fuse_from=9728), 9728, True),
    ],
)  # fmt: skip
def test_gated_products_are_fused_where_the_blocks_still_fill_the_card(tuning, width, fused):
    assert tuning.fuses(width, multiprocessors=132) == fused
