"""Rotary position embedding: the scalings of Llama-type models and their tables.

A table ``cos_sin[positions, head_dim]`` holds float32 cosines (first half of a row) and
sines (second half). Frequencies and angles are rounded to float32 exactly where
transformers rounds them, because at position 1000 one unit in the last place of a
frequency is visible in the logits.

Two scalings depend on the length of a sequence. A paged cache that sequences share cannot
follow that, so the served length fixes their frequencies instead.
``dynamic`` up to ``max_position`` and ``longrope`` up to ``original_max_position`` are
served exactly as transformers computes them, and these lengths are the default limits.
A longer served length (up to :meth:`RopeConfig.ceiling`) uses the frequencies of that
length for all positions of all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from baton.proto.errors import CheckpointError
from baton.proto.limits import MAX_POSITIONS

from ..loading.config_numbers import Finite, Positive

F32 = npt.NDArray[np.float32]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rope settings under the names of ``rope_parameters``; see :data:`SCALINGS`.

    ``rope_theta``: base. ``max_position_embeddings`` and the top-level
    ``original_max_position_embeddings`` are copied from the model's config.
    """

    rope_type: str = "default"
    rope_theta: Positive = 10000.0
    max_position_embeddings: int
    original_max_position_embeddings: Annotated[int, Meta(ge=0, le=MAX_POSITIONS)] | None = None
    factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Finite | None = None
    mscale_all_dim: Finite | None = None
    truncate: bool = True
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: tuple[Positive, ...] = ()
    long_factor: tuple[Positive, ...] = ()
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)] = 1.0

    @property
    def original(self) -> int:
        """Sequence length of the model's original training."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    def default_length(self) -> int:
        """Default number of positions to serve."""
        if self.rope_type == "longrope":
            return min(self.original, self.max_position_embeddings)
        return self.max_position_embeddings

    def ceiling(self) -> int:
        """Largest number of positions that can be served."""
        if self.rope_type == "dynamic":
            return int(self.max_position_embeddings * max(1.0, self.require("factor")))
        return self.max_position_embeddings

    def require(self, field: str) -> float:
        """Return a field that the scaling needs. Raises CheckpointError if it is missing."""
        value = getattr(self, field)
        if value is None:
            raise CheckpointError(f"config.json: rope type '{self.rope_type}' needs '{field}'")
        return float(value)


def parse_rope(raw: dict[str, Any], *, partial: bool = False) -> RopeConfig:
    """Read the rope settings of a config.json, in the old (``rope_scaling``) or new layout.

    ``partial``: whether the model may rotate only the first channels of a head.
    If both are there, ``rope_scaling`` replaces ``rope_parameters``, as in transformers. A user
    may have added it to a file that transformers wrote. Raises CheckpointError if that would
    replace the base too.
    """
    older, newer = (
        msgspec.convert(raw.get(key) or {}, dict[str, Any])
        for key in ("rope_scaling", "rope_parameters")
    )
    fields = dict(older or newer)
    if fields.get("original_max_position_embeddings", 0) is None:
        raise CheckpointError("config.json: original_max_position_embeddings must be a number")
    fields = {name: value for name, value in fields.items() if value is not None}
    fields.setdefault("rope_type", fields.pop("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if raw.get(key) is not None:
            fields.setdefault(key, raw[key])
    fields["max_position_embeddings"] = raw.get("max_position_embeddings")
    if raw.get("original_max_position_embeddings") is not None:
        fields["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    config = msgspec.convert(fields, RopeConfig)
    if newer.get("rope_theta", config.rope_theta) != config.rope_theta:
        raise CheckpointError(
            f"config.json: rope_scaling replaces rope_parameters, so rope_theta would be "
            f"{config.rope_theta:g} and not {newer['rope_theta']}; write it into rope_scaling"
        )
    if config.rope_type not in SCALINGS:
        raise CheckpointError(
            f"config.json: unsupported rope type '{config.rope_type}'; "
            f"supported are {', '.join(SCALINGS)}"
        )
    if config.partial_rotary_factor != 1.0 and config.rope_type != "proportional" and not partial:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    return config


def rotated_channels(config: RopeConfig, head_dim: int) -> int:
    """Return how many of a head's channels rotate. Raises CheckpointError for an odd number."""
    if config.rope_type == "proportional":
        return head_dim
    rotated = int(head_dim * config.partial_rotary_factor)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {config.partial_rotary_factor:g} gives {rotated} "
            f"rotary channels of {head_dim}"
        )
    return rotated


def check_frequencies(config: RopeConfig, head_dim: int) -> None:
    """Raise CheckpointError for settings that give no finite frequencies, such as a base of 1."""
    try:
        with np.errstate(all="ignore"):
            found, scale = frequencies(
                config, rotated_channels(config, head_dim), config.default_length()
            )
    except (ArithmeticError, ValueError):
        finite = False
    else:
        finite = math.isfinite(scale) and bool(np.isfinite(found).all())
    if not finite:
        fields = msgspec.structs.asdict(config).items()
        given = ", ".join(f"{name} {value}" for name, value in fields if value not in (None, ()))
        raise CheckpointError(
            f"config.json: no finite frequencies follow from the rope settings: head_dim "
            f"{head_dim}, {given}"
        )


def paired_channels(rotated: int, head_dim: int) -> list[int]:
    """Return the channels of a head in the order in which kernels rotate pairs.

    Kernels pair each channel of the first half with one of the second half; a model that rotates
    fewer channels pairs the halves of those.
    """
    half, rest = rotated // 2, (head_dim - rotated) // 2
    first, second = range(half), range(half, rotated)
    kept = range(rotated, head_dim)
    return [*first, *kept[:rest], *second, *kept[rest:]]


def frequencies(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:
    """Return the frequencies for sequences of up to ``length`` positions.

    The result is the angle per position of each pair of channels, float32 ``[head_dim / 2]``, and
    the factor for cosine and sine.
    """
    return SCALINGS[config.rope_type](config, head_dim, length)


def cos_sin_table(config: RopeConfig, head_dim: int, length: int) -> F32:
    """Return the table ``[length, head_dim]``: cosines, then sines, with the attention factor.

    Pairs that do not rotate come last in each half; the factor is not for them.
    """
    rotated = rotated_channels(config, head_dim)
    inv_freq, scale = frequencies(config, rotated, length)
    angles = np.arange(length, dtype=np.float32)[:, None] * inv_freq
    # As in transformers, the angle is rounded to float32; its cosine is computed in float64.
    exact = angles.astype(np.float64)
    turned = [part(exact).astype(np.float32) * np.float32(scale) for part in (np.cos, np.sin)]
    still = [(length, (head_dim - rotated) // 2)] * 2
    parts = zip(turned, (np.ones, np.zeros), still, strict=True)
    table = [np.concatenate([a, fill(n, np.float32)], axis=1) for a, fill, n in parts]
    return np.ascontiguousarray(np.concatenate(table, axis=1))


def _powers(theta: float, head_dim: int, count: int | None = None) -> F32:
    """``theta ** (2i / head_dim)``, rounded to float32."""
    channels = np.arange(0, head_dim if count is None else 2 * count, 2, dtype=np.float32)
    exponents = channels / np.float32(head_dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _inverse(powers: F32) -> F32:
    return np.float32(1.0) / powers


def _default(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:  # noqa: ARG001
    return _inverse(_powers(config.rope_theta, head_dim)), 1.0


def _linear(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:  # noqa: ARG001
    """Positions are interpolated by ``factor``."""
    plain = _inverse(_powers(config.rope_theta, head_dim))
    return plain / np.float32(config.require("factor")), 1.0


def _proportional(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:  # noqa: ARG001
    """Only the first pairs rotate, with the frequencies of the full head."""
    rotated = int(config.partial_rotary_factor * head_dim // 2)
    inv_freq = np.zeros(head_dim // 2, np.float32)
    inv_freq[:rotated] = _inverse(_powers(config.rope_theta, head_dim, rotated))
    return inv_freq / np.float32(config.factor or 1.0), 1.0


def _dynamic(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:
    """NTK scaling: the base grows with a served length above ``max_position_embeddings``."""
    factor, limit = config.require("factor"), config.max_position_embeddings
    stretch = factor * max(length, limit) / limit - (factor - 1)
    theta = config.rope_theta * stretch ** (head_dim / (head_dim - 2))
    return _inverse(_powers(theta, head_dim)), 1.0


def _llama3(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:  # noqa: ARG001
    """Long wavelengths are interpolated, short ones kept, those in between blended."""
    factor = np.float32(config.require("factor"))
    low, high = config.require("low_freq_factor"), config.require("high_freq_factor")
    plain = _inverse(_powers(config.rope_theta, head_dim))
    # torch computes number / tensor as reciprocal times number; this order gives equal roundings.
    wavelength = _inverse(plain) * np.float32(2 * math.pi)
    turns = _inverse(wavelength) * np.float32(config.original)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > config.original / low, plain / factor, blended)
    kept = np.where(wavelength < config.original / high, plain, scaled)
    return kept.astype(np.float32), 1.0


def _yarn(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:  # noqa: ARG001
    """Slow channels are interpolated, fast ones kept, with a ramp in between; plus a factor."""
    factor = config.factor or config.max_position_embeddings / config.original
    powers = _powers(config.rope_theta, head_dim)
    extrapolated = _inverse(powers)
    interpolated = _inverse(np.float32(factor) * powers)
    low, high = _yarn_range(config, head_dim)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep: F32 = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    inv_freq = interpolated * (1 - keep) + extrapolated * keep
    return inv_freq.astype(np.float32), _yarn_attention(config, factor)


def _yarn_range(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Return the channels between which the ramp runs."""

    def channel(rotations: float) -> float:
        turns = config.original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = channel(config.beta_fast or 32), channel(config.beta_slow or 1)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention(config: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _longrope(config: RopeConfig, head_dim: int, length: int) -> tuple[F32, float]:
    """One factor per pair of channels; the short factors up to the original length."""
    long = length > config.original
    factors = np.asarray(config.long_factor if long else config.short_factor, np.float32)
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"config.json: rope type 'longrope' needs {head_dim // 2} factors in "
            f"'{'long_factor' if long else 'short_factor'}', found {len(factors)}"
        )
    inv_freq = _inverse(factors * _powers(config.rope_theta, head_dim))
    return inv_freq, _longrope_attention(config)


def _longrope_attention(config: RopeConfig) -> float:
    factor = config.factor or config.max_position_embeddings / config.original
    if config.attention_factor is not None:
        return config.attention_factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(config.original))


SCALINGS: dict[str, Callable[[RopeConfig, int, int], tuple[F32, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""Frequencies by ``rope_type``."""
