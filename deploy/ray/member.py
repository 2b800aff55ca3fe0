"""The supervisor of one member: a Ray actor with the router or worker as child process.

The child is started with the same command line as on one machine (``deploy.processes``). The kernel
kills the child when the *thread* that started it ends. So one thread starts every child, and the
process exits if this thread ends. If the actor ends for any reason (Ray, the raylet, a signal), the
child ends too, and Ray starts another actor, which starts another child.

This module does not import ``ray``: :mod:`.actors` makes the class an actor, and tests use the
class without Ray.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from ...proto.errors import BatonError
from ...runtime.net.loop import Loop
from ...runtime.process.main import SIGN_OF_LIFE
from ..local.run_folder import RunFolder, sweep
from ..supervise.core import describe_end
from ..supervise.oom_kills import LOOK_EVERY_S, OomWatch
from ..supervise.process import Child, ProcessSpec, describe_log, not_started
from ..supervise.restart import RestartLimits
from .member_core import Action, Begin, Event, Exited, MemberCore, Served, State, Stop, Tick

TICK = 0.1
"""Seconds between two Tick events."""


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """A member's report about itself.

    ``host``: address of its node. ``supervisor``, ``pid``: process ids of the actor and its child
    (0: no child runs). ``starts``: child starts of this actor. ``code``, ``reason``, ``refused``:
    of the last exit; ``reason`` is the last error line, ``why`` the full description. ``ends``:
    consecutive exits. ``wait``: seconds until the next start. ``quiet``: seconds since the child's
    last sign of life, None before the first.
    """

    name: str
    role: str
    revision: int
    host: str
    supervisor: int
    state: State
    pid: int = 0
    starts: int = 0
    code: int = 0
    reason: str = ""
    refused: bool = False
    why: str = ""
    ends: int = 0
    wait: float = 0.0
    quiet: float | None = None


class Supervisor:
    """Keeps one child running until :meth:`stop`. Methods are safe from any thread.

    ``process``: the child. ``host``: address of this node, for the report.
    """

    def __init__(
        self,
        process: ProcessSpec,
        *,
        revision: int = 0,
        host: str = "",
        limits: RestartLimits | None = None,
    ) -> None:
        self._process = process
        self._revision, self._host = revision, host
        self._core = MemberCore(limits, retires=process.role != "router")
        self._child: Child | None = None
        self._last_error = self._last_words = ""
        self._refused = False
        self._why = ""
        self._alive_at: float | None = None
        self._loop = Loop()
        self._folder: RunFolder | None = None
        self._oom = OomWatch()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor")
        self._thread.start()

    # ------------------------------------------------------------- from any thread

    def report(self) -> MemberReport:
        """Return the member's current report."""
        child, core = self._child, self._core
        return MemberReport(
            name=self._process.name,
            role=self._process.role,
            revision=self._revision,
            host=self._host,
            supervisor=os.getpid(),
            state=core.state,
            pid=0 if child is None else child.pid,
            starts=core.starts,
            code=core.code,
            reason=core.reason,
            refused=core.refused,
            why=self._why,
            ends=core.ends,
            wait=core.wait(self._loop.now()),
            quiet=None if self._alive_at is None else self._loop.now() - self._alive_at,
        )

    def stop(self, grace: float) -> None:
        """Send SIGTERM to the child and SIGKILL after ``grace`` seconds; do not restart it."""
        self._loop.post(lambda: self._decide(Stop(grace)))

    def kill_child(self, pid: int) -> None:
        """Kill the child's process group, if its pid is still ``pid``; the child is restarted."""
        self._loop.post(lambda: self._kill(pid))

    def close(self) -> None:
        """Kill the child and end the supervising thread."""
        self._loop.post(self._close)
        self._ended.wait()
        self._thread.join()

    # ------------------------------------------------------------- the supervising thread

    def _run(self) -> None:
        try:
            self._loop.call_later(0.0, lambda: self._decide(Begin()))
            self._loop.call_later(TICK, self._tick)
            self._loop.call_later(LOOK_EVERY_S, self._look_for_oom)
            self._loop.run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        finally:
            if self._folder is not None:
                self._folder.close()
            self._ended.set()

    def _close(self) -> None:
        self._core.handle(Stop(0.0), self._loop.now())
        if self._child is not None:
            child = self._child
            child.kill()
            child.wait()
            self._on_exit()
        self._loop.stop()

    def _tick(self) -> None:
        self._loop.call_later(TICK, self._tick)
        self._decide(Tick())

    def _look_for_oom(self) -> None:
        self._loop.call_later(LOOK_EVERY_S, self._look_for_oom)
        self._oom.look()

    def _decide(self, event: Event) -> None:
        for action in self._core.handle(event, self._loop.now()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if action is Action.START:
            self._start()
        elif self._child is not None:
            self._child.terminate() if action is Action.TERMINATE else self._child.kill()

    def _start(self) -> None:
        try:
            if self._folder is None:
                sweep()  # remove folders of killed predecessors
                self._folder = RunFolder()
            path = self._folder.write(f"{self._process.name}.json", self._process.config_json())
            child = Child(self._process, path)
        except (BatonError, OSError) as problem:  # full disk, no process: treat as an exit
            self._why = not_started(problem, Path(tempfile.gettempdir()))
            full = isinstance(problem, OSError)  # may be temporary, so the start is retried
            exited = Exited(1, self._why, refused=not full)
            self._loop.post(lambda: self._decide(exited))
            return
        self._child, self._alive_at = child, None
        self._loop.add_fd(child.stderr_fd, self._on_stderr)
        self._loop.add_fd(child.exit_fd, self._on_exit)

    def _kill(self, pid: int) -> None:
        if self._child is not None and self._child.pid == pid:
            self._child.kill()

    def _on_exit(self) -> None:
        child = self._child
        if child is None or (code := child.exit_code()) is None:
            return
        self._loop.remove_fd(child.exit_fd)
        self._loop.remove_fd(child.stderr_fd)
        child.kill()  # also kills remaining processes of its group
        for event in child.drain_log():
            self._on_log(event)
        child.close()
        self._child = None
        reason = self._last_error or (self._last_words if code > 0 else "")
        refused, self._refused = self._refused, False
        self._last_error = self._last_words = ""
        self._why = describe_end(code, reason, self._oom.evidence(code))
        self._decide(Exited(code, reason, refused))

    def _on_stderr(self) -> None:
        child = self._child
        if child is None:
            return
        events = child.read_log()
        if not events and child.exit_code() is not None:
            self._loop.remove_fd(child.stderr_fd)  # closed; exit_fd reports the exit itself
        for event in events:
            self._on_log(event)

    def _on_log(self, event: dict[str, Any]) -> None:
        """Write a log event to the actor's log; keep the last error for the report."""
        if event.get("event") == SIGN_OF_LIFE:
            self._alive_at = self._loop.now()
            self._decide(Served())
            return
        if event.get("event") == "load.progress":
            return
        line = describe_log(event)
        if event.get("raw"):
            self._last_words = line
        if event.get("level") in ("error", "critical"):
            self._last_error = str(event.get("error", line))
        self._refused = self._refused or event.get("event") == "process.failed"
        sys.stderr.write(f"{self._process.name}: {event.get('level', 'info')}: {line}\n")
        sys.stderr.flush()
