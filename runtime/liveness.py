"""The timeouts of all layers, derived from one setting, ``worker_timeout_s``.

For a router a worker is alive, suspect or dead (``docs/failures.md``, Liveness). ZeroMQ's
heartbeats, the routers and the supervisor take their limits from here, so the limits stay
consistent.
"""

from __future__ import annotations

DEFAULT_WORKER_TIMEOUT_S = 5.0
"""Tolerates a container throttled to a fifth of a processor, and a network outage of 4 s."""
LEAST_WORKER_TIMEOUT_S = 0.5
HEARTBEAT_S = 0.2
"""Interval of a worker's heartbeats to its routers."""
CONNECTION_HEARTBEAT_S = 0.25
"""Interval of ZeroMQ's pings, in seconds; they detect dead connections only."""


def suspect_after(worker_timeout_s: float) -> float:
    """Seconds without heartbeat or progress after which a worker gets no new requests.

    At most 1 s (the default), and at least 2.5 heartbeats, so one lost heartbeat has no effect.
    """
    return min(1.0, max(2.5 * HEARTBEAT_S, worker_timeout_s / 5))


def connection_timeout(worker_timeout_s: float) -> float:
    """Seconds without any byte after which a connection is replaced by a new one.

    Shorter than the worker timeout: TCP doubles the pause between retransmissions. After a network
    outage of 4 s an old connection stays silent for 2 s more, but a new one works at once.
    """
    return max(3 * HEARTBEAT_S, 0.3 * worker_timeout_s)


def closed_by_peer(silent_s: float, worker_timeout_s: float) -> bool:
    """Whether the peer closed a connection that ended ``silent_s`` after its last message.

    A process that ends closes its connections at once. A connection that timed out was silent for
    the whole :func:`connection_timeout`.
    """
    return silent_s < 0.6 * connection_timeout(worker_timeout_s)
