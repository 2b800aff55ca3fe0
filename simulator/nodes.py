"""Processes of a simulated cluster: their lives, clocks and connections, and the router.

A node has incarnations: a crash loses all state and every connection; a restart is another
incarnation. A stopped node (SIGSTOP) keeps its state and handles what piled up when it goes
on. Actions are performed as the real shells do: in order, messages through the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..proto.messages import Message
from ..router import events as routing
from ..router.core import RouterCore

if TYPE_CHECKING:
    from .cluster import Cluster

TICK_S = 0.05
DETECT_S = 0.002
"""How long a broken connection takes to be noticed."""


class Node:
    """A process."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = 0
        self.alive = False
        self.stopped = False
        self.stopped_at = self.resumed_at = 0.0
        self.skew = 0.0  # of this machine's clock
        self._backlog: list[Callable[[], None]] = []

    @property
    def now(self) -> float:
        """The clock of the node's machine."""
        return self.cluster.network.now + self.skew

    @property
    def identity(self) -> bytes:
        """Routing identity of this life's connections."""
        return f"{self.name}:{self.incarnation:x}".encode()

    def start(self) -> None:
        """Begin a new life."""
        self.incarnation = self.cluster.network.random.getrandbits(63) | 1
        self.alive, self.stopped = True, False
        self._backlog.clear()
        self.boot()
        self._tick(self.incarnation)

    def boot(self) -> None:
        """Create the core and connect."""
        raise NotImplementedError

    def crash(self) -> None:
        """Kill -9: everything is lost at once; peers notice a little later."""
        if self.alive:
            self.alive = False
            self.cluster.broken(self)

    def stop(self) -> None:
        """SIGSTOP."""
        if not self.stopped:
            self.stopped_at = self.cluster.network.now
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT: what arrived meanwhile is handled now, in order."""
        self.stopped = False
        self.resumed_at = self.cluster.network.now
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            call()

    def when_up(self, call: Callable[[], None]) -> Callable[[], None]:
        """``call``, but only in this incarnation, and not while stopped."""
        incarnation = self.incarnation

        def guarded() -> None:
            if not self.alive or self.incarnation != incarnation:
                return
            if self.stopped:
                self._backlog.append(guarded)
            else:
                call()

        return guarded

    def _tick(self, incarnation: int) -> None:
        if self.alive and self.incarnation == incarnation:
            self.tick()
            self.cluster.network.after(TICK_S, self.when_up(lambda: self._tick(incarnation)))

    def tick(self) -> None:
        """Let the core evaluate its timers."""
        raise NotImplementedError

    def transmit(self, target: Node, deliver: Callable[[], None]) -> None:
        """Send over the network to the target's present incarnation."""
        if target.alive:
            self.cluster.network.send(self.name, target.name, target.when_up(deliver))


class RouterNode(Node):
    """The real router core."""

    core: RouterCore

    def boot(self) -> None:
        """A router starts with no memory; everyone reconnects."""
        self.core = self.cluster.make_router(self)
        self._held: dict[bytes, list[Message]] = {}
        self.cluster.network.after(DETECT_S, lambda: self.cluster.reconnect(self))

    def tick(self) -> None:
        """Timers, and slow clients that read again."""
        self.feed(routing.Tick())
        for identity in list(self._held):
            self._retry(identity)

    def hear_client(self, identity: bytes, messages: Sequence[Message]) -> None:
        """An envelope of a client."""
        self._perform(self.core.from_client(identity, messages, self.now))

    def hear_worker(self, identity: bytes, messages: Sequence[Message]) -> None:
        """An envelope of a worker."""
        self._perform(self.core.from_worker(identity, messages, self.now))

    def feed(self, event: routing.Event) -> None:
        """Let the core decide, then send what it wants sent."""
        self._perform(self.core.handle(event, self.now))

    def _perform(self, actions: list[routing.Action]) -> None:
        for action in actions:
            if isinstance(action, routing.ToClient):
                self._to_client(action.identity, action.message)
            elif isinstance(action, routing.ToWorker):
                self.cluster.to_worker(self, action.identity, action.message)
            elif isinstance(action, routing.Log):
                self.cluster.stats[action.event] += 1
        self.cluster.watcher.router(self)

    def client_gone(self, identity: bytes) -> None:
        """A client's connection broke."""
        self._held.pop(identity, None)
        self.feed(routing.ClientGone(identity))

    def worker_gone(self, identity: bytes) -> None:
        """A worker's connection broke."""
        self.feed(routing.WorkerGone(identity))

    def _to_client(self, identity: bytes, message: Message) -> None:
        """As the shell: behind what a full client is still owed."""
        self.cluster.watcher.to_client(self, identity, message)
        if identity in self._held:
            self._held[identity].append(message)
        elif not self.cluster.to_client(self, identity, message):
            self._held[identity] = [message]
            self.cluster.stats["full"] += 1
            self.feed(routing.ClientFull(identity))

    def _retry(self, identity: bytes) -> None:
        held = self._held.pop(identity)
        while held and self.cluster.to_client(self, identity, held[0]):
            held.pop(0)
        if held:
            self._held[identity] = held
        else:
            self.feed(routing.ClientWritable(identity))
