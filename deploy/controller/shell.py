"""Sockets and clock around :class:`.core.ControllerCore`, for any process manager.

The shell polls every router's status, forwards drains, answers operators at the admin socket, and
orders the process manager (backend) to start and stop members. All code runs on the loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec

from baton.proto.errors import BatonError, ConfigError, InputError, InternalError, RequestFailed
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import Drain, Message, RouterToClient, Status, StatusReport
from baton.runtime.keys.allowed import OPERATOR, ROUTER
from baton.runtime.keys.keyring import CONTROLLER, KeyRing, Keys, keys_for, load_keys
from baton.runtime.keys.zap import Doorkeeper, door
from baton.runtime.net.channel import Frames
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import Context, DealerChannel
from baton.runtime.process.log import get_logger

from ..autoscale.pilot import Pilot
from ..autoscale.policy import Room
from ..plan.bounds import scale_refusal
from ..plan.plan import ClusterPlan, key_folder
from ..plan.prepare import turn_refusal
from ..plan.revisions import Revisions
from ..report import ClusterReport, parse_report
from ..roles import POOLS
from ..supervise.core import Log, Phase, Reported, Tick
from . import events
from .admin import (
    AdminServer,
    Ask,
    DrainWorker,
    GoDown,
    MemberLine,
    Overview,
    Progress,
    Requests,
    Result,
    RollOut,
    ScalePools,
    TurnWorker,
)
from .backend import Backend, MemberEnded, MemberEvent, MemberSpec
from .core import ControllerCore
from .events import Action, Answer, Event, Outcome
from .health import DEGRADED, OK, problems
from .pools import Pools

TICK = 0.1
"""Seconds between Tick events."""
POLL_INTERVAL = 0.2
"""Seconds between polls of a router's status."""
PATIENCE = 2.0
"""Seconds without an answer before the connection to a router is replaced."""
STOP_PATIENCE = 10.0
"""Seconds after the members' own limits until the controller ends without them."""
_log = get_logger()


def describe(error: Exception) -> str:
    """Return an exception as one line in ASCII; its text may hold a path that is not UTF-8."""
    text = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


class StatusMonitor:
    """Polls a router's status over the client socket. Calls ``on_report`` with every answer.

    A connection without answers is replaced by a connection with another identity. After a network
    failure, the router may still hold the old connection, and would ignore a second connection
    with the same identity. A serving router would then seem to hang.
    """

    def __init__(
        self,
        loop: Loop,
        context: Context,
        address: str,
        on_report: Callable[[ClusterReport], object],
        keys: Keys | None = None,
    ) -> None:
        self._loop = loop
        self._on_report = on_report
        self._encoder = EnvelopeEncoder()
        self._decoder = EnvelopeDecoder[Message](RouterToClient)
        self._context = context
        self._address = address
        self._keys = keys_for(keys, address, ROUTER)
        self._channel = self._connect()
        self._timer = loop.every(POLL_INTERVAL, self._ask, first=0.0)

    def drain(self, worker: str) -> None:
        """Ask the router to drain a worker. The message is lost while the router is away.

        ``force``, because the controller has already checked the drain. It has more information
        than a router, for example about the next worker of a rollout.
        """
        self._channel.send(self._encoder.encode([Drain(worker=worker, force=True)]))

    def close(self) -> None:
        """Stop polling and disconnect."""
        self._timer.cancel()
        self._channel.close()

    def _connect(self) -> DealerChannel:
        identity = b"supervisor-" + os.urandom(16)
        channel = DealerChannel(self._context, self._address, identity, keys=self._keys)
        channel.attach(self._loop, self._on_message)
        self._fresh_until = self._loop.now() + PATIENCE
        return channel

    def _ask(self) -> None:
        if self._loop.now() >= self._fresh_until:
            self._channel.close()
            self._channel = self._connect()
        self._channel.send(self._encoder.encode([Status(handoffs=0)]))

    def _on_message(self, frames: Frames) -> None:
        try:
            for message in self._decoder.decode(frames):
                if isinstance(message, StatusReport):
                    self._fresh_until = self._loop.now() + PATIENCE
                    self._on_report(parse_report(message.report))
        except BatonError as problem:
            _log.warning("supervisor.bad_report", error=str(problem))


@dataclass(frozen=True)
class Contacts:
    """The routers and the operators of a controller.

    ``clients``: client address of each router by name. ``facts``: the constant fields of an
    Overview (backend, address, log, paths). ``on_log``: receives messages for the operator's
    terminal. ``keys``: keys of role operator, for tcp.
    """

    clients: Mapping[str, str]
    facts: Overview
    on_log: Callable[[Log], object]
    keys: KeyRing | None = None

    @classmethod
    def of(cls, plan: ClusterPlan, facts: Overview, on_log: Callable[[Log], object]) -> Self:
        """Return the contacts of a cluster, with the keys of its settings."""
        keys = load_keys(key_folder(plan.settings), OPERATOR, CONTROLLER)
        return cls(plan.book.clients, facts, on_log, keys)


class ControllerShell:
    """A running controller.

    ``pilot``: the autoscaler. After End, ``exit_code`` is set and the loop is stopped.
    """

    def __init__(
        self,
        loop: Loop,
        context: Context,
        core: ControllerCore,
        revisions: Revisions,
        make_backend: Callable[[Callable[[MemberEvent], None]], Backend],
        contacts: Contacts,
        pilot: Pilot | None = None,
    ) -> None:
        self.core = core
        self.backend = make_backend(self._on_member)
        self.report = ClusterReport()
        """The latest report of any router."""
        self.exit_code: int | None = None
        self._loop = loop
        self._context = context
        self._revisions = revisions
        self._clients = dict(contacts.clients)
        self._facts = contacts.facts
        self._on_log = contacts.on_log
        self._keys = keys = contacts.keys
        self._pilot = pilot
        self._doors = None if keys is None else Doorkeeper(context, keys)
        self._monitors: list[StatusMonitor] = []
        self._admin: AdminServer | None = None
        self._events: list[Event] = []
        self._stop_by = float("inf")
        self._turns_of = -1  # the revision that :meth:`_learn_turns` judged
        self._turns_allowed = False  # by its settings

    def listen(self, address: str) -> str:
        """Open the admin socket and return its address. Raises ConfigError."""
        keys = door(self._doors, "admin", OPERATOR)
        self._admin = AdminServer(self._loop, self._context, address, self._on_request, keys)
        return self._admin.endpoint

    def start(self) -> None:
        """Connect to the routers, and start the members after the loop runs."""
        if self._doors is not None:
            self._doors.attach(self._loop)
        for name, address in self._clients.items():
            handle = self._report_handler(name)
            monitor = StatusMonitor(self._loop, self._context, address, handle, self._keys)
            self._monitors.append(monitor)
        self._loop.call_later(0.0, lambda: self.feed(events.Begin()))
        self._loop.every(TICK, self._tick)

    def close(self) -> None:
        """Close the sockets."""
        for monitor in self._monitors:
            monitor.close()
        if self._admin is not None:
            self._admin.close()
        if self._doors is not None:
            self._doors.close()

    def feed(self, event: Event) -> None:
        """Pass an event to the core and carry out its actions.

        An event from inside an action is handled afterwards. After a failed action, the following
        actions and events are still handled; see :meth:`_not_done`.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                self._handle(self._events[0])
            finally:
                self._events.pop(0)

    def _handle(self, event: Event) -> None:
        try:
            actions = self.core.handle(event, self._loop.now())
        except Exception as error:
            _log.exception("controller.internal_error", trigger=type(event).__name__)
            if self.core.phase is not Phase.SERVING or isinstance(event, events.Down):
                self._give_up(error)
            return
        for action in actions:
            try:
                self._carry_out(action)
            except Exception as error:
                _log.exception("controller.internal_error", action=type(action).__name__)
                self._not_done(action, error)

    def _not_done(self, action: Action, error: Exception) -> None:
        """Handle an action that raised: a start ends with its reason, and a stop always works."""
        match action:
            case events.StartMember(name):
                why = f"cannot be started: {describe(error)}"
                self.feed(MemberEnded(name, 1, why, refused=True))
            case events.StopMember(name):
                self._loop.guarded(partial(self.backend.kill, name))
            case events.End() | events.KillMember():
                self._give_up(error)
            case _ if self.core.phase is Phase.STARTING:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End at once after an error of our own code, with one line for the operator."""
        if self.exit_code is not None:
            return
        self.exit_code = 1
        self._loop.stop()
        self._loop.guarded(lambda: self._on_log(Log("broken", detail=describe(error))))
        for member in list(self.core.pools.members):
            self._loop.guarded(partial(self.backend.kill, member.name))

    # ------------------------------------------------------------- events

    def _tick(self) -> None:
        pilot, now = self._pilot, self._loop.now()
        self._loop.guarded(self._learn_turns)
        if pilot is not None:
            self._loop.guarded(lambda: self._steer(pilot, now))
        self.feed(Tick())
        if self.core.phase is not Phase.STOPPING:
            self._stop_by = now + 2 * self.core.limits.stop_timeout + STOP_PATIENCE
        elif now >= self._stop_by:
            self._give_up(InternalError("the members did not end in time"))

    def _steer(self, pilot: Pilot, now: float) -> None:
        """Run the autoscaler, unless another operation changes the cluster."""
        core = self.core
        if core.phase is not Phase.SERVING or core.rollout is not None:
            pilot.pause(now)
            return
        measured = pilot.decide(core.pools.targets, now, Room(self._fits, core.can_turn))
        if measured is not None:
            self.feed(measured)

    def _fits(self, targets: Mapping[str, int]) -> bool:
        """Whether the present hosts have room for pools of these sizes."""
        sizes, bounds = dict(targets), self.core.bounds
        return not (
            scale_refusal(sizes, bounds) or self.backend.refusal(sizes) or self.backend.full(sizes)
        )

    def _learn_turns(self) -> None:
        """Note whether workers can change their role with the settings of the newest revision."""
        revision = self.core.pools.revision
        if revision != self._turns_of:
            self._turns_of, self._turns_allowed = revision, False
            with suppress(BatonError):
                self._turns_allowed = not turn_refusal(self._revisions.settings(revision))
        self.core.can_turn = self._turns_allowed and not self.backend.turn_refusal()

    def _report_handler(self, router: str) -> Callable[[ClusterReport], None]:
        def handle(report: ClusterReport) -> None:
            self.report = report
            self._loop.guarded(lambda: self.backend.reported(router, report))
            pilot = self._pilot
            if pilot is not None:
                self._loop.guarded(lambda: pilot.reported(router, report, self._loop.now()))
            self.feed(Reported(router, report))

        return handle

    def _on_member(self, event: MemberEvent) -> None:
        if isinstance(event, MemberEnded):
            self._revisions.release(event.name)
        self.feed(event)

    # ------------------------------------------------------------- operators

    def _on_request(self, sender: bytes, request: Requests) -> None:
        ticket = (sender, request.number)
        try:
            self._obey(ticket, request)
        except BatonError as problem:
            self._fail(ticket, problem)

    def _obey(self, ticket: tuple[bytes, int], request: Requests) -> None:
        match request:
            case Ask():
                if self._admin is not None:
                    self._admin.answer(ticket[0], self.overview(request.number))
            case ScalePools(targets=targets):
                self._check_size(targets)
                self.feed(events.Scale(ticket, targets))
            case DrainWorker(worker=worker, force=force):
                self.feed(events.Drain(ticket, self._named(worker), force=force))
            case TurnWorker(worker=worker, role=role):
                self._check_turn()
                self.feed(events.Turn(ticket, self._named(worker), role))
            case RollOut():
                self._roll_out(ticket, request)
            case GoDown(at_once=at_once):
                self.feed(events.Down(ticket))
                if at_once:
                    self.feed(events.Down())

    def _check_size(self, targets: dict[str, int]) -> None:
        problem = scale_refusal(targets, self.core.bounds, self.core.pools.targets)
        workers = {role: count for role, count in targets.items() if role in POOLS}
        problem = problem or self.backend.refusal({**self.core.pools.targets, **workers})
        if problem:
            raise InputError(problem)

    def _check_turn(self) -> None:
        """Raise ConfigError if no worker of this cluster can change its role."""
        settings = self._revisions.settings(self.core.pools.revision)
        problem = self.backend.turn_refusal() or turn_refusal(settings)
        if problem:
            raise ConfigError(problem)

    def _named(self, worker: str) -> str:
        """Return a worker's name, given its name or endpoint."""
        return next((w.id for w in self.report.workers if w.alive and worker == w.endpoint), worker)

    def _roll_out(self, ticket: tuple[bytes, int], request: RollOut) -> None:
        problem = self.core.rollout_refusal() or ("" if request.in_place else self._no_room())
        if problem:
            raise RequestFailed(problem)
        revision = self._revisions.add(self.core.pools.revision, request.changes)
        grace = self._revisions.settings(revision).grace
        self.feed(events.Rollout(ticket, revision, grace, in_place=request.in_place))

    def _no_room(self) -> str:
        """Return which pool has no room for a rollout's extra worker, or an empty text."""
        targets = self.core.pools.targets
        for role, count in targets.items():
            more = {**targets, role: count + 1}
            problem = count and (self.backend.refusal(more) or self.backend.full(more))
            if problem:
                return (
                    f"no room for one more {role} worker, which a rollout starts before it drains "
                    f"an old one: {problem}. Add a host, or replace workers in place: --in-place"
                )
        return ""

    def _answer(self, answer: Answer) -> None:
        if self._admin is None or not isinstance(answer.ticket, tuple):
            return
        sender, number = answer.ticket
        match answer.outcome:
            case Outcome.FAILED:
                self._fail(answer.ticket, RequestFailed(answer.text))
            case Outcome.DONE:
                self._admin.answer(sender, Result(number=number, text=answer.text))
            case outcome:
                accepted = outcome is Outcome.ACCEPTED
                word = Progress(number=number, text=answer.text, accepted=accepted)
                self._admin.answer(sender, word)

    def _fail(self, ticket: tuple[bytes, int], problem: BatonError) -> None:
        if self._admin is not None:
            result = Result(number=ticket[1], text=str(problem), code=problem.code)
            self._admin.answer(ticket[0], result)

    def overview(self, number: int = 0) -> Overview:
        """Return the target and actual state of the cluster."""
        core, pools = self.core, self.core.pools
        served = core.rollout.before if core.rollout else pools.revision
        running = core.rollout and f"running: {core.rollout.progress(pools)}"
        members = [
            MemberLine(
                name=m.name, role=m.role, stage=m.stage.value, revision=m.revision,
                pid=m.pid, host=m.host, note=m.waits_for, restarts=m.restarts,
            )
            for m in pools.members
        ]  # fmt: skip
        found = problems(pools, self._loop.now()) if core.phase is Phase.SERVING else []
        return msgspec.structs.replace(
            self._facts,
            number=number,
            phase=core.phase.value,
            health=DEGRADED if found else OK,
            problems=found,
            pid=os.getpid(),
            revision=served,
            rollout=running or core.last_rollout,
            role_change=_shown_turn(pools),
            targets=dict(pools.targets),
            members=members,
            settings=msgspec.to_builtins(self._revisions.settings(served)),
            launched=msgspec.to_builtins(self._revisions.settings(0)),
        )

    # ------------------------------------------------------------- actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case events.StartMember():
                self._start(action)
            case events.DrainMember(name):
                for monitor in self._monitors:
                    monitor.drain(name)
            case events.TurnMember():
                self.backend.turn(self._spec(action.name, action.role, action.revision))
            case events.StopMember(name, grace):
                self.backend.stop(name, grace)
            case events.KillMember(name):
                self.backend.kill(name)
            case events.RequestResources(bundles):
                self.backend.request(bundles)
            case Answer():
                self._answer(action)
            case events.End(code):
                self.exit_code = code
                self._loop.stop()
            case Log():
                self._on_log(action)

    def _start(self, action: events.StartMember) -> None:
        try:
            spec = self._spec(action.name, action.role, action.revision)
        except (BatonError, OSError) as problem:
            why = problem if isinstance(problem, ConfigError) else f"cannot be started: {problem}"
            self.feed(MemberEnded(action.name, 1, str(why), refused=True))
            return
        self.backend.start(spec)

    def _spec(self, name: str, role: str, revision: int) -> MemberSpec:
        return self._revisions.spec(name, role, revision, self.core.pools.gateways)


def _shown_turn(pools: Pools) -> str:
    """Return the last change of role, such as "decode-1 changed its role to prefill: ..."."""
    name, text = pools.last_turn
    member = pools.members.get(name)
    running = member is not None and member.turning
    return f"{name} {'changes' if running else 'changed'} {text}" if name else ""
