"""Prefill and decode workers of a simulated cluster: the real cores on the toy model.

The nodes act as the real shells do. A frame with contiguous blocks is read from the pool only when
it arrives, as late as a transport without copies could read it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ..decode_worker import events as decode
from ..decode_worker.core import DecodeCore
from ..decode_worker.handoffs import GrantStore
from ..engine.cache.paged_cache import PagedCache
from ..engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from ..engine.kernels.reference import NumpyBackend
from ..engine.scheduling.plan import StepPlan, StepResult, abandoned_step
from ..engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ..engine.scheduling.step_time import StepTime
from ..kv_transfer.frames import FramePacker, FrameWriter
from ..kv_transfer.receiver import Receiver, ReceiverConfig
from ..kv_transfer.sender import Sender, SenderConfig
from ..prefill_worker import events as prefill
from ..prefill_worker.core import PrefillCore, PrefillLimits
from ..prefill_worker.embed_core import EmbedCore
from ..proto.errors import ProtocolError
from ..proto.layout import ModelCard
from ..proto.wire.messages import (
    Credit,
    DecodeToPrefill,
    DeviceTicket,
    KVFrame,
    Message,
    PeerDead,
    PrefillToDecode,
)
from ..router.events import FromWorker
from ..worker.attempts import Key
from ..worker.events import (
    AbandonStep,
    DrainRequested,
    Exit,
    Fault,
    FromRouter,
    RouterDown,
    RouterUp,
    RunStep,
    StepDone,
    Tick,
    ToRouter,
)
from ..worker.membership import Membership, WorkerIdentity
from .invariants import Violation
from .nodes import DETECT_S, Node, RouterNode
from .toy_model import KILLS_DECODE, KILLS_PREFILL, Poisoned, ToyExecutor, ToyMatcher, toy_card
from .wire import Envelope, sealed_decoder

if TYPE_CHECKING:
    from .cluster import Cluster

Bytes = npt.NDArray[np.uint8]
MAX_BATCH = 8
HANG_S = 1e6


@dataclass(slots=True, frozen=True)
class Sizes:
    """Sizes of a worker; few blocks and small windows provoke waiting and preemption.

    ``window`` and ``budget``: bytes of credit. ``device``: use fences.
    ``move_s``: maximum seconds to pack or write a frame asynchronously, as on
    a GPU's transfer stream (0: synchronous). ``in_place``: decode workers read
    blocks in the prefill workers' pools, as over CUDA IPC.
    """

    block_size: int = 4
    prefill_blocks: int = 96
    decode_blocks: int = 64
    token_budget: int = 16
    growth: int = 8
    slo_ttft: float = 0.0
    frame_bytes: int = 256
    window: int = 512
    budget: int = 2048
    stream_tokens: int = 24
    device: bool = False
    move_s: float = 0.0
    in_place: bool = False


def warm_times() -> StepTime:
    """Return step times as a worker has learned them before it serves."""
    times = StepTime()
    times.learn(16, 0.005)
    return times


C = TypeVar("C", bound=PrefillCore | DecodeCore | EmbedCore)
T = TypeVar("T", bound=PrefillCore | DecodeCore)


class WorkerNode(Node, Generic[C]):
    """Common part of all simulated workers."""

    role = ""
    core: C

    def __init__(self, cluster: Cluster, name: str, sizes: Sizes) -> None:
        super().__init__(cluster, name)
        self.sizes = sizes
        self.card = self.make_card()
        self.endpoint = f"ipc:///simulated/{name}"
        self.hangs = self.misfit = False
        self.slow_step = 0.0  # additional seconds for the next step
        self.idle_from = 0.0  # time at which the engine finishes its steps

    @abstractmethod
    def make_card(self) -> ModelCard:
        """Return the card of the model that this worker serves."""

    @property
    def blocks_used(self) -> int:
        """Number of KV blocks in use."""
        return 0

    @property
    def preempted(self) -> int:
        """Preemptions over all incarnations."""
        return 0

    def boot(self) -> None:
        """Create a new pool and core, then connect to the routers."""
        self.hangs = False
        self.idle_from = 0.0
        self.member = self._membership()
        self.make()
        for router in self.cluster.routers:
            if router.alive:
                self.router_up(router)

    @abstractmethod
    def make(self) -> None:
        """Create pool, cache, scheduler and core."""

    def _membership(self) -> Membership:
        card = self.card
        if self.misfit:
            card = msgspec.structs.replace(card, fingerprint="another")
            self.misfit = False
        me = WorkerIdentity(
            worker=self.name,
            role=self.role,
            incarnation=self.incarnation,
            pid=1,
            endpoint=self.endpoint,
            pool="default",
            model=card,
            max_batch=MAX_BATCH,
        )
        return Membership(me, tuple(router.name for router in self.cluster.routers))

    # ------------------------------------------------------------------ routers

    def to_router(self, name: str, messages: list[Message]) -> None:
        """Send one envelope over this incarnation's connection to a router."""
        router, identity = self.cluster.router_named(name), self.identity
        for message in messages:
            self.cluster.watcher.to_router(self, message)
        self.transmit(router, lambda: router.feed(FromWorker(identity, messages)))

    def hear_router(self, name: str, message: Message) -> None:
        """Handle a message from a router."""
        self.feed(FromRouter(name, message))

    def router_up(self, router: RouterNode) -> None:
        """Handle a new connection to a router."""
        self.feed(RouterUp(router.name))

    def router_down(self, router: RouterNode) -> None:
        """Handle the loss of the connection to a router."""
        self.feed(RouterDown(router.name))

    def drain(self) -> None:
        """Drain, as after SIGTERM."""
        self.feed(DrainRequested())

    # ------------------------------------------------------------------ events

    def tick(self) -> None:
        """Check timers. A drained worker exits, as in its shell."""
        self.feed(Tick())
        if self.alive and self.core.is_drained:
            self.cluster.stats["drained"] += 1
            self.crash()

    def feed(self, event: object) -> None:
        """Pass an event to the core, perform its actions, check the invariants."""
        envelopes: defaultdict[str, list[Message]] = defaultdict(list)
        actions = self.core.handle(cast(Any, event), self.now)
        self.record(event, actions)
        for action in actions:
            if isinstance(action, ToRouter):
                envelopes[action.router].append(action.message)
            else:
                self.perform(action)
        for name, messages in envelopes.items():
            self.to_router(name, messages)
        self.cluster.watcher.worker(self)

    def perform(self, action: object) -> None:
        """Perform an action as the shells of both roles would."""
        if isinstance(action, Exit) and self.alive:
            self.cluster.stats["exits"] += 1
            self.crash()

    def run(self, num_tokens: int, finish: Callable[[float], None]) -> None:
        """Call ``finish(seconds)`` when the step is done, unless the engine hangs.

        A step starts after the steps before it.
        """
        network = self.cluster.network
        seconds = network.random.uniform(0.001, 0.004) + 0.0001 * num_tokens + self.slow_step
        self.slow_step = 0.0
        self.idle_from = max(self.idle_from, network.now) + (HANG_S if self.hangs else seconds)

        def done() -> None:
            try:
                finish(seconds)
            except Poisoned:
                self.cluster.stats["poisoned"] += 1
                self.crash()

        network.at(self.idle_from, self.when_up(done))


class EngineNode(WorkerNode[T]):
    """Common part of text workers: KV, grammars, preemption."""

    scheduler: Scheduler
    cache: PagedCache
    executor: ToyExecutor

    def __init__(self, cluster: Cluster, name: str, sizes: Sizes) -> None:
        super().__init__(cluster, name, sizes)
        self._preempted = 0  # in earlier incarnations
        self.grammars: dict[Key, object] = {}  # being compiled
        self.unwanted: set[int] = set()  # aborted steps

    def make_card(self) -> ModelCard:
        """Return the card of the toy model."""
        return toy_card(self.sizes.block_size)

    @property
    def blocks_used(self) -> int:
        """Number of KV blocks in use."""
        return self.cache.pool.used

    @property
    def preempted(self) -> int:
        """Preemptions over all incarnations."""
        return self._preempted + self.scheduler.load().preemptions

    def boot(self) -> None:
        """Start without compiling grammars and without steps."""
        self.grammars.clear()
        self.unwanted.clear()
        super().boot()

    def crash(self) -> None:
        """Keep the preemption count for the results."""
        if self.alive:
            self._preempted += self.scheduler.load().preemptions
        super().crash()

    def perform(self, action: object) -> None:
        """Perform an action as the shells of both roles would."""
        if isinstance(action, CompileGrammar):
            self._compile(action)
        elif isinstance(action, DropGrammar):
            self.cluster.stats["grammars_dropped"] += 1
            del self.grammars[action.key]
        else:
            super().perform(action)

    def execute(self, plan: StepPlan, seconds: float) -> StepResult:
        """Compute a step, or skip it if all its sequences were aborted."""
        if plan.step not in self.unwanted:
            return self.executor.execute(plan, seconds)
        self.unwanted.remove(plan.step)
        self.cluster.stats["abandoned"] += 1
        return abandoned_step(plan, seconds)

    def _compile(self, wanted: CompileGrammar) -> None:
        """Answer after a while, as the shells do, unless the grammar is dropped."""
        if wanted.key in self.grammars:
            raise Violation(f"{self.name} compiles a grammar twice at a time")
        ticket = self.grammars[wanted.key] = object()

        def done() -> None:
            if self.grammars.get(wanted.key) is ticket:
                del self.grammars[wanted.key]
                self.cluster.stats["grammars"] += 1
                self.feed(GrammarDone(wanted.key, ToyMatcher(wanted.task)))

        seconds = self.cluster.network.random.choice((0.001, 0.01, 0.1))
        self.cluster.network.after(seconds, self.when_up(done))


class MoveDelays:
    """A transfer stream: moves run one after the other, each with a delay."""

    def __init__(self, node: WorkerNode[Any], longest: float) -> None:
        self._node, self._longest = node, longest
        self._free_at = 0.0

    def start(self, move: Callable[[], None]) -> None:
        """Run ``move`` in its turn, if the worker is still alive by then."""
        if not self._longest:
            move()
            return
        network = self._node.cluster.network
        took = network.random.uniform(0.0, self._longest)
        self._free_at = max(self._free_at, network.now) + took
        network.after(self._free_at - network.now, self._node.when_up(move))


class PrefillNode(EngineNode[PrefillCore]):
    """A prefill worker with the real core."""

    role = "prefill"

    def make(self) -> None:
        """Create pool, scheduler, sender and core."""
        sizes, layout = self.sizes, self.card.layout
        self.executor = ToyExecutor(layout, sizes.prefill_blocks, KILLS_PREFILL)
        self.cache = PagedCache(sizes.prefill_blocks, layout.block_size)
        config = SchedulerConfig(
            max_batch=MAX_BATCH, token_budget=sizes.token_budget, one_token=True
        )
        self.scheduler = Scheduler(config, self.cache)
        self.sender = Sender(self.incarnation, layout, SenderConfig(frame_bytes=sizes.frame_bytes))
        limits = PrefillLimits(
            max_active=6,
            stream_tokens=sizes.stream_tokens,
            growth=sizes.growth,
            slo_ttft=sizes.slo_ttft,
        )
        ticket = DeviceTicket("here", b"", 0, 0) if sizes.in_place else None
        self.core = PrefillCore(
            self.member, self.scheduler, self.sender, limits, warm_times(), ticket
        )
        self.packer = FramePacker(NumpyBackend(), self.executor.pool)
        self.moves = MoveDelays(self, sizes.move_s)
        self.decoder = sealed_decoder(DecodeToPrefill)
        self.connected: set[str] = set()
        self.buried: set[int] = set()

    def hear_router(self, name: str, message: Message) -> None:
        """Record decode workers declared dead: their blocks may have been reused since."""
        if isinstance(message, PeerDead):
            self.buried.add(message.incarnation)
        super().hear_router(name, message)

    def perform(self, action: object) -> None:
        """Perform an action as the shell would."""
        match action:
            case prefill.ToPeer(endpoint=endpoint, message=message):
                self._to_peer(endpoint, message)
            case prefill.Connect(endpoint=endpoint):
                self._connect(endpoint)
            case prefill.Disconnect(endpoint=endpoint):
                self._disconnect(endpoint)
            case prefill.PackFrame():
                self._pack(action)
            case RunStep(plan=plan):
                self._run_plan(plan)
            case AbandonStep(step=step):
                self.unwanted.add(step)
            case _:
                super().perform(action)

    # ------------------------------------------------------------------ decode workers

    def _connect(self, endpoint: str) -> None:
        self.connected.add(endpoint)
        self.cluster.network.after(0.001, self.when_up(lambda: self.reach(endpoint)))

    def _disconnect(self, endpoint: str) -> None:
        self.connected.discard(endpoint)
        node = self.cluster.decode_at(endpoint)
        if node is not None:
            self.cluster.peer_gone(node, self)

    def believed_alive(self) -> list[DecodeNode]:
        """Return decode workers whose incarnation was never declared dead to this worker.

        A decode worker that is cut off from its router may be declared dead and still run. It may
        read blocks of old handoffs, but its results are never used: its router rejects it.
        """
        nodes = [n for n in self.cluster.decodes if n.incarnation not in self.buried]
        return [n for n in nodes if self.core.knows(n.endpoint, n.incarnation)]

    def peer_down(self, endpoint: str) -> None:
        """Handle the loss of a decode worker's connection; the socket keeps trying."""
        if endpoint in self.connected:
            self.feed(prefill.PeerDown(endpoint))
            self.cluster.network.after(DETECT_S, self.when_up(lambda: self.reach(endpoint)))

    def reach(self, endpoint: str) -> None:
        """Connect as soon as the decode worker is alive."""
        if endpoint not in self.connected:
            return
        node = self.cluster.decode_at(endpoint)
        if node is not None and node.alive:
            self.feed(prefill.PeerUp(endpoint))
        else:
            self.cluster.network.after(0.05, self.when_up(lambda: self.reach(endpoint)))

    def _to_peer(self, endpoint: str, message: Message) -> None:
        node, identity = self.cluster.decode_at(endpoint), self.identity
        if node is not None and endpoint in self.connected:
            envelope = Envelope(message, self.cluster.network)
            self.transmit(node, lambda: node.hear(self, identity, envelope))

    def hear(self, endpoint: str, envelope: Envelope) -> None:
        """Handle a control message from a decode worker."""
        for message in envelope.read(self.decoder, self.cluster.stats):
            self.feed(prefill.FromPeer(endpoint, message))

    def _pack(self, action: prefill.PackFrame) -> None:
        self.moves.start(lambda: self._packed(action))

    def _packed(self, action: prefill.PackFrame) -> None:
        send = action.send
        ready = self.packer.view(send.frame, action.block_table)
        if action.shared:
            frame, payload = self.packer.name(send.frame, action.block_table)
        elif ready is not None:
            frame, payload = ready
        else:
            payload = np.empty(send.frame.nbytes, np.uint8)
            frame = self.packer.pack(send.frame, action.block_table, payload)
        self._send_frame(send.endpoint, frame, payload)
        self.feed(prefill.Packed(send.key, frame.index, frame.checksum))

    def _send_frame(self, endpoint: str, frame: KVFrame, payload: Bytes) -> None:
        network, node = self.cluster.network, self.cluster.decode_at(endpoint)
        damaged = network.random.random() < network.faults.damage
        at = network.random.randrange(frame.nbytes)

        def arrive() -> None:
            received = payload.copy()  # copied on arrival: the pool may have been overwritten
            if damaged:
                received[at % len(received)] ^= 0x5A
                self.cluster.stats["damaged"] += 1
            if node is not None:
                node.data(frame, received)

        if node is not None and node.alive:
            network.send(self.name + "/data", node.name, node.when_up(arrive))

    def _run_plan(self, plan: StepPlan) -> None:
        def finish(seconds: float) -> None:
            result = self.execute(plan, seconds)
            for chunk in plan.chunks:
                if chunk.stream_layers:
                    self.feed(prefill.LayersDone(chunk.request, 1))
            self.feed(StepDone(result))

        self.run(plan.num_tokens, finish)


class DecodeNode(EngineNode[DecodeCore]):
    """A decode worker with the real core."""

    role = "decode"

    def make(self) -> None:
        """Create pool, scheduler, receiver and core."""
        sizes, layout = self.sizes, self.card.layout
        self.executor = ToyExecutor(layout, sizes.decode_blocks, KILLS_DECODE)
        self.cache = PagedCache(sizes.decode_blocks, layout.block_size)
        config = SchedulerConfig(
            max_batch=MAX_BATCH, token_budget=sizes.token_budget, growth=sizes.growth
        )
        self.scheduler = Scheduler(config, self.cache)
        store = GrantStore(self.cache, self.scheduler)
        limits = ReceiverConfig(window=sizes.window, budget=sizes.budget, device=sizes.device)
        self.receiver = Receiver(self.incarnation, layout, store, limits)
        self.core = DecodeCore(
            self.member,
            self.scheduler,
            self.receiver,
            "ipc:///simulated/data",
            1 << 20,
            warm_times(),
        )
        self.writer = FrameWriter(NumpyBackend(), self.executor.pool)
        self.moves = MoveDelays(self, sizes.move_s)
        self.decoder = sealed_decoder(PrefillToDecode)
        self.peers: dict[bytes, PrefillNode] = {}

    def perform(self, action: object) -> None:
        """Perform an action as the shell would."""
        match action:
            case decode.ToPeer(peer=peer, message=message):
                self._to_peer(peer, message)
            case decode.MapPool(peer=peer, transport=transport):
                self.feed(decode.PoolMapped(peer, "", transport))
            case RunStep(plan=plan):
                self.run(plan.num_tokens, lambda seconds: self._finish(plan, seconds))
            case AbandonStep(step=step):
                self.unwanted.add(step)
            case Fault(error=error):
                raise Violation(f"{self.name}: internal error: {error!r}") from error
            case _:
                super().perform(action)

    def tick(self) -> None:
        """Check timers and unused grants."""
        super().tick()
        if self.alive:
            self.cluster.watcher.grants(self)

    def _finish(self, plan: StepPlan, seconds: float) -> None:
        self.feed(StepDone(self.execute(plan, seconds)))

    def hear(self, node: PrefillNode, identity: bytes, envelope: Envelope) -> None:
        """Handle a control message from a prefill worker."""
        self.peers[identity] = node
        for message in envelope.read(self.decoder, self.cluster.stats):
            self.feed(decode.FromPeer(identity, message))

    def peer_gone(self, identity: bytes) -> None:
        """Handle the loss of a prefill worker's connection."""
        self.peers.pop(identity, None)
        self.feed(decode.PeerGone(identity))

    def _to_peer(self, peer: bytes, message: Message) -> None:
        """Answer over the peer's connection, if that incarnation is still alive."""
        node = self.peers.get(peer)
        if node is not None and node.alive and node.identity == peer:
            endpoint = self.endpoint
            self.cluster.stats["credits"] += isinstance(message, Credit)
            envelope = Envelope(message, self.cluster.network)
            self.transmit(node, lambda: node.hear(endpoint, envelope))

    def data(self, frame: KVFrame, payload: Bytes) -> None:
        """Handle a KV frame."""
        try:
            blocks = self.receiver.locate(frame)
        except ProtocolError:
            self.cluster.stats["bad_frames"] += 1
            return
        if blocks is not None:
            self.moves.start(lambda: self._write(frame, blocks, payload))

    def _fetch(
        self, frame: KVFrame, blocks: npt.NDArray[np.int32], payload: Bytes, owner: int
    ) -> bool:
        """Read blocks in their owner's pool. A live owner must still hold them."""
        node = next((n for n in self.cluster.prefills if n.alive and n.incarnation == owner), None)
        theirs = payload.view(np.int32)
        if node is None or theirs.min() < 0 or theirs.max() >= node.cache.num_blocks:
            return self.writer.fetch(frame, blocks, None, payload)  # owner dead or frame damaged
        damaged = self.cluster.stats["damaged"] > 0
        held = all(map(node.cache.pool.is_owned, theirs.tolist()))
        if not held and not damaged and self in node.believed_alive():
            raise Violation(f"{self.name}: frame {frame.index} is read from free blocks")
        return self.writer.fetch(frame, blocks, node.executor.pool, payload)

    def _write(self, frame: KVFrame, blocks: npt.NDArray[np.int32], payload: Bytes) -> None:
        owner = self.receiver.owner(frame.grant)
        if owner is None:
            raise Violation(f"{self.name}: frame {frame.index} is written to unowned blocks")
        if frame.shared:
            intact = self._fetch(frame, blocks, payload, owner)
        else:
            intact = self.writer.write(frame, blocks, payload)
        self.feed(decode.FrameStored(frame, intact))
