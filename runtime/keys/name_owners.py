"""Claims of keys on worker names (while connected) and incarnations (permanently).

Invariant: while peers with one key hold a name, peers with other keys are refused that name. An
incarnation is unique to one process, so its key keeps it permanently (the last :data:`KEEP_LIVES`).

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

KEEP_LIVES = 16_384


@dataclass(slots=True)
class _Claim:
    key: bytes
    peers: set[bytes] = field(default_factory=set)


class Claims:
    """Holders of names and incarnations."""

    def __init__(self) -> None:
        self._held: dict[str, _Claim] = {}
        self._by_peer: dict[bytes, set[str]] = {}
        self._lives: OrderedDict[int, bytes] = OrderedDict()

    def take(self, peer: bytes, key: bytes, incarnation: int, *names: str) -> str:
        """Claim the incarnation and all names for ``peer``, or none of them.

        Returns ``""``, or which of them another key holds: ``"incarnation"`` or the name.
        """
        if self._lives.get(incarnation, key) != key:
            return "incarnation"
        for name in names:
            held = self._held.get(name)
            if held is not None and held.key != key:
                return name
        self._lives[incarnation] = key
        self._lives.move_to_end(incarnation)
        if len(self._lives) > KEEP_LIVES:
            self._lives.popitem(last=False)
        for name in names:
            self._held.setdefault(name, _Claim(key)).peers.add(peer)
        self._by_peer.setdefault(peer, set()).update(names)
        return ""

    def lives(self, key: bytes, incarnation: int) -> bool:
        """Whether ``key`` holds the incarnation."""
        return self._lives.get(incarnation) == key

    def gone(self, peer: bytes) -> None:
        """Free the names that only this peer held."""
        for name in self._by_peer.pop(peer, ()):
            held = self._held[name]
            held.peers.discard(peer)
            if not held.peers:
                del self._held[name]
