"""The bounds of the pools' sizes and of the number of gateways, and the check of requested ones."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton.engine.loading.embedding_config import EMBED

from ..config import MAX_GATEWAYS, MAX_MEMBERS, MAX_PORT, ServeSettings
from ..roles import DECODE, GATEWAY, POOLS, PREFILL


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum and maximum workers of each pool; 0: no bound. ``embeds``: no decode workers.

    ``workers_max``: maximum workers of both pools together; 0: no bound. ``gateway_max``: maximum
    gateways; 0: the cluster was launched without any, so it has no port.
    """

    prefill_min: int = 0
    prefill_max: int = 0
    decode_min: int = 0
    decode_max: int = 0
    workers_max: int = 0
    embeds: bool = False
    gateway_max: int = 0

    @classmethod
    def of(cls, settings: ServeSettings) -> Bounds:
        """Take the bounds from settings."""
        return cls(
            prefill_min=settings.prefill_min,
            prefill_max=settings.prefill_max,
            decode_min=settings.decode_min,
            decode_max=settings.decode_max,
            workers_max=settings.workers_max,
            embeds=settings.task == EMBED,
            gateway_max=_most_gateways(settings),
        )

    def least(self, role: str) -> int:
        """Minimum workers of a pool, or gateways."""
        if role == GATEWAY:
            return 1
        if role == DECODE and self.embeds:
            return 0
        return max(1, self.prefill_min if role == PREFILL else self.decode_min)

    def most(self, role: str) -> int:
        """Maximum workers of a pool, or gateways."""
        if role == GATEWAY:
            return self.gateway_max
        if role == DECODE and self.embeds:
            return 0
        most = (self.prefill_max if role == PREFILL else self.decode_max) or MAX_MEMBERS
        return min(most, most_beside(self.workers_max, embeds=self.embeds) or MAX_MEMBERS)


def most_beside(workers_max: int, *, embeds: bool) -> int:
    """Return the maximum of a pool if both have at most this many workers; 0: no maximum."""
    return workers_max if embeds else max(0, workers_max - 1)


def _most_gateways(settings: ServeSettings) -> int:
    """Return the maximum number of gateways, each of which may have a port for its metrics."""
    if not settings.gateways:
        return 0
    if not settings.metrics_port:
        return MAX_GATEWAYS
    return min(MAX_GATEWAYS, MAX_PORT + 1 - settings.metrics_port - settings.routers)


def scale_refusal(
    targets: Mapping[str, int], bounds: Bounds, present: Mapping[str, int] | None = None
) -> str:
    """Return why the pools cannot have these sizes, in one sentence, or an empty text.

    ``present``: the sizes of the pools that ``targets`` leaves out.
    """
    if not targets:
        return "name a pool and its size, such as decode=2"
    for role, count in targets.items():
        if role not in (*POOLS, GATEWAY):
            return f"no pool {role[:40]!r}; scale {', '.join(POOLS)} or {GATEWAY}"
        if role == GATEWAY and not bounds.gateway_max:
            return "the cluster was launched without gateways; start one with baton gateway"
        if role == DECODE and bounds.embeds:
            return "an embedding model has no decode workers; scale prefill only"
        if count < bounds.least(role):
            rule = f" ({role}_min)" if bounds.least(role) > 1 else ""
            return f"{role} must be at least {bounds.least(role)}{rule}, not {count}"
        if count > bounds.most(role):
            rule = f" ({role}_max)" if role in POOLS and bounds.most(role) < MAX_MEMBERS else ""
            return f"{role} must be at most {bounds.most(role)}{rule}, not {count}"
    total = sum({**(present or {}), **targets}.get(role, 0) for role in POOLS)
    if bounds.workers_max and total > bounds.workers_max:
        return f"both pools together must have at most {bounds.workers_max} workers, not {total}"
    return ""


def clamped(targets: Mapping[str, int], bounds: Bounds) -> dict[str, int]:
    """Move sizes into the bounds. Roles other than the pools are left out."""
    return {
        role: min(max(targets[role], bounds.least(role)), bounds.most(role))
        for role in POOLS
        if role in targets
    }


def describe_targets(targets: Mapping[str, int]) -> str:
    """Format sizes as in ``baton scale``: ``prefill=2 decode=3``."""
    return " ".join(f"{role}={count}" for role, count in targets.items())
