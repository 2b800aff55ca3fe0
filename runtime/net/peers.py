"""The connection of each peer of a listening socket.

Invariant: every identity is listed under the descriptor of its last message's connection. So a
closed descriptor identifies the peers that may be gone.
"""

from __future__ import annotations

REMEMBER_CLOSED_S = 5.0
"""Maximum seconds for which a message is read later than its connection's close event."""


class PeerTable:
    """A two-way map of peer identities and descriptors."""

    def __init__(self) -> None:
        self._fd_of: dict[bytes, int] = {}
        self._by_fd: dict[int, set[bytes]] = {}
        self._closed_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._fd_of)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._fd_of

    def heard(self, identity: bytes, fd: int, now: float) -> bool:
        """Note a message's connection; return whether it may be closed already."""
        if self._fd_of.get(identity) == fd:
            return False
        self._drop(identity)
        self._fd_of[identity] = fd
        self._by_fd.setdefault(fd, set()).add(identity)
        # Not certain, since descriptor numbers are reused.
        return now - self._closed_at.get(fd, -REMEMBER_CLOSED_S) < REMEMBER_CLOSED_S

    def closed(self, fd: int, now: float) -> list[bytes]:
        """Note a closed descriptor; return the peers whose last message used it."""
        if len(self._closed_at) > 256:
            old = [f for f, at in self._closed_at.items() if now - at >= REMEMBER_CLOSED_S]
            for f in old:
                del self._closed_at[f]
        self._closed_at[fd] = now
        return list(self._by_fd.get(fd, ()))

    def descriptor(self, identity: bytes) -> int | None:
        """Return the descriptor of a peer's last message, or None."""
        return self._fd_of.get(identity)

    def forget(self, identity: bytes) -> None:
        """Remove a disconnected peer."""
        self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        fd = self._fd_of.pop(identity, None)
        if fd is None:
            return
        others = self._by_fd[fd]
        others.discard(identity)
        if not others:
            del self._by_fd[fd]
