"""Weights in 8-bit floats (e4m3) with scales, as published checkpoints have them.

A weight is its e4m3 value times a scale, rounded to bfloat16: every backend computes the products
of these bfloat16 weights, or of more exact ones. Scales are per tensor, per row ("channel"), or per
block of rows and columns. Activations are not rounded to 8 bits, so scales of activations
(``input_scale``) are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError

from ..kernels.fp8 import NAN_FP8

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""What follows the name of a tensor in that of its scales; both multiply the weights."""
INPUT_SCALE = "input_scale"
"""The scale of a module's activations, which is not used."""
_SUPPORTED = "supported are 8-bit floats (e4m3) with scales per tensor, channel or block"


class Fp8(msgspec.Struct, frozen=True):
    """The ``quantization_config`` of a checkpoint. ``block``: rows and columns of a scale."""

    block: tuple[int, int] | None = None


def read_fp8(raw: object) -> Fp8:
    """Read a ``quantization_config``. Raises CheckpointError for other forms of quantization."""
    if not isinstance(raw, dict):
        raise CheckpointError("config.json: quantization_config must be an object")
    method = raw.get("quant_method")
    if method == "fp8":
        return _of_fp8(raw)
    if method == "compressed-tensors":
        return _of_groups(raw)
    raise _unsupported("quant_method", method)


def _unsupported(key: str, value: object) -> CheckpointError:
    text = f"config.json: quantization_config: unsupported {key} {str(value)[:60]!r}; {_SUPPORTED}"
    return CheckpointError(text)


def _of_fp8(raw: dict[str, Any]) -> Fp8:
    """DeepSeek's form, and the older one with a scale per tensor."""
    if raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fmt", raw["fmt"])
    size = raw.get("weight_block_size")
    return Fp8() if size is None else Fp8(_block("weight_block_size", size))


def _of_groups(raw: dict[str, Any]) -> Fp8:
    """The form of compressed-tensors: groups of modules with one scheme each."""
    if raw.get("format", "float-quantized") != "float-quantized":
        raise _unsupported("format", raw["format"])
    if raw.get("kv_cache_scheme") is not None:
        raise _unsupported("kv_cache_scheme", raw["kv_cache_scheme"])
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("config_groups", groups)
    blocks = {_of_group(group) for group in groups.values()} - {None}
    if len(blocks) > 1:
        raise _unsupported("block_structure", sorted(map(str, blocks)))
    return Fp8(blocks.pop() if blocks else None)


def _of_group(group: object) -> tuple[int, int] | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _unsupported("weights", weights)
    wanted = {"num_bits": 8, "type": "float", "symmetric": True}
    for key, value in wanted.items():
        if weights.get(key, value) != value:
            raise _unsupported(key, weights[key])
    strategy = weights.get("strategy")
    if strategy == "block":
        return _block("block_structure", weights.get("block_structure"))
    if strategy not in ("tensor", "channel"):
        raise _unsupported("strategy", strategy)
    return None


def _block(key: str, found: object) -> tuple[int, int]:
    match found:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise _unsupported(key, found)


def row_scales(
    name: str, scales: F32, shape: Sequence[int], block: tuple[int, int] | None
) -> tuple[F32, int]:
    """Return the scales ``[rows, groups]`` of a matrix, and the columns of a group.

    Raises CheckpointError if the scales do not fit the matrix, or are not finite.
    """
    rows, columns = shape
    if not np.isfinite(scales).all():
        raise CheckpointError(f"tensor '{name}': its scales are not all finite")
    if scales.size == 1:
        return np.full((rows, 1), scales.reshape(-1)[0], np.float32), columns
    if scales.shape in ((rows,), (rows, 1)):
        return np.ascontiguousarray(scales.reshape(rows, 1)), columns
    if block is not None:
        high, wide = block
        if scales.shape == (-(-rows // high), -(-columns // wide)):
            return np.ascontiguousarray(np.repeat(scales, high, axis=0)[:rows]), wide
    raise CheckpointError(
        f"tensor '{name}': scales of shape {list(scales.shape)} do not fit {list(shape)}"
        + ("" if block is None else f" in blocks of {block[0]} x {block[1]}")
    )


def check_codes(name: str, codes: U8) -> None:
    """Raise CheckpointError if a code is not a number."""
    if (codes & 0x7F == NAN_FP8).any():
        raise CheckpointError(f"tensor '{name}' holds NaN")
