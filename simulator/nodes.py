"""The processes of a simulated cluster: the real cores, with the network as their shell.

A node has incarnations: a crash loses all state and every connection; a restart is another
incarnation. A stopped node (SIGSTOP) keeps its state and handles what piled up when it goes
on. Actions are performed as the real shells do: in order, messages through the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..decode_worker import events as decode
from ..decode_worker.core import DecodeCore, GrantStore
from ..engine.cache import PagedCache
from ..engine.kernels.reference import NumpyBackend
from ..engine.plan import StepPlan
from ..engine.scheduler import Scheduler, SchedulerConfig
from ..kv_transfer.frames import FramePacker, FrameWriter
from ..kv_transfer.receiver import Receiver, ReceiverConfig
from ..kv_transfer.sender import Sender, SenderConfig
from ..prefill_worker import events as prefill
from ..prefill_worker.core import PrefillCore, PrefillLimits
from ..proto.errors import ProtocolError
from ..proto.messages import KVFrame, Message
from ..router import events as routing
from ..router.core import RouterCore
from ..runtime.actions import Exit, FromRouter, RouterDown, RouterUp, Tick, ToRouter
from ..runtime.membership import Membership, WorkerIdentity
from .toy_model import ToyExecutor, toy_card

if TYPE_CHECKING:
    from .cluster import Cluster

TICK_S = 0.05
DETECT_S = 0.002
"""How long a broken connection takes to be noticed."""


class Node:
    """A process: its life, its clock, its connections."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = 0
        self.alive = False
        self.stopped = False
        self._backlog: list[Callable[[], None]] = []

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
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT: what arrived meanwhile is handled now, in order."""
        self.stopped = False
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

    @property
    def identity(self) -> bytes:
        """Routing identity of this life's connections."""
        return f"{self.name}:{self.incarnation:x}".encode()


class RouterNode(Node):
    """The real router core."""

    core: RouterCore

    def boot(self) -> None:
        """A router starts with no memory; everyone reconnects."""
        self.core = self.cluster.make_router(self)
        self.cluster.network.after(DETECT_S, self.cluster.reconnect)

    def tick(self) -> None:
        """Timers."""
        self.feed(routing.Tick())

    def feed(self, event: routing.Event) -> None:
        """Let the core decide, then send what it wants sent."""
        for action in self.core.handle(event, self.cluster.network.now):
            if isinstance(action, routing.ToClient):
                self.cluster.to_client(self, action.identity, action.message)
            elif isinstance(action, routing.ToWorker):
                self.cluster.to_worker(self, action.identity, action.message)


class WorkerNode(Node):
    """What prefill and decode workers share in the simulation."""

    role = ""

    def __init__(self, cluster: Cluster, name: str, *, num_blocks: int, block_size: int) -> None:
        super().__init__(cluster, name)
        self.num_blocks = num_blocks
        self.card = toy_card(block_size)
        self.endpoint = f"ipc:///simulated/{name}"

    def membership(self) -> Membership:
        """Standing with the only router."""
        me = WorkerIdentity(
            worker=self.name,
            role=self.role,
            incarnation=self.incarnation,
            pid=1,
            endpoint=self.endpoint,
            pool="default",
            model=self.card,
            max_batch=8,
        )
        return Membership(me, (self.cluster.router.name,))

    def to_router(self, message: Message) -> None:
        """Over this life's connection to the router."""
        router, identity = self.cluster.router, self.identity
        self.transmit(router, lambda: router.feed(routing.FromWorker(identity, message)))

    def hear_router(self, message: Message) -> None:
        """The router said something."""
        self.feed(FromRouter(self.cluster.router.name, message))

    def router_up(self) -> None:
        """The connection to the router stands."""
        self.feed(RouterUp(self.cluster.router.name))

    def router_down(self) -> None:
        """The connection to the router broke."""
        self.feed(RouterDown(self.cluster.router.name))

    def tick(self) -> None:
        """Timers, then the books."""
        self.feed(Tick())

    def feed(self, event: object) -> None:
        """Let the core decide and perform what it wants."""
        raise NotImplementedError

    def step_seconds(self, plan: StepPlan) -> float:
        """How long a step takes."""
        return self.cluster.network.random.uniform(0.001, 0.004) + 0.0001 * plan.num_tokens


class PrefillNode(WorkerNode):
    """The real prefill core on the toy model."""

    role = "prefill"
    core: PrefillCore

    def boot(self) -> None:
        """Fresh pool, fresh core."""
        self.executor = ToyExecutor(self.card.layout, self.num_blocks)
        self.cache = PagedCache(self.num_blocks, self.card.layout.block_size)
        config = SchedulerConfig(max_batch=8, token_budget=16, one_token=True)
        self.scheduler = Scheduler(config, self.cache)
        self.sender = Sender(self.incarnation, self.card.layout, SenderConfig(frame_bytes=256))
        limits = PrefillLimits(max_active=6, stream_tokens=24)
        self.core = PrefillCore(self.membership(), self.scheduler, self.sender, limits)
        self.packer = FramePacker(NumpyBackend(), self.executor.pool)
        self.connected: set[str] = set()
        self.router_up()

    def feed(self, event: object) -> None:
        """Perform the core's actions."""
        for action in self.core.handle(event, self.cluster.network.now):  # type: ignore[arg-type]
            self.perform(action)
        self.scheduler.check_integrity()

    def perform(self, action: prefill.Action) -> None:
        """What the shell would do."""
        match action:
            case ToRouter(message=message):
                self.to_router(message)
            case prefill.ToPeer(endpoint=endpoint, message=message):
                self.to_peer(endpoint, message)
            case prefill.Connect(endpoint=endpoint):
                self.connect(endpoint)
            case prefill.Disconnect(endpoint=endpoint):
                self.connected.discard(endpoint)
            case prefill.PackFrame() as pack:
                self.pack(pack)
            case prefill.RunStep(plan=plan):
                self.run(plan)
            case Exit():
                self.crash()
            case _:
                pass

    def connect(self, endpoint: str) -> None:
        """Reach the decode worker at an endpoint as soon as it lives."""
        self.connected.add(endpoint)
        self.cluster.network.after(0.001, self.when_up(lambda: self._reconnect(endpoint)))

    def peer_down(self, endpoint: str) -> None:
        """A decode worker's connection broke; the socket goes on trying."""
        if endpoint in self.connected:
            self.feed(prefill.PeerDown(endpoint))
            self._reconnect(endpoint)

    def _reconnect(self, endpoint: str) -> None:
        node = self.cluster.decode_at(endpoint)
        if endpoint not in self.connected:
            return
        if node and node.alive:
            self.feed(prefill.PeerUp(endpoint))
        else:
            again = self.when_up(lambda: self._reconnect(endpoint))
            self.cluster.network.after(0.05, again)

    def to_peer(self, endpoint: str, message: Message) -> None:
        """Control message to a decode worker."""
        node, identity = self.cluster.decode_at(endpoint), self.identity
        if node and endpoint in self.connected:
            self.transmit(node, lambda: node.hear(self, identity, message))

    def pack(self, action: prefill.PackFrame) -> None:
        """Gather from the pool now; the payload travels as bytes."""
        frame = action.send.frame
        buffer = np.empty(frame.nbytes, np.uint8)
        packed = self.packer.pack(frame, action.block_table, buffer)
        node = self.cluster.decode_at(action.send.endpoint)
        network = self.cluster.network
        if network.random.random() < network.faults.damage:
            buffer[network.random.randrange(len(buffer))] ^= 0x5A
            self.cluster.stats["damaged"] += 1
        if node:
            self.cluster.network.send(
                self.name + "/data", node.name, node.when_up(lambda: node.data(packed, buffer))
            )
        self.feed(prefill.Packed(action.send.key, frame.index, packed.checksum))

    def run(self, plan: StepPlan) -> None:
        """Report layers on the way, compute at the end of the step."""
        seconds = self.step_seconds(plan)

        def done() -> None:
            result = self.executor.execute(plan, seconds)
            for chunk in plan.chunks:
                if chunk.stream_layers:
                    self.feed(prefill.LayersDone(chunk.request, 1))
            self.feed(prefill.StepDone(result))

        self.cluster.network.after(seconds, self.when_up(done))


class DecodeNode(WorkerNode):
    """The real decode core on the toy model."""

    role = "decode"
    core: DecodeCore

    def boot(self) -> None:
        """Fresh pool, fresh core."""
        layout = self.card.layout
        self.executor = ToyExecutor(layout, self.num_blocks)
        self.cache = PagedCache(self.num_blocks, layout.block_size)
        config = SchedulerConfig(max_batch=8, token_budget=16, growth=8)
        self.scheduler = Scheduler(config, self.cache)
        store = GrantStore(self.cache, self.scheduler)
        self.receiver = Receiver(
            self.incarnation, layout, store, ReceiverConfig(window=512, budget=2048)
        )
        self.core = DecodeCore(
            self.membership(), self.scheduler, self.receiver, "ipc:///simulated/data", 1 << 20
        )
        backend = NumpyBackend()
        self.writer = FrameWriter(backend, self.executor.pool, self.cluster.checksum)
        self.peers: dict[bytes, PrefillNode] = {}
        self.router_up()

    def feed(self, event: object) -> None:
        """Perform the core's actions, then check the books."""
        for action in self.core.handle(event, self.cluster.network.now):  # type: ignore[arg-type]
            match action:
                case ToRouter(message=message):
                    self.to_router(message)
                case decode.ToPeer(peer=peer, message=message):
                    self.to_peer(peer, message)
                case decode.RunStep(plan=plan):
                    self.run(plan)
                case Exit():
                    self.crash()
                case _:
                    pass
        self.core.check_integrity()

    def hear(self, node: PrefillNode, identity: bytes, message: Message) -> None:
        """Control message from a prefill worker."""
        self.peers[identity] = node
        self.feed(decode.FromPeer(identity, message))

    def to_peer(self, peer: bytes, message: Message) -> None:
        """Answer over the connection the peer has, if it is still that life."""
        node = self.peers.get(peer)
        if node and node.alive and node.identity == peer:
            endpoint = self.endpoint
            self.transmit(node, lambda: node.feed(prefill.FromPeer(endpoint, message)))

    def data(self, frame: KVFrame, payload: np.ndarray) -> None:  # type: ignore[type-arg]
        """A KV frame arrived."""
        try:
            blocks = self.receiver.locate(frame)
        except ProtocolError:
            self.cluster.stats["bad_frames"] += 1
            return
        if blocks is not None:
            intact = self.writer.write(frame, blocks, payload)
            self.feed(decode.FrameStored(frame, intact))

    def run(self, plan: StepPlan) -> None:
        """Compute at the end of the step."""
        seconds = self.step_seconds(plan)

        def done() -> None:
            self.feed(decode.StepDone(self.executor.execute(plan, seconds)))

        self.cluster.network.after(seconds, self.when_up(done))
