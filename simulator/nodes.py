"""Processes of a simulated cluster, their incarnations, clocks and connections; the router node.

A crash loses all state and every connection of a node; a restart is a new incarnation. A
stopped node (SIGSTOP) keeps its state and handles its backlog when it resumes.
Actions are performed as in the real shells: in order, with messages over the network.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.client.events import NewTokens
from baton.engine.cache.paged_cache import PagedCache
from baton.extend.guard import Guard
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.sender import Sender
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import KVFrame, Message
from baton.router import events as routing
from baton.router.core import RouterCore
from baton.router.own_errors import INTERNAL

from .envelopes import Bytes, Envelope
from .keys import key_of
from .network import Network
from .own_errors import Plant
from .recording import Recording
from .records import Record
from .shape import Shape
from .toy_model import ToyExecutor
from .violation import Violation

TICK_S = 0.05
DETECT_S = 0.002
"""Seconds until a broken connection is noticed."""


class Peer(Protocol):
    """A process that another one sends to."""

    name: str
    alive: bool
    identity: bytes

    @property
    def key(self) -> bytes:
        """CURVE key of the process."""
        ...

    def when_up(self, call: Callable[[], None]) -> Callable[[], None]:
        """Wrap ``call`` so that it runs in this incarnation only."""
        ...


class Watched(Protocol):
    """A process whose books are checked."""

    name: str
    incarnation: int
    unchecked: int


class WorkerPeer(Watched, Protocol):
    """A worker."""

    core: Any

    @property
    def blocks_used(self) -> int:
        """Number of KV blocks in use."""
        ...

    @property
    def seal(self) -> bytes:
        """The hash of the secret of this process."""
        ...


class SenderPeer(Peer, Protocol):
    """What a decode worker uses of a process that sends KV blocks to it, perhaps a rogue."""

    def from_peer(self, endpoint: str, envelope: Envelope, /) -> None:
        """Handle a control message from a decode worker."""
        ...

    def has_connection(self, identity: bytes) -> bool:
        """True if one of the connections of this process has the routing identity."""
        ...


class PrefillPeer(SenderPeer, Protocol):
    """What a decode worker uses of a prefill worker."""

    incarnation: int
    cache: PagedCache
    executor: ToyExecutor
    sender: Sender

    def believed_alive(self) -> Sequence[DecodePeer]:
        """Return decode workers whose incarnation was never declared dead to this worker."""
        ...


class DecodePeer(Peer, Protocol):
    """What a prefill worker or a rogue uses of a decode worker."""

    incarnation: int
    resumed_at: float
    cluster: World
    receiver: Receiver[Any]
    decoder: EnvelopeDecoder[Message]

    @property
    def link(self) -> str:
        """Name of prefill workers' links to this worker."""
        ...

    def from_peer(self, node: SenderPeer, identity: bytes, envelope: Envelope, /) -> None:
        """Handle a control message from a prefill worker."""
        ...

    def hear(self, node: SenderPeer, identity: bytes, message: Message) -> None:
        """Handle a control message that the socket accepted."""
        ...

    def data(self, frame: KVFrame, payload: Bytes, key: bytes) -> None:
        """Handle a KV frame, which came with ``key``."""
        ...

    def peer_gone(self, identity: bytes) -> None:
        """Handle the loss of a prefill worker's connection."""
        ...


class Watch(Protocol):
    """What nodes report to the observer of their cluster; see :class:`.invariants.Watcher`."""

    @property
    def names(self) -> list[bytes]:
        """Keys of the requests that no rogue has a right to."""
        ...

    def router(self, node: RouterNode) -> None:
        """Check a router after an event."""

    def worker(self, node: WorkerPeer) -> None:
        """Check a worker after an event."""

    def grants(self, node: DecodePeer) -> None:
        """Check that grants end with their handoffs."""

    def to_router(self, node: WorkerPeer, message: Message) -> None:
        """Check a message from a worker to a router."""

    def to_client(self, node: RouterNode, identity: bytes, message: Message) -> None:
        """Check a message from a router to a client."""

    def named(self, key: bytes, record: Record) -> None:
        """Record the key under which a client submits a request."""

    def streamed(self, record: Record, new: NewTokens) -> None:
        """Check tokens that a user receives."""

    def surrender(self, request: bytes) -> None:
        """Note that a request was assigned to a rogue or came from one."""

    def is_surrendered(self, request: bytes) -> bool:
        """True if a rogue has a right to a request."""
        ...

    def ticket_keys(self) -> set[bytes]:
        """Return the keys with which the cluster's own decode workers check tickets."""
        ...


class World(Protocol):
    """What a node uses of its cluster: the network, the other nodes, and counts for the run.

    Nodes name each other through these protocols, so no two modules of nodes import each other.
    """

    certificate_faults: float
    recording: Recording | None
    shape: Shape
    stats: Counter[str]
    failures: dict[str, str]
    guards: list[Guard]
    network: Network
    routers: list[RouterNode]

    @property
    def watcher(self) -> Watch:
        """The observer."""
        ...

    @property
    def workers(self) -> Sequence[WorkerPeer]:
        """All workers."""
        ...

    @property
    def prefills(self) -> Sequence[PrefillPeer]:
        """The prefill workers."""
        ...

    @property
    def decodes(self) -> Sequence[DecodePeer]:
        """The decode workers."""
        ...

    def router_named(self, name: str) -> RouterNode:
        """Return the router with this name."""
        ...

    def decode_at(self, link: str) -> DecodePeer | None:
        """Return the decode worker that a link leads to, or None."""
        ...

    def make_router(self, node: RouterNode) -> RouterCore:
        """Create the router core of one incarnation."""
        ...

    def overheard(self, message: Any) -> None:
        """Give the rogues a message or a KV frame that was sent."""

    def to_worker(self, router: RouterNode, identity: bytes, message: Message) -> None:
        """Deliver to the worker incarnation with this identity."""

    def to_client(self, router: RouterNode, identity: bytes, message: Message) -> bool:
        """Deliver to a client's connection. Return False if the client's buffers are full."""
        ...

    def broken(self, node: Node) -> None:
        """Let the peers notice a node's death, and restart the node later."""

    def turned(self, node: Node) -> None:
        """Let the peers notice the end of an incarnation; the next one has the other role."""

    def reconnect(self, router: RouterNode) -> None:
        """Connect all workers to a router that started."""

    def peer_gone(self, decode: DecodePeer, identity: bytes) -> None:
        """Notify a decode worker that a prefill worker closed a connection."""


class Thinker(Protocol):
    """A core."""

    def handle(self, event: Any, now: float) -> list[Any]:
        """Return the actions for an event."""
        ...


class Node:
    """A simulated process."""

    def __init__(self, cluster: World, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = 0
        self.identity = b""  # routing identity of this incarnation's connections to routers
        self.alive = False
        self.stopped = False
        self.stopped_at = self.resumed_at = 0.0
        self.raised = ""  # where the last planted exception was raised in this incarnation
        self.skew = 0.0  # offset of this machine's clock, seconds
        self.unchecked = 0  # events since its books were checked
        self.plants: list[Plant] = []  # exceptions still to be raised
        self.successor: Node | None = None  # the same process in its next role
        self._backlog: list[Callable[[], None]] = []

    @property
    def now(self) -> float:
        """Time by the clock of the node's machine."""
        return self.cluster.network.now + self.skew

    @property
    def present(self) -> Node:
        """The node of this process: another one after a change of role."""
        return self if self.successor is None else self.successor.present

    @property
    def key(self) -> bytes:
        """CURVE key of the process; empty in a cluster without keys."""
        return key_of(self.name) if self.cluster.shape.rogues else b""

    def new_incarnation(self) -> int:
        """Draw the next incarnation."""
        return self.cluster.network.random.getrandbits(63) | 1

    def start(self) -> None:
        """Start a new incarnation."""
        self.incarnation = self.new_incarnation()
        self.identity = f"{self.name}:{self.incarnation:x}".encode()
        self.alive, self.stopped = True, False
        self.raised = ""
        self._backlog.clear()
        self.boot()
        self._tick(self.incarnation)

    def boot(self) -> None:
        """Create the core and connect."""
        raise NotImplementedError

    def crash(self) -> None:
        """Die as by SIGKILL: all state is lost at once; peers notice a little later."""
        if self.alive:
            self.alive = False
            self.cluster.broken(self)

    def stop(self) -> None:
        """Pause the process, as SIGSTOP does."""
        if not self.stopped:
            self.stopped_at = self.cluster.network.now
        self.stopped = True

    def resume(self) -> None:
        """Resume as after SIGCONT, and handle the backlog in order."""
        self.stopped = False
        self.resumed_at = self.cluster.network.now
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            call()

    def when_up(self, call: Callable[[], None]) -> Callable[[], None]:
        """Wrap ``call`` so that it runs in this incarnation only, after a stop if there is one."""
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
        """Let the core check its timers."""
        raise NotImplementedError

    def think(self, core: Thinker, event: Any) -> list[Any]:
        """Pass an event to a core; an exception that was planted may be raised within it."""
        plant = self.plants[0] if self.plants else None
        if plant is None or not plant.concerns(event):
            return core.handle(event, self.now)
        actions = plant.run(lambda: core.handle(event, self.now))
        if plant.where:
            self.plants.remove(plant)
            self.raised = plant.where
            self.unchecked = sys.maxsize
            self.cluster.stats["raised"] += 1
        return actions

    def fault(self, error: Exception) -> None:
        """Check that an exception of our own code follows from a planted one."""
        if not self.raised:
            raise Violation(f"{self.name}: internal error: {error!r}") from error
        self.cluster.stats["faults"] += 1

    def extension_failed(self, event: str, error: Exception, fields: dict[str, object]) -> None:
        """Count a failure of a user's own class, and keep the first traceback of each kind."""
        self.cluster.stats[event] += 1
        self.cluster.failures.setdefault(event, "".join(traceback.format_exception(error)))

    def record(self, event: object, actions: Sequence[object]) -> None:
        """Add one call of the core to the cluster's recording, if there is one."""
        if self.cluster.recording is not None:
            self.cluster.recording.add(self.name, self.now, event, actions)

    def transmit(self, target: Peer, deliver: Callable[[], None]) -> None:
        """Send over the network to the target's current incarnation."""
        if target.alive:
            self.cluster.network.send(self.name, target.name, target.when_up(deliver))


class RouterNode(Node):
    """A router with the real core."""

    cluster_key = b""  # of its incarnation
    core: RouterCore

    def boot(self) -> None:
        """Start without state; all peers reconnect."""
        self.core = self.cluster.make_router(self)
        self._held: dict[bytes, list[Message]] = {}
        self.cluster.network.after(DETECT_S, lambda: self.cluster.reconnect(self))

    def tick(self) -> None:
        """Check timers, and retry clients whose buffers were full."""
        self.feed(routing.Tick())
        for identity in list(self._held):
            self._retry(identity)

    def feed(self, event: routing.Event) -> None:
        """Pass an event to the core and perform the actions it returns."""
        actions = self.think(self.core, event)
        self.record(event, actions)
        self._perform(actions)
        self.cluster.watcher.router(self)
        if self.core.broken:
            raise Violation(f"{self.name}: {self.core.broken}, raised at {self.raised}")

    def _perform(self, actions: list[routing.Action]) -> None:
        for action in actions:
            if isinstance(action, routing.ToClient):
                self._to_client(action.identity, action.message)
            elif isinstance(action, routing.ToWorker):
                self.cluster.to_worker(self, action.identity, action.message)
            elif isinstance(action, routing.Fault):
                if action.event == INTERNAL:
                    self.fault(action.error)
                else:
                    self.extension_failed(action.event, action.error, action.fields)
            elif isinstance(action, routing.Log):
                self.cluster.stats[action.event] += 1

    def client_gone(self, identity: bytes) -> None:
        """Handle the loss of a client's connection."""
        self._held.pop(identity, None)
        self.feed(routing.ClientGone(identity))

    def worker_gone(self, identity: bytes) -> None:
        """Handle the loss of a worker's connection."""
        self.feed(routing.WorkersGone([identity]))

    def _to_client(self, identity: bytes, message: Message) -> None:
        """Send to a client as the shell does: after the messages already queued for it."""
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
