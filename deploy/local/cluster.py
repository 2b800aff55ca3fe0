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

from baton.runtime.keys.keyring import role_without_key
from baton.runtime.net.loop import Loop
from baton.runtime.process.os_settings import hold_signals, on_stop_signal

from ..autoscale.pilot import pilot_of
from ..config import ServeSettings
from ..controller.admin import Overview
from ..controller.backend import MemberEvent, MemberSpec
from ..controller.core import ControllerCore
from ..controller.events import Down
from ..controller.shell import Contacts, ControllerShell
from ..messages import FAILURES, SUPERVISOR, json_line, sentence
from ..plan.addresses import HttpPort, admin_address, check_metrics_ports, claim_admin, ipc_path
from ..plan.prepare import check_keys, check_model, make_plan, memory_refusal, served_context
from ..plan.revisions import Revisions
from ..report import ClusterReport
from ..roles import POOLS
from ..supervise.children import TICK, Children, Output
from ..supervise.core import Log, Phase, SupervisorCore
from ..supervise.hangs import HangLimits
from . import banner
from .address_lock import AddressLock
from .run_folder import RunFolder, sweep, sweep_one

__all__ = ["LocalBackend", "LocalCluster", "check_model", "make_plan"]

Out = Callable[[str], object]
EXIT_CUT_SHORT = 130
"""Exit code of a command that Ctrl-C ended, as shells use it."""


class LocalBackend:
    """Runs members as children of this process; see :class:`..controller.backend.Backend`.

    ``refusal``: function for :meth:`refusal`.
    """

    def __init__(self, children: Children, refusal: Callable[[dict[str, int]], str]) -> None:
        self._children = children
        self._refusal = refusal
        self._keyless: dict[str, str] = {}  # the role for which a worker has no key, by name

    def start(self, spec: MemberSpec) -> None:
        """Start a child and keep it running."""
        if spec.role in POOLS:
            keys = getattr(spec.process.config, "keys", "")
            self._keyless[spec.name] = role_without_key(keys, POOLS, spec.name)
        self._children.start(spec.process)

    def stop(self, name: str, grace: float) -> None:
        """SIGTERM, and SIGKILL ``grace`` seconds later."""
        self._keyless.pop(name, None)
        self._children.stop(name, grace)

    def turn(self, spec: MemberSpec) -> None:
        """Let a worker change its role."""
        self._children.turn(spec.process)

    def turn_refusal(self) -> str:
        """Return which worker has its own key, which is valid for one role, or an empty text."""
        for name, role in self._keyless.items():
            if role:
                return f"{name} cannot be a {role} worker: its key is of the other role"
        return ""

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.stop(name, 0.0)

    def request(self, bundles: dict[str, int]) -> None:
        """Do nothing: one machine has no resources to request."""

    def refusal(self, targets: dict[str, int]) -> str:
        """Return why this machine has too little memory for pools of this size, or ''."""
        return self._refusal(targets)

    def full(self, targets: dict[str, int]) -> str:
        """Return an empty text: on one machine, only :meth:`refusal` limits the pools."""
        return ""

    def reported(self, router: str, report: ClusterReport) -> None:
        """Detect hanging children with a router's report."""
        self._children.reported(router, report)

    def close(self) -> None:
        """Kill remaining children. Children remain only if the loop ended with an exception."""
        self._children.close()


class LocalCluster:
    """Runs one cluster in the calling (main) thread until it ends.

    ``out``: receives the lines for the operator, as text or JSON. ``private``: if the settings have
    no address, listen inside the run folder instead of at the user's default address. ``log``: path
    of the log file, shown in the overview.
    """

    def __init__(
        self, settings: ServeSettings, out: Out, *, private: bool = False, log: str = ""
    ) -> None:
        self._settings = settings
        self._json = out if settings.log_format == "json" else None
        self._out = out if self._json is None else lambda line: out(json_line(SUPERVISOR, line))
        self._log = log
        self._on_ready: Callable[[], object] | None = None
        self._on_stopping: Callable[[], object] | None = None
        self._lock: AddressLock | None = None
        self._http_port: HttpPort | None = None
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
        self._core = ControllerCore.of(self.plan.settings)
        self._stats: tuple[float, ClusterReport] | None = None
        self.failure = ""

    def _prepare(self, settings: ServeSettings, *, private: bool) -> None:
        """Make the run folder and the plan, and take the HTTP port and the address lock."""
        parent = Path(settings.run_dir) if settings.run_dir else None
        sweep(parent)
        self._folder = RunFolder(parent)
        try:
            if private and not settings.address:
                address = self._folder.ipc("client")
                settings = msgspec.structs.replace(settings, address=address)
            self._http_port = HttpPort.of(settings)
            check_metrics_ports(settings)
            port = 0 if self._http_port is None else self._http_port.number
            self.plan = make_plan(settings, self._folder, port)
            check_keys(self.plan)
            self.admin = settings.admin or admin_address(self.plan.address)
            claim_admin(self.admin)
            self._lock = AddressLock.take(self.admin)
            if self._lock is not None:
                if self._lock.left is not None:
                    sweep_one(self._lock.left)
                self._lock.note(self._folder.path)
        except BaseException:
            self._release()
            raise

    # ------------------------------------------------------------- life

    def run(self) -> int:
        """Serve until interrupted or failed, and return the exit code.

        1: failed, with the reason in ``failure``. :data:`EXIT_CUT_SHORT`: a second interrupt
        ended running requests.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            contacts = Contacts.of(self.plan, self._overview(), self._print)
            pilot = pilot_of(self._core, self.plan.settings)
            self._shell = ControllerShell(
                self._loop, context, self._core, Revisions(self.plan), self._make_backend,
                contacts, pilot,
            )  # fmt: skip
            self._shell.listen(self.admin)
            self._shell.start()
            self._loop.every(TICK, self._show_stats)
            self._loop.run()
            self._shell.close()
        finally:
            if self._backend is not None:
                self._backend.close()
            context.destroy(linger=0)
            self._release()
            self._loop.close()
        code = 1 if self._shell.exit_code is None else self._shell.exit_code
        return EXIT_CUT_SHORT if self._cut_short else code

    def _release(self) -> None:
        """Release the port and the lock, and remove the run folder."""
        self._folder.close()
        if self._http_port is not None:
            self._http_port.close()
        if self._lock is not None:
            self._lock.release()

    def _make_backend(self, emit: Callable[[MemberEvent], None]) -> LocalBackend:
        limits = HangLimits(worker_timeout=self._settings.worker_timeout)
        core = SupervisorCore(hang_limits=limits)
        output = Output(self._out, self._settings.log_level, self._json)
        children = Children(self._loop, core, lambda: self._folder, output, emit)
        self._backend = LocalBackend(children, self._refusal)
        return self._backend

    def on_ready(self, callback: Callable[[], object]) -> None:
        """Set a callback for the moment when every worker has registered.

        It is called once on this thread and must not block.
        """
        self._on_ready = callback

    def on_stopping(self, callback: Callable[[], object]) -> None:
        """Set a callback for the moment when a signal begins the stop. It must not block."""
        self._on_stopping = callback

    def interrupt(self) -> None:
        """Start an orderly shutdown. Safe from any thread."""
        self._loop.post(lambda: self._shell.feed(Down()))

    def _on_signal(self, times: int) -> None:
        self.interrupted = True
        self._cut_short = times > 1
        if self._on_stopping is not None:
            self._on_stopping()
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
            http=self.plan.http_url,
            log=self._log,
            paths=[*map(str, paths), str(self._folder.path)],
        )

    def _refusal(self, targets: dict[str, int]) -> str:
        return memory_refusal(self.plan.settings, self.plan.kv_default, targets)

    # ------------------------------------------------------------- the operator's terminal

    def _print(self, log: Log) -> None:
        if log.event in FAILURES:
            self.failure = sentence(log)
            return
        if log.event == "ready" and self._json is not None:
            facts = {"model": self._facts.model, "address": self._facts.address}
            self._json(json_line(SUPERVISOR, sentence(log), http=self.plan.http_url, **facts))
        else:
            self._out(sentence(log))
        if log.event == "ready":
            for line in banner.startup(self._facts, self._shell.report):
                if self._json is None:
                    self._out(line)
            self._stats = (self._loop.now(), self._shell.report)
            if self._on_ready is not None:
                self._on_ready()

    def _show_stats(self) -> None:
        interval = self._settings.stats_interval
        if not interval or self._stats is None or self._core.phase is not Phase.SERVING:
            return
        since, before = self._stats
        seconds = self._loop.now() - since
        if seconds >= interval:
            if banner.is_busy(before, self._shell.report):
                self._out(banner.throughput(before, self._shell.report, seconds))
            self._stats = (self._loop.now(), self._shell.report)
