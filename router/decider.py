"""Decide whether a request takes the way over a prefill worker or is local to a decode worker.

*Disaggregated* uses a prefill worker, and a decode worker alone only while no prefill worker is
ready. *Colocated* uses decode workers alone. A local request has no handoff, and the router treats
it as a request after its handoff (docs/decisions/0047-a-decode-worker-computes-prompts.md).

Pure.
"""

from __future__ import annotations

from baton.proto.requests import local_feature

from .config import RouterConfig
from .registry import Registry
from .requests import Request
from .workers import Worker

COLOCATED = "colocated workers"
NO_PREFILL = "no prefill worker was ready"


class Decider:
    """Applies the configured mode."""

    def __init__(self, registry: Registry, config: RouterConfig) -> None:
        self._registry = registry
        self.always = config.mode == "colocated"
        """Whether every request is local, so that no prefill worker is looked for."""
        self._falls_back = not config.enforce_disaggregation

    def local(self, request: Request, decodes: list[Worker]) -> tuple[list[Worker], str]:
        """Return the decode workers that may serve the request alone, and why, or none.

        Call it without a candidate for a prefill worker, or if :attr:`always`. A request that is
        pinned to a prefill worker is never local. Workers that are only avoided for the moment,
        such as full ones, are worth waiting for.
        """
        if request.pin is not None and request.pin[0] == "prefill":
            return [], ""
        if not self.always and (
            not self._falls_back or self._registry.ready("prefill", request.pool)
        ):
            return [], ""
        feature = local_feature(request.context)
        able = [worker for worker in decodes if feature in worker.card.features]
        return able, COLOCATED if self.always else NO_PREFILL
