"""Timeouts between the two sides of a handoff, and the senders that exceed them.

A sender that was pinged for the whole timeout and sent nothing is unreachable. Pauses of this
process do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

HANDOFF_TIMEOUT_S = 3.0
"""Seconds without an answer after which one side of a handoff treats the other as unreachable.

Shorter than the worker timeout: if only the link is broken, the request can move to another pair
of workers before any worker is declared dead. Longer than a normal pause of a busy process."""
ASK_EVERY_S = 0.5
"""Seconds between repeated pings to a peer whose answer is awaited; single pings may be lost."""
OWN_PAUSE_S = 1.0
"""If two clock readings are further apart (seconds), this process itself was paused.

Such a gap does not count towards a peer's timeout. Shorter gaps do count: a busy machine has them
all the time, and excusing all of them would never end a handoff.
"""


SILENT_S = 1.0
"""Seconds of silence after which a prefill worker with grants gets a Ping.

A prefill worker that works on handoffs sends to this worker more often than that."""


@dataclass(slots=True)
class _Contact:
    """The connection of a prefill worker that has grants.

    ``asked_since``: time of the first Ping after ``heard_at``; None while no answer is awaited.
    """

    heard_at: float
    asked_since: float | None = None
    ask_at: float = 0.0


class Contacts:
    """The senders, by identity, that have grants of a decode worker: times of their last messages.

    ``timeout``: seconds without an answer after which a sender counts as unreachable.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._contacts: dict[bytes, _Contact] = {}
        self._looked_at = math.inf

    def gone(self, peer: bytes, now: float) -> None:
        """Start the timeout of a prefill worker whose connection was lost; it may reconnect."""
        contact = self._contacts.get(peer)
        if contact is not None and contact.asked_since is None:
            contact.asked_since = now

    def heard(self, peer: bytes, now: float) -> None:
        """Note that a prefill worker sent something, so it is reachable."""
        contact = self._contacts.get(peer)
        if contact is not None:
            contact.heard_at, contact.asked_since = now, None

    def excuse(self, now: float) -> None:
        """Exclude pauses of this process from the senders' timeouts."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause > OWN_PAUSE_S:
            for contact in self._contacts.values():
                if contact.asked_since is not None:
                    contact.asked_since += pause

    def is_unreachable(self, peer: bytes, now: float) -> bool:
        """True if a sender was asked for the whole timeout and has sent nothing since."""
        contact = self._contacts.get(peer)
        if contact is None or contact.asked_since is None:
            return False
        return now >= contact.asked_since + self._timeout

    def to_ask(self, peers: Iterable[bytes], now: float) -> list[bytes]:
        """Return the silent or disconnected senders to ping now.

        ``peers``: all senders with grants; others are dropped. Without pings, the grants of an
        unreachable sender would hold their blocks until the request's deadline.
        """
        known, self._contacts = self._contacts, {}
        silent: list[bytes] = []
        for peer in sorted(peers):
            contact = self._contacts[peer] = known.get(peer) or _Contact(now)
            if contact.asked_since is None and now >= contact.heard_at + SILENT_S:
                contact.asked_since = now
            if contact.asked_since is not None and now >= contact.ask_at:
                contact.ask_at = now + ASK_EVERY_S
                silent.append(peer)
        return silent
