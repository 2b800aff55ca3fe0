"""The parent's side of a cluster that lives as long as one object of this process.

The child (:mod:`.process`) ends when its standard input is closed, which the kernel does when this
process ends in any way.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from baton.proto.errors import ConfigError, RequestFailed, error_from_code
from baton.runtime.small_files import check_writable

END_S = 30.0
"""Seconds for the cluster to end before it is killed."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the child reports once: its address, or why it did not start."""

    address: str = ""
    code: str = ""
    message: str = ""


class OwnCluster:
    """A running cluster. Raises the error of a cluster that does not start.

    ``settings``: as of ``ServeSettings``. ``log``: file for the log, else a temporary one.
    ``timeout``: seconds for the start.
    """

    def __init__(self, settings: Mapping[str, Any], *, log: str | None, timeout: float) -> None:
        reading, writing = os.pipe()
        try:
            with _open_log(log) as file:
                self._process = _start(settings, writing, file)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        try:
            with os.fdopen(reading, "rb") as report:
                self.address = _address(report, self._process, timeout)
        except BaseException:
            self._finalizer()
            raise

    def close(self) -> None:
        """End the cluster and wait for its end."""
        self._finalizer()


def _open_log(log: str | None) -> IO[bytes]:
    if log is None:
        return tempfile.TemporaryFile()
    try:
        file = Path(log).expanduser()
        check_writable(file)
        return file.open("ab")
    except OSError as problem:
        raise ConfigError(f"cannot write the log {log}: {problem.strerror}") from None


def _start(settings: Mapping[str, Any], report: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
        [sys.executable, "-P", "-m", "baton.offline.process", str(report), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=(report,),
        start_new_session=True,  # Ctrl-C interrupts the call that waits, not the cluster
    )
    line = msgspec.json.encode(settings, enc_hook=str) + b"\n"  # a Path, for example
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # the report has the reason
            process.stdin.write(line)
            process.stdin.flush()
    return process


def _address(report: IO[bytes], process: subprocess.Popen[bytes], timeout: float) -> str:
    """Wait for the child's report. Raises its error, and RequestFailed after ``timeout``."""
    until, text = time.monotonic() + timeout, b""
    poll = select.poll()  # select() fails in a program with more than 1024 open files
    poll.register(report, select.POLLIN)
    while True:
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(min(left, 1e6) * 1000):
            raise RequestFailed(f"the cluster did not start within {timeout:g} s (start_timeout)")
        part = os.read(report.fileno(), 1 << 16)
        if not part:
            break
        text += part
    if not text:
        code = process.wait()
        raise RequestFailed(f"the cluster's process ended with exit code {code} at its start")
    found = msgspec.json.decode(text, type=Report)
    if found.code:
        raise error_from_code(found.code, found.message)
    return found.address


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner; the cluster is not its own
        return
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends its children
        process.wait()
