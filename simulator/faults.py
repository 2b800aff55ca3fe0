"""Chooses the time and the target of each fault in a run, from the run's seed."""

from __future__ import annotations

from functools import partial
from random import Random

from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S, connection_timeout

from .cluster import Cluster
from .network import Link
from .nodes import Node
from .own_errors import Plant
from .scenarios import Scenario

STOP_S = 3.0
"""Longest time for which a process is stopped, seconds; shorter than the worker timeout."""
PAUSE_S = (0.3, 2.0)
"""Range of a pause, seconds: a throttled container, a swapping host."""
ABSENCE_S = (5.5, 9.0)
"""Range of an absence, seconds. Longer than the worker timeout: the worker is declared dead."""
SLOW_STEP_S = (0.3, 3.0)
"""Range of one step that takes much longer than predicted, seconds."""
CONNECTION_S = connection_timeout(DEFAULT_WORKER_TIMEOUT_S)
"""Seconds of silence after which both ends close a connection."""
RECONNECT_S = 1.0
"""Longest time until a connection is restored after the network recovers, seconds."""
BLOCK_S = 2.0
"""Longest time for which one direction is blocked, seconds."""

CUT_S = 12.0
"""Longest time a prefill and a decode worker are cut off, seconds; several handoff timeouts."""
TICKS = 0.3
"""Share of the planted exceptions that are raised in a tick."""
LINES_LOG2 = 11.0
"""Logarithm of the most lines of a core's code until a planted exception is raised."""
FEW_LINES_LOG2 = 7.0
"""The same if the exceptions are raised in a few kinds of events only."""
ISOLATE_S = 4.0
"""Longest time a router is cut off, seconds; longer than its clients wait for it."""


class Storm:
    """Draws faults and schedules them in a cluster."""

    def __init__(self, cluster: Cluster, scenario: Scenario, random: Random) -> None:
        self._cluster = cluster
        self._scenario = scenario
        self._random = random
        self._victims = [n for n in cluster.nodes if n.name.split("-")[0] in scenario.victims]

    def plan(self) -> None:
        """Draw and schedule all faults of a run."""
        scenario, random = self._scenario, self._random
        kinds = {
            self._crash: scenario.crashes,
            self._stop: scenario.stops,
            self._pause: scenario.pauses,
            self._absent: scenario.absences,
            self._slow_step: scenario.slow_steps,
            self._twin: scenario.twins,
            self._hang: scenario.hangs,
            self._flap: scenario.flaps,
            self._partition: scenario.partitions,
            self._isolate: scenario.isolations,
            self._cut: scenario.cuts,
            self._drain: scenario.drains,
            self._turn: scenario.turns,
            self._jump: scenario.jumps,
            self._slow: scenario.slow,
            self._misfit: scenario.misfits,
            self._forge: scenario.forgeries,
            self._raise: scenario.raises,
        }
        for strike, count in kinds.items():
            for _ in range(count):
                when = random.uniform(0.0, scenario.load_s)
                strike(random.choice(self._victims), when)

    def _crash(self, node: Node, when: float) -> None:
        self._cluster.network.at(when, lambda: node.present.crash())

    def _raise(self, node: Node, when: float) -> None:
        """Plant an exception in the code of a router or worker; see :mod:`.own_errors`."""
        random, names = self._random, self._scenario.raise_in
        if not names and random.random() < TICKS:
            names = frozenset({"Tick"})
        most = FEW_LINES_LOG2 if self._scenario.raise_in else LINES_LOG2
        plant = Plant(int(2 ** random.uniform(0.0, most)), names)
        self._cluster.network.at(when, lambda: node.plants.append(plant))

    def _stop(self, node: Node, when: float) -> None:
        self._stop_for(node, when, self._random.uniform(0.05, STOP_S))

    def _pause(self, node: Node, when: float) -> None:
        self._stop_for(node, when, self._random.uniform(*PAUSE_S))

    def _absent(self, node: Node, when: float) -> None:
        worker = self._random.choice(self._cluster.workers)
        self._stop_for(worker, when, self._random.uniform(*ABSENCE_S))

    def _stop_for(self, node: Node, when: float, seconds: float) -> None:
        """Schedule SIGSTOP and SIGCONT. A long stop makes the node's connections time out."""
        network = self._cluster.network
        network.at(when, lambda: node.present.stop())
        if seconds > CONNECTION_S:
            network.at(
                when + CONNECTION_S, lambda: self._cluster.timed_out(node.present, CONNECTION_S)
            )
        network.at(when + seconds, lambda: node.present.resume())

    def _slow_step(self, node: Node, when: float) -> None:
        worker = self._random.choice(self._cluster.workers)
        seconds = self._random.uniform(*SLOW_STEP_S)

        def slow() -> None:
            worker.slow_step = seconds

        self._cluster.network.at(when, slow)

    def _twin(self, node: Node, when: float) -> None:
        """Start a second process with a worker's name: a healed partition or a mistake."""
        worker = self._random.choice(self._cluster.workers)
        self._cluster.network.at(when, lambda: self._cluster.twin(worker))

    def _hang(self, node: Node, when: float) -> None:
        worker = self._random.choice(self._cluster.workers)

        def hang() -> None:
            worker.hangs = True

        self._cluster.network.at(when, hang)

    def _flap(self, node: Node, when: float) -> None:
        one, other = self._pair()

        def flap() -> None:
            if one.alive and other.alive:
                self._cluster.flap(one, other)

        self._cluster.network.at(when, flap)

    def _partition(self, node: Node, when: float) -> None:
        """Block one direction of a connection for a while, without a disconnect event."""
        one, other = self._random.sample(self._pair(), 2)
        links = {(one.name, other.name), (one.name + "/data", other.name)}
        network = self._cluster.network
        until = when + self._random.uniform(0.05, BLOCK_S)
        network.at(when, lambda: network.blocked.update(links))
        network.at(until, lambda: network.blocked.difference_update(links))

    def _cut(self, node: Node, when: float) -> None:
        """Cut a prefill and a decode worker off from each other, without a disconnect event.

        The cut starts in the first half of the load, because all faults end with the load.
        """
        cluster, random = self._cluster, self._random
        one, other = random.choice(cluster.prefills).name, random.choice(cluster.decodes).name
        kind = random.choice(self._scenario.cut_kinds)
        links = _cut_links(kind, one, other)
        start, length = when / 2, random.uniform(0.5, CUT_S)
        cluster.network.at(start, lambda: cluster.network.blocked.update(links))
        cluster.network.at(start + length, lambda: cluster.network.blocked.difference_update(links))
        cluster.stats["cuts"] += 1

    def _isolate(self, node: Node, when: float) -> None:
        """Cut a router off from all workers, all clients or both, without a disconnect event."""
        cluster, random = self._cluster, self._random
        router = random.choice(cluster.routers)
        sides = random.choice(
            ((cluster.workers,), (cluster.clients,), (cluster.workers, cluster.clients))
        )
        names = [peer.name for side in sides for peer in side]
        links = {(router.name, name) for name in names} | {(name, router.name) for name in names}
        until = when + random.uniform(0.05, ISOLATE_S)
        cluster.network.at(when, lambda: cluster.network.blocked.update(links))
        cluster.network.at(until, lambda: cluster.network.blocked.difference_update(links))
        if cluster.workers[0].name in names and until - when > CONNECTION_S:
            back = until + random.uniform(0.0, RECONNECT_S)
            for worker in cluster.workers:
                timed_out = partial(cluster.cut_off, router, worker, back)
                cluster.network.at(when + CONNECTION_S, timed_out)

    def _drain(self, node: Node, when: float) -> None:
        """Drain a worker, by SIGTERM or by an operator's request to the router."""
        cluster, asked = self._cluster, self._random.random() < 0.5
        worker = self._random.choice(cluster.workers)
        operator = self._random.choice(cluster.clients)

        def drain() -> None:
            if asked and operator.alive:
                operator.when_up(lambda: operator.drain(worker.name))()
            elif worker.alive:
                worker.when_up(worker.drain)()

        cluster.network.at(when, drain)

    def _turn(self, node: Node, when: float) -> None:
        """Change the role of a worker whose pool keeps another one."""
        cluster, choice = self._cluster, self._random.random()
        grace = self._random.choice((0.0, 0.1, 30.0))

        def turn() -> None:
            staying = [worker for worker in cluster.workers if not worker.turning]
            roles = [worker.role for worker in staying]
            able = [worker for worker in staying if roles.count(worker.role) > 1 and worker.alive]
            if able:
                worker = able[int(choice * len(able))]
                worker.turning = True  # from the order on, also if it dies before it reads it
                worker.when_up(partial(worker.turn, grace))()

        cluster.network.at(when, turn)

    def _jump(self, node: Node, when: float) -> None:
        """Move a node's clock forward (resumed host, corrected clock): all its timers are due."""
        seconds = self._random.choice((0.3, 1.5, 4.0))

        def jump() -> None:
            node.skew += seconds

        self._cluster.network.at(when, jump)

    def _slow(self, node: Node, when: float) -> None:
        client = self._random.choice(self._cluster.clients)
        until = when + self._random.uniform(0.05, 1.0)
        self._cluster.network.at(when, lambda: client.read(reading=False))
        self._cluster.network.at(until, lambda: client.read(reading=True))

    def _misfit(self, node: Node, when: float) -> None:
        """Restart a worker with another model, once."""
        worker = self._random.choice(self._cluster.workers)

        def replace() -> None:
            worker.misfit = True
            worker.crash()

        self._cluster.network.at(when, replace)

    def _forge(self, node: Node, when: float) -> None:
        self._cluster.network.at(when, self._cluster.supervisor.forge)

    def _pair(self) -> tuple[Node, Node]:
        """Return two nodes that have a connection."""
        cluster, random = self._cluster, self._random
        router = random.choice(cluster.routers)
        kind = random.randrange(3 if cluster.prefills and cluster.decodes else 2)
        if kind == 0:
            return router, random.choice(cluster.workers)
        if kind == 1:
            return router, random.choice([c for c in cluster.clients if c.router is router])
        return random.choice(cluster.prefills), random.choice(cluster.decodes)


def _cut_links(kind: str, prefill: str, decode: str) -> set[Link]:
    """Return the blocked directions of a kind of cut; KV frames use a separate connection."""
    control, data = (prefill, decode), (prefill + "/data", decode)
    back = (decode, prefill)
    return {
        "both": {control, data, back},
        "there": {control, data},
        "back": {back},
        "data": {data},
        "control": {control},
    }[kind]
