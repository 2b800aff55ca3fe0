"""The client's connection to one of its routers: which router, and whether it still answers. Pure.

Invariant: while the client is connected and active, a router that sends nothing for longer than
the silence limit is left for the next router, or connected again if it is the only one.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.proto.wire.messages import Ping, Pong

from .events import Action, Look, Reconnect, Send
from .routers import Routers

PING_S = 1.0
SILENCE_S = 3.0
"""Seconds without a message after which an open connection counts as dead."""
SUSPENDED_S = 2.0
"""Delay of a tick that means this process was suspended, so that the router was not silent."""
SOON_S = 0.5
"""Replaces ``PING_S`` and ``SUSPENDED_S`` if the client has several routers."""
SILENCE_THEN_S = 1.5
"""Replaces ``SILENCE_S`` if the client has several routers: then it moves to the next router."""


class Link:
    """The current connection of a client. ``active``: the client has unfinished work."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.routers = Routers(addresses)
        self.identity = b""
        self.connected = False
        self.heard_at = float("-inf")  # last message of the router
        self.alive_at = float("-inf")  # last message or connection: the router runs
        self.hint = ""  # why the last handshake failed
        self.met = False  # a router has accepted a connection since the start
        self._quiet_since = 0.0  # last message, connection or start of activity
        self._ping_at = 0.0
        self._pinged_at = 0.0
        self._pings = 0  # number of pings sent, the nonce of the latest
        self._ponged = 0  # nonce of the latest ping that was answered
        self._ticked = 0.0

    @property
    def _ping_s(self) -> float:
        return SOON_S if self.routers.several else PING_S

    def wake(self, now: float) -> None:
        """Reset the silence timers of an idle client, because they did not run."""
        self._quiet_since = self._ticked = now
        self._ping_at = now + self._ping_s
        if not self.connected:
            self.routers.trying(now)

    # ------------------------------------------------------------------ connecting

    def opened(self, identity: bytes, now: float) -> None:
        """Record that the connection is open."""
        self.identity = identity
        self.connected = self.met = True
        self.hint = ""
        self.routers.connected(now)
        self._quiet_since = self.alive_at = now
        self._ping_at = now + self._ping_s
        self._ponged = self._pings  # pings on the previous connection are not answered any more

    def move(self, now: float) -> Reconnect:
        """Connect to the next router, or again to the only router. Requests continue there."""
        self.connected = False
        return Reconnect(self.routers.move(now))

    def refuse(self, now: float) -> Reconnect | None:
        """Connect to a router that has not refused the client. None if all have refused."""
        return None if self.routers.refuse() else self.move(now)

    def overdue(self, now: float) -> bool:
        """Whether connecting takes so long that the next router should be tried."""
        return not self.connected and self.routers.overdue(now)

    def home_is_back(self, address: str, now: float, *, active: bool) -> list[Action]:
        """Record that the router at ``address`` answered a Look."""
        if address != self.routers.home or not self.routers.away:
            return []
        self.routers.home_is_back = True
        return self.go_home(now, active=active)

    def go_home(self, now: float, *, active: bool) -> list[Action]:
        """Return to the home router if nothing runs. Moving a running request gains nothing."""
        if not self.routers.home_is_back or active:
            return []
        self.connected = False
        return [Reconnect(self.routers.go_home(now))]

    # ------------------------------------------------------------------ silence

    def heard(self, now: float) -> None:
        """Record a message of the router."""
        self.heard_at = self.alive_at = self._quiet_since = now

    def tick(self, now: float, *, active: bool) -> None:
        """Restart the silence timers if this process was suspended: the router was not silent."""
        late = SOON_S if self.routers.several else SUSPENDED_S
        if now - self._ticked > late and active:
            self.heard(now)
        self._ticked = now

    def keep_alive(self, now: float) -> list[Action]:
        """Ping the router when due, or leave it after too long a silence."""
        patience = SILENCE_THEN_S if self.routers.several else SILENCE_S
        if now - self._quiet_since > patience:
            return [self.move(now)]
        if now < self._ping_at:
            return []
        self._ping_at, self._pinged_at = now + self._ping_s, now
        self._pings += 1
        return [Send(Ping(nonce=self._pings))]

    def look_home(self, now: float) -> list[Action]:
        """Check whether the home router is back, when that is due."""
        return [Look(self.routers.home)] if self.routers.wants_look(now) else []

    def ponged(self, message: Pong) -> tuple[float | None, bool] | None:
        """Match a Pong to a ping of this connection. None if it answers no unanswered ping.

        Returns the time of that ping, or None if a later ping is unanswered; and whether an
        earlier ping was lost, or its answer.
        """
        if not self._ponged < message.nonce <= self._pings:
            return None
        lost = message.nonce > self._ponged + 1
        self._ponged = message.nonce
        return (self._pinged_at if message.nonce == self._pings else None), lost
