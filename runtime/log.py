"""JSON log lines on stderr, each with the process's role and id.

A log line is an event with keys: ``get_logger().info("handoff.accepted", blocks=3)``.
Prompts and tokens are never logged. structlog's global settings stay untouched, since the
client lives inside other people's programs; before :func:`configure` only warnings show.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import msgspec
import structlog

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _StderrWriter:
    """Writes to whatever ``sys.stderr`` is when the line is written."""

    def msg(self, line: str) -> None:
        """Write one line; a closed stderr must not end the process."""
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = exception = critical = log = msg


def _render_json(_logger: Any, _method: str, event: dict[str, Any]) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode("utf-8", "replace")


def _format_traceback(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    if event.pop("exc_info", None):
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


def _make(level: str, *, human: bool, bound: dict[str, str]) -> Any:
    logger = structlog.wrap_logger(
        _StderrWriter(),
        processors=_chain(human=human),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
    )
    return logger.bind(**bound)


class Logger:
    """The process's logger; one object, so :func:`configure` reaches every module."""

    def __init__(self) -> None:
        self._out = _make("warning", human=True, bound={})

    def configure(self, out: Any) -> None:
        """Write through ``out`` from now on."""
        self._out = out

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
    _logger.configure(_make(level, human=human, bound=bound))
