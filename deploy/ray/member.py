"""The supervisor of one member: a Ray actor with the router or worker as child process.

The child is started and supervised as on one machine (:mod:`..supervise.children`). The kernel
kills the child when the *thread* that started it ends. So one thread starts every child, and the
process exits if this thread ends. If the actor ends for any reason (Ray, the raylet, a signal), the
child ends too, and Ray starts another actor, which starts another child.

This module does not import ``ray``: :mod:`.actors` makes the class an actor, and tests use the
class without Ray.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import traceback

import msgspec

from baton.runtime.net.loop import Loop

from ..controller.backend import MemberDown, MemberEnded, MemberEvent, MemberStarted
from ..local.run_folder import RunFolder, sweep
from ..messages import SUPERVISOR, json_line, sentence
from ..supervise.children import Children, Output
from ..supervise.core import Log, SupervisorCore, describe_exit
from ..supervise.process import ProcessSpec
from ..supervise.restart import RestartLimits


class State(enum.StrEnum):
    """The member's state."""

    RUNNING = "running"
    WAITING = "waiting"  # for its next start
    STOPPING = "stopping"
    ENDED = "ended"


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """A member's report about itself.

    ``host``: address of its node. ``supervisor``, ``pid``: process ids of the actor and its child
    (0: no child runs). ``starts``: child starts of this actor. ``why``, ``ends``, ``wait``: of a
    member that waits for its next start: why the last process ended, number of consecutive exits,
    seconds until the start. ``code``, ``reason``, ``refused``: of an ended member; see
    :class:`..controller.backend.MemberEnded`. ``quiet``: seconds since the child's last heartbeat,
    None before the first. ``keyless``: the role that the worker could not have on its host for lack
    of a key, or empty.
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
    keyless: str = ""


class Supervisor:
    """Keeps one child running until :meth:`stop`. Methods are safe from any thread.

    ``process``: the child. ``host``, ``keyless``: see :class:`MemberReport`.
    """

    def __init__(
        self,
        process: ProcessSpec,
        *,
        revision: int = 0,
        host: str = "",
        keyless: str = "",
        limits: RestartLimits | None = None,
    ) -> None:
        self._process = process
        self._report = MemberReport(
            name=process.name,
            role=process.role,
            revision=revision,
            host=host,
            supervisor=os.getpid(),
            state=State.RUNNING,
            keyless=keyless,
        )
        """As of the child's last event; replaced as a whole, because other threads read it."""
        self._start_at = 0.0
        self._loop = Loop()
        self._folder: RunFolder | None = None
        core = SupervisorCore(limits or RestartLimits(), reports=False)
        as_json = _write if process.json_log else None
        output = Output(self._say, "debug", as_json)
        self._children = Children(
            self._loop, core, self._run_folder, output, self._on_child, retry=True
        )
        self._ended = threading.Event()
        self._loop.post(lambda: self._children.start(process))
        self._thread = threading.Thread(target=self._run, name="supervisor")
        self._thread.start()

    # ------------------------------------------------------------- from any thread

    def report(self) -> MemberReport:
        """Return the member's current report."""
        report, name = self._report, self._process.name
        waits = report.state is State.WAITING
        return msgspec.structs.replace(
            report,
            pid=self._children.pid(name),
            wait=max(0.0, self._start_at - self._loop.now()) if waits else 0.0,
            quiet=self._children.quiet(name),
        )

    def stop(self, grace: float) -> None:
        """Send SIGTERM to the child and SIGKILL after ``grace`` seconds; do not restart it."""
        self._loop.post(lambda: self._stop(grace))

    def turn(self, process: ProcessSpec) -> None:
        """Let the child go on in the role of ``process``, also after restarts. Idempotent."""
        self._loop.post(lambda: self._turn(process))

    def kill_child(self, pid: int) -> None:
        """Kill the child's process group, if its pid is still ``pid``; the child is restarted."""
        self._loop.post(lambda: self._children.kill_process(self._process.name, pid))

    def close(self) -> None:
        """Kill the child and end the supervising thread."""
        self._loop.post(self._close)
        self._ended.wait()
        self._thread.join()

    # ------------------------------------------------------------- the supervising thread

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        finally:
            if self._folder is not None:
                self._folder.close()
            self._ended.set()

    def _run_folder(self) -> RunFolder:
        if self._folder is None:
            sweep()  # remove folders of killed predecessors
            self._folder = RunFolder()
        return self._folder

    def _close(self) -> None:
        try:
            self._children.close()
        finally:
            self._loop.stop()

    def _stop(self, grace: float) -> None:
        if self._report.state is not State.ENDED:
            self._report = msgspec.structs.replace(self._report, state=State.STOPPING)
            self._children.stop(self._process.name, grace)

    def _turn(self, process: ProcessSpec) -> None:
        state = self._report.state
        if state in (State.STOPPING, State.ENDED) or process.role == self._report.role:
            return
        self._say(f"{process.name} turns to {process.role}")
        self._report = msgspec.structs.replace(self._report, role=process.role)
        self._children.turn(process)

    def _say(self, line: str) -> None:
        """Write a line of the supervisor to the actor's log."""
        _write(json_line(SUPERVISOR, line) if self._process.json_log else line)

    def _on_child(self, event: MemberEvent) -> None:
        """Write the child's event to the actor's log, and update the report."""
        replace, report, starts = msgspec.structs.replace, self._report, self._children.starts
        stopping = report.state is State.STOPPING
        match event:
            case MemberStarted():
                state = State.STOPPING if stopping else State.RUNNING
                self._report = replace(report, state=state, starts=starts)
            case MemberDown(name, why, seconds, ends):
                self._say(sentence(Log("restarting", name, why, seconds)))
                self._start_at = self._loop.now() + seconds
                self._report = replace(
                    report, state=State.WAITING, starts=starts, why=why, ends=ends
                )
            case MemberEnded(name, code, reason, refused):
                self._say(f"{name} ended: {reason or describe_exit(code)}")
                self._report = replace(
                    report, state=State.ENDED, code=code, reason=reason, refused=refused
                )


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
