"""One simulated run: load, faults, a quiet end, the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .clients import ClientNode, Record
from .cluster import Cluster, Shape
from .invariants import Violation, check_all
from .network import Faults


@dataclass(slots=True, frozen=True)
class Scenario:
    """What happens in a run.

    ``crashes`` and ``stops``: how many; drawn over all nodes named by ``victims``
    (``prefill``, ``decode``, ``router``, ``client``). ``load_s``: how long requests come and
    faults strike; ``patience_s``: simulated time by which everything must have ended.
    """

    requests: int = 30
    load_s: float = 1.0
    faults: Faults = field(default_factory=Faults)
    crashes: int = 0
    stops: int = 0
    cancels: float = 0.0
    pins: float = 0.0
    victims: tuple[str, ...] = ("prefill", "decode")
    shape: Shape = field(default_factory=Shape)
    patience_s: float = 60.0


def run(seed: int, scenario: Scenario) -> Counter[str]:
    """Play a scenario; returns its figures, raises Violation with the seed."""
    cluster = Cluster(seed, scenario.shape, scenario.faults)
    network = cluster.network
    _plan_load(cluster, scenario)
    _plan_faults(cluster, scenario)
    network.at(scenario.load_s, lambda: _calm(cluster))
    try:
        while network.now < scenario.patience_s and not _settled(cluster, scenario):
            network.step()
        check_all(cluster)
    except Exception as error:
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error
    return _figures(cluster)


def _plan_load(cluster: Cluster, scenario: Scenario) -> None:
    random = cluster.network.random
    shared = [random.randrange(1, 250) for _ in range(40)]
    for number in range(scenario.requests):
        client = random.choice(cluster.clients)
        length = random.randint(1, 60)
        prompt = [random.randrange(1, 250) for _ in range(length)]
        if random.random() < 0.4:
            prompt = shared[: random.randint(4, 40)] + prompt[:6]
        record = Record(f"{number}", prompt, random.randint(1, 24), scenario.patience_s * 2)
        if random.random() < scenario.pins:
            record.endpoint = random.choice(cluster.workers).endpoint
        when = random.uniform(0.05, scenario.load_s)
        cluster.network.at(when, lambda c=client, r=record: _submit(cluster, c, r))  # type: ignore[misc]
        if random.random() < scenario.cancels:
            later = when + random.uniform(0.0, 0.1)
            cluster.network.at(later, lambda c=client, r=record: _cancel(c, r))  # type: ignore[misc]


def _submit(cluster: Cluster, client: ClientNode, record: Record) -> None:
    if client.alive:
        client.when_up(lambda: client.submit(record))()
    else:
        cluster.network.after(0.1, lambda: _submit(cluster, client, record))


def _cancel(client: ClientNode, record: Record) -> None:
    if client.alive and record in client.live.values():
        client.cancel(record)


def _plan_faults(cluster: Cluster, scenario: Scenario) -> None:
    random, network = cluster.network.random, cluster.network
    nodes = [n for n in cluster.nodes if n.name.split("-")[0] in scenario.victims]
    for _ in range(scenario.crashes if nodes else 0):
        network.at(random.uniform(0.0, scenario.load_s), random.choice(nodes).crash)
    for _ in range(scenario.stops if nodes else 0):
        node = random.choice(nodes)
        start = random.uniform(0.0, scenario.load_s)
        pause = random.uniform(0.05, 3.0)
        network.at(start, node.stop)
        network.at(start + pause, node.resume)


def _calm(cluster: Cluster) -> None:
    """The faults stop."""
    cluster.network.faults = Faults()


def _settled(cluster: Cluster, scenario: Scenario) -> bool:
    if cluster.network.now < scenario.load_s + 0.5:
        return False
    if any(not node.alive or node.stopped for node in cluster.nodes):
        return False
    open_requests = any(client.live for client in cluster.clients)
    idle = all(node.core.idle and not node.cache.pool.used for node in cluster.workers)
    return not open_requests and idle and not cluster.router.core.unfinished


def _figures(cluster: Cluster) -> Counter[str]:
    figures = Counter(cluster.stats)
    network = cluster.network
    figures.update(
        events=network.events,
        messages=network.sent,
        lost=network.lost,
        duplicated=network.duplicated,
        reordered=network.reordered,
        milliseconds=int(network.now * 1000),
        preemptions=sum(n.scheduler.load().preemptions for n in cluster.decodes),
    )
    for client in cluster.clients:
        for record in client.history:
            figures["requests"] += 1
            figures["tokens"] += len(record.tokens)
            figures["repeated_tokens"] += record.repeats
            end = (
                "orphaned"
                if record.orphaned
                else (record.terminals[0].status or record.terminals[0].code or "")
            )
            figures[f"ended {end}"] += 1
    return figures
