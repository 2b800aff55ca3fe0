"""Errors of :mod:`.sandbox` and its limit on output, for those who do not render: without Jinja."""

MAX_OUTPUT_CHARS = 8 << 20


class RenderError(Exception):
    """The template is invalid, or rejected these messages with ``raise_exception``."""


class RenderLimit(RenderError):
    """The template or its output exceeds its size limit."""
