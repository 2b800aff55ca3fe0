"""One simulated run: load, faults, settling, checks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from .clients import ClientNode
from .cluster import Cluster
from .end_checks import check_forgotten, check_quiet, check_request
from .faults import ABSENCE_S, BLOCK_S, STOP_S, Storm
from .network import Aim, Faults
from .recording import Recording
from .records import Record
from .scenarios import Scenario
from .toy_model import KILLS_DECODE, KILLS_PREFILL, MUTE, expected_tokens
from .violation import Violation

Calls = dict[str, tuple[int, float]]
IDLE_S = 700.0
"""Seconds after which every table has expired its entries."""
MUTED = 0.1
"""Share of texts without an embedding."""
IDLE_LOOK_S = 0.7
"""Seconds in which every timer fires at least once."""


@dataclass(slots=True)
class Run:
    """One scenario with one seed.

    ``aim``: additional faults for single messages. ``at_event``: calls made after event numbers.
    ``recording``: gets what every core is given and returns. ``check_every``: as in
    :class:`.invariants.Watcher`. ``failures``, ``calls``: as in :func:`run`.
    """

    seed: int
    scenario: Scenario
    aim: Aim = field(default_factory=Aim)
    at_event: dict[int, Callable[[Cluster], None]] = field(default_factory=dict)
    recording: Recording | None = None
    check_every: int = 1
    failures: dict[str, str] = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        """Create the cluster."""
        scenario = self.scenario
        self.cluster = Cluster(
            self.seed,
            scenario.shape,
            scenario.faults,
            self.aim,
            self.recording,
            scenario.certificate_faults,
            self.check_every,
        )
        self.cluster.failures = self.failures

    def play(self) -> Counter[str]:
        """Run to the end and return the results. Raises Violation with the seed."""
        cluster, scenario, random = self.cluster, self.scenario, Random(self.seed)  # noqa: S311
        _plan_load(cluster, scenario, random)
        Storm(cluster, scenario, random).plan()
        cluster.network.at(scenario.load_s, lambda: calm(cluster))
        try:
            self._settle(scenario.load_s + scenario.settle_s)
            cluster.stats["messages_settled"] = cluster.network.sent
            cluster.stats["events_settled"] = cluster.network.events
            self._check()
            self._idle()  # everything in a grace period ends now
            self._idle()  # and its last entries expire now
            check_forgotten(cluster)
        except Exception as error:
            text = f"seed {self.seed}: {type(error).__name__}: {error}"
            raise Violation(text) from error
        finally:
            self._time_calls()
        return figures(cluster)

    def _time_calls(self) -> None:
        """Add the calls of users' classes and their seconds."""
        for guard in self.cluster.guards:
            key = f"{guard.point.name} {guard.name}"
            calls, seconds = self.calls.get(key, (0, 0.0))
            self.calls[key] = calls + guard.calls, seconds + guard.seconds

    def _settle(self, limit: float) -> None:
        network = self.cluster.network
        while network.now < limit and not _settled(self.cluster, self.scenario):
            network.step()
            strike = self.at_event.get(network.events)
            if strike is not None:
                strike(self.cluster)

    def _check(self) -> None:
        cluster, scenario = self.cluster, self.scenario
        for client in cluster.clients:
            for record in client.history:
                check_request(cluster, record, scenario.allowed, self._calm_at())
                if record.longest_wait > scenario.wait_s:
                    text = f"no message for {record.longest_wait:.1f} s"
                    raise Violation(f"{record.request_id}: {text}")
        check_quiet(cluster)
        lost = cluster.stats["worker.dead"] + cluster.stats["exits"]
        if scenario.harmless and lost:
            raise Violation(f"{lost} workers were lost although no process had ended")
        clean = not (scenario.faults.loss or scenario.faults.duplication)
        if clean and cluster.stats["bad_frames"]:
            raise Violation(f"{cluster.stats['bad_frames']} frames violated their grants")

    def _calm_at(self) -> float:
        """Return the time at which the last fault's effect ends."""
        scenario = self.scenario
        blocked = BLOCK_S if scenario.partitions else 0.0
        restart = scenario.shape.restart_s
        absent = ABSENCE_S[1] if scenario.absences else 0.0
        stopped = STOP_S if scenario.stops or scenario.pauses or scenario.slow_steps else blocked
        return scenario.load_s + max(stopped, restart, absent)

    def _idle(self) -> None:
        """Advance all clocks far enough for every timer and expiry."""
        network = self.cluster.network
        for node in self.cluster.nodes:
            node.skew += IDLE_S
        until = network.now + IDLE_LOOK_S
        while network.now < until:
            network.step()


def run(
    seed: int,
    scenario: Scenario,
    recording: Recording | None = None,
    check_every: int = 1,
    failures: dict[str, str] | None = None,
    calls: Calls | None = None,
) -> Counter[str]:
    """Run a scenario and return its results. Raises Violation with the seed.

    ``failures``: gets the first traceback of each kind of failure of users' own classes. ``calls``:
    gets their numbers of calls and the seconds of these on this machine, by point and name.
    """
    failures, calls = {} if failures is None else failures, {} if calls is None else calls
    return Run(
        seed, scenario, recording=recording, check_every=check_every, failures=failures, calls=calls
    ).play()


def _plan_load(cluster: Cluster, scenario: Scenario, random: Random) -> None:
    shared = [random.randrange(1, 250) for _ in range(40)]
    for number in range(scenario.requests):
        client = random.choice(cluster.clients)
        record = _request(cluster, scenario, random, number, shared)
        if number < scenario.poison:
            record.prompt[-1] = KILLS_DECODE if number % 2 and not record.embed else KILLS_PREFILL
            record.poison = True
        elif record.embed and random.random() < MUTED:
            record.prompt[-1], record.mute = MUTE, True
        when = random.uniform(0.05, scenario.load_s)
        cluster.network.at(when, partial(_submit, cluster, client, record))
        if random.random() < scenario.cancels:
            soon = random.choice((0.02, 0.2))
            later, report = when + random.uniform(0.0, soon), random.random() < 0.7
            call = partial(_cancel, client, record, report=report)
            cluster.network.at(later, call)


def _request(
    cluster: Cluster, scenario: Scenario, random: Random, number: int, shared: list[int]
) -> Record:
    prompt = [random.randrange(1, 250) for _ in range(random.randint(1, scenario.prompt))]
    if random.random() < 0.4:
        prompt = shared[: random.randint(4, 40)] + prompt[:6]
    elif random.random() < 0.1:
        prompt = shared[:16]  # whole blocks, so that a repetition finds all of it cached
    record = Record(f"{number}", prompt, random.randint(1, scenario.answer))
    record.embed, record.draws = bool(scenario.shape.embed), scenario.shape.draws
    if random.random() < scenario.names:
        record.request_id = f"name-{number % 3}"
    if random.random() < scenario.deadlines:
        record.deadline = random.uniform(0.005, 1.5)
    if scenario.structured and random.random() < scenario.structured:
        record.schema = json.dumps(expected_tokens(record.prompt, record.max_new_tokens))
    if random.random() < scenario.pins:
        record.endpoint = random.choice(cluster.workers).endpoint
        record.pin = random.choice(("prefer", "strict"))
        record.fallback = random.random() < 0.5
    return record


def _submit(cluster: Cluster, client: ClientNode, record: Record) -> None:
    if client.alive:
        client.when_up(lambda: client.submit(record))()
    else:
        cluster.network.after(0.1, lambda: _submit(cluster, client, record))


def _cancel(client: ClientNode, record: Record, *, report: bool) -> None:
    if client.alive:
        client.when_up(lambda: client.cancel(record, report=report))()


def calm(cluster: Cluster) -> None:
    """The faults stop."""
    cluster.network.faults = Faults()
    cluster.network.blocked.clear()
    cluster.end_twins()
    for client in cluster.clients:
        if client.alive:
            client.read(reading=True)


def _settled(cluster: Cluster, scenario: Scenario) -> bool:
    if cluster.network.now < scenario.load_s + 0.5:
        return False
    if any(client.live for client in cluster.clients):  # first, as the most frequent reason
        return False
    if any(router.core.unfinished for router in cluster.routers):
        return False
    if any(not node.alive or node.stopped for node in cluster.nodes):
        return False
    return all(
        node.core.idle and not node.blocks_used and not node.member.unacknowledged
        for node in cluster.workers
    )


def figures(cluster: Cluster) -> Counter[str]:
    """Sums of what happened."""
    sums = Counter(cluster.stats)
    network = cluster.network
    sums.update(
        events=network.events,
        messages=network.sent,
        lost=network.lost,
        duplicated=network.duplicated,
        reordered=network.reordered,
        milliseconds=int(network.now * 1000),
        preemptions=sum(node.preempted for node in cluster.workers),
        local=sum(router.core.metrics.local.total() for router in cluster.routers),
        replays=sum(router.core.metrics.replayed for router in cluster.routers),
    )
    for client in cluster.clients:
        for record in client.history:
            sums["requests"] += 1
            sums["tokens"] += len(record.tokens)
            end = record.ends[0] if record.ends else None
            sums["vectors"] += end is not None and end.embedding is not None
            code = end.error.code if end is not None and end.error is not None else ""
            sums[f"ended {(end.status or code) if end is not None else 'orphaned'}"] += 1
    return sums
