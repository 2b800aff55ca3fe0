"""Requests and tokens of each router at a worker, as running sums."""

from __future__ import annotations

from collections import Counter

from baton.proto.wire.messages import Share


class Shares:
    """Requests and tokens by router."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, router: str, tokens: int) -> None:
        """Add a request of ``router``."""
        self._requests[router] += 1
        self._tokens[router] += tokens

    def drop(self, router: str, tokens: int) -> None:
        """Remove a request that was added with the same arguments."""
        self._requests[router] -= 1
        self._tokens[router] -= tokens
        if not self._requests[router]:
            del self._requests[router], self._tokens[router]

    def report(self) -> dict[str, Share]:
        """Return the sums by router, as sent in heartbeats."""
        return {name: Share(count, self._tokens[name]) for name, count in self._requests.items()}
