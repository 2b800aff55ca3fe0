"""Ray as a backend of the controller: each member is an actor, watched on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...runtime.loop import Loop
from ..launcher import MemberEnded, MemberEvent, MemberSpec, MemberStarted
from ..report import ClusterReport
from .hangs import Hangs
from .watch import MemberWatch, RayApi

HANG_CHECK = 0.5
"""Seconds between looks for members that hang."""


class RayBackend:
    """A ``Backend`` (see :mod:`deploy.launcher`); ``emit`` is called on ``loop``."""

    def __init__(self, loop: Loop, api: RayApi, emit: Callable[[MemberEvent], object]) -> None:
        self._loop = loop
        self._emit = emit
        self._roles: dict[str, str] = {}
        self._hangs = Hangs()
        self._watch = MemberWatch(api, lambda event: loop.post(partial(self._said, event)))
        self._watch.begin()
        self._timer = loop.call_later(HANG_CHECK, self._look_for_hangs)

    def close(self) -> None:
        """Watch no more; members go on."""
        self._timer.cancel()
        self._watch.end()

    def put(self, command: Callable[[], object]) -> None:
        """Run ``command`` on the thread that talks to Ray, in its turn."""
        self._watch.put(command)

    def start(self, spec: MemberSpec) -> None:
        """See ``Backend``; an actor of this name that is there already is taken over."""
        self._roles[spec.name] = spec.role
        self._watch.put(partial(self._watch.start, spec))

    def stop(self, name: str, grace: float) -> None:
        """See ``Backend``."""
        self._watch.put(partial(self._watch.stop, name, grace))

    def kill(self, name: str) -> None:
        """See ``Backend``."""
        self._watch.put(partial(self._watch.kill, name))

    def request(self, bundles: dict[str, int]) -> None:
        """See ``Backend``: the one place that asks Ray's autoscaler for room."""
        self._watch.put(partial(self._watch.request, dict(bundles)))

    def refusal(self, targets: dict[str, int]) -> str:
        """See ``Backend``: what the autoscaler's node types can hold at most."""
        capacity = self._watch.capacity
        for role, count in targets.items():
            most = count if capacity is None else capacity.get(role, 0)
            if count > most:
                return (
                    f"{role}={count}: the nodes of this Ray cluster hold {most} {role} workers at "
                    "most; give fewer, or raise max_workers and the hosts of this node type"
                )
        return ""

    def heard(self, router: str, report: ClusterReport) -> None:
        """See ``Backend``."""
        self._hangs.heard(router, report, self._loop.now())

    def _said(self, event: MemberEvent) -> None:
        if isinstance(event, MemberStarted):
            self._hangs.started(event.name, self._roles.get(event.name, ""), event.pid)
        elif isinstance(event, MemberEnded):
            self._hangs.ended(event.name)
            self._roles.pop(event.name, None)
        self._emit(event)

    def _look_for_hangs(self) -> None:
        self._timer = self._loop.call_later(HANG_CHECK, self._look_for_hangs)
        for name, pid in self._hangs.hung(self._loop.now()):
            self._watch.put(partial(self._watch.kill_child, name, pid))
