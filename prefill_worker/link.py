"""One decode worker as a prefill worker sees it: from first contact to agreed layouts.

Invariants: nothing is reserved at a peer before both sides agreed on model, layout and
transport. A peer that owes an answer for the handoff timeout is lost, whatever its connections
seem to be: packets may be dropped in one direction only, and a connection that passes nothing
stays open for a while. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..kv_transfer.timeout import ASK_EVERY_S, HANDOFF_TIMEOUT_S

OPEN_REPEAT_S = 0.5
KEEP_LOST_S = 60.0
"""How long a lost link nobody waits for is kept. The router tries a failed pair again now and then;
a kept link answers that at once, where a new one would have to be waited for."""


class LinkState(Enum):
    """Life of a link."""

    CONNECTING = "connecting"  # the socket has no peer yet
    OPENING = "opening"  # Open is out
    OPEN = "open"
    REFUSED = "refused"  # models or layouts differ


@dataclass(slots=True)
class Link:
    """State of one endpoint.

    ``unanswered_since``: when the oldest question was asked that the peer still has to answer;
    None while it owes no answer. Connecting counts as a question, and so do Open and Ping. Only
    the answer to a question proves that both directions work: what a peer sends unasked arrives
    as well when nothing reaches it any more. ``timeout``: seconds until such a peer is lost.
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
    frame_limit: int = 0  # bytes the peer takes in one KV frame
    no_data_since: float | None = None  # the connection for KV frames is missed since then

    @property
    def is_ready(self) -> bool:
        """Whether blocks may be asked for: both connections stand."""
        return self.state is LinkState.OPEN and self.no_data_since is None

    @property
    def refuses(self) -> bool:
        """Whether the peer answers and the two do not fit together."""
        return self.state is LinkState.REFUSED

    def await_answer(self, now: float) -> None:
        """A question was asked; an older one that is unanswered counts on."""
        if self.unanswered_since is None:
            self.unanswered_since = now

    def ask(self, now: float) -> int | None:
        """Nonce of a Ping that is due: the time it is sent at, in microseconds."""
        if self.state is not LinkState.OPEN or now < self.repeat_at:
            return None
        self.repeat_at = now + ASK_EVERY_S
        self.last_nonce = max(self.last_nonce + 1, int(now * 1e6))
        self.await_answer(now)
        return self.last_nonce

    def answered(self, nonce: int) -> None:
        """The peer answered the Ping with this nonce, so both directions worked after it was sent.

        A nonce that no Ping of this link had proves nothing.
        """
        since = self.unanswered_since
        if self.state is not LinkState.OPEN or since is None or nonce > self.last_nonce:
            return
        if nonce == self.last_nonce:
            self.unanswered_since = None
        else:
            self.unanswered_since = max(since, nonce / 1e6)

    def excuse(self, seconds: float) -> None:
        """Allow for a pause of this process: answers may wait to be read."""
        if self.unanswered_since is not None:
            self.unanswered_since += seconds
        if self.no_data_since is not None:
            self.no_data_since += seconds

    def misses_data(self, now: float) -> bool:
        """Whether the connection for KV frames has been missing for the handoff timeout."""
        since = self.no_data_since
        return self.state is LinkState.OPEN and since is not None and now >= since + self.timeout

    def hopeless(self, now: float) -> str:
        """Why no handoff can go over this link now; empty when one can, or may soon."""
        if self.state is LinkState.REFUSED:
            # The router has workers of one model only: this one came without its knowledge.
            return self.refusal
        if self.misses_data(now):
            return f"no connection for KV frames to {self.endpoint}"
        return f"no answer from {self.endpoint} for {self.timeout:g} s" if self.is_lost(now) else ""

    def is_lost(self, now: float) -> bool:
        """Whether the peer has owed an answer for the handoff timeout."""
        since = self.unanswered_since
        return since is not None and now >= since + self.timeout

    def is_stale(self, now: float) -> bool:
        """Whether it has been lost for so long that only a new connection is worth a try."""
        since = self.unanswered_since
        return since is not None and now >= since + self.timeout + KEEP_LOST_S
