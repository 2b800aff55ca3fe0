"""A whole cluster in one process: real cores, a seeded network and a simulated host.

The cluster restarts ended processes after a pause. The supervisor node certifies their end.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

from baton.extend.guard import Guard
from baton.proto.wire.messages import Assign, Message
from baton.router.config import PolicyConfig, RouterConfig
from baton.router.core import RouterCore
from baton.router.records import NO_KEYS, Authentication

from .clients import ClientNode
from .decode_nodes import DecodeNode
from .invariants import Watcher
from .keys import ROLES, client_caller, is_rogue, key_behind, worker_caller
from .network import Aim, Faults, Network
from .nodes import DETECT_S, DecodePeer, Node, RouterNode
from .prefill_nodes import EmbedNode, PrefillNode
from .recording import Recording
from .rogues import Captured, Rogue
from .shape import Shape
from .supervisor import SupervisorNode
from .workers import EngineNode, WorkerNode, rack_of

CLUSTER_KEY = "00" * 16
FLAP_S = 0.02
"""Seconds until a broken connection is made again."""


class Cluster:
    """All nodes of one simulation."""

    def __init__(
        self,
        seed: int,
        shape: Shape | None = None,
        faults: Faults | None = None,
        aim: Aim | None = None,
        recording: Recording | None = None,
        certificate_faults: float = 0.0,
        check_every: int = 1,
    ) -> None:
        self.certificate_faults = certificate_faults
        self.recording = recording
        self.shape = shape = shape or Shape()
        self.stats: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.guards: list[Guard] = []  # of users' classes
        """The first traceback of each event of users' own classes."""
        self.twins: list[WorkerNode[Any]] = []
        self.watcher = Watcher(self, check_every)
        self.network = Network(
            Random(seed),  # noqa: S311
            faults or Faults(),
            aim or Aim(),
        )
        self.routers = [RouterNode(self, f"router-{i}") for i in range(shape.routers)]
        self.prefills = [
            PrefillNode(self, f"prefill-{i}", shape.sizes) for i in range(shape.prefill)
        ]
        self.decodes = [DecodeNode(self, f"decode-{i}", shape.sizes) for i in range(shape.decode)]
        self.embedders = [EmbedNode(self, f"prefill-{i}", shape.sizes) for i in range(shape.embed)]
        self.clients = [
            ClientNode(self, f"client-{i}", self._routers_from(i % shape.routers))
            for i in range(shape.clients)
        ]
        self.supervisor = SupervisorNode(self, "supervisor")
        self.captured = Captured()
        self.rogues: list[Rogue] = []
        if shape.rogues:
            self._admit_rogues()
        for node in (self.supervisor, *self.nodes, *self.rogues):
            node.start()

    def _admit_rogues(self) -> None:
        """Add a rogue of each role, and workers with their keys that compute falsely."""
        shape, card = self.shape, self.workers[0].card
        self.rogues += [
            Rogue(self, self.captured, role, card, greedy=shape.greedy) for role in ROLES
        ]
        if shape.greedy:
            liars: list[EngineNode[Any]] = [
                PrefillNode(self, "rogue-prefill-worker", shape.sizes),
                DecodeNode(self, "rogue-decode-worker", shape.sizes),
            ]
            for liar in liars:
                liar.lies = True
                self._pool_of(liar).append(liar)
            self.twins += liars

    def overheard(self, message: Any) -> None:
        """Give the rogues a message or a KV frame that was sent."""
        if self.rogues:
            self.captured.add(message)

    def _routers_from(self, first: int) -> list[RouterNode]:
        """Return all routers in order, starting with number ``first``."""
        return [*self.routers[first:], *self.routers[:first]]

    @property
    def workers(self) -> list[WorkerNode[Any]]:
        """All workers: prefill, decode and embedding workers."""
        return [*self.prefills, *self.decodes, *self.embedders]

    @property
    def nodes(self) -> list[Node]:
        """All processes that can crash."""
        return [*self.routers, *self.workers, *self.clients]

    def make_router(self, node: RouterNode) -> RouterCore:
        """Create the router core of one incarnation, as the router process would."""
        config = RouterConfig(
            client_address=f"ipc:///simulated/{node.name}",
            worker_address=f"ipc:///simulated/{node.name}-workers",
            name=node.name,
            cluster_key=CLUSTER_KEY,
            mode=self.shape.mode,
            policy=PolicyConfig(name=self.shape.policy, block_tokens=8),
            decider=self.shape.decider,
            extensions=self.shape.extensions,
        )
        node.cluster_key = config.key
        keys = Authentication(client_caller, worker_caller) if self.shape.rogues else NO_KEYS
        core = RouterCore(config, incarnation=node.incarnation, now=node.now, authentication=keys)
        self.guards += core.extensions.guards
        return core

    # ------------------------------------------------------------------ connections

    def router_named(self, name: str) -> RouterNode:
        """Return the router with this name."""
        return next(router for router in self.routers if router.name == name)

    def decode_at(self, link: str) -> DecodeNode | None:
        """Return the decode worker that a link leads to, or None."""
        return next((n for n in self.decodes if n.link == link), None)

    def to_worker(self, router: RouterNode, identity: bytes, message: Message) -> None:
        """Deliver to the worker incarnation with this identity, or to the supervisor."""
        if identity == self.supervisor.identity:
            self.supervisor.answered(router, message)
            return
        self.overheard(message)
        if isinstance(message, Assign):
            self._count_racks(identity, message)
        if isinstance(message, Assign) and self._is_rogues(identity, message):
            self.watcher.surrender(message.request)
        for rogue in self.rogues:
            if rogue.alive and rogue.identity == identity:
                router.transmit(rogue, partial(rogue.received, message))
        for node in self.workers:
            if node.alive and node.identity == identity:
                router.transmit(node, partial(node.from_router, router.name, message))

    def _count_racks(self, identity: bytes, message: Assign) -> None:
        decode = self.decode_at(message.decode)
        prefill = next((node for node in self.prefills if node.identity == identity), None)
        if prefill is not None and decode is not None:
            self.stats["pairs"] += 1
            self.stats["pairs in one rack"] += rack_of(prefill.name) == rack_of(decode.name)

    def to_client(self, router: RouterNode, identity: bytes, message: Message) -> bool:
        """Deliver to a client's connection. Return False if the client's buffers are full."""
        self.overheard(message)
        for rogue in self.rogues:
            if rogue.alive and rogue.identity == identity:
                router.transmit(rogue, partial(rogue.received, message))
        for node in self.clients:
            if node.alive and node.identity == identity and node.router is router:
                return node.take(message)
        return True

    @staticmethod
    def _is_rogues(identity: bytes, message: Assign) -> bool:
        return is_rogue(key_behind(identity)) or is_rogue(message.decode_key)

    # ------------------------------------------------------------------ broken connections

    def broken(self, node: Node) -> None:
        """Let the peers notice a node's death, and restart the node later."""
        identity = node.identity
        if isinstance(node, WorkerNode):
            self.supervisor.ended(node)
        self.network.after(DETECT_S, lambda: self._notice(node, identity))
        self.network.after(self.shape.restart_s, lambda: self._restart(node))

    def turned(self, node: Node) -> None:
        """Let the peers notice the end of an incarnation; the next one has the other role.

        The process goes on, so nothing certifies its end.
        """
        identity = node.identity
        self.network.after(DETECT_S, lambda: self._notice(node, identity))
        self.network.after(FLAP_S, lambda: self._restart(node))

    def _restart(self, node: Node) -> None:
        if node in self.nodes:
            self._in_its_role(node).start()

    def _in_its_role(self, node: Node) -> Node:
        """Return the node, or its successor in the other pool if it changes its role."""
        if not isinstance(node, WorkerNode) or not node.turning:
            return node
        other = DecodeNode if isinstance(node, PrefillNode) else PrefillNode
        node.successor = successor = other(self, node.name, node.sizes)
        self._pool_of(node).remove(node)
        self._pool_of(successor).append(successor)
        return successor

    def _notice(self, node: Node, identity: bytes) -> None:
        if isinstance(node, RouterNode):
            self._router_gone(node)
        elif isinstance(node, ClientNode):
            router = node.router
            router.when_up(lambda: router.client_gone(identity))()
        elif isinstance(node, WorkerNode):
            for router in self.routers:
                self._worker_gone(router, identity)
            self._peers_notice(node)

    def _router_gone(self, node: RouterNode) -> None:
        for worker in self.workers:
            worker.when_up(partial(worker.router_down, node))()
        for client in self.clients:
            if client.router is node:
                client.when_up(client.router_down)()

    @staticmethod
    def _worker_gone(router: RouterNode, identity: bytes) -> None:
        router.when_up(lambda: router.worker_gone(identity))()

    def _peers_notice(self, node: WorkerNode[Any]) -> None:
        if isinstance(node, DecodeNode):
            for prefill in self.prefills:
                prefill.when_up(partial(prefill.peer_down, node.link))()
        elif isinstance(node, PrefillNode):
            for decode in self.decodes:
                decode.when_up(partial(decode.peer_gone, node.connected.get(decode.link, b"")))()

    def peer_gone(self, decode: DecodePeer, identity: bytes) -> None:
        """Notify a decode worker that a prefill worker closed a connection."""
        self.network.after(DETECT_S, decode.when_up(lambda: decode.peer_gone(identity)))

    def reconnect(self, router: RouterNode) -> None:
        """Connect all workers to a router that started. Clients reconnect by themselves."""
        for worker in self.workers:
            if worker.alive and router.alive:
                worker.when_up(partial(worker.router_up, router))()

    def flap(self, one: Node, other: Node) -> None:
        """Break a connection and restore it a moment later; messages in flight are lost."""
        self.network.cut(one.name, other.name)
        pair = {type(one): one, type(other): other}
        router, client = pair.get(RouterNode), pair.get(ClientNode)
        prefill, decode = pair.get(PrefillNode), pair.get(DecodeNode)
        if isinstance(prefill, PrefillNode) and isinstance(decode, DecodeNode):
            endpoint = decode.link
            identity = prefill.connected.get(endpoint, b"")
            decode.when_up(lambda: decode.peer_gone(identity))()
            prefill.when_up(lambda: prefill.peer_down(endpoint))()
        elif isinstance(router, RouterNode) and isinstance(client, ClientNode):
            if client.router is router:
                gone = client.identity
                router.when_up(lambda: router.client_gone(gone))()
                client.when_up(client.router_down)()
        elif isinstance(router, RouterNode):
            self._flap_worker(router, next(n for n in (one, other) if n is not router))

    def timed_out(self, node: Node, seconds: float) -> None:
        """Close the connections of a node stopped for ``seconds``; it reconnects later."""
        if not (node.alive and node.stopped) or self.network.now < node.stopped_at + seconds - 1e-9:
            return
        for router in self.routers:
            for worker in self.workers:
                if node is router or node is worker:
                    self._drop(router, worker)
                    again = partial(self._connect_again, router, worker)
                    node.when_up(partial(self.network.after, FLAP_S, again))()

    def cut_off(self, router: RouterNode, worker: WorkerNode[Any], back: float) -> None:
        """Close a connection after both ends timed out, and restore it at ``back``."""
        if router.alive and worker.alive:
            self._drop(router, worker)
            self.network.at(back, partial(self._connect_again, router, worker))

    def _drop(self, router: RouterNode, worker: WorkerNode[Any]) -> None:
        identity = worker.identity
        self.network.cut(router.name, worker.name)
        router.when_up(lambda: router.worker_gone(identity))()
        worker.when_up(lambda: worker.router_down(router))()

    @staticmethod
    def _connect_again(router: RouterNode, worker: WorkerNode[Any]) -> None:
        worker.when_up(lambda: worker.router_up(router) if router.alive else None)()

    def twin(self, worker: WorkerNode[Any]) -> None:
        """Start a second process with the worker's name, at another address."""
        twin = type(worker)(self, worker.name, worker.sizes)
        twin.endpoint += f"-twin-{len(self.twins)}"
        self._pool_of(worker).append(twin)
        self.twins.append(twin)
        twin.start()

    def end_twins(self) -> None:
        """Stop all twins and rogues permanently, like an operator after noticing them."""
        for rogue in self.rogues:
            rogue.leave()
        for twin in self.twins:
            twin.crash()
            self._pool_of(twin).remove(twin)
        self.twins.clear()

    def _pool_of(self, worker: WorkerNode[Any]) -> list[Any]:
        if isinstance(worker, PrefillNode):
            return self.prefills
        return self.decodes if isinstance(worker, DecodeNode) else self.embedders

    def _flap_worker(self, router: RouterNode, node: Node) -> None:
        if not isinstance(node, WorkerNode):
            return
        worker, identity = node, node.identity
        router.when_up(lambda: router.worker_gone(identity))()
        worker.when_up(lambda: worker.router_down(router))()
        up = worker.when_up(lambda: worker.router_up(router) if router.alive else None)
        self.network.after(FLAP_S, up)
