"""Committed handoffs. The router keeps the reports, since workers may end that sent them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.proto.wire.messages import HandoffReport

from .decider import HandoffTails
from .metrics import HandoffMetrics
from .records import ANYBODY, Caller

KEEP_HANDOFFS = 256


class Handoffs:
    """Totals of all handoffs, and the latest reports.

    ``known``: see :class:`HandoffMetrics`. ``tails``: learn from the reports, in mode adaptive.
    """

    def __init__(self, known: Callable[[str], bool], tails: HandoffTails | None = None) -> None:
        self._tails = tails
        self._last: deque[tuple[HandoffReport, bytes]] = deque(maxlen=KEEP_HANDOFFS)
        self.metrics = HandoffMetrics(known)

    def add(self, report: HandoffReport, owner: bytes = b"") -> None:
        """Add a committed handoff; ``owner``: key of the request's client."""
        self._last.append((report, owner))
        self.metrics.add(report)
        if self._tails is not None:
            self._tails.add(report)

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
