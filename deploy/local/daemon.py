"""A cluster in the background: ``python -m baton.deploy.local.daemon``, and its start by a parent.

The settings come as JSON over standard input. Standard output and error are the log file. The
parent waits at a pipe for ``ready`` or an error line. Invariant: if the parent dies before either,
the cluster stops. After ``ready``, the cluster runs independently of the parent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":
    gc.disable()  # until baton.runtime.process.garbage.end_of_imports

import msgspec

from baton.proto.errors import BatonError, ConfigError, RequestFailed
from baton.runtime.process.garbage import end_of_imports
from baton.runtime.process.log import timestamp
from baton.runtime.process.os_settings import die_with_parent, outlive_parent
from baton.runtime.small_files import check_writable

from ..config import ServeSettings
from ..messages import SUPERVISOR, json_line
from .cluster import LocalCluster
from .terminal import terminal

_READY = b"ready\n"


class Daemon:
    """A background cluster, on the parent's side."""

    def __init__(self, settings: ServeSettings, log: Path) -> None:
        reading, writing = os.pipe()
        try:
            with _open_log(log) as file:
                self._process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
                    [
                        *(sys.executable, "-P", "-m", "baton.deploy.local.daemon"),
                        *("--report", str(writing), "--log", str(log)),
                        *("--parent", str(os.getpid())),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._report = os.fdopen(reading, "rb")
        if self._process.stdin is not None:
            with self._process.stdin as stdin:
                stdin.write(msgspec.json.encode(settings))
        self.pid = self._process.pid
        self._log = log

    def wait_ready(self) -> None:
        """Return after the cluster serves. Raises RequestFailed with the reason if it fails.

        An interrupt stops the cluster, so that no half-started cluster remains.
        """
        try:
            with self._report as report:
                text = report.read()
        except BaseException:
            self._process.terminate()
            self._process.wait()
            raise
        if text == _READY:
            return
        self._process.wait()
        raise RequestFailed(text.decode("utf-8", "replace").strip() or f"it ended; see {self._log}")


def _open_log(log: Path) -> BinaryIO:
    """Open the log file for appending, readable by this user only. Raises ConfigError."""
    try:
        check_writable(log)
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise ConfigError(f"cannot write the log {log}: {problem.strerror}") from problem
    return os.fdopen(descriptor, "ab")


def _stamped(line: str) -> None:
    terminal(f"{timestamp()} {line}")


def _json(line: str) -> None:
    terminal(json_line(SUPERVISOR, line, level="error"))


def main() -> int:
    """Run the cluster in the background process, and report once whether it serves."""
    end_of_imports()
    parser = argparse.ArgumentParser(prog="baton-daemon")
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    out: Callable[[str], object] = _stamped
    with os.fdopen(options.report, "wb", buffering=0) as report:
        try:
            settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ServeSettings)
            lines = terminal if settings.log_format == "json" else _stamped
            if settings.log_format == "json":
                out = _json
            cluster = LocalCluster(settings, lines, log=options.log)

            def ready() -> None:
                outlive_parent()
                try:
                    report.write(_READY)
                except BrokenPipeError:
                    cluster.interrupt()  # the parent has just died
                report.close()

            cluster.on_ready(ready)
            code = cluster.run()
            failure = cluster.failure
        except (BatonError, OSError) as problem:
            code, failure = 1, str(problem)
        if failure:
            out(failure)
            if not report.closed:
                with contextlib.suppress(BrokenPipeError):
                    report.write(failure.encode())
    terminal.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
