"""The child processes of one supervisor: starts, signals, exits and log lines.

The local process manager has one such object for all its children, and each actor of Ray one for
its single child. :class:`.core.SupervisorCore` decides; this class owns the processes and their
descriptors. All code runs on the loop's thread. The kernel kills a child when the *thread* that
started it ends, so this thread must outlive the children.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from ...proto.errors import BatonError
from ...runtime.net.loop import Loop
from ..controller.backend import ROUTER, MemberDown, MemberEnded, MemberEvent, MemberStarted
from ..local.run_folder import RunFolder
from ..messages import sentence
from ..report import ClusterReport
from .child_log import ChildLog
from .core import (
    Action,
    Add,
    Alive,
    Event,
    Exited,
    Kill,
    Log,
    Remove,
    Reported,
    Start,
    Started,
    SupervisorCore,
    Terminate,
    Tick,
)
from .oom import LOOK_EVERY_S, OomWatch
from .process import Child, ProcessSpec, not_started

TICK = 0.1
"""Seconds between two Tick events."""


class Children:
    """The children of one supervisor.

    ``folder``: returns the folder of the config files. ``out``: receives lines for the operator,
    and the children's log lines of severity ``log_level`` and above. ``emit``: receives
    MemberStarted, MemberDown and MemberEnded in a later turn of the loop. ``retry``: start again
    after the system refused a first start, for example because the disk is full.
    """

    def __init__(
        self,
        loop: Loop,
        core: SupervisorCore,
        folder: Callable[[], RunFolder],
        out: Callable[[str], object],
        emit: Callable[[MemberEvent], object],
        log_level: str,
        *,
        retry: bool = False,
    ) -> None:
        self._loop = loop
        self._core = core
        self._folder = folder
        self._place = Path(tempfile.gettempdir())
        self._out = out
        self._emit = emit
        self._retry = retry
        self._log = ChildLog(out, log_level, lambda name: self._decide(Alive(name)))
        self._oom = OomWatch()
        self._specs: dict[str, ProcessSpec] = {}
        self._children: dict[str, Child] = {}
        self.starts = 0
        """Number of starts, including failed starts."""
        loop.call_later(TICK, self._tick)
        loop.call_later(LOOK_EVERY_S, self._look_for_oom)

    # ------------------------------------------------------------- from the owner

    def start(self, spec: ProcessSpec) -> None:
        """Start a child with an unused name and keep it running."""
        self._specs[spec.name] = spec
        self._decide(Add(spec.name, router=spec.role == ROUTER))

    def stop(self, name: str, grace: float) -> None:
        """Stop a child permanently: SIGTERM, and SIGKILL ``grace`` seconds later."""
        self._decide(Remove(name, grace))

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

    # ------------------------------------------------------------- events

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
            self._log.handle(name, event)
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
            self._log.handle(name, event)

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
            case Log():
                self._out(sentence(action))
            case MemberDown():
                self._send(action)
            case MemberEnded(name):
                del self._specs[name]
                self._send(action)

    def _send(self, event: MemberEvent) -> None:
        """Emit an event in the next turn of the loop, never inside a call of the owner."""
        self._loop.post(lambda: self._emit(event))

    def _try_start(self, name: str) -> None:
        """Start a child. If the system refuses (disk full, no process), report an Exited."""
        self.starts += 1
        try:
            self._start(name)
        except (BatonError, OSError) as problem:
            why = not_started(problem, self._place)
            refused = not (self._retry and isinstance(problem, OSError))
            self._loop.post(lambda: self._decide(Exited(name, 1, why, refused=refused)))

    def _start(self, name: str) -> None:
        spec, folder = self._specs[name], self._folder()
        self._place = folder.path
        child = Child(spec, folder.write(f"{name}.json", spec.config_json()))
        self._children[name] = child
        self._loop.add_fd(child.stderr_fd, lambda: self._on_stderr(name))
        self._loop.add_fd(child.exit_fd, lambda: self._on_exit(name))
        self._decide(Started(name, child.pid))
        self._send(MemberStarted(name, "", child.pid))
