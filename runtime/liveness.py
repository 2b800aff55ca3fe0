"""The one setting of liveness, ``worker_timeout_s``, and the times every layer derives from it.

A router sees a worker as alive, suspect or dead (``docs/architecture.md``, Liveness). Each
layer takes its limit from here, so one number governs ZeroMQ's heartbeats, the router's
judgement and the supervisor's patience, and no layer gives a worker up before another.
"""

from __future__ import annotations

DEFAULT_WORKER_TIMEOUT_S = 5.0
"""Survives a container throttled to a fifth of a processor, and 4 s without a network."""
LEAST_WORKER_TIMEOUT_S = 0.5
HEARTBEAT_S = 0.2
"""Interval of a worker's heartbeats to its routers."""
CONNECTION_HEARTBEAT_S = 0.25
"""Interval of ZeroMQ's own pings; they only find connections that are dead."""


def suspect_after(worker_timeout_s: float) -> float:
    """Seconds without heartbeat or progress after which a worker gets no new requests.

    A second by default; never less than two heartbeats, or every lost one would count.
    """
    return min(1.0, max(2.5 * HEARTBEAT_S, worker_timeout_s / 5))


def connection_timeout(worker_timeout_s: float) -> float:
    """Seconds without any byte after which a connection is closed and made anew.

    Shorter than the worker timeout: TCP doubles its pauses between two tries, so after 4 s
    without a network an old connection stays silent for 2 s more, and a new one does not.
    """
    return max(3 * HEARTBEAT_S, 0.3 * worker_timeout_s)


def closed_by_peer(silent_s: float, worker_timeout_s: float) -> bool:
    """Whether a connection that closed ``silent_s`` after its last message was closed by its peer.

    The end of a process closes its connections at once. A connection that timed out was silent
    for the whole of :func:`connection_timeout`.
    """
    return silent_s < 0.6 * connection_timeout(worker_timeout_s)
