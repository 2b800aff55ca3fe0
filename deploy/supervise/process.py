"""One child process: its start, its log lines, its end.

Each child leads a separate process group. So Ctrl-C at the terminal reaches only the supervisor,
and a kill also reaches the child's own children. All children stay in the supervisor's session:
Linux divides processor time among sessions first (autogroups). With a session per process, a router
on busy processors waited up to 100 ms before it could read a message. The kernel kills a child
when its parent dies (``runtime.lifecycle``). A child's standard error is a pipe of JSON lines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from baton.proto.errors import BatonError
from baton.proto.wire.proofs import seal_of
from baton.runtime.keys.api_keys import KEY_VARIABLE
from baton.runtime.net.room import MORE_FILES, MORE_THREADS
from baton.runtime.process.supervision import TURN_SIGNAL

from ..roles import POOLS
from .certificates import new_secret
from .oom import let_die_first

_READ = 1 << 16
_MAX_LINE = 1 << 20
_REMEDIES = {
    os.strerror(errno.EAGAIN): MORE_THREADS,
    "can't start new thread": MORE_THREADS,
    os.strerror(errno.EMFILE): MORE_FILES,
}
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to run: ``python -P -m module --config FILE --parent PID``.

    A worker also gets ``--seal HEX``, and ``--weights FD`` if it may share weights. ``json_log``: a
    supervisor of this process alone writes its lines as JSON.
    """

    name: str
    role: str
    module: str
    config: msgspec.Struct
    json_log: bool = False

    def config_json(self) -> bytes:
        """The config file's content."""
        return msgspec.json.format(msgspec.json.encode(self.config), indent=2)


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child.

    One BLAS thread per process, because the processes share the machine. PYTHONSAFEPATH, because
    the working directory may contain a folder with the name of a package. No API key: a gateway
    gets the digests in its config. CUDA_VISIBLE_DEVICES is kept: ordinals count what it leaves.
    """
    fixed = dict.fromkeys(_ONE_THREAD, "1")
    kept = {name: value for name, value in environment.items() if name != KEY_VARIABLE}
    return {**kept, **fixed, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def not_started(problem: Exception, folder: Path) -> str:
    """Describe why a process could not be started. ``folder``: folder of its config file."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"cannot be started: the disk of {folder} on {socket.gethostname()} is full "
            f"({problem.strerror}); see df -h {folder.parent}"
        )
    if not isinstance(problem, OSError | BatonError):
        return f"cannot be started: {type(problem).__name__}: {problem}"
    why = problem.strerror if isinstance(problem, OSError) else problem
    return with_remedy(f"cannot be started: {why}")


def with_remedy(reason: str) -> str:
    """Add which limit to raise, if ``reason`` is the system's text for a limit that was reached."""
    for text, remedy in _REMEDIES.items():
        if text in reason:
            return f"{reason}; {remedy}"
    return reason


class Child:
    """A started process. ``stderr_fd`` is readable after a log line and at the end.

    ``weights``: descriptor of the memory for shared weights (:mod:`.weights`), -1 without any.
    ``secret``: certifies the death of a worker (:mod:`.certificates`). Empty for other processes.
    """

    def __init__(self, spec: ProcessSpec, config_path: Path, weights: int = -1) -> None:
        self.spec = spec
        self.secret = new_secret() if spec.role in POOLS else b""
        seal = ["--seal", seal_of(self.secret).hex()] if self.secret else []
        shared = ["--weights", str(weights)] if weights >= 0 else []
        self._popen = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            [
                *(sys.executable, "-P", "-m", spec.module),
                *("--config", str(config_path), "--parent", str(os.getpid()), *seal, *shared),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=child_environment(os.environ),
            process_group=0,
            pass_fds=(weights,) if weights >= 0 else (),
        )
        if spec.role in POOLS:
            let_die_first(self.pid)
        if self._popen.stderr is None:
            raise OSError("no pipe to the child's standard error")
        self._pipe = self._popen.stderr
        os.set_blocking(self._pipe.fileno(), False)
        self._buffer = b""
        self.exit_fd = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._popen.pid

    @property
    def stderr_fd(self) -> int:
        """Descriptor of the log pipe."""
        return self._pipe.fileno()

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._popen.poll()

    def wait(self) -> None:
        """Block until the process has ended."""
        self._popen.wait()

    def terminate(self) -> None:
        """Send SIGTERM for an orderly exit."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.terminate()

    def turn(self) -> None:
        """Send the order to change the role."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(TURN_SIGNAL)

    def kill(self) -> None:
        """Kill the whole process group with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def read_log(self) -> list[dict[str, Any]]:
        """Return the log events that arrived. A line that is not JSON becomes a warning."""
        try:
            data = os.read(self.stderr_fd, _READ)
        except BlockingIOError:
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_LINE or not data:
            lines, self._buffer = [*lines, self._buffer], b""
        return [parse_log_line(line) for line in lines if line.strip()]

    def drain_log(self) -> list[dict[str, Any]]:
        """Return the remaining log events of an ended child."""
        events: list[dict[str, Any]] = []
        while more := self.read_log():
            events += more
        return events

    def close(self) -> None:
        """Close the descriptors. The process must have ended."""
        self._pipe.close()
        os.close(self.exit_fd)


def parse_log_line(line: bytes) -> dict[str, Any]:
    """Parse a log event of ``runtime.log``. Other text becomes a warning with the key ``raw``.

    Other text is, for example, the traceback of an interpreter that crashed.
    """
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"level": "warning", "event": line.decode("utf-8", "replace").rstrip(), "raw": True}


def describe_log(event: dict[str, Any]) -> str:
    """Format a log event as one line for the terminal."""
    hidden = {"event", "level", "timestamp", "role", "process", "traceback", "raw"}
    keys = " ".join(f"{key}={value}" for key, value in event.items() if key not in hidden)
    return f"{event.get('event', '')} {keys}".strip()
