"""The local supervisor behind ``baton serve``: one cluster on this machine, from start to end.

The decisions are :class:`.core.SupervisorCore`'s; here are the processes, descriptors and
timers around it. Invariant: when :meth:`LocalCluster.run` returns, no child lives and the
run folder and socket files are gone; if the supervisor itself is killed, the kernel ends the
children and the next start sweeps the files.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..engine.checkpoint import load_checkpoint
from ..engine.embedding_config import EMBED
from ..engine.runner import DEFAULT_KV_BYTES, model_task
from ..proto.errors import BatonError
from ..runtime.lifecycle import on_stop_signal
from ..runtime.loop import Loop
from . import banner
from .addresses import client_address, free_ports, ipc_path
from .config import ServeSettings
from .core import (
    Action,
    Begin,
    End,
    Event,
    Exited,
    Interrupted,
    Kill,
    Phase,
    Reported,
    Say,
    Start,
    SupervisorCore,
    SupervisorLimits,
    Terminate,
    Tick,
)
from .memory import free_memory, kv_share, model_memory
from .monitor import StatusMonitor
from .plan import (
    ROUTER,
    ClusterPlan,
    ipc_addresses,
    model_folder,
    ports_needed,
    resolve_plan,
    tcp_addresses,
)
from .processes import Child, describe_log
from .progress import LoadProgress
from .report import ClusterReport
from .run_folder import RunFolder, sweep

TICK = 0.1
"""Seconds between looks at the clock."""
_SEVERITY = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}

Out = Callable[[str], object]


def check_model(settings: ServeSettings) -> None:
    """Open the model folder; CheckpointError now, once, instead of from every worker.

    A folder without a tokenizer is served: prompts then are token ids, and a client that
    gives text is told so.
    """
    model_task(load_checkpoint(model_folder(settings)), settings.task)


def with_task(settings: ServeSettings) -> ServeSettings:
    """The settings as the model needs them: what embeds has no decode workers."""
    try:
        task = model_task(load_checkpoint(model_folder(settings)), settings.task)
    except BatonError:
        return settings  # the workers say what is wrong
    return settings if task != EMBED else msgspec.structs.replace(settings, task=task, decode=0)


def served_context(settings: ServeSettings) -> int:
    """Tokens of a whole context, by the settings or the model; 0 if its folder is wrong."""
    try:
        rope = load_checkpoint(model_folder(settings)).config.rope
    except BatonError:
        return 0  # the workers say what is wrong
    return settings.max_length or rope.default_length()


def default_kv_bytes(settings: ServeSettings) -> int:
    """KV memory of each worker the settings say nothing of, by what is free now."""
    free = free_memory()
    if free is None:
        return DEFAULT_KV_BYTES
    try:
        model = model_memory(load_checkpoint(model_folder(settings)), settings.max_length)
    except BatonError:
        return DEFAULT_KV_BYTES  # the workers say what is wrong
    batch = max(settings.max_batch, settings.prefill_max_batch)
    return kv_share(free, settings.prefill + settings.decode, batch, model)


def make_plan(settings: ServeSettings, folder: RunFolder | None) -> ClusterPlan:
    """Choose addresses and resolve the plan; without a folder (``--dry-run``) a placeholder."""
    settings = with_task(settings)
    client = client_address(settings.address, claim=folder is not None)
    if settings.transport == "tcp":
        addresses = tcp_addresses(settings, client, free_ports(ports_needed(settings)))
    else:
        path = folder.path if folder is not None else Path("RUN_FOLDER")
        addresses = ipc_addresses(settings, client, str(path))
    return resolve_plan(settings, addresses, secrets.token_hex(32), default_kv_bytes(settings))


class LocalCluster:
    """Runs one cluster in the calling (main) thread until it ends.

    ``out``: takes the lines for the operator. ``private``: without an address in the settings
    listen inside the run folder instead of at the user's default address.
    """

    def __init__(self, settings: ServeSettings, out: Out, *, private: bool = False) -> None:
        self._settings = settings
        self._out = out
        self._on_ready: Callable[[], object] | None = None
        self._loop = Loop()
        try:
            self._prepare(settings, private=private)
        except BaseException:
            self._loop.close()
            raise
        context = served_context(self.plan.settings)
        self._facts = banner.facts(self.plan, hint=not private, context=context)
        self._specs = {spec.name: spec for spec in self.plan.processes}
        self._children: dict[str, Child] = {}
        self._last_error: dict[str, str] = {}
        self._last_words: dict[str, str] = {}
        self._refused: set[str] = set()
        self._progress = LoadProgress(out)
        self._report = ClusterReport()
        self._stats: tuple[float, ClusterReport] | None = None
        limits = SupervisorLimits(grace=settings.grace)
        self._core = SupervisorCore(ROUTER, self.plan.worker_names, limits)
        self._exit_code = 1
        self.failure = ""

    def _prepare(self, settings: ServeSettings, *, private: bool) -> None:
        """Make the run folder; from before that on an interrupt waits for :meth:`run`."""
        self.interrupted = False  # by a signal
        on_stop_signal(self._loop, lambda _times: self._on_signal())
        self._loop.on_signal(signal.SIGHUP, self._on_signal)
        parent = Path(settings.run_dir) if settings.run_dir else None
        sweep(parent)
        self._folder = RunFolder(parent)
        try:
            if private and not settings.address:
                address = self._folder.ipc("client")
                settings = msgspec.structs.replace(settings, address=address)
            self.plan = make_plan(settings, self._folder)
        except BaseException:
            self._folder.close()
            raise

    # ------------------------------------------------------------- life

    def run(self) -> int:
        """Serve until interrupted or failed; returns the exit code, 1 with ``failure`` set."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        path = ipc_path(self.plan.address)
        try:
            if path is not None:
                self._folder.own_socket(path)
            monitor = StatusMonitor(self._loop, context, self.plan.address, self._on_report)
            self._loop.call_later(0.0, lambda: self._decide(Begin()))
            self._loop.call_later(TICK, self._tick)
            self._loop.run()
            monitor.close()
        finally:
            self._end_children()
            context.destroy(linger=0)
            self._folder.close()
            self._loop.close()
        return self._exit_code

    def on_ready(self, callback: Callable[[], object]) -> None:
        """Call once when every worker has registered, on this thread; it must not block."""
        self._on_ready = callback

    def interrupt(self) -> None:
        """Begin an orderly end; safe from any thread."""
        self._loop.post(lambda: self._decide(Interrupted()))

    def _end_children(self) -> None:
        """Only does something when the loop was left by an exception."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
            child.close()
        self._children.clear()

    # ------------------------------------------------------------- events

    def _on_signal(self) -> None:
        self.interrupted = True
        self._decide(Interrupted())

    def _tick(self) -> None:
        self._loop.call_later(TICK, self._tick)
        self._decide(Tick())
        self._show_stats()

    def _on_report(self, report: ClusterReport) -> None:
        self._report = report
        self._decide(Reported({w.id: w.pid for w in report.workers if w.alive}))

    def _on_exit(self, name: str) -> None:
        child = self._children[name]
        code = child.exit_code()
        if code is None:
            return
        self._loop.remove_fd(child.exit_fd)
        self._loop.remove_fd(child.stderr_fd)
        child.kill()  # whatever it may have left in its process group
        for event in child.drain_log():
            self._on_log(name, event)
        child.close()
        del self._children[name]
        self._progress.forget(name)
        refused = name in self._refused
        self._refused.discard(name)
        words = self._last_words.pop(name, "")
        reason = self._last_error.pop(name, "") or (words if code > 0 else "")
        self._decide(Exited(name, code, reason, refused))

    def _on_stderr(self, name: str) -> None:
        child = self._children[name]
        events = child.read_log()
        if not events and child.exit_code() is not None:
            self._loop.remove_fd(child.stderr_fd)  # closed; the exit itself comes by exit_fd
        for event in events:
            self._on_log(name, event)

    def _on_log(self, name: str, event: dict[str, Any]) -> None:
        level = str(event.get("level", "info"))
        if event.get("event") == "load.progress":
            done, total = (event.get(key, 0) for key in ("bytes_done", "bytes_total"))
            self._progress.update(name, int(done), int(total))
            return
        line = describe_log(event)
        if event.get("raw"):
            self._last_words[name] = line
        if _SEVERITY.get(level, 1) >= _SEVERITY["error"]:
            self._last_error[name] = str(event.get("error", line))
        if event.get("event") == "process.failed":
            self._refused.add(name)  # what it said comes with what is decided about its end
            return
        if _SEVERITY.get(level, 1) >= _SEVERITY[self._settings.log_level]:
            self._out(f"{name}: {level}: {line}")

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
                self._say(action)
            case End(code):
                self._exit_code = code
                self._loop.stop()

    def _try_start(self, name: str) -> None:
        """Start a child; what the system refuses (no space, no process) is the child's end."""
        try:
            self._start(name)
        except OSError as problem:
            why = f"cannot be started: {problem}"
            self._loop.post(lambda: self._decide(Exited(name, 1, why, refused=True)))

    def _start(self, name: str) -> None:
        spec = self._specs[name]
        child = Child(spec, self._folder.write(f"{name}.json", spec.config_json()))
        self._children[name] = child
        self._core.started(name, child.pid)
        self._loop.add_fd(child.stderr_fd, lambda: self._on_stderr(name))
        self._loop.add_fd(child.exit_fd, lambda: self._on_exit(name))

    def _say(self, say: Say) -> None:
        if say.what in banner.FAILURES:
            self.failure = banner.sentence(say)
            return
        self._out(banner.sentence(say))
        if say.what == "ready":
            for line in banner.startup(self._facts, self._report):
                self._out(line)
            self._stats = (self._loop.now(), self._report)
            if self._on_ready is not None:
                self._on_ready()

    def _show_stats(self) -> None:
        interval = self._settings.stats_interval
        if not interval or self._stats is None or self._core.phase is not Phase.SERVING:
            return
        since, before = self._stats
        seconds = self._loop.now() - since
        if seconds >= interval:
            self._out(banner.throughput(before, self._report, seconds))
            self._stats = (self._loop.now(), self._report)
