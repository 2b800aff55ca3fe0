"""JSON log lines on stderr, each with the process's role and id.

A log line is an event with keys: ``get_logger().info("handoff.accepted", blocks=3)``.
Prompts and tokens are never logged. structlog's global settings stay untouched, since the
client lives inside other people's programs; before :func:`configure` only warnings show.

Invariant: nobody waits for a reader. Lines for which a pipe or terminal has no room are
dropped, and their number is logged as soon as there is room again.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
import traceback
from typing import Any, Literal

import msgspec
import structlog

Level = Literal["debug", "info", "warning", "error"]
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _StderrWriter:
    """Writes to whatever ``sys.stderr`` is when the line is written; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = b""  # of a line that was written in part
        self._dropped = 0

    def msg(self, line: str) -> None:
        """Write one line or drop it; a closed stderr must not end the process."""
        if sys.stderr is None:
            return
        with self._lock:
            try:
                self._write(sys.stderr, line)
            except (OSError, ValueError):
                return

    def _write(self, stream: Any, line: str) -> None:
        fd = _descriptor(stream)
        if fd is None:
            stream.write(line + "\n")
            stream.flush()
            return
        self._rest = _send(fd, self._rest)
        data = line.encode("utf-8", "replace") + b"\n"
        if self._dropped:
            data = _dropped_line(self._dropped) + data
        left = data if self._rest else _send(fd, data)
        if len(left) == len(data):
            self._dropped += 1
            return
        self._rest, self._dropped = left, 0

    debug = info = warning = error = exception = critical = log = msg


def _descriptor(stream: Any) -> int | None:
    """The stream's file descriptor, if a descriptor is behind it."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _send(fd: int, data: bytes) -> bytes:
    """Write what there is room for now; returns the rest."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not data or not poll.poll(0):
        return data
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data


def _dropped_line(count: int) -> bytes:
    event = {"event": "log.dropped", "level": "warning", "lines": count}
    return msgspec.json.encode(event) + b"\n"


def never_block() -> None:
    """Let no write to a piped stderr wait, however long the line.

    Only for a process whose pipe is its own: the setting is shared with whoever shares it.
    """
    fd = _descriptor(sys.stderr)
    if fd is not None and stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.set_blocking(fd, False)


def _render_json(_logger: Any, _method: str, event: dict[str, Any]) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode("utf-8", "replace")


def _format_traceback(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    error = event.pop("exc_info", None)
    if isinstance(error, BaseException):
        event["traceback"] = "".join(traceback.format_exception(error))
    elif error:
        event["traceback"] = traceback.format_exc()
    return event


def _chain(*, human: bool) -> list[Any]:
    shared = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if human:
        colors = sys.stderr is not None and sys.stderr.isatty()
        plain = structlog.dev.plain_traceback
        return [*shared, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return [*shared, _format_traceback, _render_json]


_writer = _StderrWriter()


def _make(level: str, *, human: bool, bound: dict[str, str]) -> Any:
    logger = structlog.wrap_logger(
        _writer,
        processors=_chain(human=human),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
    )
    return logger.bind(**bound)


class Logger:
    """The process's logger; one object, so :func:`configure` reaches every module."""

    def __init__(self) -> None:
        self._out = self._always = _make("warning", human=True, bound={})

    def configure(self, out: Any, always: Any = None) -> None:
        """Write through ``out`` from now on, and :meth:`report` through ``always``."""
        self._out = out
        self._always = out if always is None else always

    def report(self, event: str, **keys: object) -> None:
        """What a supervisor wants to know whatever level people want to read."""
        self._always.info(event, **keys)

    def debug(self, event: str, **keys: object) -> None:
        """Detail for someone who follows one request."""
        self._out.debug(event, **keys)

    def info(self, event: str, **keys: object) -> None:
        """Something happened that an operator may want to know."""
        self._out.info(event, **keys)

    def warning(self, event: str, **keys: object) -> None:
        """Something is wrong and was dealt with."""
        self._out.warning(event, **keys)

    def error(self, event: str, **keys: object) -> None:
        """Something failed."""
        self._out.error(event, **keys)

    def exception(self, event: str, **keys: object) -> None:
        """Our own bug, with the traceback of the exception being handled."""
        self._out.exception(event, **keys)


_logger = Logger()


def get_logger() -> Logger:
    """The process's logger."""
    return _logger


def configure(
    role: str = "", process: str = "", *, level: str = "info", human: bool = False
) -> None:
    """Set the format once per process and bind who is speaking.

    ``role``: router, prefill, decode ...; ``process``: its id; ``level``: least severe level
    shown (debug, info, warning, error); ``human``: text instead of JSON.
    """
    bound = {key: value for key, value in (("role", role), ("process", process)) if value}
    _logger.configure(
        _make(level, human=human, bound=bound), _make("info", human=human, bound=bound)
    )
