"""The vision part of a model's configuration: its tower, its pixels, and its rope sections."""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.proto.errors import CheckpointError
from baton.proto.limits import MAX_LAYERS, MAX_SIZE

from .config_numbers import Finite, Positive
from .family_defaults import FAMILY_DEFAULTS
from .json_files import read_json

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Triple = tuple[Finite, Finite, Finite]

QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL = "Qwen3VLForConditionalGeneration"

_CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Triple = (0.5, 0.5, 0.5)
IMAGENET_STD: Triple = (0.5, 0.5, 0.5)


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a vision tower, and how pixels become numbers.

    ``patch_size``: pixels of a patch's side. ``merge_size``: patches of a token's side.
    ``window_size``: pixels of a window's side, 0 without windows. ``full_layers``: layers in which
    a patch attends to the whole image instead of its window. ``rope_theta``: base of the tower's
    rotary positions. ``image_mean``, ``image_std``: per channel, of pixels times
    ``rescale_factor``. ``side``: of the square table of learned positions, 0 without.
    ``deep_layers``: layers of the tower whose features are added after the decoder's first layers.
    ``layer_norm``: LayerNorm, and an MLP with GELU, instead of RMSNorm and a gated MLP with SiLU.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    window_size: int
    full_layers: tuple[int, ...]
    rope_theta: float
    image_mean: Triple
    image_std: Triple
    rescale_factor: float
    side: int = 0
    deep_layers: tuple[int, ...] = ()
    layer_norm: bool = False

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads


class _VisionRope(msgspec.Struct, kw_only=True):
    """The keys read from ``rope_parameters`` of ``vision_config``."""

    rope_type: str = "axial"
    rope_theta: Positive | None = None


class _RawVision(msgspec.Struct, kw_only=True):
    """The keys read from ``vision_config``; other keys are ignored."""

    depth: Layers
    hidden_size: Size
    intermediate_size: Size
    num_heads: Size
    patch_size: Size
    temporal_patch_size: Size
    spatial_merge_size: Size
    out_hidden_size: Size
    window_size: Size = 1
    fullatt_block_indexes: list[int] = []
    num_position_embeddings: Size = 1
    deepstack_visual_indexes: list[int] = []
    hidden_act: str
    in_channels: int
    rope_theta: Positive
    rope_parameters: _VisionRope | None = None


class ImageScale(msgspec.Struct, kw_only=True):
    """How pixels become numbers, as the image processor's config has it."""

    image_mean: Triple
    image_std: tuple[Positive, Positive, Positive]
    rescale_factor: Annotated[float, Meta(ge=1e-9, le=1e9)] = 1 / 255
    do_rescale: bool = True
    do_normalize: bool = True


def parse_vision(raw: dict[str, Any], architecture: str, folder: Path | None) -> VisionConfig:
    """Read the tower's shape from config.json's object and the pixels' scale from ``folder``.

    Raises CheckpointError or msgspec.ValidationError for settings that are not supported.
    """
    given = msgspec.convert(raw.get("vision_config") or {}, dict[str, Any])
    given = renamed(given, {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"})
    fields = msgspec.convert({**_family_keys(architecture), **given}, _RawVision)
    images, _ = read_image_scale(folder, _CLIP_MEAN, _CLIP_STD)
    rope = fields.rope_parameters or _VisionRope()
    _refuse(fields, architecture, rope)
    deep = architecture == QWEN3_VL
    return VisionConfig(
        depth=fields.depth,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_heads=fields.num_heads,
        patch_size=fields.patch_size,
        temporal_patch_size=fields.temporal_patch_size,
        merge_size=fields.spatial_merge_size,
        out_hidden_size=fields.out_hidden_size,
        window_size=0 if deep else fields.window_size,
        full_layers=tuple(range(fields.depth) if deep else fields.fullatt_block_indexes),
        rope_theta=rope.rope_theta or fields.rope_theta,
        image_mean=images.image_mean,
        image_std=images.image_std,
        rescale_factor=images.rescale_factor,
        side=isqrt(fields.num_position_embeddings) if deep else 0,
        deep_layers=tuple(fields.deepstack_visual_indexes) if deep else (),
        layer_norm=deep,
    )


def renamed(settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return settings under the names that a family's files have; ``names``: of other releases.

    Raises CheckpointError if both names are given with two values.
    """
    found = dict(settings)
    for other, name in names.items():
        value = found.pop(other, None)
        if value is not None and found.setdefault(name, value) != value:
            raise CheckpointError(f"config.json: {other} {value} and {name} {found[name]} differ")
    return found


def _family_keys(architecture: str) -> dict[str, Any]:
    """Return the tower's keys that a family has, with their defaults."""
    return FAMILY_DEFAULTS[architecture]["vision_config"]


def _refuse(fields: _RawVision, architecture: str, rope: _VisionRope) -> None:
    """Reject settings that would silently change the features."""
    if fields.hidden_act != _family_keys(architecture)["hidden_act"] or fields.in_channels != 3:
        raise CheckpointError(
            f"config.json: unsupported vision_config: hidden_act '{fields.hidden_act}', "
            f"in_channels {fields.in_channels}"
        )
    if rope.rope_type != "axial":
        raise CheckpointError(f"config.json: unsupported vision rope '{rope.rope_type}'")
    if fields.hidden_size % (4 * fields.num_heads):
        raise CheckpointError(
            f"config.json: num_heads {fields.num_heads} of the tower do not divide hidden_size "
            f"{fields.hidden_size} in quarters"
        )
    if architecture == QWEN3_VL:
        deep = fields.deepstack_visual_indexes
        if isqrt(fields.num_position_embeddings) ** 2 != fields.num_position_embeddings:
            raise CheckpointError("config.json: num_position_embeddings must be a square number")
        if len(set(deep)) != len(deep) or not all(0 <= i < fields.depth for i in deep):
            raise CheckpointError(
                f"config.json: deepstack_visual_indexes {deep} are not layers of the tower's depth "
                f"{fields.depth}"
            )
    elif fields.window_size // fields.patch_size // fields.spatial_merge_size < 1:
        raise CheckpointError(
            f"config.json: window_size {fields.window_size} of the tower is smaller than a token, "
            f"by patch_size {fields.patch_size} and spatial_merge_size {fields.spatial_merge_size}"
        )


def rope_axes(raw: dict[str, Any], architecture: str, head_dim: int) -> tuple[int, ...]:
    """Return which rope position turns each pair of channels: 0 time, 1 row, 2 column.

    ``raw``: the object with the rope settings. The sections of Qwen2.5-VL follow each other, those
    of Qwen3-VL are interleaved. Raises CheckpointError if the sections do not cover the head's
    ``head_dim / 2`` pairs.
    """
    nested = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    usual = [24, 20, 20] if architecture == QWEN3_VL else [16, 24, 24]
    sections = msgspec.convert(nested.get("mrope_section", usual), tuple[int, int, int])
    pairs = head_dim // 2
    if min(sections) < 0 or sum(sections) != pairs:
        raise CheckpointError(
            f"config.json: mrope_section {list(sections)} of rope_parameters or rope_scaling does "
            f"not cover {pairs} pairs of head_dim {head_dim} (by default hidden_size / "
            "num_attention_heads)"
        )
    if architecture != QWEN3_VL:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def read_image_scale(
    folder: Path | None, mean: Triple, std: Triple
) -> tuple[ImageScale, dict[str, Any]]:
    """Read the image processor's settings, in the file of the hub or of transformers 5.

    ``mean``, ``std``: defaults. Returns the scale and all settings, which are empty without a file.
    Raises CheckpointError for wrong values, and if the processor does not rescale or normalize.
    """
    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = None if folder is None else folder / name
        if path is not None and path.is_file():
            raw = read_json(path)
            nested = raw.get("image_processor")
            settings = nested if isinstance(nested, dict) else raw
            break
    try:
        scale = msgspec.convert({"image_mean": mean, "image_std": std, **settings}, ImageScale)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"preprocessor_config.json: {error}") from error
    if not scale.do_rescale or not scale.do_normalize:
        raise CheckpointError("preprocessor_config.json: pixels must be rescaled and normalized")
    return scale, settings
