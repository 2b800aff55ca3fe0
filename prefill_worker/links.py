"""A prefill worker's links to decode workers: created on demand, opened, lost, closed.

Invariant: until both sides have agreed, an endpoint receives Open and nothing else. Links that
requests wait for or handoffs use are pinged. So are links with an unanswered question, until
they answer or have been lost for :data:`.link.KEEP_LOST_S`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..kv_transfer.timeout import HANDOFF_TIMEOUT_S, OWN_PAUSE_S
from ..proto.limits import PROTOCOL_VERSION
from ..proto.wire.messages import (
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
from ..worker.events import Note
from ..worker.membership import WorkerIdentity
from .events import Action, Connect, ToPeer
from .link import OPEN_REPEAT_S, Link, LinkState


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
        self._links: dict[str, Link] = {}
        self._looked_at = math.inf

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def get(self, endpoint: str) -> Link | None:
        """Return the link to an endpoint, or None."""
        return self._links.get(endpoint)

    def connect(self, endpoint: str, now: float) -> list[Action]:
        """Create a link to an endpoint unless it exists."""
        if endpoint in self._links:
            return []
        self._links[endpoint] = Link(endpoint, now, self._timeout)
        return [Connect(endpoint)]

    def up(self, endpoint: str, now: float) -> list[Action]:
        """Send Open over a new connection, to agree with the process that listens there now."""
        link = self._links.get(endpoint)
        if link is None:
            return []
        # Also after a refusal: another process may be listening now.
        link.state = LinkState.OPENING
        link.await_answer(now)
        return [self._open(link, now)]

    def down(self, endpoint: str, now: float) -> None:
        """Mark the link as connecting again: its connection was lost."""
        link = self._links.get(endpoint)
        if link:
            link.state = LinkState.CONNECTING
            link.await_answer(now)

    def opened(self, link: Link, message: Opened, now: float) -> None:
        """Mark the link as open: both sides have agreed."""
        link.state, link.unanswered_since = LinkState.OPEN, None
        link.worker, link.incarnation = message.worker, message.incarnation
        link.transport, link.frame_limit = message.transport, message.max_frame_bytes
        if link.no_data_since is not None:
            link.no_data_since = now  # perhaps another process: restart the timeout

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
        return [Note("handoff.refused", {"endpoint": endpoint, "field": message.field})]

    def of_another_version(self, endpoint: str, reason: str) -> list[Action]:
        """Mark the link as refused: the protocol versions differ."""
        link = self._links.get(endpoint)
        if link is None:
            return []
        link.state, link.unanswered_since, link.refusal = LinkState.REFUSED, None, reason
        return [Note("handoff.refused", {"endpoint": endpoint, "field": "version"})]

    def drop(self, link: Link) -> None:
        """Remove a link."""
        del self._links[link.endpoint]

    def of_worker(self, endpoint: str, incarnation: int) -> Link | None:
        """Return the link to a worker's incarnation, or to its endpoint if that never answered."""
        for link in self._links.values():
            if link.incarnation == incarnation or (link.endpoint == endpoint and not link.worker):
                return link
        return None

    def tick(self, now: float, wanted: Callable[[str], bool]) -> list[Action]:
        """Repeat unanswered Opens and send due Pings.

        ``wanted(endpoint)``: True if requests wait for this endpoint or handoffs use it.
        """
        self._excuse(now)
        actions: list[Action] = []
        for link in self._links.values():
            if link.state is LinkState.OPENING and now >= link.repeat_at:
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

    def _open(self, link: Link, now: float) -> Action:
        link.repeat_at = now + OPEN_REPEAT_S
        transports, pool, device_pool = [STREAMED], None, None
        if isinstance(self._ticket, DeviceTicket):
            transports, device_pool = [DEVICE, STREAMED], self._ticket
        elif self._ticket is not None:
            transports, pool = [SHARED, STREAMED], self._ticket
        message = Open(
            version=PROTOCOL_VERSION,
            worker=self._me.worker,
            incarnation=self._me.incarnation,
            model=self._me.model,
            transports=transports,
            pool=pool,
            device_pool=device_pool,
        )
        return ToPeer(link.endpoint, message)
