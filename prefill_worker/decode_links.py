"""A prefill worker's links to decode workers: created on demand, opened, lost, closed.

Invariants: until both sides agreed on model, layout and transport, an endpoint receives Open and
nothing else, and no blocks are reserved there. A peer that leaves a question unanswered for the
handoff timeout is lost, even if its connection looks healthy: the network may drop packets in one
direction only, and a connection that passes nothing stays open for a while. Links that requests
wait for or handoffs use are pinged. So are links with an unanswered question, until they answer or
have been lost for :data:`KEEP_LOST_S`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from baton.kv_transfer.timeout import ASK_EVERY_S, HANDOFF_TIMEOUT_S, OWN_PAUSE_S
from baton.proto.layout import KVLayout, frame_layout
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import (
    DEVICE,
    SHARED,
    STREAMED,
    DeviceTicket,
    Open,
    Opened,
    OpenRefused,
    Ping,
    PoolTicket,
)
from baton.worker.events import Log
from baton.worker.membership import WorkerIdentity

from .events import Action, Connect, ToPeer

OPEN_REPEAT_S = 0.5
DENIED_PAUSE_S = 5.0
"""Seconds between two Opens to a peer whose key list does not allow this worker."""
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
class DecodeLink:
    """State of one endpoint.

    ``unanswered_since``: time of the oldest question that the peer has not answered, or None.
    Connecting, Open and Ping are questions. Only an answer proves that both
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
    layout: KVLayout | None = None  # of the frames; None: as this worker's blocks
    denied: bool = False  # refused by the peer's key list, which may change
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


class DecodeLinks:
    """Links to all decode endpoints this worker uses."""

    def __init__(
        self,
        me: WorkerIdentity,
        ticket: PoolTicket | DeviceTicket | None = None,
        timeout: float = HANDOFF_TIMEOUT_S,
    ) -> None:
        """``timeout``: seconds without an answer after which a peer is lost."""
        self._me = me
        self._ticket = ticket
        self._timeout = timeout
        self._links: dict[str, DecodeLink] = {}
        self._looked_at = math.inf

    def __iter__(self) -> Iterator[DecodeLink]:
        return iter(list(self._links.values()))

    def get(self, endpoint: str) -> DecodeLink | None:
        """Return the link to an endpoint, or None."""
        return self._links.get(endpoint)

    def connect(self, endpoint: str, now: float) -> list[Action]:
        """Create a link to an endpoint unless it exists."""
        if endpoint in self._links:
            return []
        self._links[endpoint] = DecodeLink(endpoint, now, self._timeout)
        return [Connect(endpoint)]

    def up(self, endpoint: str, now: float) -> list[Action]:
        """Send Open over a new connection, to agree with the process that listens there now."""
        link = self._links.get(endpoint)
        if link is None:
            return []
        # Also after a refusal: another process may be listening now.
        link.state, link.denied = LinkState.OPENING, False
        link.await_answer(now)
        return [self._open(link, now)]

    def down(self, endpoint: str, now: float) -> None:
        """Mark the link as connecting again: its connection was lost."""
        link = self._links.get(endpoint)
        if link:
            link.state = LinkState.CONNECTING
            link.await_answer(now)

    def opened(self, link: DecodeLink, message: Opened, now: float) -> None:
        """Mark the link as open: both sides have agreed."""
        link.state, link.unanswered_since, link.denied = LinkState.OPEN, None, False
        link.worker, link.incarnation = message.worker, message.incarnation
        link.transport, link.frame_limit = message.transport, message.max_frame_bytes
        own, theirs = self._me.model.layout, message.layout
        link.layout = None if theirs in (None, own) else frame_layout(own, theirs)
        if link.no_data_since is not None:
            link.no_data_since = now  # perhaps another process: restart the timeout

    def agree_again(self, endpoint: str, now: float) -> None:
        """Send Open again soon: an event of the link was lost in an exception of our own code."""
        link = self._links.get(endpoint)
        if link is not None:
            link.state, link.repeat_at = LinkState.OPENING, now + OPEN_REPEAT_S
            link.await_answer(now)

    def pong(self, endpoint: str, nonce: int) -> None:
        """Pass a Pong to its link."""
        link = self._links.get(endpoint)
        if link is not None:
            link.answered(nonce)

    def data(self, endpoint: str, *, stands: bool, now: float) -> None:
        """Note that the data connection was made or lost."""
        link = self._links.get(endpoint)
        if link is None:
            return
        if stands:
            link.no_data_since = None
        elif link.no_data_since is None:
            link.no_data_since = now

    def refused(self, endpoint: str, message: OpenRefused) -> list[Action]:
        """Mark the link as refused: models or layouts differ."""
        link = self._links.get(endpoint)
        if link is None:
            return []
        link.state, link.unanswered_since = LinkState.REFUSED, None
        link.refusal = (
            f"workers differ in {message.field}: {message.theirs} here,"
            f" {message.ours} at {endpoint}"
        )
        return [Log("handoff.refused", {"endpoint": endpoint, "field": message.field})]

    def of_another_version(self, endpoint: str, reason: str) -> list[Action]:
        """Mark the link as refused: the protocol versions differ."""
        link = self._links.get(endpoint)
        if link is None:
            return []
        link.state, link.unanswered_since, link.refusal = LinkState.REFUSED, None, reason
        return [Log("handoff.refused", {"endpoint": endpoint, "field": "version"})]

    def denied(self, endpoint: str, reason: str, now: float) -> None:
        """Mark the link as refused by the peer's key list; ask again later with Open.

        The list may be changed there without a new connection.
        """
        link = self._links.get(endpoint)
        if link is not None:
            link.state, link.unanswered_since = LinkState.REFUSED, None
            link.refusal, link.repeat_at = f"{endpoint}: {reason}", now + DENIED_PAUSE_S
            link.denied = True

    def drop(self, link: DecodeLink) -> None:
        """Remove a link."""
        del self._links[link.endpoint]

    def of_worker(self, endpoint: str, incarnation: int) -> DecodeLink | None:
        """Return the link to a worker's incarnation, or None.

        The incarnation alone proves nothing: any decode worker may state it in its Opened.
        """
        link = self._links.get(endpoint)
        return None if link is None or (link.worker and link.incarnation != incarnation) else link

    def tick(self, now: float, wanted: Callable[[str], bool]) -> list[Action]:
        """Repeat unanswered Opens and send due Pings.

        ``wanted(endpoint)``: True if requests wait for this endpoint or handoffs use it.
        """
        self._excuse(now)
        actions: list[Action] = []
        for link in self._links.values():
            again = link.state is LinkState.REFUSED and link.denied
            if (again or link.state is LinkState.OPENING) and now >= link.repeat_at:
                actions.append(self._open(link, now))
            elif wanted(link.endpoint) or link.unanswered_since is not None:
                nonce = link.ask(now)
                if nonce is not None:
                    actions.append(ToPeer(link.endpoint, Ping(nonce=nonce)))
        return actions

    def _excuse(self, now: float) -> None:
        """Exclude a pause of this process from the peers' timeouts."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause > OWN_PAUSE_S:
            for link in self._links.values():
                link.excuse(pause)

    def _open(self, link: DecodeLink, now: float) -> Action:
        link.repeat_at = now + (DENIED_PAUSE_S if link.denied else OPEN_REPEAT_S)
        transports, pool, device_pool = [STREAMED], None, None
        if isinstance(self._ticket, DeviceTicket):
            transports, device_pool = [DEVICE, STREAMED], self._ticket
        elif self._ticket is not None:
            transports, pool = [SHARED, STREAMED], self._ticket
        message = Open(
            version=PROTOCOL_VERSION,
            worker=self._me.worker,
            incarnation=self._me.incarnation,
            nonce=self._me.nonce,
            model=self._me.model,
            transports=transports,
            pool=pool,
            device_pool=device_pool,
        )
        return ToPeer(link.endpoint, message)
