"""Ownership of routing identities on a socket with keys: the first key to use one owns it.

ZeroMQ lets any peer choose its routing identity, and gives a free identity to the next peer that
asks for it. So an identity alone proves nothing. ZAP attaches the connection's key to every
message, and this key is checked.

Invariant: a message whose key does not own its identity is refused, while the owner is connected
and after it disconnected (for the last :data:`KEEP_GONE` identities).

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from .allowed import AllowedKeys, KeyEntry

KEEP_GONE = 16_384


class Callers:
    """The peers of one socket.

    ``allowed()`` returns the current key list; ``roles`` are the roles allowed on the socket.
    """

    def __init__(self, allowed: Callable[[], AllowedKeys], roles: frozenset[str]) -> None:
        self.allowed = allowed
        self._roles = roles
        self._key_of: dict[bytes, bytes] = {}
        self._gone: OrderedDict[bytes, bytes] = OrderedDict()

    def admits(self, key: bytes) -> KeyEntry | None:
        """Return the entry of a key that may use this socket now, or None."""
        entry = self.allowed().get(key)
        return entry if entry is not None and entry.role in self._roles else None

    def heard(self, identity: bytes, key: bytes) -> str:
        """Check a message that came with ``key``; return why it is refused, or ``""``."""
        owner = self._key_of.get(identity) or self._gone.get(identity)
        if owner is not None and owner != key:
            return "another key's identity"
        if self.admits(key) is None:
            return "a key that is no longer allowed"
        if identity not in self._key_of:
            self._gone.pop(identity, None)
            self._key_of[identity] = key
        return ""

    def key_of(self, identity: bytes) -> bytes:
        """Return the key of a connected peer; empty if unknown."""
        return self._key_of.get(identity, b"")

    def entry_of(self, identity: bytes) -> KeyEntry | None:
        """Return the current list entry of a connected peer, or None."""
        return self.admits(self.key_of(identity))

    def gone(self, identity: bytes) -> None:
        """Remove a disconnected peer; its key keeps the identity."""
        key = self._key_of.pop(identity, None)
        if key is None:
            return
        self._gone[identity] = key
        if len(self._gone) > KEEP_GONE:
            self._gone.popitem(last=False)

    def withdrawn(self) -> list[bytes]:
        """Return connected peers whose keys were removed from the list."""
        return [identity for identity, key in self._key_of.items() if self.admits(key) is None]
