"""The settings of a Gemma 3 decoder that other decoders do not have.

A config.json of transformers 5 has one object of rope settings per kind of layer; older ones have
``rope_theta``, ``rope_local_base_freq`` and ``rope_scaling``, which is of full attention alone.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.proto.errors import CheckpointError

from ..models.rope import parse_rope
from .config_numbers import Finite, Positive

GEMMA3 = "Gemma3ForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"
_ROPE_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq",
    "original_max_position_embeddings",  # transformers reads it in the objects alone
)  # fmt: skip


class _Raw(msgspec.Struct, kw_only=True):
    """The keys read from config.json besides those of every decoder."""

    num_hidden_layers: int
    hidden_activation: str
    query_pre_attn_scalar: Positive
    sliding_window_pattern: Annotated[int, Meta(ge=1)] = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: Finite | None = None
    attn_logit_softcapping: Finite | None = None
    use_bidirectional_attention: bool | None = None


def plain_settings(filled: dict[str, Any]) -> dict[str, Any]:
    """Return the settings under the keys of every decoder. Raises CheckpointError."""
    raw = msgspec.convert(filled, _Raw)
    if raw.hidden_activation != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"config.json: unsupported hidden_activation '{raw.hidden_activation}'"
        )
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(raw, name) is not None:
            raise CheckpointError(f"config.json: {name} is not supported")
    if raw.use_bidirectional_attention:
        raise CheckpointError("config.json: use_bidirectional_attention is not supported")
    layers = range(1, raw.num_hidden_layers + 1)
    types = [SLIDING if layer % raw.sliding_window_pattern else FULL for layer in layers]
    kept = {key: value for key, value in filled.items() if key not in _ROPE_KEYS}
    return kept | {
        "hidden_act": "silu",  # of the decoders that these keys are made for
        "use_sliding_window": True,
        "layer_types": raw.layer_types or types,
        "rope_parameters": _rope(filled, FULL),
    }


def own_settings(filled: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a GemmaConfig that a ModelConfig lacks."""
    kept = {key: value for key, value in filled.items() if key not in _ROPE_KEYS}
    local = parse_rope(kept | {"rope_parameters": _rope(filled, SLIDING)})
    return {"local_rope": local, "query_pre_attn_scalar": float(filled["query_pre_attn_scalar"])}


def _rope(filled: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the rope settings of a kind of layers, as a flat object. Raises CheckpointError.

    As in transformers, ``rope_scaling`` changes those of full attention alone.
    """
    newer = msgspec.convert(filled.get("rope_parameters") or {}, dict[str, Any])
    found = dict(msgspec.convert(newer.get(kind) or {}, dict[str, Any]))
    if kind == FULL:
        scaling = msgspec.convert(filled.get("rope_scaling") or {}, dict[str, Any])
        _check_scaling(scaling, filled.get("rope_parameters"))
        found |= scaling
    base = filled.get("rope_theta" if kind == FULL else "rope_local_base_freq")
    if base is not None:
        found.setdefault("rope_theta", base)
    return found


def _check_scaling(scaling: dict[str, Any], parameters: dict[str, Any] | None) -> None:
    """Raise CheckpointError for a ``rope_scaling`` that transformers refuses or ignores."""
    if not scaling:
        return
    if parameters is not None and not parameters.get(FULL):
        raise CheckpointError(
            f"config.json: rope_scaling changes rope_parameters.{FULL}, which is missing"
        )
    if parameters is None and "rope_type" not in scaling and scaling.get("type") != "default":
        raise CheckpointError(
            "config.json: rope_scaling has no rope_type; transformers ignores its type in a "
            "Gemma 3 model"
        )
