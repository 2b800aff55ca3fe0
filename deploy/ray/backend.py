"""Ray as process manager: each member is an actor, watched on a separate thread.

Ray's calls may block while its head is away, so only the thread of :class:`MemberWatch` makes them.
Commands arrive through a queue. :class:`RayBackend` receives the events on the controller's loop.
Invariant: :class:`MemberEnded` is emitted once, after the name is free in Ray.

This module does not import ``ray``: it uses the interface :class:`RayApi`, which :mod:`.api`
implements.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from baton.proto.errors import BatonError
from baton.runtime.net.loop import Loop
from baton.runtime.process.log import get_logger

from ..controller.backend import (
    MemberDown,
    MemberEnded,
    MemberEvent,
    MemberServes,
    MemberSpec,
    MemberStarted,
    MemberUnplaced,
)
from ..plan.plan import role_of
from ..report import ClusterReport
from ..roles import GATEWAY, POOLS
from ..supervise.hangs import HangLimits, Hangs
from .member import MemberReport, State

CYCLE = 0.2
"""Seconds between two checks of all members."""
UNPLACED_AFTER = 2.0
"""Seconds without a report before a member's node is checked, and before a wait is reported."""
ASK_AGAIN = 1.0
"""Seconds before a stop without effect is repeated; the actor may have been restarting."""
MARGIN = 5.0
"""Seconds after the grace before an actor without a final report is killed."""
CAPACITY_EVERY = 5.0
HANG_CHECK = 0.5
"""Seconds between checks for hanging members."""
_log = get_logger()


class ActorGone(Exception):
    """The actor has ended permanently, without an order of this process."""


class RayApi(Protocol):
    """The calls to Ray. Methods may block while its head is away, and raise BatonError."""

    def create(self, spec: MemberSpec) -> Any:
        """Return the member's actor, and create it if it does not exist."""

    def ask(self, actor: Any) -> Any:
        """Request an actor's report. Returns a ticket for :meth:`answer`."""

    def answer(self, ticket: Any) -> MemberReport | None:
        """Return the report, or None before it arrives.

        Raises ActorGone, or BatonError if the caller should ask again.
        """

    def stop(self, actor: Any, grace: float) -> None:
        """Order the actor to stop its child within ``grace`` seconds."""

    def turn(self, actor: Any, spec: MemberSpec) -> None:
        """Order the actor to let its worker take the role of ``spec``."""

    def kill_child(self, actor: Any, pid: int) -> None:
        """Order the actor to kill its hanging child."""

    def kill(self, actor: Any) -> None:
        """Kill the actor permanently."""

    def is_free(self, name: str) -> bool:
        """Whether no actor has this name."""
        raise NotImplementedError

    def why_unplaced(self, actor: Any, role: str) -> str:
        """Return why the actor has no node, or an empty text."""
        raise NotImplementedError

    def request(self, bundles: dict[str, int]) -> None:
        """Request room from Ray's autoscaler."""

    def capacity(self) -> dict[str, int] | None:
        """Maximum members of each role that the nodes can ever hold; None: unknown."""

    def nodes(self) -> dict[str, int]:
        """Number of workers of each role that the live nodes can hold."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class MemberAlive:
    """A member's child sent a heartbeat ``quiet`` seconds ago."""

    name: str
    quiet: float


WatchEvent = MemberEvent | MemberAlive


@dataclass(slots=True)
class _Remote:
    """One member's actor, with the data of its last report."""

    spec: MemberSpec
    actor: Any = None
    ticket: Any = None
    asked_at: float = 0.0
    report: MemberReport | None = None
    started_sent: tuple[int, int] = (0, 0)  # (supervisor, pid) of the last MemberStarted
    serves_sent: tuple[int, int] = (0, 0)  # (supervisor, pid) of the last MemberServes
    down_sent: tuple[int, int] = (0, 0)  # (supervisor, starts) of the last MemberDown
    waits_for: str = ""
    waits_since: float = 0.0
    waits_sent: str = ""
    turn_sent_at: float = 0.0
    stop_until: float | None = None
    stop_sent_at: float = 0.0
    ending: MemberEnded | None = None  # to emit after the name is free
    kills: int = 0


class MemberWatch:
    """See the module docstring. ``emit`` is called on the watching thread."""

    def __init__(self, api: RayApi, emit: Callable[[WatchEvent], object]) -> None:
        self._api = api
        self._emit = emit
        self._remotes: dict[str, _Remote] = {}
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._wanted: dict[str, int] | None = None  # members by role, as the controller counts
        self._requested: dict[str, int] | None = None  # by the pool of their nodes
        self.capacity: dict[str, int] | None = None
        """See :meth:`RayApi.capacity`; as last read."""
        self.nodes: dict[str, int] | None = None
        """See :meth:`RayApi.nodes`; as last read, None before."""
        self.keyless: dict[str, str] = {}
        """See :class:`.member.MemberReport`; by member, as last read."""
        self._capacity_at = 0.0
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)

    # ------------------------------------------------------------- from any thread

    def begin(self) -> None:
        """Read the capacity, then start the watching thread."""
        self._guarded(self._read_capacity)
        self._thread.start()

    def end(self) -> None:
        """Stop watching. The actors keep running."""
        self._over.set()

    def put(self, command: Callable[[], object]) -> None:
        """Run ``command``, a method of this object, on the watching thread."""
        self._commands.put(command)

    # ------------------------------------------------------------- the watching thread

    def _run(self) -> None:
        while not self._over.wait(CYCLE):
            self.cycle(time.monotonic())

    def cycle(self, now: float) -> None:
        """Run the queued commands, then check every member."""
        while not self._commands.empty():
            self._guarded(self._commands.get())
        if now >= self._capacity_at:
            self._capacity_at = now + CAPACITY_EVERY
            self._guarded(self._read_capacity)
        for remote in list(self._remotes.values()):
            self._guarded(partial(self._look, remote, now))
        self._guarded(self._send_request)

    def _guarded(self, command: Callable[[], object]) -> None:
        try:
            command()
        except BatonError as problem:
            _log.warning("ray.call_failed", error=str(problem))
        except Exception:
            _log.exception("ray.call_failed")

    def _read_capacity(self) -> None:
        self.capacity = self._api.capacity()
        self.nodes = self._api.nodes()

    def start(self, spec: MemberSpec) -> None:
        """See ``Backend.start``."""
        self._remotes[spec.name] = _Remote(spec)

    def stop(self, name: str, grace: float) -> None:
        """See ``Backend.stop``."""
        remote = self._remotes.get(name)
        if remote is not None and remote.ending is None:
            remote.stop_until = time.monotonic() + grace
            remote.stop_sent_at = 0.0

    def kill(self, name: str) -> None:
        """See ``Backend.kill``."""
        remote = self._remotes.get(name)
        if remote is not None and remote.ending is None:
            remote.ending = MemberEnded(name, -9, "killed")

    def kill_child(self, name: str, pid: int) -> None:
        """Kill the member's child if it is still this process."""
        remote = self._remotes.get(name)
        if remote is not None and remote.actor is not None:
            self._api.kill_child(remote.actor, pid)

    def request(self, bundles: dict[str, int]) -> None:
        """See ``Backend.request``."""
        self._wanted, self._requested = bundles, None

    def turn(self, spec: MemberSpec) -> None:
        """See ``Backend.turn``."""
        remote = self._remotes.get(spec.name)
        if remote is not None:
            remote.spec, remote.turn_sent_at = spec, 0.0

    def _send_request(self) -> None:
        """Request nodes; a worker that changed its role keeps a node of the pool where it began."""
        if self._wanted is None:
            return
        roles = {remote.spec.name: remote.spec.role for remote in self._remotes.values()}
        bundles = by_node(self._wanted, roles)
        if bundles != self._requested:
            self._requested = bundles
            self._api.request(bundles)

    # ------------------------------------------------------------- one member

    def _look(self, remote: _Remote, now: float) -> None:
        if remote.ending is not None:
            self._finish(remote, remote.ending)
            return
        if remote.actor is None:
            remote.actor = self._api.create(remote.spec)
            remote.asked_at = now
        if remote.stop_until is not None:
            self._stop(remote, remote.stop_until, now)
        if remote.ticket is None:
            remote.ticket = self._api.ask(remote.actor)
        self._read_report(remote, now)
        self._turn(remote, now)

    def _turn(self, remote: _Remote, now: float) -> None:
        """Order a change of role until the actor reports it, again after the actor's restart."""
        report, spec = remote.report, remote.spec
        if report is None or spec.role not in POOLS or report.role == spec.role:
            return
        if report.state is not State.ENDED and now - remote.turn_sent_at >= ASK_AGAIN:
            self._api.turn(remote.actor, spec)
            remote.turn_sent_at = now

    def _read_report(self, remote: _Remote, now: float) -> None:
        try:
            report = self._api.answer(remote.ticket)
        except ActorGone as problem:
            remote.ending = MemberEnded(remote.spec.name, -9, f"its actor has ended: {problem}")
            return
        except BatonError:  # its actor is being restarted
            remote.ticket = None
            return
        if report is not None:
            remote.ticket, remote.report = None, report
            self.keyless[remote.spec.name] = report.keyless
            remote.asked_at, remote.waits_sent = now, ""
            self._handle(remote, report)
        elif now - remote.asked_at >= UNPLACED_AFTER:
            self._send_unplaced(remote, now)

    def _handle(self, remote: _Remote, report: MemberReport) -> None:
        name = remote.spec.name
        if report.state is State.ENDED:
            remote.ending = MemberEnded(name, report.code, report.reason, report.refused)
        elif report.pid and remote.started_sent != (report.supervisor, report.pid):
            remote.started_sent = (report.supervisor, report.pid)
            self._emit(MemberStarted(name, report.host, report.pid))
        elif report.state is State.WAITING and report.starts:
            self._send_down(remote, report)
        if report.pid and report.quiet is not None:
            self._emit(MemberAlive(name, report.quiet))
            process = (report.supervisor, report.pid)
            if remote.spec.role == GATEWAY and remote.serves_sent != process:
                remote.serves_sent = process
                self._emit(MemberServes(name))

    def _send_down(self, remote: _Remote, report: MemberReport) -> None:
        ended = (report.supervisor, report.starts)
        if remote.down_sent != ended:
            remote.down_sent = ended
            down = MemberDown(remote.spec.name, report.why, report.wait, report.ends)
            self._emit(down)

    def _send_unplaced(self, remote: _Remote, now: float) -> None:
        """Report why a member waits for a host, after the reason was constant for a while.

        The delay avoids messages while hosts join one after another.
        """
        why = self._api.why_unplaced(remote.actor, role_of(remote.spec.name))
        if why != remote.waits_for:
            remote.waits_for, remote.waits_since = why, now
        lasting = now - remote.waits_since >= UNPLACED_AFTER
        if why and lasting and why != remote.waits_sent:
            remote.waits_sent = why
            self._emit(MemberUnplaced(remote.spec.name, why))

    def _stop(self, remote: _Remote, until: float, now: float) -> None:
        """Order the stop. Kill an actor without a host or without a report in time."""
        waits = remote.report is None and bool(
            self._api.why_unplaced(remote.actor, role_of(remote.spec.name))
        )
        if waits or now > until + MARGIN:
            remote.ending = MemberEnded(remote.spec.name, -9, "stopped")
            return
        heard = remote.report is not None and remote.report.state is State.STOPPING
        if not remote.stop_sent_at or (not heard and now - remote.stop_sent_at >= ASK_AGAIN):
            self._api.stop(remote.actor, max(0.0, until - now))
            remote.stop_sent_at = now

    def _finish(self, remote: _Remote, ended: MemberEnded) -> None:
        if remote.actor is not None and remote.kills % 10 == 0:
            self._api.kill(remote.actor)
        remote.kills += 1
        if self._api.is_free(remote.spec.name):
            del self._remotes[remote.spec.name]
            self.keyless.pop(remote.spec.name, None)
            self._emit(ended)


def by_node(
    sizes: Mapping[str, int], roles: Mapping[str, str], *, may_turn: bool = False
) -> dict[str, int]:
    """Return sizes of pools by the pools of their nodes, which are those where workers began.

    ``roles``: the present roles by member. ``may_turn``: spare workers of one pool will change to
    the other pool if that lacks workers, as the controller decides (``Pools.turns``).
    """
    found = dict(sizes)
    if not set(POOLS) <= found.keys():
        return found
    for role, other in (POOLS, POOLS[::-1]):
        moved = sum(now == role and role_of(name) == other for name, now in roles.items())
        if may_turn:
            present = [sum(now == pool for now in roles.values()) for pool in (role, other)]
            moved += max(0, min(sizes[role] - present[0], present[1] - sizes[other]))
        moved = min(moved, found[role])
        found[role] -= moved
        found[other] += moved
    return found


class RayBackend:
    """A ``Backend`` (see :mod:`..controller.backend`). ``emit`` is called on ``loop``.

    ``can_turn``: returns whether the controller lets workers change their role.
    """

    def __init__(
        self,
        loop: Loop,
        api: RayApi,
        emit: Callable[[MemberEvent], object],
        worker_timeout: float,
        can_turn: Callable[[], bool] = lambda: False,
    ) -> None:
        self._can_turn = can_turn
        self._loop = loop
        self._emit = emit
        self._roles: dict[str, str] = {}
        self._hangs = Hangs(HangLimits(worker_timeout=worker_timeout))
        self._watch = MemberWatch(api, lambda event: loop.post(partial(self._on_event, event)))
        self._watch.begin()
        self._timer = loop.every(HANG_CHECK, self._look_for_hangs)

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

    def turn(self, spec: MemberSpec) -> None:
        """See ``Backend``. The worker stays on its node, which another pool started."""
        self._roles[spec.name] = spec.role
        self._watch.put(partial(self._watch.turn, spec))

    def turn_refusal(self) -> str:
        """Return which worker's host has no key of the other role, or an empty text."""
        for name, role in dict(self._watch.keyless).items():
            if role:
                return (
                    f"{name} cannot be a {role} worker: its host has no {role} key for it; "
                    "`baton ray-config --turn` gives workers' hosts both"
                )
        return ""

    def kill(self, name: str) -> None:
        """See ``Backend``."""
        self._watch.put(partial(self._watch.kill, name))

    def request(self, bundles: dict[str, int]) -> None:
        """See ``Backend``: the only code that requests room from Ray's autoscaler."""
        self._watch.put(partial(self._watch.request, dict(bundles)))

    def refusal(self, targets: dict[str, int]) -> str:
        """See ``Backend``: by the maximum capacity of the autoscaler's node types."""
        capacity = self._watch.capacity
        for role, count in self._on_nodes(targets).items():
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
        for role, count in self._on_nodes(targets).items():
            if count > nodes.get(role, 0):
                return f"the Ray cluster has {nodes.get(role, 0)} live nodes for {role} workers"
        return ""

    def _on_nodes(self, targets: Mapping[str, int]) -> dict[str, int]:
        """Return pools of these sizes by the pool of their nodes, after the changes of role."""
        return by_node(targets, self._roles, may_turn=self._can_turn())

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
        now = self._loop.now()
        self._hangs.forgive_pause(now)
        for hang in self._hangs.hung(now):
            _log.warning("member.hangs", member=hang.name, reason=hang.why)
            self._watch.put(partial(self._watch.kill_child, hang.name, hang.pid))
