"""The child processes of one supervisor: starts, signals, exits and log lines.

The local process manager has one such object for all its children, and each actor of Ray one for
its single child. :class:`.core.SupervisorCore` decides; this class owns the processes and their
descriptors. All code runs on the loop's thread. The kernel kills a child when the *thread* that
started it ends, so this thread must outlive the children.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from baton.proto.errors import BatonError
from baton.runtime.net.loop import Loop
from baton.runtime.process.log import get_logger
from baton.runtime.process.memory import size_text
from baton.runtime.process.supervision import SIGN_OF_LIFE

from ..controller.backend import (
    MemberDown,
    MemberEnded,
    MemberEvent,
    MemberServes,
    MemberStarted,
)
from ..local.run_folder import RunFolder
from ..local.terminal import Terminal
from ..messages import json_line, load_progress, sentence
from ..report import ClusterReport
from .certifier import Certifier
from .core import (
    Action,
    Add,
    Alive,
    Event,
    Exited,
    Kill,
    Log,
    Raised,
    Remove,
    Reported,
    Start,
    Started,
    SupervisorCore,
    Terminate,
    Tick,
)
from .oom import LOOK_EVERY_S, OomWatch
from .process import Child, ProcessSpec, describe_log, not_started, with_remedy
from .weights import WeightsMemories

TICK = 0.1
"""Seconds between two Tick events."""
_log = get_logger()


@dataclass(slots=True, frozen=True)
class Output:
    """Where lines go.

    ``out``: receives lines for the operator, and the children's log lines of severity ``level`` and
    above. ``as_json``: receives the children's lines as JSON, instead of ``out``.
    """

    out: Callable[[str], object]
    level: str
    as_json: Callable[[str], object] | None = None


class Children:
    """The children of one supervisor.

    ``folder``: returns the folder of the config files. ``emit``: receives MemberStarted,
    MemberServes, MemberDown and MemberEnded in a later turn of the loop. ``retry``: start again
    after the system refused a first start, for example because the disk is full.
    """

    def __init__(
        self,
        loop: Loop,
        core: SupervisorCore,
        folder: Callable[[], RunFolder],
        output: Output,
        emit: Callable[[MemberEvent], object],
        *,
        retry: bool = False,
    ) -> None:
        self._loop = loop
        self._core = core
        self._folder = folder
        self._place = Path(tempfile.gettempdir())
        self._out = output.out
        self._emit = emit
        self._retry = retry
        self._log = ChildLog(output, lambda name, turns: self._decide(Alive(name, turns)))
        self._oom = OomWatch()
        self._certifier = Certifier(loop)
        self._weights = WeightsMemories()
        self._specs: dict[str, ProcessSpec] = {}
        self._children: dict[str, Child] = {}
        self.starts = 0
        """Number of starts, including failed starts."""
        loop.every(TICK, self._tick)
        loop.every(LOOK_EVERY_S, self._oom.look)

    # ------------------------------------------------------------- from the owner

    def start(self, spec: ProcessSpec) -> None:
        """Start a child with an unused name and keep it running."""
        self._specs[spec.name] = spec
        self._decide(Add(spec.name, spec.role))

    def stop(self, name: str, grace: float) -> None:
        """Stop a child permanently: SIGTERM, and SIGKILL ``grace`` seconds later."""
        self._decide(Remove(name, grace))

    def turn(self, spec: ProcessSpec) -> None:
        """Let a worker change its role: it drains, and goes on with the settings of ``spec``.

        Every later start has these settings too. A process that does not serve yet, and so cannot
        read the order, is killed; its restart has the new role.
        """
        if spec.name not in self._specs:
            return
        self._specs[spec.name] = spec
        child = self._children.get(spec.name)
        if child is None:
            return
        self._folder().write(f"{spec.name}.json", spec.config_json())
        if self.quiet(spec.name) is None:
            child.kill()
        else:
            child.turn()

    def kill_process(self, name: str, pid: int) -> None:
        """Kill the child's process group if its process is still ``pid``; it is restarted."""
        if self.pid(name) == pid:
            self._children[name].kill()

    def reported(self, router: str, report: ClusterReport) -> None:
        """Detect hanging children with a router's report."""
        self._decide(Reported(router, report))

    def pid(self, name: str) -> int:
        """Process id of a child; 0 while no process runs."""
        child = self._children.get(name)
        return 0 if child is None else child.pid

    def quiet(self, name: str) -> float | None:
        """Return the seconds since a child's last heartbeat; None before the first."""
        return self._core.quiet(name, self._loop.now())

    def close(self) -> None:
        """Kill the remaining children and wait for their end."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()
            child.close()
        self._children.clear()
        self._weights.keep(())
        self._certifier.close()

    # ------------------------------------------------------------- events

    def _tick(self) -> None:
        self._decide(Tick())

    def _on_exit(self, name: str) -> None:
        child = self._children[name]
        code = child.exit_code()
        if code is None:
            return
        # Unregistered first and each step on its own: the descriptors stay readable, and an
        # exception must not keep the core from the exit.
        del self._children[name]
        self._loop.remove_fd(child.exit_fd)
        self._loop.remove_fd(child.stderr_fd)
        if child.secret:
            self._loop.guarded(partial(self._certifier.died, child.spec, child.secret, code))
        child.kill()  # ends remaining processes of the child's process group
        self._loop.guarded(partial(self._drain_log, name, child))
        child.close()
        reason, refused = self._log.ended(name, code)
        self._decide(Exited(name, code, reason, refused, self._oom.evidence(code)))

    def _drain_log(self, name: str, child: Child) -> None:
        for event in child.drain_log():
            self._log.handle(name, event)

    def _on_stderr(self, name: str) -> None:
        child = self._children[name]
        events = child.read_log()
        if not events and child.exit_code() is not None:
            self._loop.remove_fd(child.stderr_fd)  # closed; exit_fd reports the exit
        for event in events:
            self._log.handle(name, event)

    # ------------------------------------------------------------- actions

    def _decide(self, event: Event) -> None:
        for action in self._core.handle(event, self._loop.now()):
            self._loop.guarded(partial(self._carry_out, action))

    def _carry_out(self, action: Action) -> None:
        match action:
            case Raised(error=error):
                raise error  # the loop logs it
            case Start(name):
                self._try_start(name)
            case Terminate(name) if name in self._children:
                self._children[name].terminate()
            case Kill(name) if name in self._children:
                self._children[name].kill()
            case Log():
                self._out(sentence(action))
            case MemberServes() | MemberDown():
                self._send(action)
            case MemberEnded(name):
                del self._specs[name]
                self._weights.keep(self._specs.values())
                self._send(action)

    def _send(self, event: MemberEvent) -> None:
        """Emit an event in the next turn of the loop, never inside a call of the owner."""
        self._loop.post(lambda: self._emit(event))

    def _try_start(self, name: str) -> None:
        """Start a child. If that fails, whatever the reason, report an Exited."""
        self.starts += 1
        try:
            self._start(name)
        except Exception as problem:
            if not isinstance(problem, BatonError | OSError):
                _log.exception("supervisor.start_failed", name=name)
            why = not_started(problem, self._place)
            refused = not (self._retry and isinstance(problem, OSError))
            self._loop.post(lambda: self._decide(Exited(name, 1, why, refused=refused)))

    def _start(self, name: str) -> None:
        spec, folder = self._specs[name], self._folder()
        self._place = folder.path
        config = folder.write(f"{name}.json", spec.config_json())
        child = Child(spec, config, self._weights.of(spec))
        self._children[name] = child
        self._loop.add_fd(child.stderr_fd, lambda: self._on_stderr(name))
        self._loop.add_fd(child.exit_fd, lambda: self._on_exit(name))
        self._decide(Started(name, child.pid))
        self._send(MemberStarted(name, "", child.pid))


# ---------------------------------------------------------------- log events of children

REDRAW_S = 0.1
"""Minimum seconds between two drawings of the bar."""
LOADING_LINE_S = 1.0
"""Seconds of loading before a line is printed."""
_SEVERITY = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}
_HOPELESS = 1
"""Exit code of a process that would fail again after a restart."""


_OF_LINE = ("event", "process", "raw")


class ChildLog:
    """Handles the log events of child processes: lines, progress of loading, reasons of exits.

    ``on_life`` receives the process name and the completed turns of each heartbeat to the
    supervisor.
    """

    def __init__(
        self,
        output: Output,
        on_life: Callable[[str, int], object] = lambda _name, _turns: None,
    ) -> None:
        self._out, self._as_json = output.out, output.as_json
        self._on_life = on_life
        self._shown_from = _SEVERITY[output.level]
        self._progress = LoadProgress(output.out)
        self._last_error: dict[str, str] = {}
        self._last_words: dict[str, str] = {}
        self._refused: set[str] = set()
        self._gave_in: set[str] = set()  # workers that logged why they exit

    def handle(self, name: str, event: dict[str, Any]) -> None:
        """Handle one event of a child's log."""
        if event.get("event") == SIGN_OF_LIFE:
            turns = event.get("turns")
            self._on_life(name, turns if isinstance(turns, int) else 0)
            return
        severity = _SEVERITY.get(str(event.get("level", "info")), 1)
        if event.get("event") == "load.progress":
            done, total = (event.get(key, 0) for key in ("bytes_done", "bytes_total"))
            self._progress.update(name, int(done), int(total))
            return
        line = describe_log(event)
        if event.get("raw"):
            self._last_words[name] = line
        if severity >= _SEVERITY["error"]:
            self._last_error[name] = str(event.get("error", line))
        if event.get("event") == "worker.exit" and severity >= _SEVERITY["error"]:
            self._last_error[name] = str(event.get("reason", line))
            self._gave_in.add(name)
        if event.get("event") == "process.failed":
            self._refused.add(name)  # the error is printed with the decision about the exit
            return
        if severity >= self._shown_from:
            if self._as_json is not None:
                fields = {key: value for key, value in event.items() if key not in _OF_LINE}
                self._as_json(json_line(name, str(event.get("event", "")), **fields))
            else:
                self._out(f"{name}: {event.get('level', 'info')}: {line}")
                if event.get("traceback"):  # of our own code: the only place that has it
                    self._out(f"{name}: {event['traceback']}")

    def ended(self, name: str, code: int) -> tuple[str, bool]:
        """Return the reason of a child's exit and whether its settings are wrong.

        Settings are also wrong if the routers rejected the worker permanently, for example because
        it serves another model. Drops all data about the child.
        """
        self._progress.forget(name)
        refused = name in self._refused or (name in self._gave_in and code == _HOPELESS)
        self._refused.discard(name)
        self._gave_in.discard(name)
        words = self._last_words.pop(name, "")
        # libzmq writes why it aborts, as at a limit on threads
        said = words if code > 0 or code == -signal.SIGABRT else ""
        return with_remedy(self._last_error.pop(name, "") or said), refused


@dataclass(slots=True)
class _Load:
    """Loading of one worker's weights: ``done`` of ``total`` bytes, and the lines printed."""

    began: float
    done: int = 0
    total: int = 0
    announced: bool = False
    ended: bool = False


class LoadProgress:
    """Collects ``(bytes done, bytes total)`` per worker. ``out`` receives the lines.

    A terminal shows a bar that is redrawn. A log file gets lines: one if loading takes longer than
    ``LOADING_LINE_S``, and one when a worker's weights are loaded.
    """

    def __init__(
        self, out: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._draw = out.draw if isinstance(out, Terminal) and out.draws() else None
        self._clock = clock
        self._drawn_at = clock()
        self._loads: dict[str, _Load] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Worker ``name`` has packed ``done`` of ``total`` bytes of weights."""
        now = self._clock()
        load = self._loads.setdefault(name, _Load(began=now))
        if load.ended:
            return  # a repeated event
        load.done, load.total = done, total
        if done >= total:
            load.ended = True
            self._out(f"{name} loaded {size_text(total)} of weights in {now - load.began:.1f} s")
        elif self._draw is None and not load.announced and now >= load.began + LOADING_LINE_S:
            load.announced = True
            self._out(f"{name} loads {size_text(total)} of weights")
        running = [(n, o.done, o.total) for n, o in self._loads.items() if not o.ended]
        if self._draw is not None and running and now >= self._drawn_at + REDRAW_S:
            self._drawn_at = now
            self._draw(load_progress(running))

    def forget(self, name: str) -> None:
        """Drop an ended worker."""
        self._loads.pop(name, None)
