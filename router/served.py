"""What a gateway learns about the way of a request, for the headers of its answer. Pure."""

from __future__ import annotations

from math import isfinite

from baton.proto.wire.messages import Begun, ServedTimes, Terminal

from .records import Request


def begun(request: Request) -> Begun:
    """Return the workers of a request whose first token arrived, and what is known by then."""
    prefill, decode = request.attempt.prefill, request.attempt.decode
    return Begun(
        request.key,
        prefill.id if prefill is not None else decode.id if decode is not None else "",
        decode.id if decode is not None else "",
        served_times(request, None),
    )


def served_times(request: Request, terminal: Terminal | None) -> ServedTimes:
    """Return where the time before the first token went.

    ``terminal``: of the worker that ended the request. The times of an attempt that was handed over
    are in its report, which may arrive after the terminal; then they are not known.
    """
    attempt = request.attempt
    handed = attempt.report.times if attempt.report is not None else None
    times = handed
    if times is None and terminal is not None and (attempt.local or not terminal.decode):
        times = terminal.times
    waited = attempt.assigned_at - request.submitted_at
    total = request.first_at - request.submitted_at
    first = max(0.0, total) if isfinite(total) else None
    if times is None or times.computing is None or not isfinite(waited):
        return ServedTimes(first_token=first)
    computed = times.computed
    prefill = handoff = None
    if computed is not None:
        prefill = max(0.0, computed - times.computing)
        if handed is not None and times.ended is not None:
            handoff = max(0.0, times.ended - computed)
    return ServedTimes(max(0.0, waited) + times.computing, prefill, handoff, first)
