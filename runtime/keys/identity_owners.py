"""Routing identities on a socket with keys: an identity begins with a tag of its owner's key.

ZeroMQ lets any peer choose its routing identity, and gives a free identity to the next peer that
asks for it. So an identity alone proves nothing. ZAP attaches the connection's key to every
message, and this key must give the identity's tag. No table of earlier identities is needed.

Invariant: a message is refused if its identity has the tag of another key.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

from .allowed import AllowedKeys, KeyEntry


@lru_cache(maxsize=1024)
def key_tag(key: bytes) -> bytes:
    """Return the first bytes of all routing identities of a key (z85).

    ZeroMQ reserves identities whose first byte is 0.
    """
    return b"K" + blake2b(key, digest_size=16, person=b"baton-identity").digest()


def tagged(identity: bytes, key: bytes) -> bytes:
    """Return a routing identity with the tag of ``key``; unchanged without a key."""
    return key_tag(key) + identity if key else identity


class Callers:
    """The peers of one socket.

    ``allowed()`` returns the current key list; ``roles`` are the roles allowed on the socket.
    """

    def __init__(self, allowed: Callable[[], AllowedKeys], roles: frozenset[str]) -> None:
        self.allowed = allowed
        self._roles = roles
        self._key_of: dict[bytes, bytes] = {}

    def admits(self, key: bytes) -> KeyEntry | None:
        """Return the entry of a key that may use this socket now, or None."""
        entry = self.allowed().get(key)
        return entry if entry is not None and entry.role in self._roles else None

    def heard(self, identity: bytes, key: bytes) -> str:
        """Check a message that came with ``key``; return why it is refused, or ``""``."""
        known = self._key_of.get(identity) == key
        if not known and not identity.startswith(key_tag(key)):
            return "another key's identity"
        if self.admits(key) is None:
            return "a key that is no longer allowed"
        if not known:
            self._key_of[identity] = key
        return ""

    def key_of(self, identity: bytes) -> bytes:
        """Return the key of a connected peer; empty if unknown."""
        return self._key_of.get(identity, b"")

    def entry_of(self, identity: bytes) -> KeyEntry | None:
        """Return the current list entry of a connected peer, or None."""
        return self.admits(self.key_of(identity))

    def gone(self, identity: bytes) -> None:
        """Remove a disconnected peer."""
        self._key_of.pop(identity, None)

    def withdrawn(self) -> list[bytes]:
        """Return connected peers whose keys were removed from the list."""
        return [identity for identity, key in self._key_of.items() if self.admits(key) is None]
