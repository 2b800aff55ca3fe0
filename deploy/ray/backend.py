"""Ray as process manager: each member is an actor, watched on a separate thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...runtime.net.loop import Loop
from ...runtime.process.log import get_logger
from ..controller.backend import (
    GATEWAY,
    MemberDown,
    MemberEnded,
    MemberEvent,
    MemberSpec,
    MemberStarted,
)
from ..report import ClusterReport
from ..supervise.hangs import HangLimits, Hangs
from .watch import MemberAlive, MemberWatch, RayApi, WatchEvent

HANG_CHECK = 0.5
"""Seconds between checks for hanging members."""
_log = get_logger()


class RayBackend:
    """A ``Backend`` (see :mod:`..controller.backend`). ``emit`` is called on ``loop``."""

    def __init__(
        self,
        loop: Loop,
        api: RayApi,
        emit: Callable[[MemberEvent], object],
        worker_timeout: float,
    ) -> None:
        self._loop = loop
        self._emit = emit
        self._roles: dict[str, str] = {}
        self._hangs = Hangs(HangLimits(worker_timeout=worker_timeout))
        self._watch = MemberWatch(api, lambda event: loop.post(partial(self._on_event, event)))
        self._watch.begin()
        self._timer = loop.call_later(HANG_CHECK, self._look_for_hangs)

    def close(self) -> None:
        """Stop watching. The members keep running."""
        self._timer.cancel()
        self._watch.end()

    def put(self, command: Callable[[], object]) -> None:
        """Queue ``command`` for the thread that calls Ray."""
        self._watch.put(command)

    def start(self, spec: MemberSpec) -> None:
        """See ``Backend``. An existing actor with this name is taken over."""
        self._roles[spec.name] = spec.role
        self._watch.put(partial(self._watch.start, spec))

    def stop(self, name: str, grace: float) -> None:
        """See ``Backend``."""
        self._watch.put(partial(self._watch.stop, name, grace))

    def kill(self, name: str) -> None:
        """See ``Backend``."""
        self._watch.put(partial(self._watch.kill, name))

    def request(self, bundles: dict[str, int]) -> None:
        """See ``Backend``: the only code that requests room from Ray's autoscaler."""
        self._watch.put(partial(self._watch.request, dict(bundles)))

    def refusal(self, targets: dict[str, int]) -> str:
        """See ``Backend``: by the maximum capacity of the autoscaler's node types."""
        capacity = self._watch.capacity
        for role, count in targets.items():
            most = count if capacity is None else capacity.get(role, 0)
            if count > most:
                return (
                    f"{role}={count}: the nodes of this Ray cluster hold {most} {role} workers at "
                    "most; give fewer, or raise max_workers and the hosts of this node type"
                )
        return ""

    def full(self, targets: dict[str, int]) -> str:
        """See ``Backend``: by the present nodes, unless an autoscaler can add nodes."""
        nodes = self._watch.nodes
        if self._watch.capacity is not None or nodes is None:
            return ""
        for role, count in targets.items():
            if count > nodes.get(role, 0):
                return f"the Ray cluster has {nodes.get(role, 0)} live nodes for {role} workers"
        return ""

    def reported(self, router: str, report: ClusterReport) -> None:
        """See ``Backend``."""
        for name, reason in self._hangs.reported(router, report, self._loop.now()):
            timeout = self._hangs.limits.worker_timeout
            _log.warning("member.declared_dead", member=name, reason=reason, worker_timeout=timeout)

    def _on_event(self, event: WatchEvent) -> None:
        if isinstance(event, MemberAlive):
            self._hangs.alive(event.name, self._loop.now() - event.quiet)
            return
        if isinstance(event, MemberStarted):
            role = self._roles.get(event.name, "")
            if role != GATEWAY:  # its actor notices that it hangs, without a router's report
                self._hangs.started(event.name, event.pid, role)
        elif isinstance(event, MemberDown):
            self._hangs.ended(event.name)
        elif isinstance(event, MemberEnded):
            self._hangs.ended(event.name)
            self._roles.pop(event.name, None)
        self._emit(event)

    def _look_for_hangs(self) -> None:
        self._timer = self._loop.call_later(HANG_CHECK, self._look_for_hangs)
        now = self._loop.now()
        self._hangs.forgive_pause(now)
        for hang in self._hangs.hung(now):
            _log.warning("member.hangs", member=hang.name, reason=hang.why)
            self._watch.put(partial(self._watch.kill_child, hang.name, hang.pid))
