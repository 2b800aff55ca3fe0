"""Targets and constants of the autoscaler."""

from __future__ import annotations

import math

import msgspec

from baton.proto.errors import ConfigError

from ..plan.bounds import Bounds
from ..roles import POOLS


class ScaleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latency targets, the bounds of both pools, and the timing; durations in seconds.

    ``slo_ttft``, ``slo_itl``: targets for TTFT and ITL, to be met for the share ``keep`` of the
    requests of the last ``window``. ``up_margin``, ``down_margin``: share of the targets that a
    pool may use when it grows and when it shrinks; the difference is the hysteresis.
    ``kv_share``: share of a decode worker's KV blocks in use at which the pool grows. ``calm``:
    stabilization window before a pool shrinks. ``cold_start``: first estimate of the time from an
    order for a worker to the worker's first report. ``spare``:
    time for which a pool must have had a worker to spare before it changes its role.
    """

    slo_ttft: float = 2.0
    slo_itl: float = 0.05
    bounds: Bounds = Bounds()
    keep: float = 0.97
    window: float = 300.0
    up_margin: float = 0.95
    down_margin: float = 0.8
    kv_share: float = 0.9
    calm: float = 600.0
    cold_start: float = 60.0
    spare: float = 120.0

    def __post_init__(self) -> None:
        """Check all fields. Raises ConfigError with the field's name."""
        for name in ("slo_ttft", "slo_itl", "window", "calm", "cold_start", "spare"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a positive number of seconds")
        for name in ("keep", "up_margin", "down_margin", "kv_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}; it must be greater than 0 and at most 1")
        if self.down_margin > self.up_margin:
            raise ConfigError("down_margin must not be above up_margin, or a pool would flap")
        for role in POOLS:
            if self.bounds.least(role) > self.bounds.most(role):
                raise ConfigError(f"{role}_min is above {role}_max")
