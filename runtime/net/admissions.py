"""Limit on the connections of a socket that have not finished their handshake.

ZeroMQ accepts every connection and closes it only after :data:`HANDSHAKE_S` without a handshake,
so strangers without a key could exhaust the descriptors of a process.

Invariant: at most ``most`` pending connections are open. Above that, the address with most pending
connections loses one: the oldest at its earliest handshake stage. So only a flooding address loses
connections, and a client that shares this address keeps its connection if its handshake got
further than the flood's.

Pure: connections are identified by descriptor and address.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

HANDSHAKE_S = 2.0
"""ZeroMQ's handshake timeout; an older open connection has finished its handshake."""
MAX_PENDING = 4096
"""Maximum pending connections of a socket."""


class Stage(enum.IntEnum):
    """Progress of a handshake."""

    SILENT = 0
    SPOKEN = 1
    """The peer has sent bytes, which needs no key."""
    ANSWERED = 2
    """The peer's HELLO was answered, which requires the public key of this process."""


class _Address:
    """Pending connections of one address, by last seen stage and then by arrival."""

    def __init__(self) -> None:
        self.by_stage: tuple[dict[int, None], ...] = tuple({} for _ in Stage)

    def __len__(self) -> int:
        return sum(map(len, self.by_stage))

    def remove(self, fd: int) -> None:
        for there in self.by_stage:
            there.pop(fd, None)

    def least(self, stage_of: Callable[[int], Stage]) -> int:
        """Return the oldest connection at the earliest stage.

        Stages are queried lazily: a candidate that has advanced moves to its new stage. So each
        connection is queried at most three times, and an eviction usually needs one query.
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
    """Pending connections of one socket; ``stage_of(fd)`` queries a handshake's current stage."""

    def __init__(self, most: int, stage_of: Callable[[int], Stage]) -> None:
        self._most = most
        self._stage_of = stage_of
        self._pending: dict[int, tuple[str, float]] = {}  # descriptor: address, accept time
        self._by_address: dict[str, _Address] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def accepted(self, fd: int, address: str, now: float) -> int | None:
        """Add a new connection; return the descriptor to close in exchange, or None."""
        self.settled(fd)  # the descriptor number may be reused
        while self._pending:
            oldest = next(iter(self._pending))
            if now < self._pending[oldest][1] + HANDSHAKE_S:
                break
            self.settled(oldest)
        self._pending[fd] = address, now
        self._by_address.setdefault(address, _Address()).by_stage[Stage.SILENT][fd] = None
        return self._crowded_out() if len(self._pending) > self._most else None

    def settled(self, fd: int) -> None:
        """Remove a connection that finished its handshake or was closed."""
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
