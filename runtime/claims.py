"""What belongs to a key: a worker's name while it is there, an incarnation for good.

Invariant: of two peers with different keys that claim the same thing, the later is refused until
the earlier one's connections are gone; an incarnation, which no other process ever has, stays its
key's (the last :data:`KEEP_LIVES` of them).

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
    """Names and incarnations, and who holds them."""

    def __init__(self) -> None:
        self._held: dict[str, _Claim] = {}
        self._by_peer: dict[bytes, set[str]] = {}
        self._lives: OrderedDict[int, bytes] = OrderedDict()

    def take(self, peer: bytes, key: bytes, incarnation: int, *names: str) -> str:
        """Claim all for a peer with ``key``, or nothing: then what another key has, in words."""
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
        """Whether the incarnation is known as this key's."""
        return self._lives.get(incarnation) == key

    def gone(self, peer: bytes) -> None:
        """Names only this peer held are free."""
        for name in self._by_peer.pop(peer, ()):
            held = self._held[name]
            held.peers.discard(peer)
            if not held.peers:
                del self._held[name]
