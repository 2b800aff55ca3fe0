"""JSON log lines on stderr, each with the process's role and id.

A log line is an event with keys: ``get_logger().info("handoff.accepted", blocks=3)``.
Prompts and tokens are never logged. Before :func:`configure` only warnings and errors are shown.

Invariant: logging never blocks. If a pipe or terminal is full, lines are dropped, and their number
is logged once there is room again.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, TextIO, get_args

import msgspec

Level = Literal["debug", "info", "warning", "error"]
_LEVELS: tuple[Level, ...] = get_args(Level)


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
    if not _poller(fd).poll(0):
        return data
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data


@lru_cache(maxsize=8)
def _poller(fd: int) -> select.poll:
    """Return what asks whether this number's file takes bytes, whichever file it is by then."""
    found = select.poll()
    found.register(fd, select.POLLOUT)
    return found


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


def _json_line(keys: dict[str, Any]) -> str:
    error = keys.pop("exc_info", None)
    if isinstance(error, BaseException):
        keys["traceback"] = "".join(traceback.format_exception(error))
    elif error:
        keys["traceback"] = traceback.format_exc()
    return _encode_json(keys).decode("utf-8", "replace")


def _human_line(keys: dict[str, Any]) -> str:
    # Processes of a cluster write JSON, and the import takes a tenth of their start.
    import structlog.dev

    def plain(out: TextIO, error: Any) -> None:
        text = io.StringIO()
        structlog.dev.plain_traceback(text, error)
        out.write(printable(text.getvalue(), keep="\n\t"))

    colors = sys.stderr is not None and sys.stderr.isatty()
    render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    shown = {name: printable(one) if isinstance(one, str) else one for name, one in keys.items()}
    return render(None, str(keys["level"]), shown)


def printable(text: str, keep: str = "") -> str:
    """Return text that cannot control a terminal: clients and workers choose names in it.

    ``keep``: characters besides printable ones that stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def timestamp() -> str:
    """Return the time as every log line has it: UTC, ISO 8601, microseconds."""
    now = datetime.now(UTC).replace(tzinfo=None)
    return now.isoformat(timespec="microseconds") + "Z"


_writer = _StderrWriter()
LINES_PER_WRITE = 8
"""Lines of one write. The system does not split the writes of a shared pipe up to 4,096 bytes."""


class Logger:
    """The process's logger: one shared object, so :func:`configure` affects every module."""

    def __init__(self) -> None:
        self.configure("warning", human=True, bound={})

    def configure(self, level: Level, *, human: bool, bound: Mapping[str, object]) -> None:
        """Write lines of ``level`` and above from now on, each with the keys of ``bound``."""
        self._level, self._human, self._bound = level, human, bound

    def prepare(self) -> None:
        """Import what a line needs, for a process that may run out of descriptors."""
        if self._human:
            _human_line({"event": "", "level": "info"})

    def _shows(self, level: Level) -> bool:
        return _LEVELS.index(level) >= _LEVELS.index(self._level)

    def _log(self, level: Level, event: str, keys: Mapping[str, object]) -> None:
        end = {"event": event, "level": level, "timestamp": timestamp()}
        line = _human_line if self._human else _json_line
        _writer.msg(line({**self._bound, **keys, **end}))

    def report(self, event: str, **keys: object) -> None:
        """Log for a supervisor, independent of the log level."""
        self._log("info", event, keys)

    def debug(self, event: str, **keys: object) -> None:
        """Log a detail of one request."""
        if self._shows("debug"):
            self._log("debug", event, keys)

    def info(self, event: str, **keys: object) -> None:
        """Log an event of interest to operators."""
        if self._shows("info"):
            self._log("info", event, keys)

    def info_all(self, event: str, records: Sequence[msgspec.Struct]) -> None:
        """Log an event with the fields of each record, all at this time.

        A record has a field, and none of the names that every line has. As JSON, a line costs a
        tenth of :meth:`info`.
        """
        if not self._shows("info"):
            return
        if self._human:
            for record in records:
                self._log("info", event, msgspec.to_builtins(record, enc_hook=repr))
            return
        begin = b"{" + _encode_json(self._bound)[1:-1] + b"," if self._bound else b"{"
        end = {"event": event, "level": "info", "timestamp": timestamp()}
        rest = b"," + _encode_json(end)[1:] + b"\n"
        for some in (
            records[i : i + LINES_PER_WRITE] for i in range(0, len(records), LINES_PER_WRITE)
        ):
            fields = [_encode_json(record)[1:-1] for record in some]
            _writer.write(begin + (rest + begin).join(fields) + rest, len(fields))

    def warning(self, event: str, **keys: object) -> None:
        """Log a problem that was handled."""
        if self._shows("warning"):
            self._log("warning", event, keys)

    def error(self, event: str, **keys: object) -> None:
        """Log a failure."""
        self._log("error", event, keys)

    def exception(self, event: str, **keys: object) -> None:
        """Log a bug in Baton with the traceback of the current exception."""
        self._log("error", event, {"exc_info": True, **keys})


_logger = Logger()


def get_logger() -> Logger:
    """Return the process's logger."""
    return _logger


def configure(
    role: str = "", process: str = "", *, level: Level = "info", human: bool = False
) -> None:
    """Set the log format of this process and the role and id in each line.

    ``role``: router, prefill, decode etc.; ``process``: its id; ``level``: lowest level shown
    (debug, info, warning, error); ``human``: text instead of JSON.
    """
    bound = {key: value for key, value in (("role", role), ("process", process)) if value}
    _logger.configure(level, human=human, bound=bound)
