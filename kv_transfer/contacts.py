"""The prefill workers that have grants of a decode worker: which of them are unreachable.

A sender that was pinged for the whole timeout and sent nothing is unreachable. Pauses of this
process do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .grants import Peer
from .timeout import ASK_EVERY_S, OWN_PAUSE_S

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
    """Times of the last messages of the senders that have grants.

    ``timeout``: seconds without an answer after which a sender counts as unreachable.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._contacts: dict[Peer, _Contact] = {}
        self._looked_at = math.inf

    def gone(self, peer: Peer, now: float) -> None:
        """Start the timeout of a prefill worker whose connection was lost; it may reconnect."""
        contact = self._contacts.get(peer)
        if contact is not None and contact.asked_since is None:
            contact.asked_since = now

    def heard(self, peer: Peer, now: float) -> None:
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

    def is_unreachable(self, peer: Peer, now: float) -> bool:
        """True if a sender was asked for the whole timeout and has sent nothing since."""
        contact = self._contacts.get(peer)
        if contact is None or contact.asked_since is None:
            return False
        return now >= contact.asked_since + self._timeout

    def to_ask(self, peers: Iterable[Peer], now: float) -> list[Peer]:
        """Return the silent or disconnected senders to ping now.

        ``peers``: all senders with grants; others are dropped. Without pings, the grants of an
        unreachable sender would hold their blocks until the request's deadline.
        """
        known, self._contacts = self._contacts, {}
        silent: list[Peer] = []
        for peer in sorted(peers):
            contact = self._contacts[peer] = known.get(peer) or _Contact(now)
            if contact.asked_since is None and now >= contact.heard_at + SILENT_S:
                contact.asked_since = now
            if contact.asked_since is not None and now >= contact.ask_at:
                contact.ask_at = now + ASK_EVERY_S
                silent.append(peer)
        return silent
