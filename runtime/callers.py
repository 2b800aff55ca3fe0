"""Who speaks on a socket with keys: each routing identity belongs to the key that used it first.

ZeroMQ lets any peer choose its routing identity, and hands a name that became free to the next
who asks. So a name alone proves nothing; the key of the connection, which ZAP attached to every
message, does.

Invariant: an identity that was heard with one key is never taken for its owner with another,
while it lives and, for the last :data:`KEEP_GONE` of them, after it has gone.

Pure: told of messages and of the ends of connections.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from .allowed_keys import AllowedKeys, KeyEntry

KEEP_GONE = 16_384


class Callers:
    """The peers of one socket. ``allowed()``: the list as it is now; ``roles``: who may come."""

    def __init__(self, allowed: Callable[[], AllowedKeys], roles: frozenset[str]) -> None:
        self.allowed = allowed
        self._roles = roles
        self._key_of: dict[bytes, bytes] = {}
        self._gone: OrderedDict[bytes, bytes] = OrderedDict()

    def admits(self, key: bytes) -> KeyEntry | None:
        """The entry of a key that may use this socket now."""
        entry = self.allowed().get(key)
        return entry if entry is not None and entry.role in self._roles else None

    def heard(self, identity: bytes, key: bytes) -> str:
        """Note a message that came with ``key``; why it must not be used, or the empty text."""
        owner = self._key_of.get(identity) or self._gone.get(identity)
        if owner is not None and owner != key:
            return "another key's identity"
        if self.admits(key) is None:
            return "a key that is not let in any more"
        if identity not in self._key_of:
            self._gone.pop(identity, None)
            self._key_of[identity] = key
        return ""

    def key_of(self, identity: bytes) -> bytes:
        """The key a live peer speaks with; empty for none."""
        return self._key_of.get(identity, b"")

    def entry_of(self, identity: bytes) -> KeyEntry | None:
        """What a live peer may do, by the list as it is now."""
        return self.admits(self.key_of(identity))

    def gone(self, identity: bytes) -> None:
        """Its connection ended; the name stays its key's."""
        key = self._key_of.pop(identity, None)
        if key is None:
            return
        self._gone[identity] = key
        if len(self._gone) > KEEP_GONE:
            self._gone.popitem(last=False)

    def withdrawn(self) -> list[bytes]:
        """Live peers whose keys the list does not let in any more."""
        return [identity for identity, key in self._key_of.items() if self.admits(key) is None]
