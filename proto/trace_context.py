"""W3C Trace Context: the ``traceparent`` header that names a request's trace and parent span.

Pure. Reference: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 1
VERSION = "00"
MAX_TRACEPARENT_CHARS = 64


class TraceContext(NamedTuple):
    """``trace_id``: 128 bits, ``span_id``: 64 bits of the parent; ``sampled``: spans are wanted."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """Return the header's value."""
        return f"{VERSION}-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_traceparent(text: str) -> TraceContext | None:
    """Return the context that a header names, or None for an invalid header."""
    found = _FORM.fullmatch(text.strip()) if len(text) <= MAX_TRACEPARENT_CHARS else None
    if found is None or found[1] == "ff" or (found[1] == VERSION and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    if not trace or not span:
        return None
    return TraceContext(trace, span, bool(int(found[4], 16) & _SAMPLED))
