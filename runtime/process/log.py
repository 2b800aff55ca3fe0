"""JSON log lines on stderr, each with the process's role and id.

A log line is an event with keys: ``get_logger().info("handoff.accepted", blocks=3)``.
Prompts and tokens are never logged. structlog's global settings are not changed, because the
client runs inside users' programs. Before :func:`configure` only warnings and errors are shown.

Invariant: logging never blocks. If a pipe or terminal is full, lines are dropped, and their number
is logged once there is room again.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
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
    """Writes lines to the current ``sys.stderr``; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = b""  # unwritten rest of a partly written line
        self._dropped = 0

    def msg(self, line: str) -> None:
        """Write a line, or drop it if stderr is full or closed."""
        self.write(line.encode("utf-8", "replace") + b"\n", 1)

    def write(self, data: bytes, lines: int) -> None:
        """Write this number of whole lines at once, or drop all of them."""
        if sys.stderr is None:
            return
        with self._lock:
            try:
                self._write(sys.stderr, data, lines)
            except (OSError, ValueError):
                return

    def _write(self, stream: Any, data: bytes, lines: int) -> None:
        fd = _descriptor(stream)
        if fd is None:
            stream.write(data.decode())
            stream.flush()
            return
        self._rest = _send(fd, self._rest)
        if self._dropped:
            data = _dropped_line(self._dropped) + data
        left = data if self._rest else _send(fd, data)
        if len(left) == len(data):
            self._dropped += lines
            return
        self._rest, self._dropped = left, 0

    debug = info = warning = error = exception = critical = log = msg


def _descriptor(stream: Any) -> int | None:
    """Return the stream's file descriptor, or None if it has none."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _send(fd: int, data: bytes) -> bytes:
    """Write without blocking; return the unwritten rest."""
    if not data:
        return data
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        return data
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data


def _dropped_line(count: int) -> bytes:
    event = {"event": "log.dropped", "level": "warning", "lines": count}
    return msgspec.json.encode(event) + b"\n"


def never_block() -> None:
    """Make a piped stderr non-blocking, so that long lines cannot block either.

    Only for a process that does not share its pipe: the mode applies to all its writers.
    """
    fd = _descriptor(sys.stderr)
    if fd is not None and stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.set_blocking(fd, False)


_encode_json = msgspec.json.Encoder(enc_hook=repr).encode


def _render_json(_logger: Any, _method: str, event: dict[str, Any]) -> str:
    return _encode_json(event).decode("utf-8", "replace")


def _format_traceback(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    error = event.pop("exc_info", None)
    if isinstance(error, BaseException):
        event["traceback"] = "".join(traceback.format_exception(error))
    elif error:
        event["traceback"] = traceback.format_exc()
    return event


def _chain(*, human: bool) -> list[Any]:
    shared = [structlog.processors.add_log_level, _stamp]
    if human:
        colors = sys.stderr is not None and sys.stderr.isatty()
        plain = structlog.dev.plain_traceback
        return [*shared, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    return [*shared, _format_traceback, _render_json]


_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
_writer = _StderrWriter()
LINES_PER_WRITE = 8
"""Lines of one write. The system does not split the writes of a shared pipe up to 4,096 bytes."""


def _make(level: str, *, human: bool, bound: dict[str, str]) -> Any:
    logger = structlog.wrap_logger(
        _writer,
        processors=_chain(human=human),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
    )
    return logger.bind(**bound)


class Logger:
    """The process's logger: one shared object, so :func:`configure` affects every module."""

    def __init__(self) -> None:
        self._out = self._always = _make("warning", human=True, bound={})
        self._bound: dict[str, str] | None = None  # keys of each JSON line, None: not JSON

    def configure(self, out: Any, always: Any = None, bound: dict[str, str] | None = None) -> None:
        """Write to ``out`` from now on, and reports to ``always`` (default: ``out``).

        ``bound``: the keys of each line, if ``out`` writes JSON at level info.
        """
        self._out = out
        self._always = out if always is None else always
        self._bound = bound

    def report(self, event: str, **keys: object) -> None:
        """Log for a supervisor, independent of the log level."""
        self._always.info(event, **keys)

    def debug(self, event: str, **keys: object) -> None:
        """Log a detail of one request."""
        self._out.debug(event, **keys)

    def info(self, event: str, **keys: object) -> None:
        """Log an event of interest to operators."""
        self._out.info(event, **keys)

    def info_all(self, event: str, records: Sequence[Mapping[str, object]]) -> None:
        """Log an event with the keys of each record, all at this time.

        As JSON, a line costs a fifth of :meth:`info`.
        """
        if self._bound is None:
            for record in records:
                self._out.info(event, **record)
            return
        end = _stamp(None, "info", {"event": event, "level": "info"})
        for some in (
            records[i : i + LINES_PER_WRITE] for i in range(0, len(records), LINES_PER_WRITE)
        ):
            lines = [_encode_json({**self._bound, **record, **end}) for record in some]
            _writer.write(b"\n".join([*lines, b""]), len(lines))

    def warning(self, event: str, **keys: object) -> None:
        """Log a problem that was handled."""
        self._out.warning(event, **keys)

    def error(self, event: str, **keys: object) -> None:
        """Log a failure."""
        self._out.error(event, **keys)

    def exception(self, event: str, **keys: object) -> None:
        """Log a bug in Baton with the traceback of the current exception."""
        self._out.exception(event, **keys)


_logger = Logger()


def get_logger() -> Logger:
    """Return the process's logger."""
    return _logger


def configure(
    role: str = "", process: str = "", *, level: str = "info", human: bool = False
) -> None:
    """Set the log format of this process and the role and id in each line.

    ``role``: router, prefill, decode etc.; ``process``: its id; ``level``: lowest level shown
    (debug, info, warning, error); ``human``: text instead of JSON.
    """
    bound = {key: value for key, value in (("role", role), ("process", process)) if value}
    _logger.configure(
        _make(level, human=human, bound=bound),
        _make("info", human=human, bound=bound),
        None if human or _LEVELS[level] > logging.INFO else bound,
    )
