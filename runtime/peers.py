"""Which connection each peer of a listening socket speaks through.

Invariant: every identity is listed under the descriptor of the connection its last message
came by, so the event "descriptor closed" finds whom to suspect.
"""

from __future__ import annotations

REMEMBER_CLOSED_S = 5.0
"""How long a message may lie unread behind the event that its connection closed."""


class PeerTable:
    """Identities by descriptor and back."""

    def __init__(self) -> None:
        self._fd_of: dict[bytes, int] = {}
        self._by_fd: dict[int, set[bytes]] = {}
        self._closed_at: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._fd_of)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._fd_of

    def heard(self, identity: bytes, fd: int, now: float) -> bool:
        """Note a message's connection; true when that connection may be closed already."""
        if self._fd_of.get(identity) == fd:
            return False
        self._drop(identity)
        self._fd_of[identity] = fd
        self._by_fd.setdefault(fd, set()).add(identity)
        # Descriptors are reused, so this is a suspicion only.
        return now - self._closed_at.get(fd, -REMEMBER_CLOSED_S) < REMEMBER_CLOSED_S

    def closed(self, fd: int, now: float) -> list[bytes]:
        """Note a closed descriptor; returns the peers last heard on it."""
        if len(self._closed_at) > 256:
            old = [f for f, at in self._closed_at.items() if now - at >= REMEMBER_CLOSED_S]
            for f in old:
                del self._closed_at[f]
        self._closed_at[fd] = now
        return list(self._by_fd.get(fd, ()))

    def descriptor(self, identity: bytes) -> int | None:
        """The descriptor of the connection a peer was last heard on."""
        return self._fd_of.get(identity)

    def forget(self, identity: bytes) -> None:
        """The peer is gone."""
        self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        fd = self._fd_of.pop(identity, None)
        if fd is None:
            return
        others = self._by_fd[fd]
        others.discard(identity)
        if not others:
            del self._by_fd[fd]
