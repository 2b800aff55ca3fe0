"""Headers of an answer: the workers that served it, and where the time went.

``x-baton-prefill``, ``x-baton-decode``, and ``server-timing`` as in W3C Server Timing.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from baton.client.output import Output
from baton.proto.wire.messages import ServedTimes

HEADERS = ("X-Baton-Prefill", "X-Baton-Decode", "Server-Timing")
_PLAIN = "!#$&'()*+-./:;<=>?@[]^_`{|}~"
"""Characters that a worker's name keeps besides letters and digits; others become ``%XX``."""


def served_by(output: Output) -> bytes:
    """Return the header lines of an answer that begins with this output; empty: not known."""
    lines = b""
    for header, worker in (("x-baton-prefill", output.prefill), ("x-baton-decode", output.decode)):
        if worker:
            lines += _line(header, worker)
    timing = "" if output.served is None else _timing(output.served)
    return lines + f"server-timing: {timing}\r\n".encode() if timing else lines


@lru_cache(maxsize=1024)
def _line(header: str, worker: str) -> bytes:
    """Return the line of a worker. Names are few, and to quote one takes 2 % of a request."""
    return f"{header}: {quote(worker, safe=_PLAIN)}\r\n".encode()


def _timing(times: ServedTimes) -> str:
    parts = (
        ("queue", times.queue),
        ("prefill", times.prefill),
        ("handoff", times.handoff),
        ("first-token", times.first_token),
    )
    return ", ".join(f"{name};dur={value * 1e3:.3f}" for name, value in parts if value is not None)
