"""One decode worker as seen by a prefill worker: from connecting to an agreed layout.

Invariants: blocks are reserved at a peer only after both sides agreed on model, layout and
transport. A peer that leaves a question unanswered for the handoff timeout is lost, even if its
connection looks healthy: the network may drop packets in one direction only, and a connection that
passes nothing stays open for a while. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..kv_transfer.timeout import ASK_EVERY_S, HANDOFF_TIMEOUT_S

OPEN_REPEAT_S = 0.5
KEEP_LOST_S = 60.0
"""Seconds for which a lost link is kept although no request waits for it.

The router retries a failed pair of workers from time to time. A kept link rejects the retry at
once; a new link would have to time out first."""


class LinkState(Enum):
    """Life of a link."""

    CONNECTING = "connecting"  # no connection yet
    OPENING = "opening"  # Open was sent
    OPEN = "open"
    REFUSED = "refused"  # models or layouts differ


@dataclass(slots=True)
class Link:
    """State of one endpoint.

    ``unanswered_since``: time of the oldest question that the peer has not answered; None if there
    is none. Connecting, Open and Ping are questions. Only an answer proves that both
    directions work: messages that the peer sends on its own initiative arrive even if the peer
    receives nothing. ``timeout``: seconds until such a peer is lost.
    """

    endpoint: str
    unanswered_since: float | None
    timeout: float = HANDOFF_TIMEOUT_S
    state: LinkState = LinkState.CONNECTING
    worker: str = ""
    incarnation: int = 0
    transport: str = ""
    refusal: str = ""
    repeat_at: float = 0.0  # Open or Ping
    last_nonce: int = 0
    frame_limit: int = 0  # bytes the peer accepts in one KV frame
    no_data_since: float | None = None  # the data connection has been missing since then

    @property
    def is_ready(self) -> bool:
        """True if blocks may be reserved: both connections are up."""
        return self.state is LinkState.OPEN and self.no_data_since is None

    @property
    def refuses(self) -> bool:
        """True if the peer answers, but the two workers do not fit together."""
        return self.state is LinkState.REFUSED

    def await_answer(self, now: float) -> None:
        """Note a question. If an older one is unanswered, its time is kept."""
        if self.unanswered_since is None:
            self.unanswered_since = now

    def ask(self, now: float) -> int | None:
        """Return the nonce of a due Ping: its send time in microseconds. None if none is due."""
        if self.state is not LinkState.OPEN or now < self.repeat_at:
            return None
        self.repeat_at = now + ASK_EVERY_S
        self.last_nonce = max(self.last_nonce + 1, int(now * 1e6))
        self.await_answer(now)
        return self.last_nonce

    def answered(self, nonce: int) -> None:
        """Handle a Pong: both directions worked after the Ping with this nonce was sent.

        A nonce that this link never sent is ignored.
        """
        since = self.unanswered_since
        if self.state is not LinkState.OPEN or since is None or nonce > self.last_nonce:
            return
        if nonce == self.last_nonce:
            self.unanswered_since = None
        else:
            self.unanswered_since = max(since, nonce / 1e6)

    def excuse(self, seconds: float) -> None:
        """Extend the timeouts by a pause of this process: answers may wait to be read."""
        if self.unanswered_since is not None:
            self.unanswered_since += seconds
        if self.no_data_since is not None:
            self.no_data_since += seconds

    def misses_data(self, now: float) -> bool:
        """True if the data connection has been missing for the handoff timeout."""
        since = self.no_data_since
        return self.state is LinkState.OPEN and since is not None and now >= since + self.timeout

    def hopeless(self, now: float) -> str:
        """Return why no handoff can use this link, or an empty string if it can or soon may."""
        if self.state is LinkState.REFUSED:
            # A router serves one model; this endpoint was replaced without its knowledge.
            return self.refusal
        if self.misses_data(now):
            return f"no connection for KV frames to {self.endpoint}"
        return f"no answer from {self.endpoint} for {self.timeout:g} s" if self.is_lost(now) else ""

    def is_lost(self, now: float) -> bool:
        """True if a question has been unanswered for the handoff timeout."""
        since = self.unanswered_since
        return since is not None and now >= since + self.timeout

    def is_stale(self, now: float) -> bool:
        """True if the peer has been lost for so long that only a new connection makes sense."""
        since = self.unanswered_since
        return since is not None and now >= since + self.timeout + KEEP_LOST_S
