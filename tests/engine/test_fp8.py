"""Checkpoints in 8-bit floats: the results of their bfloat16 twins, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.llm import LLMEngine
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.fp8 import check_codes, read_fp8, row_scales
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.loading.safetensors import TensorStore, widened
from baton.proto.errors import CheckpointError
from baton.proto.sampling import SamplingParams

from .fp8_folders import FORMS, Form, write, write_fp8

SHAPE = Shape("tiny", vocab=96, hidden=160, intermediate=208, layers=2, heads=5, kv_heads=1)
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 2, 11], [3] * 30, list(range(4, 90))]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "plain", SHAPE, "BF16")


def tokens_of(folder: Path) -> list[list[int]]:
    runner = load_runner(RunnerConfig(model=str(folder), num_blocks=64, block_size=8))
    contexts = LLMEngine(runner).generate(PROMPTS, GREEDY)
    return [context.tokens.generated.tolist() for context in contexts]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_weights_and_tokens_are_those_of_the_bfloat16_twin(
    tmp_path: Path, plain: Path, form: Form
) -> None:
    folder, twin = write_fp8(plain, tmp_path / "made", form)
    ours, theirs = load_checkpoint(folder).tensors, load_checkpoint(twin).tensors
    for name in theirs:
        shape = theirs.entry(name).shape
        exact = ours.take(name, shape)
        if ours.entry(name).dtype == "F8_E4M3":
            exact = bfloat16_bits(widened(exact))
        assert np.array_equal(exact, theirs.take(name, shape)), name
    assert tokens_of(folder) == tokens_of(twin)
    assert load_checkpoint(folder).fingerprint() != load_checkpoint(twin).fingerprint()


def test_a_scale_is_part_of_the_fingerprint(tmp_path: Path, plain: Path) -> None:
    folder, _ = write_fp8(plain, tmp_path / "made", FORMS[0])
    before = load_checkpoint(folder).fingerprint()
    path = folder / "model.safetensors"
    store = TensorStore.open(folder)
    entry = store.entry("model.layers.0.mlp.up_proj.weight_scale")
    content = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    content[data + entry.begin] ^= 1
    path.write_bytes(content)
    assert load_checkpoint(folder).fingerprint() != before


def changed(folder: Path, **tensors: Any) -> None:
    """Write a folder again with other tensors; None leaves one out."""
    store = TensorStore.open(folder)
    found = {
        name: (store.entry(name).dtype, np.frombuffer(store.raw(name), np.uint8)) for name in store
    }
    kept = {
        name: (dtype, raw.view({"BF16": "<u2", "F32": "<f4"}.get(dtype, "u1")).reshape(
            store.entry(name).shape
        ))
        for name, (dtype, raw) in found.items()
    }  # fmt: skip
    for key, value in tensors.items():
        name = f"model.layers.1.self_attn.{key}"
        kept.pop(name, None)
        if value is not None:
            kept[name] = value
    config = json.loads((folder / "config.json").read_text())
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write(folder, kept, config)


def test_scales_of_activations_are_not_used(tmp_path: Path, plain: Path) -> None:
    folder, twin = write_fp8(plain, tmp_path / "made", FORMS[1])
    changed(folder, **{"q_proj.input_scale": ("F32", np.ones(1, np.float32))})
    assert tokens_of(folder) == tokens_of(twin)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("q_proj.weight_scale", None, "q_proj.weight' has no scales"),
        ("q_proj.weight_scale", np.ones((7, 1), np.float32), r"scales of shape \[7, 1\]"),
        ("q_proj.weight_scale", np.full((160, 1), np.inf, np.float32), "not all finite"),
        ("o_proj.bias_scale", np.ones((1,), np.float32), "is not used"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, plain: Path, name: str, value: Any, words: str
) -> None:
    folder, _ = write_fp8(plain, tmp_path / "made", FORMS[0])
    changed(folder, **{name: None if value is None else ("F32", value)})
    with pytest.raises(CheckpointError, match=words):
        tokens_of(folder)


def test_a_weight_that_is_no_number_is_refused() -> None:
    codes = np.array([[1, 0x7F]], np.uint8)
    with pytest.raises(CheckpointError, match="holds NaN"):
        check_codes("w", codes)


def test_a_matrix_without_a_quantization_config_is_refused(tmp_path: Path, plain: Path) -> None:
    folder, _ = write_fp8(plain, tmp_path / "made", FORMS[0])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is F8_E4M3; supported are"):
        tokens_of(folder)


def test_the_last_blocks_of_a_matrix_may_be_smaller() -> None:
    scales = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows, width = row_scales("w", scales, (130, 300), (128, 128))
    assert width == 128 and rows.shape == (130, 3)
    assert rows[127].tolist() == [0, 1, 2] and rows[128].tolist() == [3, 4, 5]


def group(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel", **weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": scheme}}}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (3, "must be an object"),
        ({"quant_method": "gptq"}, "unsupported quant_method 'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "unsupported fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "unsupported weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "unsupported weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "unsupported config_groups"),
        (group(num_bits=4), "unsupported num_bits '4'"),
        (group(type="int"), "unsupported type 'int'"),
        (group(symmetric=False), "unsupported symmetric"),
        (group(strategy="group"), "unsupported strategy 'group'"),
        (group(strategy="block", block_structure="128x128"), "unsupported block_structure"),
        ({**group(), "format": "pack-quantized"}, "unsupported format"),
        ({**group(), "kv_cache_scheme": {"num_bits": 8}}, "unsupported kv_cache_scheme"),
    ],
)
def test_other_quantizations_are_refused(raw: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_fp8(raw)
