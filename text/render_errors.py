"""Errors and the output limit of :mod:`.sandbox`, for modules that must not import Jinja."""

MAX_OUTPUT_CHARS = 8 << 20


class RenderError(Exception):
    """The template is invalid, or rejected these messages with ``raise_exception``."""


class RenderLimit(RenderError):
    """The template or its output exceeds its size limit."""
