"""The connected clients, their requests, and which of them read too slowly.

Invariant: a client with ``behind`` set receives nothing until it has caught up. The requests'
records keep its tokens, so a slow client loses nothing and costs no further memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.proto.wire.messages import Begun, TokenRun

from .requests import Request


class Client:
    """One connection of a client and its requests."""

    __slots__ = ("begun", "behind", "identity", "requests", "runs")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.requests: dict[bytes, Request] = {}
        self.runs: list[TokenRun] = []  # for the Tokens message that is being built
        self.begun: list[Begun] = []  # for the same message
        self.behind = False


class Clients:
    """All clients with requests, by routing id."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Client] = {}

    def get(self, identity: bytes) -> Client | None:
        """Return the client, or None if it has no requests."""
        return self._by_identity.get(identity)

    def attach(self, request: Request, identity: bytes) -> Client:
        """Stream ``request`` to ``identity``, and to no other client."""
        client = self._by_identity.get(identity)
        if client is None:
            client = self._by_identity[identity] = Client(identity)
        if request.client is not client:
            if request.client is not None:
                self.detach(request)
            request.client = client
            client.requests[request.key] = request
        return client

    def detach(self, request: Request) -> None:
        """Remove the client from ``request``."""
        client = request.client
        if client is None:
            return
        request.client = None
        request.sent = -1
        client.requests.pop(request.key, None)
        if not client.requests and not client.behind:
            self._by_identity.pop(client.identity, None)

    def full(self, identity: bytes) -> None:
        """Mark a client that reads too slowly."""
        client = self._by_identity.get(identity)
        if client is None:
            client = self._by_identity[identity] = Client(identity)
        client.behind = True

    def writable(self, identity: bytes) -> Client | None:
        """Clear the mark and return the client, or None if it has no requests."""
        client = self._by_identity.get(identity)
        if client is None:
            return None
        client.behind = False
        if not client.requests:
            del self._by_identity[identity]
            return None
        return client

    def gone(self, identity: bytes) -> list[Request]:
        """Drop a lost connection and return its requests, which have no client then."""
        client = self._by_identity.pop(identity, None)
        if client is None:
            return []
        requests = list(client.requests.values())
        for request in requests:
            request.client = None
            request.sent = -1
        return requests

    def all(self) -> list[Client]:
        """Return all clients."""
        return list(self._by_identity.values())

    def recount(self, requests: Mapping[bytes, Request]) -> None:
        """Make the lists of all clients again from the requests' records."""
        for client in self._by_identity.values():
            client.requests = {}
        for request in requests.values():
            if request.client is not None:
                client = self._by_identity.setdefault(request.client.identity, request.client)
                request.client = client
                client.requests[request.key] = request
        for client in self.all():
            if not client.requests and not client.behind:
                del self._by_identity[client.identity]

    def __len__(self) -> int:
        return len(self._by_identity)
