"""The settings of each revision, and the members made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.proto.errors import ConfigError

from ..config import ServeSettings, check, convert
from ..controller.backend import MemberSpec
from .plan import ClusterPlan, gateway_names, process_of
from .prepare import check_extensions, check_model

FIXED = (
    "task", "routers", "gateways", "http_host", "http_port", "address", "transport", "run_dir",
    "keys", "admin", "device", "device_ids", "kv_type", "prefill_kv_type", "decode_kv_type",
    "prefill", "decode", "prefill_min", "prefill_max", "decode_min", "decode_max", "workers_max",
)  # fmt: skip
"""Settings that a rollout cannot change: addresses, and settings with a separate command."""


class Revisions:
    """The revisions of one cluster. ``known``: those of a previous controller, by number."""

    def __init__(self, plan: ClusterPlan, known: Mapping[int, ServeSettings] | None = None) -> None:
        self._plan = plan
        self._settings = {0: plan.settings, **(known or {})}
        self.kv_default = plan.kv_default
        """KV memory per worker, the same in all revisions, so that all workers have one size."""

    @property
    def newest(self) -> int:
        """The latest revision."""
        return max(self._settings)

    @property
    def known(self) -> dict[int, ServeSettings]:
        """The settings of all revisions."""
        return dict(self._settings)

    def settings(self, revision: int) -> ServeSettings:
        """Return the settings of a revision."""
        return self._settings[revision]

    def add(self, current: int, changes: Mapping[str, Any]) -> int:
        """Add settings for a rollout: those of ``current`` with ``changes``. Returns the revision.

        Raises ConfigError or CheckpointError, and then adds no revision.
        """
        settings = changed(self._settings[current], changes)
        check_extensions(settings)  # first: a model family reads the folder
        check_model(settings)
        revision = self.newest + 1
        # Make one process of each role here, so that wrong settings raise before the rollout.
        gateways = gateway_names(settings)[:1]
        book = self._plan.book
        for name in ("prefill-0", "decode-0", *book.clients, *gateways):
            had_gpu = name in book.gpus
            process_of(name, settings, book, self._plan.cluster_key, self.kv_default)
            if not had_gpu:  # no worker has this name, so it must not keep a GPU from others
                book.gpus.release(name)
        self._settings[revision] = settings
        return revision

    def spec(self, name: str, role: str, revision: int, gateways: int = 0) -> MemberSpec:
        """Make the specification to start a member.

        ``gateways``: their target number, which decides the ports of their metrics; 0: as launched.
        """
        plan = self._plan
        settings = self._settings[revision]
        if gateways:
            settings = msgspec.structs.replace(settings, gateways=gateways)
        process = process_of(name, settings, plan.book, plan.cluster_key, self.kv_default, role)
        if settings.log_format == "json":
            process = msgspec.structs.replace(process, json_log=True)
        return MemberSpec(name=name, role=role, revision=revision, process=process)

    def release(self, name: str) -> None:
        """Release the addresses of an ended member."""
        self._plan.book.release(name)


def changed(settings: ServeSettings, changes: Mapping[str, Any]) -> ServeSettings:
    """Replace some settings and check the result. Raises ConfigError."""
    before = msgspec.to_builtins(settings)
    after = convert({**before, **changes})
    for name in FIXED:
        if getattr(after, name) != getattr(settings, name):
            scaled = name in ("prefill", "decode", "gateways")
            how = "use baton scale" if scaled else "launch a new cluster"
            raise ConfigError(f"a rollout cannot change {name}; {how}")
    for role in ("", "prefill_", "decode_"):  # blocks and memory replace each other
        for one, other in (("kv_blocks", "kv_memory"), ("kv_memory", "kv_blocks")):
            if changes.get(role + one) and role + other not in changes:
                default = getattr(ServeSettings(), role + other)
                after = msgspec.structs.replace(after, **{role + other: default})
    # An embedding model has 0 decode workers, which check() would reject.
    least = max(1, after.decode_min)
    check(after if after.decode else msgspec.structs.replace(after, decode=least))
    return after
