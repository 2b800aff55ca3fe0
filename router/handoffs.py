"""Committed handoffs. The router keeps the reports, since workers may end that sent them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.proto.wire.messages import HandoffReport
from baton.runtime.metrics.families import (
    BYTES,
    BYTES_PER_S,
    HANDOFF_S,
    Column,
    Histogram,
    Limited,
    Rows,
)

from .records import ANYBODY, Caller

KEEP_HANDOFFS = 256
MAX_TRANSPORTS = 8
MAX_WORKERS = 1024


class TransportMetrics:
    """Handoffs over one transport."""

    def __init__(self) -> None:
        self.count = self.bytes = self.bytes_received = 0
        self.seconds = Histogram(HANDOFF_S)
        self.sizes = Histogram(BYTES)
        self.bytes_per_s = Histogram(BYTES_PER_S)
        self.new = Rows(3, self._count)
        """Bytes sent and received, and seconds, of committed handoffs that are not counted yet."""

    def _count(self, columns: Column) -> None:
        sizes, received, seconds = columns
        self.count += len(sizes)
        self.bytes += int(sizes.sum())
        self.bytes_received += int(received.sum())
        self.seconds.observe_all(seconds)
        self.sizes.observe_all(sizes)
        known = seconds > 0
        self.bytes_per_s.observe_all(sizes[known] / seconds[known])


class Transferred:
    """What one worker has sent or received in handoffs."""

    __slots__ = ("bytes", "seconds")

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0


class HandoffMetrics:
    """All handoffs by transport, and by worker. Old worker names are dropped above a limit.

    ``known``: whether a worker with this name is registered. A report could name any worker, so
    other names are not counted by worker.
    """

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known
        self._transports: dict[str, TransportMetrics] = {}
        self._limited = Limited(MAX_TRANSPORTS)
        self.by_worker: dict[str, Transferred] = {}

    @property
    def by_transport(self) -> dict[str, TransportMetrics]:
        """Handoffs so far by transport."""
        for one in self._transports.values():
            one.new.fold()
        return self._transports

    def add(self, report: HandoffReport) -> None:
        """Count a committed handoff."""
        size, seconds = report.bytes_sent, report.seconds
        transport = self._transports.get(report.transport)
        if transport is None:
            transport = self._transport(report.transport)
        transport.new.add((size, report.bytes_received, seconds))
        by_worker = self.by_worker
        prefill = by_worker.get(report.prefill) or self._worker(report.prefill)
        if prefill is not None:
            prefill.bytes += size
            prefill.seconds += seconds
        decode = by_worker.get(report.decode) or self._worker(report.decode)
        if decode is not None:
            decode.bytes += size
            decode.seconds += seconds

    def _transport(self, name: str) -> TransportMetrics:
        name = self._limited(name or "unknown")
        return self._transports.setdefault(name, TransportMetrics())

    def _worker(self, name: str) -> Transferred | None:
        if not self._known(name):
            return None
        if len(self.by_worker) >= MAX_WORKERS:
            self.by_worker.pop(next(iter(self.by_worker)))
        done = self.by_worker[name] = Transferred()
        return done


class Handoffs:
    """Totals of all handoffs, and the latest reports.

    ``known``: see :class:`HandoffMetrics`. ``learn``: gets each report too.
    """

    def __init__(
        self,
        known: Callable[[str], bool],
        learn: Callable[[HandoffReport], None] | None = None,
    ) -> None:
        self._learn = learn
        self._last: deque[tuple[HandoffReport, bytes]] = deque(maxlen=KEEP_HANDOFFS)
        self.metrics = HandoffMetrics(known)

    def add(self, report: HandoffReport, owner: bytes = b"") -> None:
        """Add a committed handoff; ``owner``: key of the request's client."""
        self._last.append((report, owner))
        self.metrics.add(report)
        if self._learn is not None:
            self._learn(report)

    @property
    def count(self) -> int:
        """Number of committed handoffs."""
        return sum(one.count for one in self.metrics.by_transport.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes of committed handoffs."""
        return sum(one.bytes for one in self.metrics.by_transport.values())

    def listed(self, most: int, caller: Caller = ANYBODY) -> dict[str, object]:
        """Return totals and up to ``most`` recent handoffs that the caller may see, latest last."""
        seen = [one for one, owner in self._last if caller.operator or owner == caller.key]
        recent = seen[-most:] if most > 0 else []
        transports = self.metrics.by_transport.values()
        return {
            "count": self.count,
            "bytes_sent": self.bytes_sent,
            "bytes_received": sum(one.bytes_received for one in transports),
            "last": [_handoff(report) for report in recent],
        }


def _handoff(report: HandoffReport) -> dict[str, object]:
    return {
        "request": report.request.hex(),
        "attempt": report.attempt,
        "prefill": report.prefill,
        "decode": report.decode,
        "transport": report.transport,
        "bytes": report.bytes_sent,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "blocks": report.blocks,
        "cached_tokens": report.cached_tokens,
        "frames": report.frames,
        "resent_frames": report.resent_frames,
        "milliseconds": round(report.seconds * 1000, 3),
    }
