"""The configuration of cross-attention models (mllama): tower of tiles, cross-attention layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.proto.contexts.tiled_images import MAX_TILES, aspect_ratios
from baton.proto.errors import CheckpointError
from baton.proto.limits import MAX_LAYERS, MAX_SIZE

from .config_numbers import Epsilon
from .family_defaults import FAMILY_DEFAULTS
from .vision_config import IMAGENET_MEAN, IMAGENET_STD, Triple, read_image_scale, renamed

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]

MLLAMA = "MllamaForConditionalGeneration"
EXTRA_TOKENS = 8
"""Rows of the embedding table beyond the vocabulary; the first is the image token's."""
PATCH_MULTIPLE = 8
"""The rows of a tile are padded with zeros to a multiple of this."""


class TiledVisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a tower for images of tiles, and how pixels become numbers.

    ``layers``: of the first encoder. ``global_layers``: gated layers after it. ``deep_layers``:
    layers of the first encoder whose outputs are features too. ``tile_size``: pixels of a tile's
    side. ``max_tiles``: tiles of an image. ``norm_eps``: of the layers' norms. ``image_mean``,
    ``image_std``: per channel, of pixels times ``rescale_factor``.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    global_layers: int
    num_heads: int
    patch_size: int
    tile_size: int
    max_tiles: int
    deep_layers: tuple[int, ...]
    norm_eps: float
    image_mean: Triple
    image_std: Triple
    rescale_factor: float

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads

    @property
    def tile_tokens(self) -> int:
        """Vision tokens of a tile: its patches, and one for the tile."""
        return (self.tile_size // self.patch_size) ** 2 + 1

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in the tower: its tokens, and padding."""
        return -(-self.tile_tokens // PATCH_MULTIPLE) * PATCH_MULTIPLE

    @property
    def image_tokens(self) -> int:
        """Vision tokens of an image, with those of the tiles that it does not have."""
        return self.max_tiles * self.tile_tokens

    @property
    def features(self) -> int:
        """Channels of a vision token, before they are projected to the decoder's."""
        return self.hidden_size * (1 + len(self.deep_layers))


class _RawVision(msgspec.Struct, kw_only=True):
    """The keys read from ``vision_config``; other keys are ignored."""

    hidden_size: Size
    hidden_act: str
    num_hidden_layers: Layers
    num_global_layers: Layers
    attention_heads: Size
    num_channels: int
    intermediate_size: Size
    vision_output_dim: Size
    image_size: Size
    patch_size: Size
    norm_eps: Epsilon
    max_num_tiles: Annotated[int, Meta(ge=1, le=MAX_TILES)]
    intermediate_layers_indices: list[int] | None
    supported_aspect_ratios: list[list[int]] | None


class _RawTiles(msgspec.Struct, kw_only=True):
    """The keys of the image processor's settings that the model's shape must agree with."""

    max_image_tiles: int = 4
    size: dict[str, int] = msgspec.field(default_factory=dict)


_CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
_DEEP_LAYERS = (3, 7, 15, 23, 30)


def parse_tiled_vision(raw: dict[str, Any], folder: Path | None) -> TiledVisionConfig:
    """Read the tower's shape from config.json's object and the pixels' scale from ``folder``.

    Raises CheckpointError or msgspec.ValidationError for settings that are not supported.
    """
    given = msgspec.convert(raw.get("vision_config") or {}, dict[str, Any])
    given = renamed(given, {"num_attention_heads": "attention_heads"})
    fields = msgspec.convert({**FAMILY_DEFAULTS[MLLAMA]["vision_config"], **given}, _RawVision)
    scale, settings = read_image_scale(folder, IMAGENET_MEAN, IMAGENET_STD)
    deep = fields.intermediate_layers_indices
    vision = TiledVisionConfig(
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        layers=fields.num_hidden_layers,
        global_layers=fields.num_global_layers,
        num_heads=fields.attention_heads,
        patch_size=fields.patch_size,
        tile_size=fields.image_size,
        max_tiles=fields.max_num_tiles,
        deep_layers=_DEEP_LAYERS if deep is None else tuple(deep),
        norm_eps=fields.norm_eps,
        image_mean=scale.image_mean,
        image_std=scale.image_std,
        rescale_factor=scale.rescale_factor,
    )
    _refuse(fields, vision)
    if settings:
        _check_tiles(msgspec.convert(settings, _RawTiles), vision)
    return vision


def _refuse(fields: _RawVision, vision: TiledVisionConfig) -> None:
    """Reject settings that would silently change the features."""
    ratios = [list(ratio) for ratio in aspect_ratios(vision.max_tiles)]
    supported = fields.supported_aspect_ratios
    if fields.hidden_act != "gelu" or fields.num_channels != 3:
        raise CheckpointError(
            f"config.json: unsupported vision_config: hidden_act '{fields.hidden_act}', "
            f"num_channels {fields.num_channels}"
        )
    if vision.hidden_size % vision.num_heads or vision.head_dim % 2:
        raise CheckpointError(
            f"config.json: attention_heads {vision.num_heads} of the tower do not divide "
            f"hidden_size {vision.hidden_size} in pairs"
        )
    if vision.tile_size % vision.patch_size:
        raise CheckpointError(
            f"config.json: a tile of image_size {vision.tile_size} has no whole patches of "
            f"patch_size {vision.patch_size}"
        )
    if supported is not None and supported != ratios:
        raise CheckpointError(
            "config.json: supported_aspect_ratios must be those of max_num_tiles "
            f"{vision.max_tiles}"
        )
    if not all(0 <= layer < vision.layers for layer in vision.deep_layers):
        raise CheckpointError(
            f"config.json: intermediate_layers_indices {list(vision.deep_layers)} are not layers "
            f"of the tower's num_hidden_layers {vision.layers}"
        )
    if fields.vision_output_dim != vision.features:
        raise CheckpointError(
            f"config.json: vision_output_dim {fields.vision_output_dim} is not hidden_size "
            f"{vision.hidden_size} times {1 + len(vision.deep_layers)}, by the "
            "intermediate_layers_indices"
        )


def _check_tiles(settings: _RawTiles, vision: TiledVisionConfig) -> None:
    tiles, sides = settings.max_image_tiles, set(settings.size.values())
    if tiles != vision.max_tiles or (sides and sides != {vision.tile_size}):
        raise CheckpointError(
            f"preprocessor_config.json has {tiles} tiles of {sorted(sides)} pixels, but "
            f"vision_config has max_num_tiles {vision.max_tiles} and image_size {vision.tile_size}"
        )


def cross_layers(text: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the ascending indices of the cross-attention layers among ``num_layers`` layers.

    Raises CheckpointError if the first layer is one, or if they outnumber the other layers, whose
    KV memory holds their keys and values.
    """
    given = text.get("cross_attention_layers")
    found = msgspec.convert(_CROSS_LAYERS if given is None else given, tuple[int, ...])
    if not found or sorted(set(found)) != list(found) or not 0 < found[0] <= found[-1] < num_layers:
        raise CheckpointError(
            f"config.json: cross_attention_layers {list(found)} are not ascending layers from 1 to "
            f"{num_layers - 1} of num_hidden_layers {num_layers}"
        )
    if 2 * len(found) > num_layers:
        raise CheckpointError(
            f"config.json: {len(found)} cross_attention_layers of num_hidden_layers {num_layers}; "
            "at most half of them can be"
        )
    return found
