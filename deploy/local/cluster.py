"""A cluster on this machine, from start to end, for ``baton serve`` and ``baton launch``.

:class:`..controller.core.ControllerCore` decides which members exist, and
:class:`..supervise.core.SupervisorCore` decides about restarts. This module owns the processes and
descriptors. Invariant: when :meth:`LocalCluster.run` returns, no child lives, and the run folder
and the socket files are removed. If the supervisor itself is killed, the kernel ends the children,
and the next start removes the files.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from ...proto.errors import BatonError
from ...runtime.keys.allowed import OPERATOR
from ...runtime.keys.keyring import CONTROLLER, load_keys
from ...runtime.net.loop import Loop
from ...runtime.process.os_settings import hold_signals, on_stop_signal
from ..autoscale.pilot import pilot_of
from ..config import ServeSettings
from ..controller.admin import Overview
from ..controller.backend import (
    ROUTER,
    MemberDown,
    MemberEnded,
    MemberEvent,
    MemberSpec,
    MemberStarted,
)
from ..controller.core import ControllerCore
from ..controller.events import Down
from ..controller.pools import ControllerLimits
from ..controller.shell import TICK, ControllerShell
from ..plan.addresses import admin_address, claim_admin, ipc_path
from ..plan.bounds import Bounds
from ..plan.plan import key_folder, router_names
from ..plan.prepare import check_keys, check_model, make_plan, memory_refusal, served_context
from ..plan.revisions import Roster
from ..report import ClusterReport
from ..supervise.child_log import ChildLog
from ..supervise.core import (
    Action,
    Add,
    Alive,
    Ended,
    Event,
    Exited,
    Kill,
    Phase,
    Remove,
    Reported,
    Restarting,
    Say,
    Start,
    SupervisorCore,
    Terminate,
    Tick,
)
from ..supervise.hangs import HangLimits, declared_dead
from ..supervise.oom_kills import LOOK_EVERY_S, OomWatch
from ..supervise.process import Child, not_started
from . import banner
from .address_lock import AddressLock
from .run_folder import RunFolder, sweep

__all__ = ["LocalBackend", "LocalCluster", "check_model", "make_plan"]

Out = Callable[[str], object]
EXIT_CUT_SHORT = 130
"""Exit code of a command that Ctrl-C ended, as shells use it."""


class LocalBackend:
    """Runs members as children of this process; see :class:`..controller.backend.Backend`.

    ``refusal``: function for :meth:`refusal`. ``log_level``: lowest severity of the children's log
    lines that ``out`` receives.
    """

    def __init__(
        self,
        loop: Loop,
        folder: RunFolder,
        out: Out,
        emit: Callable[[MemberEvent], None],
        refusal: Callable[[dict[str, int]], str],
        log_level: str,
        worker_timeout: float,
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._out = out
        self._emit = emit
        self._refusal = refusal
        self._log = ChildLog(out, log_level, lambda name: self._decide(Alive(name)))
        self._core = SupervisorCore(hang_limits=HangLimits(worker_timeout=worker_timeout))
        self._oom = OomWatch()
        self._specs: dict[str, MemberSpec] = {}
        self._children: dict[str, Child] = {}
        loop.call_later(TICK, self._tick)
        loop.call_later(LOOK_EVERY_S, self._look_for_oom)

    # ------------------------------------------------------------- calls of the controller

    def start(self, spec: MemberSpec) -> None:
        """Start a child and keep it running."""
        self._specs[spec.name] = spec
        self._decide(Add(spec.name, router=spec.role == ROUTER))

    def stop(self, name: str, grace: float) -> None:
        """SIGTERM, and SIGKILL ``grace`` seconds later."""
        self._decide(Remove(name, grace))

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._decide(Remove(name))

    def request(self, bundles: dict[str, int]) -> None:
        """Do nothing: one machine has no resources to request."""

    def refusal(self, targets: dict[str, int]) -> str:
        """Return why this machine has too little memory for pools of this size, or ''."""
        return self._refusal(targets)

    def full(self, targets: dict[str, int]) -> str:
        """Return an empty text: on one machine, only :meth:`refusal` limits the pools."""
        return ""

    def heard(self, router: str, report: ClusterReport) -> None:
        """Detect hanging children with a router's report."""
        alive = {worker.id: worker.pid for worker in report.workers if worker.alive}
        self._decide(Reported(router, alive, declared_dead(report)))

    def close(self) -> None:
        """Kill remaining children. There are none unless the loop ended with an exception."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
            child.close()
        self._children.clear()

    # ------------------------------------------------------------- events of children

    def _tick(self) -> None:
        self._loop.call_later(TICK, self._tick)
        self._decide(Tick())

    def _look_for_oom(self) -> None:
        self._loop.call_later(LOOK_EVERY_S, self._look_for_oom)
        self._oom.look()

    def _on_exit(self, name: str) -> None:
        child = self._children[name]
        code = child.exit_code()
        if code is None:
            return
        self._loop.remove_fd(child.exit_fd)
        self._loop.remove_fd(child.stderr_fd)
        child.kill()  # ends remaining processes of the child's process group
        for event in child.drain_log():
            self._log.hear(name, event)
        child.close()
        del self._children[name]
        reason, refused = self._log.ended(name, code)
        self._decide(Exited(name, code, reason, refused, self._oom.evidence(code)))

    def _on_stderr(self, name: str) -> None:
        child = self._children[name]
        events = child.read_log()
        if not events and child.exit_code() is not None:
            self._loop.remove_fd(child.stderr_fd)  # closed; exit_fd reports the exit
        for event in events:
            self._log.hear(name, event)

    # ------------------------------------------------------------- actions

    def _decide(self, event: Event) -> None:
        for action in self._core.handle(event, self._loop.now()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start(name):
                self._try_start(name)
            case Terminate(name) if name in self._children:
                self._children[name].terminate()
            case Kill(name) if name in self._children:
                self._children[name].kill()
            case Say():
                self._out(banner.sentence(action))
            case Restarting(name, why, seconds, ends):
                self._tell(MemberDown(name, why, seconds, ends))
            case Ended(name, code, reason, refused):
                del self._specs[name]
                self._tell(MemberEnded(name, code, reason, refused))

    def _tell(self, event: MemberEvent) -> None:
        """Emit an event in the next turn of the loop, never inside a call of the controller."""
        self._loop.post(lambda: self._emit(event))

    def _try_start(self, name: str) -> None:
        """Start a child. If the system refuses (disk full, no process), report an Exited."""
        try:
            self._start(name)
        except (BatonError, OSError) as problem:
            why = not_started(problem, self._folder.path)
            self._loop.post(lambda: self._decide(Exited(name, 1, why, refused=True)))

    def _start(self, name: str) -> None:
        process = self._specs[name].process
        child = Child(process, self._folder.write(f"{name}.json", process.config_json()))
        self._children[name] = child
        self._core.started(name, child.pid)
        self._loop.add_fd(child.stderr_fd, lambda: self._on_stderr(name))
        self._loop.add_fd(child.exit_fd, lambda: self._on_exit(name))
        self._tell(MemberStarted(name, "", child.pid))


class LocalCluster:
    """Runs one cluster in the calling (main) thread until it ends.

    ``out``: receives the lines for the operator. ``private``: if the settings have no address,
    listen inside the run folder instead of at the user's default address. ``log``: path of the log
    file, shown in the overview.
    """

    def __init__(
        self, settings: ServeSettings, out: Out, *, private: bool = False, log: str = ""
    ) -> None:
        self._settings = settings
        self._out = out
        self._log = log
        self._on_ready: Callable[[], object] | None = None
        self._lock: AddressLock | None = None
        self._backend: LocalBackend | None = None
        self.interrupted = False  # by a signal
        self._cut_short = False  # by a second one
        with hold_signals():  # an interrupt before :meth:`run` takes effect in run
            self._loop = Loop()
            on_stop_signal(self._loop, self._on_signal)
            self._loop.on_signal(signal.SIGHUP, partial(self._on_signal, 1))
        try:
            self._prepare(settings, private=private)
        except BaseException:
            self._loop.close()
            raise
        context = served_context(self.plan.settings)
        self._facts = banner.facts(self.plan, hint=not private, context=context)
        self._roster = Roster(self.plan)
        self._core = self._controller(self.plan.settings)
        self._stats: tuple[float, ClusterReport] | None = None
        self.failure = ""

    def _prepare(self, settings: ServeSettings, *, private: bool) -> None:
        """Make the run folder, the plan and the address lock."""
        parent = Path(settings.run_dir) if settings.run_dir else None
        sweep(parent)
        self._folder = RunFolder(parent)
        try:
            if private and not settings.address:
                address = self._folder.ipc("client")
                settings = msgspec.structs.replace(settings, address=address)
            self.plan = make_plan(settings, self._folder)
            check_keys(self.plan)
            self.admin = settings.admin or admin_address(self.plan.address)
            claim_admin(self.admin)
            self._lock = AddressLock.take(self.admin)
        except BaseException:
            self._folder.close()
            raise

    @staticmethod
    def _controller(settings: ServeSettings) -> ControllerCore:
        bounds = Bounds.of(settings)
        targets = {"prefill": settings.prefill, "decode": settings.decode}
        limits = ControllerLimits(grace=settings.grace)
        return ControllerCore(targets, router_names(settings), limits, bounds)

    # ------------------------------------------------------------- life

    def run(self) -> int:
        """Serve until interrupted or failed, and return the exit code.

        1: failed, with the reason in ``failure``. :data:`EXIT_CUT_SHORT`: a second interrupt
        ended running requests.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._shell = ControllerShell(
                self._loop, context, self._core, self._roster, self._make_backend,
                self.plan.book.clients, self._overview(), self._say,
                load_keys(key_folder(self.plan.settings), OPERATOR, CONTROLLER),
                pilot_of(self._core, self.plan.settings),
            )  # fmt: skip
            self._shell.listen(self.admin)
            self._shell.start()
            self._loop.call_later(TICK, self._show_stats)
            self._loop.run()
            self._shell.close()
        finally:
            if self._backend is not None:
                self._backend.close()
            context.destroy(linger=0)
            self._folder.close()
            if self._lock is not None:
                self._lock.release()
            self._loop.close()
        code = 1 if self._shell.exit_code is None else self._shell.exit_code
        return EXIT_CUT_SHORT if self._cut_short else code

    def _make_backend(self, emit: Callable[[MemberEvent], None]) -> LocalBackend:
        level, timeout = self._settings.log_level, self._settings.worker_timeout
        self._backend = LocalBackend(
            self._loop, self._folder, self._out, emit, self._refusal, level, timeout
        )
        return self._backend

    def on_ready(self, callback: Callable[[], object]) -> None:
        """Set a callback for the moment when every worker has registered.

        It is called once on this thread and must not block.
        """
        self._on_ready = callback

    def interrupt(self) -> None:
        """Start an orderly shutdown. Safe from any thread."""
        self._loop.post(lambda: self._shell.feed(Down()))

    def _on_signal(self, times: int) -> None:
        self.interrupted = True
        self._cut_short = times > 1
        self._shell.feed(Down())

    def _overview(self) -> Overview:
        """Return the constant part of the overview, and register the socket files for removal."""
        sockets = [ipc_path(address) for address in (*self.plan.book.clients.values(), self.admin)]
        paths = [path for path in sockets if path is not None]
        for path in paths:
            self._folder.own_socket(path)
        return Overview(
            backend="local",
            address=self.plan.address,
            log=self._log,
            paths=[*map(str, paths), str(self._folder.path)],
        )

    def _refusal(self, targets: dict[str, int]) -> str:
        return memory_refusal(self.plan.settings, self.plan.kv_default, targets)

    # ------------------------------------------------------------- the operator's terminal

    def _say(self, say: Say) -> None:
        if say.what in banner.FAILURES:
            self.failure = banner.sentence(say)
            return
        self._out(banner.sentence(say))
        if say.what == "ready":
            for line in banner.startup(self._facts, self._shell.report):
                self._out(line)
            self._stats = (self._loop.now(), self._shell.report)
            if self._on_ready is not None:
                self._on_ready()

    def _show_stats(self) -> None:
        self._loop.call_later(TICK, self._show_stats)
        interval = self._settings.stats_interval
        if not interval or self._stats is None or self._core.phase is not Phase.SERVING:
            return
        since, before = self._stats
        seconds = self._loop.now() - since
        if seconds >= interval:
            self._out(banner.throughput(before, self._shell.report, seconds))
            self._stats = (self._loop.now(), self._shell.report)
