"""Connections that have not spoken yet: how many a listening socket has of them, and from where.

ZeroMQ accepts whoever connects and lets go only after :data:`HANDSHAKE_S`, so strangers without a
key could take all descriptors of a process. Invariant: at most ``most`` connections that are
younger than that and have said nothing stand; where there are more, the oldest of the address that
has most of them goes. So an address is crowded out by itself alone.

Pure: told of connections by their descriptors and addresses.
"""

from __future__ import annotations

from collections import Counter

HANDSHAKE_S = 2.0
"""How long ZeroMQ gives a handshake; a connection that stands longer has finished it."""
MAX_SILENT = 4096
"""Most connections of a socket that have said nothing yet."""


class Admissions:
    """Connections in the order they came."""

    def __init__(self, most: int = MAX_SILENT) -> None:
        self._most = most
        self._silent: dict[int, tuple[str, float]] = {}  # descriptor: address, since when
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._silent)

    def accepted(self, fd: int, address: str, now: float) -> int | None:
        """Note a new connection; the descriptor of one that has to go for it, if any."""
        self.settled(fd)  # its number was another connection's before
        while self._silent:
            oldest = next(iter(self._silent))
            if now < self._silent[oldest][1] + HANDSHAKE_S:
                break
            self.settled(oldest)
        self._silent[fd] = address, now
        self._by_address[address] += 1
        return self._crowded_out() if len(self._silent) > self._most else None

    def settled(self, fd: int) -> None:
        """The connection has spoken, or is gone."""
        known = self._silent.pop(fd, None)
        if known is not None:
            self._by_address[known[0]] -= 1
            if not self._by_address[known[0]]:
                del self._by_address[known[0]]

    def _crowded_out(self) -> int:
        busiest = max(self._by_address, key=self._by_address.__getitem__)
        fd = next(fd for fd, (address, _) in self._silent.items() if address == busiest)
        self.settled(fd)
        return fd
