"""What all workers of a simulated cluster share. The nodes act as the real shells do.

Messages between workers are encoded bytes, and faults damage some of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from baton.deploy.supervise.certificates import SECRET_BYTES
from baton.engine.cache.paged_cache import PagedCache
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.engine.scheduling.plan import StepPlan, StepResult, abandoned_step
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_time import StepTime
from baton.prefill_worker.link_names import link_name
from baton.proto.ids import NONCE_BYTES, worker_incarnation
from baton.proto.layout import ModelCard
from baton.proto.wire.messages import Message
from baton.proto.wire.proofs import seal_of
from baton.router.events import FromWorker
from baton.worker.attempts import Key
from baton.worker.events import (
    AbandonStep,
    DrainRequested,
    Exit,
    Fault,
    FromRouter,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
)
from baton.worker.membership import Membership, WorkerIdentity

from .nodes import Node, RouterNode, World
from .shape import Sizes
from .toy_model import Poisoned, ToyExecutor, ToyMatcher, ToyPictures, picture_card, toy_card
from .violation import Violation

MAX_BATCH = 8
HANG_S = 1e6
RACKS = 2


def rack_of(name: str) -> str:
    """Return the rack of a worker: ``prefill-3`` is in rack ``r1``."""
    number = name.rpartition("-")[2]
    return f"r{int(number) % RACKS}" if number.isdecimal() else "r0"


def warm_times() -> StepTime:
    """Return step times as a worker has learned them before it serves."""
    times = StepTime()
    times.learn(16, 0.005)
    return times


class Core(Protocol):
    """The core of a worker."""

    @property
    def is_drained(self) -> bool:
        """Whether the worker has drained and may exit."""
        ...

    def handle(self, event: Any, now: float) -> list[Any]:
        """Return the actions for an event."""
        ...

    def check_integrity(self) -> None:
        """Compare the counters with the state. Raises if they differ."""


C = TypeVar("C", bound=Core)


class WorkerNode(Node, Generic[C]):
    """Common part of all simulated workers."""

    role = ""
    core: C

    def __init__(self, cluster: World, name: str, sizes: Sizes) -> None:
        super().__init__(cluster, name)
        self.sizes = sizes
        self.card = self.make_card()
        self.endpoint = f"ipc:///simulated/{name}"
        self.hangs = self.misfit = False
        self.turning = False  # the process goes on in the other role
        self.nonce = b""  # of this incarnation, in a cluster with keys
        self.secret = b""  # only its supervisor has it
        self.slow_step = 0.0  # additional seconds for the next step
        self.idle_from = 0.0  # time at which the engine finishes its steps

    @abstractmethod
    def make_card(self) -> ModelCard:
        """Return the card of the model that this worker serves."""

    @property
    def link(self) -> str:
        """Name of prefill workers' links to this worker."""
        return link_name(self.endpoint, self.key)

    @property
    def seal(self) -> bytes:
        """The hash of the secret of this process, as its supervisor passed it on."""
        return seal_of(self.secret)

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
        self.secret = self.cluster.network.random.randbytes(SECRET_BYTES)
        self.member = self._membership()
        self.make()
        for router in self.cluster.routers:
            if router.alive:
                self.router_up(router)

    @abstractmethod
    def make(self) -> None:
        """Create pool, cache, scheduler and core."""

    def new_incarnation(self) -> int:
        """Draw the next incarnation, with a key if there is one."""
        if not self.key:
            return super().new_incarnation()
        self.nonce = self.cluster.network.random.randbytes(NONCE_BYTES)
        return worker_incarnation(self.key, self.nonce)

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
            seal=self.seal,
            nonce=self.nonce,
            labels={"rack": rack_of(self.name)},
        )
        return Membership(me, tuple(router.name for router in self.cluster.routers))

    # ------------------------------------------------------------------ routers

    def to_router(self, name: str, messages: list[Message]) -> None:
        """Send one envelope over this incarnation's connection to a router."""
        router, identity = self.cluster.router_named(name), self.identity
        for message in messages:
            self.cluster.watcher.to_router(self, message)
            self.cluster.overheard(message)
        self.transmit(router, lambda: router.feed(FromWorker(identity, messages)))

    def from_router(self, name: str, message: Message) -> None:
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

    def turn(self, grace: float) -> None:
        """Drain for an ordered change of role, ``grace`` seconds later at the latest."""
        self.drain()
        self.cluster.network.after(grace, self.when_up(self._turned))

    def _turned(self) -> None:
        """End this incarnation, not the process."""
        self.cluster.stats["turned"] += 1
        self.end()
        self.cluster.turned(self)

    def end(self) -> None:
        """Lose all state."""
        self.alive = False

    # ------------------------------------------------------------------ events

    def tick(self) -> None:
        """Check timers. A drained worker exits, as in its shell."""
        self.feed(Tick())
        if self.alive and self.core.is_drained:
            self.cluster.stats["drained"] += 1
            if self.turning:
                self._turned()
            else:
                self.crash()

    def feed(self, event: object) -> None:
        """Pass an event to the core, perform its actions, check the invariants."""
        envelopes: defaultdict[str, list[Message]] = defaultdict(list)
        actions = self.think(self.core, event)
        self.record(event, actions)
        for action in actions:
            if isinstance(action, ToRouter):
                envelopes[action.router].append(action.message)
            else:
                self.perform(action)
        for name, messages in envelopes.items():
            self.to_router(name, messages)
        if self.alive:
            self.cluster.watcher.worker(self)

    def perform(self, action: object) -> None:
        """Perform an action as the shells of both roles would."""
        if isinstance(action, Fault):
            self.fault(action.error)
        elif isinstance(action, Exit) and self.alive:
            self.cluster.stats["exits"] += 1
            self.cluster.stats["own_error_exits"] += action.own_error
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


class EngineNode(WorkerNode[C]):
    """Common part of text workers: KV, grammars, preemption."""

    scheduler: Scheduler
    cache: PagedCache
    executor: ToyExecutor

    def __init__(self, cluster: World, name: str, sizes: Sizes) -> None:
        super().__init__(cluster, name, sizes)
        self._preempted = 0  # in earlier incarnations
        self.grammars: dict[Key, object] = {}  # being compiled
        self.unwanted: set[int] = set()  # aborted steps
        self.lies = False  # a rogue: what it has computed is made wrong

    def make_card(self) -> ModelCard:
        """Return the card of the toy model."""
        size = self.sizes.block_size
        return picture_card(size) if self.cluster.shape.draws else toy_card(size)

    def make_executor(self, num_blocks: int, kills: int) -> ToyExecutor:
        """Return the engine of the toy model; ``kills``: the token that crashes it."""
        kind = ToyPictures if self.cluster.shape.draws else ToyExecutor
        return kind(self.card.layout, num_blocks, kills)

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

    def end(self) -> None:
        """Keep the preemption count for the results."""
        self._preempted += self.scheduler.load().preemptions
        super().end()

    def perform(self, action: object) -> None:
        """Perform an action as the shells of both roles would."""
        if isinstance(action, CompileGrammar):
            self._compile(action)
        elif isinstance(action, DropGrammar):
            self.cluster.stats["grammars_dropped"] += 1
            known = self.grammars.pop(action.key, None)
            if known is None and not self.raised:  # else the core lost the compile's result
                raise Violation(f"{self.name} drops a grammar that is not compiled")
        elif isinstance(action, AbandonStep):
            self.unwanted.add(action.step)
        else:
            super().perform(action)

    def execute(self, plan: StepPlan, seconds: float) -> StepResult:
        """Compute a step, or skip it if all its sequences were aborted."""
        if plan.step not in self.unwanted:
            result = self.executor.execute(plan, seconds)
            self.executor.pool += self.lies
            return result
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
