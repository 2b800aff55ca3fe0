"""Clients as the router sees them: what each is owed and whether it keeps up.

Invariant: a client that is behind is given nothing until it has caught up; nothing is lost
for it, since records keep their tokens, so a slow client costs no memory beyond them.
"""

from __future__ import annotations

from ..proto.messages import TokenRun
from .request import Request


class Client:
    """One connection of a client and its requests."""

    __slots__ = ("behind", "identity", "requests", "runs")

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.requests: dict[bytes, Request] = {}
        self.runs: list[TokenRun] = []  # of the message being relayed
        self.behind = False


class Clients:
    """All clients with requests, by routing id."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Client] = {}

    def get(self, identity: bytes) -> Client | None:
        """The client, or None when it has no requests here."""
        return self._by_identity.get(identity)

    def attach(self, request: Request, identity: bytes) -> Client:
        """Serve ``request`` to ``identity`` from now on."""
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
        """Serve ``request`` to nobody."""
        client = request.client
        if client is None:
            return
        request.client = None
        request.sent = -1
        client.requests.pop(request.key, None)
        if not client.requests and not client.behind:
            self._by_identity.pop(client.identity, None)

    def full(self, identity: bytes) -> None:
        """The client reads too slowly."""
        client = self._by_identity.get(identity)
        if client is None:
            client = self._by_identity[identity] = Client(identity)
        client.behind = True

    def writable(self, identity: bytes) -> Client | None:
        """The client has caught up; None when it has no requests any more."""
        client = self._by_identity.get(identity)
        if client is None:
            return None
        client.behind = False
        if not client.requests:
            del self._by_identity[identity]
            return None
        return client

    def gone(self, identity: bytes) -> list[Request]:
        """The connection is lost: its requests, now without a client."""
        client = self._by_identity.pop(identity, None)
        if client is None:
            return []
        requests = list(client.requests.values())
        for request in requests:
            request.client = None
            request.sent = -1
        return requests

    def __len__(self) -> int:
        return len(self._by_identity)
