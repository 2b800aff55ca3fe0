"""Connections that have not finished their handshake: how many a socket has of them, from where.

ZeroMQ accepts whoever connects and lets go only after :data:`HANDSHAKE_S`, so strangers without a
key could take all descriptors of a process. Invariant: at most ``most`` connections that are
younger than that and have not finished their handshake stand. Where there are more, one of the
address that has most of them is closed: of those whose handshake got least far the oldest. So an
address is crowded out by itself alone, and a client behind the same address as a flood is safe
from connections that did not get as far as its own.

Pure: told of connections by their descriptors and addresses.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

HANDSHAKE_S = 2.0
"""How long ZeroMQ gives a handshake; a connection that stands longer has finished it."""
MAX_PENDING = 4096
"""Most connections of a socket that have not finished their handshake."""


class Stage(enum.IntEnum):
    """How far a handshake got."""

    SILENT = 0
    SPOKEN = 1
    """The peer has sent something, which needs no key."""
    ANSWERED = 2
    """The peer got an answer to its HELLO, for which it needs the public key of this process."""


class _Address:
    """The pending connections of one address: by the stage last seen, each in order of coming."""

    def __init__(self) -> None:
        self.by_stage: tuple[dict[int, None], ...] = tuple({} for _ in Stage)

    def __len__(self) -> int:
        return sum(map(len, self.by_stage))

    def remove(self, fd: int) -> None:
        for there in self.by_stage:
            there.pop(fd, None)

    def least(self, stage_of: Callable[[int], Stage]) -> int:
        """Of the connections that got least far the oldest.

        A connection is asked for its stage only when its turn comes and moves up if it has got
        further, so an eviction asks about one connection, and each one at most three times.
        """
        for stage, there in zip(Stage, self.by_stage, strict=True):
            while there:
                fd = next(iter(there))
                found = stage_of(fd)
                if found <= stage:
                    return fd
                del there[fd]
                self.by_stage[found][fd] = None
        raise KeyError("no pending connection")


class Admissions:
    """Pending connections. ``stage_of(fd)``: how far the handshake of a connection is now."""

    def __init__(self, most: int, stage_of: Callable[[int], Stage]) -> None:
        self._most = most
        self._stage_of = stage_of
        self._pending: dict[int, tuple[str, float]] = {}  # descriptor: address, since when
        self._by_address: dict[str, _Address] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def accepted(self, fd: int, address: str, now: float) -> int | None:
        """Note a new connection; the descriptor of one that has to go for it, if any."""
        self.settled(fd)  # its number was another connection's before
        while self._pending:
            oldest = next(iter(self._pending))
            if now < self._pending[oldest][1] + HANDSHAKE_S:
                break
            self.settled(oldest)
        self._pending[fd] = address, now
        self._by_address.setdefault(address, _Address()).by_stage[Stage.SILENT][fd] = None
        return self._crowded_out() if len(self._pending) > self._most else None

    def settled(self, fd: int) -> None:
        """The connection has finished its handshake, or is gone."""
        known = self._pending.pop(fd, None)
        if known is not None:
            there = self._by_address[known[0]]
            there.remove(fd)
            if not len(there):
                del self._by_address[known[0]]

    def _crowded_out(self) -> int:
        fd = max(self._by_address.values(), key=len).least(self._stage_of)
        self.settled(fd)
        return fd
