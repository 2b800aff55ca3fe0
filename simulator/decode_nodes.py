"""Decode workers of a simulated cluster: the real core on the toy model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.decode_worker import events as decode
from baton.decode_worker.core import DecodeCore
from baton.decode_worker.handoffs import GrantStore
from baton.decode_worker.job import with_local_prompts
from baton.engine.cache.paged_cache import PagedCache
from baton.engine.kernels.reference import NumpyBackend
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.kv_transfer.frames import FrameWriter
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import ReceiverConfig
from baton.proto.errors import ProtocolError
from baton.proto.layout import ModelCard
from baton.proto.wire.messages import Credit, KVFrame, Message, PrefillToDecode
from baton.worker.events import RunStep, StepDone

from .envelopes import Bytes, Envelope, sealed_decoder
from .keys import is_rogue
from .nodes import SenderPeer
from .toy_model import KILLS_DECODE
from .violation import Violation
from .workers import (
    MAX_BATCH,
    EngineNode,
    MoveDelays,
    warm_times,
)


class DecodeNode(EngineNode[DecodeCore]):
    """A decode worker with the real core."""

    role = "decode"

    def make_card(self) -> ModelCard:
        """Return the card, with the feature of local requests if the scenario has them."""
        card = super().make_card()
        return with_local_prompts(card, vision=False) if self.cluster.shape.local else card

    def make(self) -> None:
        """Create pool, scheduler, receiver and core."""
        sizes, layout = self.sizes, self.card.layout
        self.executor = self.make_executor(sizes.decode_blocks, KILLS_DECODE)
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
            ("ipc:///simulated/data", 1 << 20),
            warm_times(),
            slo_ttft=sizes.slo_ttft,
        )
        self.writer = FrameWriter(NumpyBackend(), self.executor.pool)
        self.moves = MoveDelays(self, sizes.move_s)
        self.decoder = sealed_decoder(PrefillToDecode)
        self.peers: dict[bytes, SenderPeer] = {}

    def perform(self, action: object) -> None:
        """Perform an action as the shell would."""
        match action:
            case decode.ToPeer(peer=peer, message=message):
                self._to_peer(peer, message)
            case decode.MapPool(peer=peer, transport=transport):
                self.feed(decode.PoolMapped(peer, "", transport))
            case RunStep(plan=plan):
                self.run(plan.num_tokens, lambda seconds: self._finish(plan, seconds))
            case _:
                super().perform(action)

    def tick(self) -> None:
        """Check timers and unused grants."""
        super().tick()
        if self.alive:
            self.cluster.watcher.grants(self)

    def _finish(self, plan: StepPlan, seconds: float) -> None:
        self.feed(StepDone(self.execute(plan, seconds)))

    def from_peer(self, node: SenderPeer, identity: bytes, envelope: Envelope) -> None:
        """Handle a control message from a prefill worker."""
        for message in envelope.read(self.decoder, self.cluster.stats):
            self.cluster.overheard(message)
            self.hear(node, identity, message)

    def hear(self, node: SenderPeer, identity: bytes, message: Message) -> None:
        """Handle a control message that the socket accepted."""
        self.peers[identity] = node
        self.feed(decode.FromPeer(identity, message, node.key))

    def peer_gone(self, identity: bytes) -> None:
        """Handle the loss of a prefill worker's connection."""
        self.peers.pop(identity, None)
        self.feed(decode.PeerGone(identity))

    def _to_peer(self, peer: bytes, message: Message) -> None:
        """Answer over the peer's connection, if that incarnation is still alive."""
        node = self.peers.get(peer)
        if node is not None and node.alive and node.has_connection(peer):
            endpoint = self.link
            self.cluster.stats["credits"] += isinstance(message, Credit)
            envelope = Envelope(message, self.cluster.network)
            self.cluster.overheard(message)
            self.transmit(node, lambda: node.from_peer(endpoint, envelope))

    def data(self, frame: KVFrame, payload: Bytes, key: bytes) -> None:
        """Handle a KV frame, which came with ``key``."""
        owner = self.receiver.owner(frame.grant)
        if owner is not None and owner.key != key:
            self.cluster.stats["foreign_frames"] += 1
            return
        try:
            blocks = self.receiver.data.locate(frame)
        except ProtocolError:
            self.cluster.stats["rogue_frames" if is_rogue(key) else "bad_frames"] += 1
            return
        if blocks is not None:
            self.moves.start(lambda: self._write(frame, blocks, payload))

    def _fetch(
        self, frame: KVFrame, blocks: npt.NDArray[np.int32], payload: Bytes, owner: int
    ) -> bool:
        """Read blocks in their owner's pool. A live owner must still hold them."""
        node = next((n for n in self.cluster.prefills if n.alive and n.incarnation == owner), None)
        theirs = payload[: len(payload) // 4 * 4].view(np.int32)
        if self._rogue_owns(frame):
            return self.writer.fetch(frame, blocks, None, payload)
        if node is None or theirs.min() < 0 or theirs.max() >= node.cache.num_blocks:
            return self.writer.fetch(frame, blocks, None, payload)  # owner dead or frame damaged
        damaged = self.cluster.stats["damaged"] > 0
        held = all(map(node.cache.pool.is_owned, theirs.tolist()))
        if not held and not damaged and self in node.believed_alive():
            raise Violation(f"{self.name}: frame {frame.index} is read from free blocks")
        return self.writer.fetch(frame, blocks, node.executor.pool, payload)

    def _rogue_owns(self, frame: KVFrame) -> bool:
        holder = self.receiver.owner(frame.grant)
        return holder is not None and is_rogue(holder.key)

    def _write(self, frame: KVFrame, blocks: npt.NDArray[np.int32], payload: Bytes) -> None:
        holder = self.receiver.owner(frame.grant)
        if holder is None:
            raise Violation(f"{self.name}: frame {frame.index} is written to unowned blocks")
        if frame.shared:
            intact = self._fetch(frame, blocks, payload, holder.incarnation)
        else:
            layout = self.receiver.layout_of(frame.grant)
            intact = self.writer.write(frame, blocks, payload, layout)
        self.feed(decode.FrameStored(frame, intact))
