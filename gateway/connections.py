"""Which connections a gateway keeps when it cannot keep all of them.

A connection is ``FRESH`` until one of its requests was admitted, by its key or without one where
none is required. Then it is ``WORKING`` while a request runs, and ``IDLE`` between requests.

Invariants: at most ``most`` connections are open, one address has at most :data:`SHARE` of them,
and a working one is never closed for another one, nor is one that came just now. For a new
connection, others are closed in this order: fresh ones beyond :data:`FRESH_SHARE`, idle ones, fresh
ones. Of these, the addresses with most of them lose their oldest. If every connection works, the
new one is refused: it has one of ``lanes`` until it was answered.

Pure: the caller ends what :meth:`Connections.opened` returns.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable

from baton.proto.errors import ConfigError

SHARE = 7 / 8
"""Of all connections, what one address may have."""
FRESH_SHARE = 1 / 8
"""Of all connections, what fresh ones may have while others need the room."""
FIRST_S = 1.0
"""Seconds that a connection has in any case for its first request."""
_BATCH = 1 / 64
"""Of all connections, what is closed at a time: choosing takes a look at each of them."""


class Phase(enum.Enum):
    """What a connection does."""

    FRESH = enum.auto()
    IDLE = enum.auto()
    WORKING = enum.auto()
    REFUSED = enum.auto()


def nothing() -> None:
    """End nothing."""


class Place:
    """One connection. ``since``: the time of its last phase; ``end``: closes it."""

    __slots__ = ("address", "end", "phase", "since")

    def __init__(self, address: str, phase: Phase, since: float) -> None:
        self.address = address
        self.phase = phase
        self.since = since
        self.end: Callable[[], object] = nothing

    def may_end(self, now: float) -> bool:
        """Whether the connection may be closed for another one."""
        if self.phase is Phase.FRESH:
            return now >= self.since + FIRST_S
        return self.phase is Phase.IDLE

    def works(self) -> None:
        """Note that a request was admitted."""
        if self.phase is not Phase.REFUSED:
            self.phase = Phase.WORKING

    def rests(self, now: float) -> None:
        """Note the end of an answer."""
        self.since = now
        if self.phase is Phase.WORKING:
            self.phase = Phase.IDLE


class Connections:
    """The open connections of one gateway."""

    def __init__(self, most: int, lanes: int) -> None:
        self.most = most
        self.crowded_out = self.refused = 0
        self._lanes = lanes
        self._open: dict[Place, None] = {}  # by arrival
        self._others: set[Place] = set()  # refused, or crowded out and not closed yet
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def takes_more(self, now: float) -> bool:
        """Whether to accept one more connection now; else it can wait in the kernel.

        It waits for a descriptor, and while others have come just now.
        """
        if len(self._open) + len(self._others) >= self.most + self._lanes:
            return False
        if len(self._open) < self.most or self._least(self._open, now):
            return True
        return not any(place.phase is Phase.FRESH for place in self._open)

    def opened(self, address: str, now: float) -> tuple[Place, list[Place]]:
        """Add a connection. Return it, and the connections to end in exchange."""
        share = max(1, int(self.most * SHARE))
        ended: list[Place] = []
        is_over = self._by_address[address] >= share
        if is_over or len(self._open) >= self.most:
            own = (place for place in self._open if place.address == address)
            ended = self._least(own if is_over else self._open, now)
            for place in ended:
                self.closed(place)
                self._others.add(place)
            self.crowded_out += len(ended)
            if not ended:
                self.refused += 1
                place = Place(address, Phase.REFUSED, now)
                self._others.add(place)
                return place, []
        place = Place(address, Phase.FRESH, now)
        self._open[place] = None
        self._by_address[address] += 1
        return place, ended

    def closed(self, place: Place) -> None:
        """Note that a connection's descriptor is free."""
        self._others.discard(place)
        if place in self._open:
            del self._open[place]
            self._by_address[place.address] -= 1
            if not self._by_address[place.address]:
                del self._by_address[place.address]

    def _least(self, candidates: Iterable[Place], now: float) -> list[Place]:
        fresh: list[Place] = []
        idle: list[Place] = []
        for place in candidates:
            if place.phase is Phase.FRESH:
                fresh.append(place)
            elif place.phase is Phase.IDLE:
                idle.append(place)
        old = [place for place in fresh if place.may_end(now)]
        batch = max(1, int(self.most * _BATCH))
        beyond = len(fresh) - int(self.most * FRESH_SHARE)
        if beyond > 0:
            return _of_the_most(old, min(batch, beyond))
        return _of_the_most(idle or old, batch)


def _of_the_most(places: list[Place], count: int) -> list[Place]:
    """Return the oldest places of the addresses with most of them, which so become equal."""
    newer: Counter[str] = Counter()
    ranked: list[tuple[int, float, int, Place]] = []
    for place in sorted(places, key=lambda one: one.since, reverse=True):
        newer[place.address] += 1
        ranked.append((-newer[place.address], place.since, len(ranked), place))
    return [place for *_, place in sorted(ranked)[:count]]


def address_of(host: str) -> str:
    """Return what shares are counted by: an IPv4 address, or the network of an IPv6 address."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if found.version == 4:
        return host
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or ipaddress.ip_network((int(found) >> 64 << 64, 64)))


def places_for(files: int, needed: int, most: int) -> tuple[int, int]:
    """Return how many connections, and lanes for refusals, the limit on open files allows.

    ``files``: the limit; ``needed``: descriptors for everything else; ``most``: as configured.
    Raises ConfigError if next to nothing is left.
    """
    left = files - needed
    lanes = max(2, min(64, left // 8))
    if left - lanes < _LEAST:
        raise ConfigError(
            f"a limit of {files} open files is too low: a gateway needs {needed + _LEAST + 2} "
            "(ulimit -n)"
        )
    return min(most, left - lanes), lanes


_LEAST = 8
