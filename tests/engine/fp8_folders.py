"""Checkpoints in 8-bit floats, in the forms that are published, and their twins in bfloat16."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.kernels.fp8 import FP8_VALUES
from baton.engine.loading.safetensors import TensorStore, widened

F32 = npt.NDArray[np.float32]
_POSITIVE = FP8_VALUES[:0x7F]
_MIDDLES = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2


@dataclass(frozen=True)
class Form:
    """How scales lie: ``block`` rows and columns, (0, 0) for one scale, (1, 0) for one per row."""

    name: str
    config: dict[str, Any]
    suffix: str
    dtype: str
    block: tuple[int, int]


def _groups(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FORMS = [
    Form("channel", _groups("channel"), "_scale", "BF16", (1, 0)),
    Form("tensor", _groups("tensor"), "_scale", "F32", (0, 0)),
    Form(
        "block", _groups("block", block_structure=[16, 64]), "_scale", "BF16", (16, 64)
    ),
    Form(
        "inverse",
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
         "activation_scheme": "dynamic"},
        "_scale_inv", "F32", (128, 128),
    ),
]  # fmt: skip


def encoded(values: F32) -> npt.NDArray[np.uint8]:
    """Return the nearest codes of values up to 448."""
    found = np.searchsorted(_MIDDLES, np.abs(values)) | np.where(np.signbit(values), 0x80, 0)
    return found.astype(np.uint8)


def scales_of(weights: F32, block: tuple[int, int]) -> F32:
    """Return the scales by which the largest weight of each part becomes 448."""
    rows, columns = weights.shape
    high, wide = block[0] or rows, block[1] or columns
    starts = np.arange(0, rows, high), np.arange(0, columns, wide)
    largest = np.maximum.reduceat(
        np.maximum.reduceat(np.abs(weights), starts[0]), starts[1], axis=1
    )
    scales = bfloat16_bits((largest / 448).astype(np.float32)).astype(np.uint32) << 16
    return scales.view(np.float32)


def spread(scales: F32, shape: tuple[int, int], block: tuple[int, int]) -> F32:
    """Return the scale of each weight."""
    high, wide = block[0] or shape[0], block[1] or shape[1]
    return np.repeat(np.repeat(scales, high, 0)[: shape[0]], wide, 1)[:, : shape[1]]


def write_fp8(source: Path, folder: Path, form: Form) -> tuple[Path, Path]:
    """Quantize the projections of a checkpoint; return its folder and that of its twin."""
    store, ours, twins = TensorStore.open(source), {}, {}
    for name in store:
        values = widened(store.tensor(name))
        kept = ("BF16", bfloat16_bits(values))
        ours[name] = twins[name] = kept
        if not name.endswith("_proj.weight"):
            continue
        scales = scales_of(values, form.block)
        each = spread(scales, values.shape, form.block)
        codes = encoded(np.clip(values / each, -448, 448))
        ours[name] = ("F8_E4M3", codes)
        stored = scales if form.block != (0, 0) else scales.reshape(())
        ours[name + form.suffix] = (
            form.dtype, bfloat16_bits(stored) if form.dtype == "BF16" else stored
        )  # fmt: skip
        twins[name] = ("BF16", bfloat16_bits(FP8_VALUES[codes] * each))
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    twin = write(folder / "twin", twins, config)
    return write(folder / form.name, ours, config | {"quantization_config": form.config}), twin


def write(
    folder: Path, tensors: dict[str, tuple[str, npt.NDArray[Any]]], config: dict[str, Any]
) -> Path:
    """Write tensors by name, with their dtypes, and a config.json."""
    folder.mkdir(parents=True)
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        end = at + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
