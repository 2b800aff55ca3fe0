"""Prefill workers of a simulated cluster: the real cores on the toy model, for text or embeddings.

A frame with contiguous blocks is read from the pool only when it arrives, as late as a transport
without copies could read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from baton.engine.cache.paged_cache import PagedCache
from baton.engine.kernels.reference import NumpyBackend
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.kv_transfer.frames import FramePacker
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import SenderConfig
from baton.prefill_worker import events as prefill
from baton.prefill_worker.core import PrefillCore, PrefillLimits
from baton.prefill_worker.custom_order import CustomOrder
from baton.prefill_worker.embed_core import BatchDone, EmbedCore, EmbedLimits, RunBatch
from baton.proto.layout import ModelCard
from baton.proto.wire.messages import DecodeToPrefill, DeviceTicket, KVFrame, Message, PeerDead
from baton.worker.events import RunStep, StepDone

from .envelopes import Bytes, Envelope, sealed_decoder
from .nodes import DETECT_S, DecodePeer
from .toy_model import (
    KILLS_PREFILL,
    MUTE,
    Poisoned,
    embed_card,
    expected_vector,
)
from .workers import (
    MAX_BATCH,
    EngineNode,
    MoveDelays,
    WorkerNode,
    warm_times,
)


class PrefillNode(EngineNode[PrefillCore]):
    """A prefill worker with the real core."""

    role = "prefill"

    def make(self) -> None:
        """Create pool, scheduler, sender and core."""
        sizes, layout = self.sizes, self.card.layout
        self.executor = self.make_executor(sizes.prefill_blocks, KILLS_PREFILL)
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
        shape, order = self.cluster.shape, None
        if shape.order:
            order = CustomOrder(shape.order, shape.extensions, self.extension_failed)
            self.cluster.guards.append(order.guard)
        self.core = PrefillCore(
            self.member, self.scheduler, self.sender, limits, warm_times(), ticket, order=order
        )
        self.packer = FramePacker(NumpyBackend(), self.executor.pool)
        self.moves = MoveDelays(self, sizes.move_s)
        self.decoder = sealed_decoder(DecodeToPrefill)
        self.connected: dict[str, bytes] = {}  # routing identity of each endpoint's connection
        self.connections = 0
        self.data_links: set[str] = set()  # endpoints to which frames can be sent
        self.waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.buried: set[int] = set()

    def from_router(self, name: str, message: Message) -> None:
        """Record decode workers declared dead: their blocks may have been reused since."""
        if isinstance(message, PeerDead):
            self.buried.add(message.incarnation)
        super().from_router(name, message)

    def perform(self, action: object) -> None:
        """Perform an action as the shell would."""
        match action:
            case prefill.ToPeer(endpoint=endpoint, message=message):
                self._to_peer(endpoint, message)
            case prefill.Connect(endpoint=endpoint):
                self._connect(endpoint)
            case prefill.OpenData(endpoint=endpoint):
                self._open_data(endpoint)
            case prefill.Disconnect(endpoint=endpoint):
                self._disconnect(endpoint)
            case prefill.PackFrame():
                self._pack(action)
            case RunStep(plan=plan):
                self._run_plan(plan)
            case _:
                super().perform(action)

    # ------------------------------------------------------------------ decode workers

    def _connect(self, endpoint: str) -> None:
        self.connected[endpoint] = self._new_identity()
        self._reach_later(endpoint, 0.001)

    def _disconnect(self, endpoint: str) -> None:
        identity = self.connected.pop(endpoint, b"")
        self.data_links.discard(endpoint)
        self.waiting.pop(endpoint, None)
        node = self.cluster.decode_at(endpoint)
        if node is not None:
            self.cluster.peer_gone(node, identity)

    def _new_identity(self) -> bytes:
        """As the shell does: what ends one connection cannot end the next."""
        self.connections += 1
        return self.identity + b":%d" % self.connections

    def _reach_later(self, endpoint: str, seconds: float) -> None:
        identity = self.connected[endpoint]
        self.cluster.network.after(seconds, self.when_up(lambda: self.reach(endpoint, identity)))

    def has_connection(self, identity: bytes) -> bool:
        """True if one of the connections of this worker has the routing identity."""
        return identity in self.connected.values()

    def _open_data(self, endpoint: str) -> None:
        """Send the frames that have waited for the data connection."""
        self.data_links.add(endpoint)
        for send in self.waiting.pop(endpoint, []):
            send()

    def believed_alive(self) -> list[DecodePeer]:
        """Return decode workers whose incarnation was never declared dead to this worker.

        A decode worker that is cut off from its router may be declared dead and still run. It may
        read blocks of old handoffs, but its results are never used: its router rejects it.
        """
        nodes = [n for n in self.cluster.decodes if n.incarnation not in self.buried]
        return [n for n in nodes if self.core.knows(n.link, n.incarnation)]

    def peer_down(self, endpoint: str) -> None:
        """Handle the loss of a decode worker's connection; the socket keeps trying."""
        if endpoint in self.connected:
            self.connected[endpoint] = self._new_identity()
            self.feed(prefill.PeerDown(endpoint))
            self._reach_later(endpoint, DETECT_S)

    def reach(self, endpoint: str, identity: bytes) -> None:
        """Connect as soon as the decode worker is alive, unless the connection was given up."""
        if self.connected.get(endpoint) != identity:
            return
        node = self.cluster.decode_at(endpoint)
        if node is not None and node.alive:
            self.feed(prefill.PeerUp(endpoint))
        else:
            self._reach_later(endpoint, 0.05)

    def _to_peer(self, endpoint: str, message: Message) -> None:
        node, identity = self.cluster.decode_at(endpoint), self.connected.get(endpoint)
        if node is not None and identity is not None:
            envelope = Envelope(message, self.cluster.network)
            self.transmit(node, lambda: node.from_peer(self, identity, envelope))

    def from_peer(self, endpoint: str, envelope: Envelope) -> None:
        """Handle a control message from a decode worker."""
        for message in envelope.read(self.decoder, self.cluster.stats):
            self.feed(prefill.FromPeer(endpoint, message))

    def _pack(self, action: prefill.PackFrame) -> None:
        self.moves.start(lambda: self._packed(action))

    def _packed(self, action: prefill.PackFrame) -> None:
        send = action.send
        ready = None
        if action.layout is None:
            ready = self.packer.view(send.frame, action.block_table)
        if action.shared:
            frame, payload = self.packer.name(send.frame, action.block_table)
        elif ready is not None:
            frame, payload = ready
        else:
            payload = np.empty(send.frame.nbytes, np.uint8)
            frame = self.packer.pack(send.frame, action.block_table, payload, action.layout)
        self._send_frame(send.endpoint, frame, payload)
        self.feed(prefill.Packed(send.key, frame.index, frame.checksum))

    def _send_frame(self, endpoint: str, frame: KVFrame, payload: Bytes) -> None:
        if endpoint not in self.data_links:
            self.waiting[endpoint].append(lambda: self._send_frame(endpoint, frame, payload))
            return
        network, node = self.cluster.network, self.cluster.decode_at(endpoint)
        self.cluster.overheard(frame)
        damaged = network.random.random() < network.faults.damage
        at = network.random.randrange(frame.nbytes)

        def arrive() -> None:
            received = payload.copy()  # copied on arrival: the pool may have been overwritten
            if damaged:
                received[at % len(received)] ^= 0x5A
                self.cluster.stats["damaged"] += 1
            if node is not None:
                node.data(frame, received, self.key)

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


class EmbedNode(WorkerNode[EmbedCore]):
    """An embedding worker with the real core."""

    role = "prefill"

    def make_card(self) -> ModelCard:
        """Return the card of the embedding model."""
        return embed_card()

    def make(self) -> None:
        """Create a new core."""
        limits = EmbedLimits(token_budget=4 * self.sizes.token_budget, max_batch=6, max_queue=64)
        self.core = EmbedCore(self.member, limits, warm_times())

    def perform(self, action: object) -> None:
        """Perform an action as the shell would."""
        if isinstance(action, RunBatch):
            batch = action
            self.run(batch.tokens, lambda seconds: self._finish(batch, seconds))
        else:
            super().perform(action)

    def _finish(self, run: RunBatch, seconds: float) -> None:
        """Compute the embeddings of a batch, except for texts the model cannot embed."""
        vectors = {}
        for name, context in run.batch.items():
            tokens = context.tokens.all.tolist()
            if KILLS_PREFILL in tokens:
                raise Poisoned
            if MUTE not in tokens:
                vectors[name] = expected_vector(tokens)
        self.cluster.stats["batches"] += 1
        self.cluster.stats["batched"] += len(run.batch)
        self.feed(BatchDone(vectors, seconds))
