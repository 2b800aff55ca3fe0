"""A whole cluster in one process: real cores, seeded network, faults, and a watcher.

The supervisor's part (restart what died, after a pause) is played here too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import xxhash

from ..decode_worker import events as decode
from ..proto.messages import Message
from ..router import events as routing
from ..router.core import RouterCore
from .clients import ClientNode
from .network import Faults, Network
from .nodes import DETECT_S, DecodeNode, Node, PrefillNode, RouterNode, WorkerNode
from .routers import make_router_core


@dataclass(slots=True, frozen=True)
class Shape:
    """Size of a simulated cluster; few blocks make preemption and Busy happen."""

    prefill: int = 2
    decode: int = 2
    clients: int = 2
    block_size: int = 4
    prefill_blocks: int = 96
    decode_blocks: int = 64
    restart_s: float = 0.3


@dataclass(slots=True)
class Cluster:
    """All nodes of one simulation."""

    seed: int
    shape: Shape = field(default_factory=Shape)
    faults: Faults = field(default_factory=Faults)
    stats: Counter[str] = field(default_factory=Counter)
    network: Network = field(init=False)
    router: RouterNode = field(init=False)
    prefills: list[PrefillNode] = field(init=False)
    decodes: list[DecodeNode] = field(init=False)
    clients: list[ClientNode] = field(init=False)

    def __post_init__(self) -> None:
        """Create and start all nodes."""
        shape = self.shape
        self.network = Network(Random(self.seed), self.faults)
        self.router = RouterNode(self, "router")
        self.prefills = [
            PrefillNode(
                self, f"prefill-{i}", num_blocks=shape.prefill_blocks, block_size=shape.block_size
            )
            for i in range(shape.prefill)
        ]
        self.decodes = [
            DecodeNode(
                self, f"decode-{i}", num_blocks=shape.decode_blocks, block_size=shape.block_size
            )
            for i in range(shape.decode)
        ]
        self.clients = [ClientNode(self, f"client-{i}") for i in range(shape.clients)]
        for node in self.nodes:
            node.start()

    @property
    def workers(self) -> list[WorkerNode]:
        """Prefill and decode workers."""
        return [*self.prefills, *self.decodes]

    @property
    def nodes(self) -> list[Node]:
        """Everything that can die."""
        return [self.router, *self.prefills, *self.decodes, *self.clients]

    def make_router(self, node: RouterNode) -> RouterCore:
        """A router core for one life of the router node."""
        return make_router_core(node.incarnation, self.network.now)

    # ------------------------------------------------------------------ connections

    def decode_at(self, endpoint: str) -> DecodeNode | None:
        """Decode worker that listens at ``endpoint``."""
        return next((n for n in self.decodes if n.endpoint == endpoint), None)

    def to_worker(self, router: RouterNode, identity: bytes, message: Message) -> None:
        """Deliver to the life of a worker that has this identity; others are unreachable."""
        for node in self.workers:
            if node.alive and node.identity == identity:
                router.transmit(node, lambda node=node: node.hear_router(message))  # type: ignore[misc]

    def to_client(self, router: RouterNode, identity: bytes, message: Message) -> None:
        """Deliver to a client's connection."""
        for node in self.clients:
            if node.alive and node.identity == identity:
                router.transmit(node, lambda node=node: node.hear(message))  # type: ignore[misc]

    def broken(self, node: Node) -> None:
        """A node died: its peers notice, and it is started again after a while."""
        identity = node.identity
        self.network.after(DETECT_S, lambda: self._notice(node, identity))
        self.network.after(self.shape.restart_s, node.start)

    def _notice(self, node: Node, identity: bytes) -> None:
        if isinstance(node, RouterNode):
            for worker in self.workers:
                if worker.alive:
                    worker.when_up(worker.router_down)()
            return
        if isinstance(node, DecodeNode):
            for prefill in self.prefills:
                if prefill.alive:
                    prefill.when_up(lambda p=prefill: p.peer_down(node.endpoint))()
        if isinstance(node, PrefillNode):
            for decoder in self.decodes:
                if decoder.alive:
                    decoder.when_up(lambda d=decoder: d.feed(decode.PeerGone(identity)))()  # type: ignore[misc]
        router = self.router
        if router.alive:
            gone = routing.ClientGone if isinstance(node, ClientNode) else routing.WorkerGone
            router.when_up(lambda: router.feed(gone(identity)))()

    def reconnect(self) -> None:
        """The router is back: workers and clients connect again."""
        for worker in self.workers:
            if worker.alive:
                worker.when_up(worker.router_up)()
        for client in self.clients:
            if client.alive:
                client.when_up(client.router_up)()

    @staticmethod
    def checksum(payload: np.ndarray) -> int:  # type: ignore[type-arg]
        """XXH3-64, as in the shell."""
        return xxhash.xxh3_64_intdigest(payload)
