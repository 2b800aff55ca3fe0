"""Clients of a simulated cluster: the real client core with a simulated user.

The user records each request's tokens, in arrival order, and its end for :mod:`.invariants`.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.client import events as client
from baton.client.core import ClientCore
from baton.proto.ids import request_key
from baton.proto.wire.messages import Drain, Message, Submit
from baton.router.events import FromClient

from .nodes import DETECT_S, Node, RouterNode, World
from .records import Record

SOCKET_MESSAGES = 6
"""Number of messages that the socket buffers hold for a client that does not read."""


class ClientNode(Node):
    """A client process with any number of requests. It uses all routers, starting with the first.

    A router's address is its name.
    """

    core: ClientCore

    def __init__(self, cluster: World, name: str, routers: Sequence[RouterNode]) -> None:
        super().__init__(cluster, name)
        self._routers = [router.name for router in routers]
        self.router = routers[0]
        self.live: dict[str, Record] = {}
        self.history: list[Record] = []
        self._connection = 0
        self._unread: list[Message] = []
        self._reading = True
        self._tickets = 0

    def _name_connection(self) -> None:
        self.identity = f"{self.name}:{self.incarnation:x}:{self._connection}".encode()

    def boot(self) -> None:
        """Start a new process: requests of the previous one are orphaned."""
        self._name_connection()
        for record in self.live.values():
            record.orphaned = True
        self.live.clear()
        self._unread.clear()
        self._reading = True
        self.core = ClientCore(*self._routers)
        self.router = self.cluster.router_named(self.core.router)
        self._connect()

    # ------------------------------------------------------------------ the user

    def submit(self, record: Record) -> None:
        """Submit a request unless its id is in use."""
        if record.request_id in self.live:
            return
        record.started = record.heard_at = self.cluster.network.now
        self.live[record.request_id] = record
        self.history.append(record)
        self.feed(client.Start(record.spec()))

    def cancel(self, record: Record, *, report: bool) -> None:
        """Cancel a request; without ``report`` the user ignores its end."""
        if self.live.get(record.request_id) is not record:
            return
        record.stopped = True
        if not report:
            del self.live[record.request_id]
            record.orphaned = True
        self.feed(client.Stop(record.request_id, report))

    def drain(self, worker: str) -> None:
        """Drain a worker, as an operator would."""
        self._tickets += 1
        self.feed(client.Ask(self._tickets, Drain(worker=worker, force=True), 2.0))

    # ------------------------------------------------------------------ the connection

    def _connect(self) -> None:
        identity = self.identity

        def connected() -> None:
            if identity != self.identity:
                return
            if self._reaches(self.router):
                self.feed(client.Connected(identity))
            else:
                self.cluster.network.after(0.05, self.when_up(connected))

        self.cluster.network.after(DETECT_S, self.when_up(connected))

    def _reaches(self, router: RouterNode) -> bool:
        """True if a handshake with the router would succeed now."""
        blocked = self.cluster.network.blocked
        passes = not {(self.name, router.name), (router.name, self.name)} & blocked
        return router.alive and not router.stopped and passes

    def _look(self, name: str) -> None:
        """Check over a second connection whether a router is reachable."""
        if self._reaches(self.cluster.router_named(name)):
            self.cluster.stats["looks"] += 1
            seen = self.when_up(lambda: self.feed(client.Reached(name)))
            self.cluster.network.after(DETECT_S, seen)

    def router_down(self) -> None:
        """Handle the loss of the connection."""
        self._unread.clear()
        self.feed(client.Disconnected())

    def _renew(self, name: str) -> None:
        """Connect again as the core asks; the old router is notified if it is reachable."""
        self._unread.clear()
        old, router = self.identity, self.router
        self._connection += 1
        self._name_connection()
        self.router = self.cluster.router_named(name)
        self.cluster.stats["moves"] += self.router is not router
        self.cluster.network.after(DETECT_S, router.when_up(lambda: router.client_gone(old)))
        self._connect()

    def take(self, message: Message) -> bool:
        """Accept a message; return False if the buffers of a client that does not read are full."""
        if not self._reading and len(self._unread) >= SOCKET_MESSAGES:
            return False
        identity = self.identity

        def arrive() -> None:
            if identity != self.identity:
                return
            if self._reading:
                self.feed(client.Received(message))
            else:
                self._unread.append(message)

        self.router.transmit(self, arrive)
        return True

    def read(self, *, reading: bool) -> None:
        """Stop reading, or handle the unread messages and continue."""
        self._reading = reading
        if reading:
            unread, self._unread = self._unread, []
            for message in unread:
                self.feed(client.Received(message))

    # ------------------------------------------------------------------ events

    def tick(self) -> None:
        """Let the core check its timers."""
        if self._reading:
            self.feed(client.Tick())

    def feed(self, event: client.Event) -> None:
        """Pass an event to the core and perform the actions it returns."""
        said: list[Message] = []
        actions = self.core.handle(event, self.now)
        self.record(event, actions)
        for action in actions:
            match action:
                case client.Send(message=message):
                    said.append(message)
                case client.NewTokens():
                    self._tokens(action)
                case client.Ended():
                    self._ended(action)
                case client.Reconnect(address=name):
                    said = self._send(said)
                    self._renew(name)
                case client.Look(address=name):
                    self._look(name)
                case _:
                    pass
        self._send(said)

    def _send(self, messages: list[Message]) -> list[Message]:
        """Send one envelope and return an empty list for the next one."""
        router, identity = self.router, self.identity
        for message in messages:
            self.cluster.overheard(message)
            if isinstance(message, Submit) and message.request_id in self.live:
                key = request_key(identity, message.request_id, message.serial)
                self.cluster.watcher.named(key, self.live[message.request_id])
        if messages:
            self.transmit(router, lambda: router.feed(FromClient(identity, messages)))
        return []

    def _tokens(self, action: client.NewTokens) -> None:
        record = self.live.get(action.request_id)
        if record is not None:
            self._heard(record)
            self.cluster.watcher.streamed(record, action)

    def _heard(self, record: Record) -> None:
        now = self.cluster.network.now
        record.longest_wait = max(record.longest_wait, now - record.heard_at)
        record.heard_at = now

    def _ended(self, action: client.Ended) -> None:
        record = self.live.pop(action.request_id, None)
        if record is not None:
            self._heard(record)
            record.ends.append(action)
            record.ended_at = self.cluster.network.now
