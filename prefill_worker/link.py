"""One decode worker as a prefill worker sees it: from first contact to agreed layouts.

Invariant: nothing is reserved at a peer before both sides agreed on model, layout and
transport. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

OPEN_REPEAT_S = 0.5
OPEN_PATIENCE_S = 3.0


class LinkState(Enum):
    """Life of a link."""

    CONNECTING = "connecting"  # the socket has no peer yet
    OPENING = "opening"  # Open is out
    OPEN = "open"
    REFUSED = "refused"  # models or layouts differ


@dataclass(slots=True)
class Link:
    """State of one endpoint; ``since`` is when the last change happened."""

    endpoint: str
    since: float
    state: LinkState = LinkState.CONNECTING
    worker: str = ""
    incarnation: int = 0
    transport: str = ""
    refusal: str = ""
    repeat_at: float = 0.0
    frame_limit: int = 0  # bytes the peer takes in one KV frame
    no_data_since: float | None = None  # the connection for KV frames is missed since then

    @property
    def is_ready(self) -> bool:
        """Whether blocks may be asked for: both connections stand."""
        return self.state is LinkState.OPEN and self.no_data_since is None

    def misses_data(self, now: float) -> bool:
        """Whether patience with a peer that takes no KV frames is over."""
        since = self.no_data_since
        return self.state is LinkState.OPEN and since is not None and now >= since + OPEN_PATIENCE_S

    def hopeless(self, now: float) -> str:
        """Why no handoff can go over this link now; empty when one can, or may soon."""
        if self.state is LinkState.REFUSED:
            # The router has workers of one model only: this one came without its knowledge.
            return self.refusal
        if self.misses_data(now):
            return f"no connection for KV frames to {self.endpoint}"
        return f"no answer from {self.endpoint}" if self.is_lost(now) else ""

    def is_lost(self, now: float) -> bool:
        """Whether patience with an unanswering peer is over."""
        waiting = self.state in (LinkState.CONNECTING, LinkState.OPENING)
        return waiting and now >= self.since + OPEN_PATIENCE_S
