"""What a member of a name and a revision is started with: one settings struct per revision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..proto.errors import ConfigError
from .config import ServeSettings, check, convert
from .launcher import MemberSpec
from .plan import ClusterPlan, process_of
from .prepare import check_model

FIXED = (
    "task", "routers", "address", "transport", "run_dir", "keys", "admin", "device",
    "prefill", "decode", "prefill_min", "prefill_max", "decode_min", "decode_max",
)  # fmt: skip
"""What a rollout cannot change: where processes meet, and what other verbs are for."""


class Roster:
    """The revisions of one cluster on this machine."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._settings = {0: plan.settings}
        self.kv_default = plan.kv_default
        """Of every revision: a worker added later is as large as the others."""

    @property
    def newest(self) -> int:
        """The highest revision there are settings for."""
        return max(self._settings)

    def settings(self, revision: int) -> ServeSettings:
        """Settings of a revision."""
        return self._settings[revision]

    def add(self, current: int, changes: Mapping[str, Any]) -> int:
        """Settings for a rollout: those of ``current`` with ``changes``; returns their revision.

        ConfigError or CheckpointError says what is wrong; then nothing is changed.
        """
        settings = changed(self._settings[current], changes)
        check_model(settings)
        revision = self.newest + 1
        # Made once for each role, so that what cannot be is said now.
        for name in ("prefill-0", "decode-0", *self._plan.book.clients):
            process_of(name, settings, self._plan.book, self._plan.cluster_key, self.kv_default)
        self._settings[revision] = settings
        return revision

    def spec(self, name: str, role: str, revision: int) -> MemberSpec:
        """The member as it is to be started."""
        plan = self._plan
        settings = self._settings[revision]
        process = process_of(name, settings, plan.book, plan.cluster_key, self.kv_default)
        return MemberSpec(name=name, role=role, revision=revision, process=process)

    def release(self, name: str) -> None:
        """The member has ended: its addresses are free."""
        self._plan.book.release(name)


def changed(settings: ServeSettings, changes: Mapping[str, Any]) -> ServeSettings:
    """Checked settings with some replaced; ConfigError for what a rollout cannot change."""
    before = msgspec.to_builtins(settings)
    after = convert({**before, **changes})
    for name in FIXED:
        if getattr(after, name) != getattr(settings, name):
            how = "use baton scale" if name in ("prefill", "decode") else "launch the cluster anew"
            raise ConfigError(f"a rollout cannot change {name}; {how}")
    for role in ("", "prefill_", "decode_"):  # one kind of size replaces the other
        for one, other in (("kv_blocks", "kv_memory"), ("kv_memory", "kv_blocks")):
            if changes.get(role + one) and role + other not in changes:
                default = getattr(ServeSettings(), role + other)
                after = msgspec.structs.replace(after, **{role + other: default})
    # An embedding model has no decode workers, which a launch cannot ask for.
    least = max(1, after.decode_min)
    check(after if after.decode else msgspec.structs.replace(after, decode=least))
    return after
