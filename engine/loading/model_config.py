"""The model's configuration, read from config.json in its older and newer layouts.

Older checkpoints have ``rope_theta``, ``rope_scaling`` and ``torch_dtype``; newer ones
``rope_parameters`` and ``dtype``. Both become one :class:`ModelConfig`, so later code
does not see the difference. Settings that the models do not support are rejected here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.proto.errors import CheckpointError
from baton.proto.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE

from ..models.rope import RopeConfig, check_frequencies, parse_rope
from .config_numbers import Epsilon
from .family_defaults import FAMILY_DEFAULTS, PHI3
from .fp8 import read_fp8
from .gemma_config import GEMMA3, own_settings, plain_settings
from .json_files import read_json
from .own_family import own_family
from .tiled_config import (
    EXTRA_TOKENS,
    MLLAMA,
    TiledVisionConfig,
    cross_layers,
    parse_tiled_vision,
)
from .vision_config import QWEN2_5_VL, QWEN3_VL, VisionConfig, parse_vision, rope_axes

FAMILIES = {
    **{name: name for name in FAMILY_DEFAULTS},
    **{
        f"{family}Model": f"{family}ForCausalLM"
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    },
}
"""The architecture with a head, by ``architectures[0]``. Embedding models are saved without one."""
SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
_WAY_OUT = "a class of your own can serve another architecture: --model-family (docs/extend.md)"
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    GEMMA3: "gemma3_text",
    PHI3: "phi3",
    QWEN2_5_VL: "qwen2_5_vl",
    QWEN3_VL: "qwen3_vl",
    MLLAMA: "mllama",
    "BertModel": "bert",
}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and options of a decoder.

    ``windows``: sliding window per layer, in tokens (0: full attention). ``eos_token_ids``: from
    config.json; generation_config.json may set others. ``dtype``: as stated by the checkpoint;
    the tensors decide.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    dtype: str


class BertConfig(ModelConfig, frozen=True, kw_only=True):
    """Shape of a BERT encoder; of ``rope``, only the number of positions is used."""

    layer_norm_eps: float
    type_vocab_size: int


class GemmaConfig(ModelConfig, frozen=True, kw_only=True):
    """Shape of a Gemma 3 decoder.

    ``local_rope``: of layers with a sliding window; ``rope`` is of the others.
    ``query_pre_attn_scalar``: the power -1/2 of this number scales the products of attention.
    """

    local_rope: RopeConfig
    query_pre_attn_scalar: float


class VisionLanguageConfig(ModelConfig, frozen=True, kw_only=True):
    """Shape of a decoder with a vision tower.

    ``image_token_id``: placeholder token of images. ``rope_axes``: for each pair of channels of a
    head, the rope position that turns it: 0 time, 1 row, 2 column.
    """

    vision: VisionConfig
    image_token_id: int
    rope_axes: tuple[int, ...]


class CrossConfig(ModelConfig, frozen=True, kw_only=True):
    """Shape of a decoder that reads images in cross-attention layers.

    ``num_layers``, ``windows``: of the layers with self-attention only. ``cross_layers``: indices
    of the others among all layers. ``vocab_size``: with the rows for special tokens such as
    ``image_token_id``, which have no logits.
    """

    vision: TiledVisionConfig
    image_token_id: int
    cross_layers: tuple[int, ...]

    @property
    def self_layers(self) -> tuple[int, ...]:
        """Indices of the layers with self-attention among all layers."""
        every = range(self.num_layers + len(self.cross_layers))
        return tuple(layer for layer in every if layer not in self.cross_layers)

    @property
    def tokens_per_position(self) -> int:
        """Vision tokens whose cross-attention keys and values fit into one position's KV memory."""
        return self.num_layers // len(self.cross_layers)

    @property
    def image_positions(self) -> int:
        """Positions whose KV memory holds the cross-attention keys and values of an image."""
        return -(-self.vision.image_tokens // self.tokens_per_position)


_TEXT_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "tie_word_embeddings": "tie_word_embeddings",
    "o_bias": "attention_bias", "mlp_bias": "mlp_bias", "type_vocab_size": "type_vocab_size",
    "cross_layers": "cross_attention_layers",
}  # fmt: skip
_VISION_SIZES = {
    "depth": "depth", "layers": "num_hidden_layers", "global_layers": "num_global_layers",
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_heads": "num_heads", "patch_size": "patch_size", "tile_size": "image_size",
    "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size",
    "out_hidden_size": "out_hidden_size", "side": "num_position_embeddings, its root",
    "deep_layers": "deepstack_visual_indexes or intermediate_layers_indices",
    "max_tiles": "max_num_tiles",
}  # fmt: skip


def stated_sizes(config: ModelConfig) -> str:
    """Return the sizes that decide the tensors' shapes, under their names in config.json."""
    text = [
        f"{name} {getattr(config, field)}"
        for field, name in _TEXT_SIZES.items()
        if hasattr(config, field)
    ]
    if isinstance(config, BertConfig):
        text.append(f"max_position_embeddings {config.rope.max_position_embeddings}")
    if not isinstance(config, VisionLanguageConfig | CrossConfig):
        return f"config.json: {', '.join(text)}"
    vision = [
        f"{name} {getattr(config.vision, field)}"
        for field, name in _VISION_SIZES.items()
        if hasattr(config.vision, field)
    ]
    return f"config.json: {', '.join(text)}; vision_config: {', '.join(vision)}"


Size = Annotated[int, Meta(le=MAX_SIZE)]
"""A dimension. Whether it is positive is checked later, with a readable message."""
Layers = Annotated[int, Meta(le=MAX_LAYERS)]
Positions = Annotated[int, Meta(le=MAX_POSITIONS)]
Token = Annotated[int, Meta(ge=-MAX_SIZE, le=MAX_SIZE)]
"""An id of a token, which may lie outside the vocabulary."""


class _Raw(msgspec.Struct, kw_only=True):
    """The keys read from config.json, typed and bounded; other keys are ignored.

    The defaults are those of keys that a family does not have.
    """

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Positions
    rms_norm_eps: Epsilon
    hidden_act: str
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    eos_token_id: Token | list[Token] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json``. Raises :class:`CheckpointError` if the model is not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: config.json is missing; is this a model folder?")
    raw = read_json(path)
    own = own_family()
    if own is not None:
        raw = own.config(raw)
    origin = f"{path}:" if own is None else f"{path}: {own.said}: config() returned"
    architecture = _architecture(origin, raw)
    family = FAMILIES[architecture]
    try:
        if raw.get("model_type", _MODEL_TYPES[family]) != _MODEL_TYPES[family]:
            raise CheckpointError(
                f"config.json: model_type {raw['model_type']} does not fit {architecture}; "
                f"{_WAY_OUT}"
            )
        if family in (QWEN2_5_VL, QWEN3_VL):
            return parse_vision_language_config(raw, family, folder)
        if family == MLLAMA:
            return parse_cross_config(raw, family, folder)
        parse = _PARSERS.get(family, parse_model_config)
        return msgspec.structs.replace(parse(raw, family), architecture=architecture)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def parse_model_config(raw: dict[str, Any], architecture: str) -> ModelConfig:
    """Build the config from config.json's object. Raises as :func:`load_model_config`."""
    return ModelConfig(**_decoder_fields(raw, architecture))


def parse_gemma_config(raw: dict[str, Any], architecture: str) -> GemmaConfig:
    """Build the config of a Gemma 3. Raises as :func:`load_model_config`."""
    filled = {**_family_keys(architecture), **raw}
    fields = _decoder_fields(plain_settings(filled), architecture)
    config = GemmaConfig(**fields, **own_settings(filled))
    check_frequencies(config.local_rope, config.head_dim)
    return config


def parse_phi_config(raw: dict[str, Any], architecture: str) -> ModelConfig:
    """Build the config of a Phi-3 or Phi-4. Raises as :func:`load_model_config`.

    As in transformers, the older names of its rope scaling stand for ``longrope``.
    """
    named = dict(raw)
    for key in ("rope_scaling", "rope_parameters"):
        rope = msgspec.convert(raw.get(key) or {}, dict[str, Any])
        for kind in ("type", "rope_type"):
            if rope.get(kind) in ("su", "yarn"):
                named[key] = rope = {**rope, kind: "longrope"}
    return ModelConfig(**_decoder_fields(named, architecture))


def parse_vision_language_config(
    raw: dict[str, Any], architecture: str, folder: Path | None = None
) -> VisionLanguageConfig:
    """Build the config of a decoder with a tower. Raises as :func:`load_model_config`.

    ``raw``: the decoder's keys at its top level (files of the hub) or in ``text_config``.
    ``folder``: has the image processor's settings.
    """
    text = _text_settings(raw, architecture)
    tied = raw.get("tie_word_embeddings") is True or text.get("tie_word_embeddings") is True
    for key in ("rope_scaling", "rope_parameters"):
        nested = text.get(key)
        if isinstance(nested, dict):
            plain = {k: "default" if v == "mrope" else v for k, v in nested.items()}
            text[key] = plain
    fields = _decoder_fields({**text, "tie_word_embeddings": tied}, architecture)
    vision = parse_vision(raw, architecture, folder)
    if vision.out_hidden_size != fields["hidden_size"]:
        raise CheckpointError(
            f"config.json: out_hidden_size {vision.out_hidden_size} of vision_config does not fit "
            f"hidden_size {fields['hidden_size']} of text_config"
        )
    if len(vision.deep_layers) >= fields["num_layers"]:
        raise CheckpointError(
            f"config.json: num_hidden_layers {fields['num_layers']} of text_config are too few for "
            f"the features of {len(vision.deep_layers)} deepstack_visual_indexes"
        )
    image_token = _image_token(raw, architecture)
    if not 0 <= image_token < fields["vocab_size"]:
        raise CheckpointError(f"config.json: image_token_id {image_token} is not below vocab_size")
    return VisionLanguageConfig(
        **fields,
        vision=vision,
        image_token_id=image_token,
        rope_axes=rope_axes(text, architecture, fields["head_dim"]),
    )


def parse_cross_config(
    raw: dict[str, Any], architecture: str, folder: Path | None = None
) -> CrossConfig:
    """Build the config of a decoder with cross-attention. Raises as :func:`load_model_config`.

    ``folder``: has the image processor's settings.
    """
    fields = _decoder_fields(_text_settings(raw, architecture), architecture)
    if fields["tie_word_embeddings"]:
        raise CheckpointError(
            "config.json: tied embeddings (tie_word_embeddings) are not supported"
        )
    cross = cross_layers(_text_settings(raw, architecture), fields["num_layers"])
    layers = fields["num_layers"] - len(cross)
    fields |= {"num_layers": layers, "windows": (0,) * layers}
    image_token = _image_token(raw, architecture)
    vocabulary = fields["vocab_size"]
    fields["vocab_size"] = vocabulary + EXTRA_TOKENS
    if not vocabulary <= image_token < fields["vocab_size"]:
        raise CheckpointError(
            f"config.json: image_token_index {image_token} is not one of the {EXTRA_TOKENS} tokens "
            f"after vocab_size {vocabulary} of text_config"
        )
    vision = parse_tiled_vision(raw, folder)
    return CrossConfig(**fields, vision=vision, image_token_id=image_token, cross_layers=cross)


def _text_settings(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the decoder's settings of a config.json with ``text_config``.

    Files of Qwen2.5-VL on the hub have them at the top level instead.
    """
    nested = raw.get("text_config")
    if nested is not None:
        return dict(msgspec.convert(nested, dict[str, Any]))
    if architecture != QWEN2_5_VL:
        return {}
    known = (*FAMILY_DEFAULTS[architecture]["text_config"], "rope_scaling", "rope_parameters")
    return {key: raw[key] for key in known if key in raw}


def _image_token(raw: dict[str, Any], architecture: str) -> int:
    """Return the placeholder of images. Raises CheckpointError if two keys name two tokens."""
    keys = ("image_token_id", "image_token_index")
    defaults = FAMILY_DEFAULTS[architecture][""]
    given = [msgspec.convert(raw[key], int) for key in keys if raw.get(key) is not None]
    if len(set(given)) > 1:
        raise CheckpointError(f"config.json: {' and '.join(keys)} differ: {given}")
    return given[0] if given else int(next(defaults[key] for key in keys if key in defaults))


def _end_tokens(raw: dict[str, Any], fields: _Raw) -> tuple[int, ...]:
    """Return the stated ids, or the family's; a small vocabulary may not have the latter."""
    ids = token_ids(fields.eos_token_id)
    return ids if "eos_token_id" in raw else tuple(i for i in ids if i < fields.vocab_size)


def _decoder_fields(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the fields of a :class:`ModelConfig`."""
    filled = {**_family_keys(architecture), **raw}
    fields = msgspec.convert(filled, _Raw)
    _refuse(filled, fields)
    kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    head_dim = fields.head_dim or fields.hidden_size // fields.num_attention_heads
    if fields.num_attention_heads % kv_heads or head_dim < 2 or head_dim % 2:
        raise CheckpointError(
            f"config.json: num_attention_heads {fields.num_attention_heads}, head_dim {head_dim} "
            f"and num_key_value_heads {kv_heads} do not fit each other and rotary pairs"
        )
    rope = parse_rope(filled, partial=architecture == PHI3)
    check_frequencies(rope, head_dim)
    qwen2 = architecture in ("Qwen2ForCausalLM", QWEN2_5_VL)
    qwen3 = architecture in ("Qwen3ForCausalLM", QWEN3_VL)
    biased = fields.attention_bias and (qwen3 or architecture in ("LlamaForCausalLM", GEMMA3))
    return {
        "architecture": architecture,
        "vocab_size": fields.vocab_size,
        "hidden_size": fields.hidden_size,
        "intermediate_size": fields.intermediate_size,
        "num_layers": fields.num_hidden_layers,
        "num_heads": fields.num_attention_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.rms_norm_eps,
        "rope": rope,
        "tie_word_embeddings": fields.tie_word_embeddings,
        "qkv_bias": qwen2 or biased,
        "o_bias": biased,
        "mlp_bias": fields.mlp_bias and architecture == "LlamaForCausalLM",
        "qk_norm": qwen3 or architecture == GEMMA3,
        "windows": _windows(fields, architecture),
        "eos_token_ids": _end_tokens(raw, fields),
        "dtype": fields.dtype or fields.torch_dtype or "float32",
    }


class _RawBert(msgspec.Struct, kw_only=True):
    """The keys read from a BERT's config.json."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    max_position_embeddings: Positions
    type_vocab_size: Size
    layer_norm_eps: Epsilon
    hidden_act: str
    position_embedding_type: str | None = "absolute"
    is_decoder: bool
    dtype: str | None = None
    torch_dtype: str | None = None


def parse_bert_config(raw: dict[str, Any], architecture: str) -> BertConfig:
    """Build a BERT's config from config.json's object. Raises as :func:`load_model_config`."""
    fields = msgspec.convert({**FAMILY_DEFAULTS[architecture][""], **raw}, _RawBert)
    _refuse_sizes(fields, raw)
    if fields.hidden_act != "gelu":
        raise CheckpointError(f"config.json: unsupported hidden_act '{fields.hidden_act}'")
    if fields.position_embedding_type not in (None, "absolute") or fields.is_decoder:
        raise CheckpointError(
            "config.json: only encoders with absolute positions are supported, not "
            f"position_embedding_type {fields.position_embedding_type} with is_decoder "
            f"{fields.is_decoder}"
        )
    heads, hidden = fields.num_attention_heads, fields.hidden_size
    if hidden % heads or hidden // heads % 2:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} do not divide hidden_size {hidden} in pairs"
        )
    if fields.type_vocab_size < 1:
        raise CheckpointError("config.json: type_vocab_size must be positive")
    return BertConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        rms_norm_eps=0.0,
        layer_norm_eps=fields.layer_norm_eps,
        rope=RopeConfig(max_position_embeddings=fields.max_position_embeddings),
        tie_word_embeddings=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=False,
        windows=(0,) * fields.num_hidden_layers,
        eos_token_ids=(),
        dtype=fields.dtype or fields.torch_dtype or "float32",
        type_vocab_size=fields.type_vocab_size,
    )


_PARSERS: dict[str, Callable[[dict[str, Any], str], ModelConfig]] = {
    "BertModel": parse_bert_config,
    GEMMA3: parse_gemma_config,
    PHI3: parse_phi_config,
}


def _architecture(origin: str, raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{origin} unsupported architecture "
            f"{name or 'none given'}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}; "
            f"{_WAY_OUT}"
        )
    return name


def _refuse(raw: dict[str, Any], fields: _Raw) -> None:
    """Reject settings that would silently change the results."""
    if fields.hidden_act != "silu":
        raise CheckpointError(f"config.json: unsupported hidden_act '{fields.hidden_act}'")
    _refuse_sizes(fields, raw)
    if (fields.num_key_value_heads or 1) < 1 or (fields.head_dim or 1) < 1:
        raise CheckpointError("config.json: num_key_value_heads and head_dim must be positive")


def _refuse_sizes(fields: _Raw | _RawBert, raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        read_fp8(raw["quantization_config"])
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    for name in sizes:
        if getattr(fields, name) < 1:
            raise CheckpointError(f"config.json: {name} must be positive")


def _windows(fields: _Raw, architecture: str) -> tuple[int, ...]:
    """Return the sliding window of each layer, 0 for full attention."""
    layers, window = fields.num_hidden_layers, fields.sliding_window
    if "sliding_window" not in _family_keys(architecture):
        return (0,) * layers
    if window is not None and window < 1:
        raise CheckpointError(f"config.json: sliding_window {window} must be positive")
    if architecture in ("MistralForCausalLM", PHI3):
        kind = "full_attention" if window is None else "sliding_attention"
        if set(fields.layer_types or ()) - {kind}:
            raise CheckpointError(f"config.json: layer_types other than {kind} are not supported")
        return (window or 0,) * layers
    if not fields.use_sliding_window:
        window = None
    if fields.layer_types is not None:
        return _windows_by_type(fields.layer_types, layers, window)
    full = min(fields.max_window_layers, layers)
    return (0,) * full + (window or 0,) * (layers - full)


def _family_keys(architecture: str) -> dict[str, Any]:
    """Return the decoder's keys that a family has, with their defaults."""
    defaults = FAMILY_DEFAULTS[architecture]
    return defaults.get("text_config", defaults[""])


def _windows_by_type(types: list[str], layers: int, window: int | None) -> tuple[int, ...]:
    known = {"full_attention": 0, "sliding_attention": window}
    windows = [known.get(kind) for kind in types]
    if len(types) != layers or None in windows:
        raise CheckpointError(
            f"config.json: layer_types {types} do not describe {layers} num_hidden_layers of full "
            f"or sliding attention (sliding_window {window}, by use_sliding_window)"
        )
    return tuple(w or 0 for w in windows)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return token ids given as one number, as a list, or not at all."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))
