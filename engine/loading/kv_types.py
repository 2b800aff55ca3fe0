"""The type in which a model's keys and values are kept, and the type to which they are rounded.

Workers of one cluster may keep them in different types. All of them round to the narrowest of these
types, so the values are the same on every worker, and a conversion between two of them changes
nothing (docs/decisions/0059).
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.proto.errors import ConfigError
from baton.proto.layout import KV_CHOICES, KV_TYPES

from ..kernels.backend import Backend
from .checkpoint import Checkpoint
from .model_config import CrossConfig

AUTO = KV_CHOICES[0]
_WIDE_WEIGHTS = frozenset({"F32", "F16", "F64"})


def kv_type_of(checkpoint: Checkpoint, wanted: str = AUTO, *, floats: bool = False) -> str:
    """Return the type that a setting means for a model: "auto" depends on its weights.

    ``floats``: quantized weights become float32. Raises ConfigError for an unknown type, and for a
    type that the model's images do not have.
    """
    if wanted not in KV_CHOICES:
        raise ConfigError(f"kv_type must be one of {', '.join(KV_CHOICES)}, not {wanted!r}")
    if isinstance(checkpoint.config, CrossConfig):
        if wanted not in (AUTO, "float32"):
            raise ConfigError(f"{checkpoint.folder} has its images as float32 keys and values only")
        return "float32"
    if wanted != AUTO:
        return wanted
    narrow = set(checkpoint.weight_dtypes()) - _WIDE_WEIGHTS
    return "bfloat16" if narrow and not floats else "float32"


def set_kv_type(
    checkpoint: Checkpoint, backend: Backend, wanted: str, pools: Sequence[str] = ()
) -> None:
    """Let a backend keep keys and values in the ``wanted`` type.

    ``pools``: the types that the cluster's pools want. Raises ConfigError for a type that the
    kernels lack, and on a GPU for pools of several types.
    """
    if not backend.on_host:
        kinds = [backend.kv_types[0] if one == AUTO else one for one in (wanted, *pools)]
        lacking = [one for one in kinds if one not in backend.kv_types]
        if lacking:
            has = " or ".join(backend.kv_types)
            raise ConfigError(f"kv_type {lacking[0]}: device cuda keeps keys and values in {has}")
        if len(set(kinds)) > 1:
            found = " and ".join(sorted(set(kinds)))
            raise ConfigError(f"kv_type: all pools on device cuda have one type, not {found}")
    else:
        floats = backend.wide_weights
        kinds = [kv_type_of(checkpoint, one, floats=floats) for one in (wanted, *pools)]
    backend.kv_dtype = kinds[0]
    backend.kv_rounding = max(kinds, key=KV_TYPES.index)
