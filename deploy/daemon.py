"""A cluster in the background: ``python -m baton.deploy.daemon``, and how it is started.

The settings come as JSON by standard input; standard output and error are the log file. Whoever
starts it waits at a pipe: ``ready``, or the line that says why not. Invariant: if who waits dies
before it has heard either, everything ends; afterwards the cluster lives on alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..proto.errors import BatonError, ConfigError, RequestFailed
from ..runtime.lifecycle import die_with_parent, outlive_parent
from .config import ServeSettings
from .local import LocalCluster
from .terminal import terminal

_READY = b"ready\n"


class Daemon:
    """A started background cluster; the parent's side."""

    def __init__(self, settings: ServeSettings, log: Path) -> None:
        reading, writing = os.pipe()
        try:
            with _open_log(log) as file:
                self._process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
                    [
                        *(sys.executable, "-P", "-m", "baton.deploy.daemon"),
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
        """Return when the cluster serves; RequestFailed says why it never will.

        An interrupt ends it, so that nothing is half-started.
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
    """The log file, this user's alone; what is in it stays. ConfigError when it cannot be."""
    try:
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        raise ConfigError(f"cannot write the log {log}: {problem.strerror}") from problem
    return os.fdopen(descriptor, "ab")


def _stamped(line: str) -> None:
    terminal(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")


def main() -> int:
    """The background process: run the cluster and report once whether it serves."""
    parser = argparse.ArgumentParser(prog="baton-daemon")
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    with os.fdopen(options.report, "wb", buffering=0) as report:
        try:
            settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ServeSettings)
            cluster = LocalCluster(settings, _stamped, log=options.log)

            def ready() -> None:
                outlive_parent()
                try:
                    report.write(_READY)
                except BrokenPipeError:
                    cluster.interrupt()  # who started it died just now
                report.close()

            cluster.on_ready(ready)
            code = cluster.run()
            failure = cluster.failure
        except (BatonError, OSError) as problem:
            code, failure = 1, str(problem)
        if failure:
            _stamped(failure)
            if not report.closed:
                with contextlib.suppress(BrokenPipeError):
                    report.write(failure.encode())
    terminal.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
