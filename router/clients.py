"""The connected clients, their requests, and which of them read too slowly.

Invariant: a client with ``behind`` set receives nothing until it has caught up. The requests'
records keep its tokens, so a slow client loses nothing and costs no further memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.wire.messages import TokenRun

from .records import Client, Request


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


def runs_from(request: Request, position: int) -> list[TokenRun]:
    """Return all stored tokens from ``position`` on: one run, or more if there are media.

    A run ends at the token that completes its media.
    """
    start = max(0, position - request.base)
    tokens = request.emitted[start:].tolist()
    if not tokens:
        return []
    logprobs = _logprobs_from(request, start)
    number, base = request.attempt.number, request.base + start
    end = base + len(tokens)  # an error may have left media without their token
    media = {at - base: one for at, one in (request.media or {}).items() if base <= at < end}
    runs, first = [], 0
    for last in sorted({*media, len(tokens) - 1}):
        part = None if logprobs is None else logprobs[first : last + 1]
        run = TokenRun(
            request.key, number, base + first, tokens[first : last + 1], part, media.get(last)
        )
        runs.append(run)
        first = last + 1
    return runs


def _logprobs_from(request: Request, start: int) -> list[TokenLogProbs] | None:
    if request.logprobs is None:
        return None
    known = [entry for entry in request.logprobs[start:] if entry is not None]
    # Tokens from a Resume have no log probabilities, and that client does not need them.
    return known if len(known) == len(request.logprobs) - start else None
