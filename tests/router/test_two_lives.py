"""Two processes with one name, in random orders and with all faults: a healthy one keeps the name.

Only the router's core runs, so 100,000 runs take minutes (``-m full``). The simulator does the same
with whole workers (scenarios ``lives`` and ``twins``), and tests/cluster with processes.
"""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from baton.proto.wire.messages import Heartbeat, PeerDead, Rejected, RequestState
from baton.router.events import Tick, WorkersGone
from baton.router.states import WorkerState

from .conftest import Bench, make_config

RUNS, FULL_RUNS = 2_000, 100_000
STEPS = 30
HEALTHY_S = 0.6
"""A connected process with a heartbeat within this many seconds must keep its name."""


class Life:
    """One process with the name: the messages that it sends to the router."""

    def __init__(self, bench: Bench, hello, number: int) -> None:
        self.bench = bench
        self.hello = msgspec.structs.replace(
            hello, incarnation=500 + number, pid=500 + number, endpoint=f"ipc:///run/{number}"
        )
        self.connections = 0
        self.identity = b""
        self.beat_at = float("-inf")

    @property
    def registered(self) -> bool:
        found = self.bench.core.registry.by_identity(self.identity)
        return found is not None and found.incarnation == self.hello.incarnation

    @property
    def healthy(self) -> bool:
        return self.registered and self.bench.now - self.beat_at <= HEALTHY_S

    def connect(self, **changes) -> None:
        """Send Hello over a new connection; ``changes`` make it invalid."""
        if not changes:
            self.connections += 1
            self.identity = b"%d/%d" % (self.hello.incarnation, self.connections)
            self.beat_at = self.bench.now
        peer = b"wrong" if changes else self.identity
        self.bench.hear(peer, msgspec.structs.replace(self.hello, **changes))
        if changes:
            self.bench.feed(WorkersGone([peer]))

    def beat(self) -> None:
        if self.identity:
            self.beat_at = self.bench.now
            self.bench.hear(
                self.identity, Heartbeat(incarnation=self.hello.incarnation, progress=0)
            )

    def gone(self) -> None:
        if self.identity:
            self.bench.feed(WorkersGone([self.identity]))
            self.identity = b""


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.bench = Bench(make_config())
        self.role = self.random.choice(("prefill", "decode"))
        other = "decode" if self.role == "prefill" else "prefill"
        self.other = self.bench.join(other)
        template = self.bench.join(self.role).hello
        self.bench.workers.pop().gone()
        self.lives = [Life(self.bench, template, number) for number in (1, 2)]
        if self.random.random() < 0.5:
            self.bench.submit()

    def step(self) -> None:
        random, bench = self.random, self.bench
        actor = random.choice(self.lives)
        others = [life for life in self.lives if life is not actor]
        healthy = [life for life in others if life.healthy]
        card = actor.hello.model
        act = random.choice(
            (
                actor.connect,
                actor.beat,
                actor.beat,
                actor.gone,
                lambda: actor.connect(version=1),
                lambda: actor.connect(role="cook"),
                lambda: actor.connect(endpoint=others[0].hello.endpoint),
                lambda: actor.connect(model=msgspec.structs.replace(card, fingerprint="other")),
                lambda: actor.connect(incarnation=random.choice((3, 501, 502))),
                lambda: actor.connect(requests=[RequestState(b"k" * 16, 1, 5, 3)]),
                lambda: bench.feed(Tick()),
                self.pass_time,
            )
        )
        sent = {peer: len(messages) for peer, messages in bench.sent.items()}
        act()
        if act == self.pass_time:
            return
        for life in healthy:
            said = bench.sent[life.identity][sent.get(life.identity, 0) :]
            assert life.registered, "a healthy worker lost its name"
            assert not [m for m in said if isinstance(m, Rejected)], said
        told = bench.sent[self.other.identity][sent.get(self.other.identity, 0) :]
        dead = {m.incarnation for m in told if isinstance(m, PeerDead)}
        assert not dead & {life.hello.incarnation for life in healthy}

    def pass_time(self) -> None:
        """Advance the clock; none, one or both of the processes send heartbeats."""
        heard = [life for life in self.lives if self.random.random() < 0.7]
        for _ in range(self.random.choice((1, 3, 10, 40, 120))):
            self.bench.now += 0.05
            self.other.beat()
            for life in heard:
                before = life.healthy
                life.beat()
                assert life.registered or not before, "a heartbeat made it lose its name"
            self.bench.feed(Tick())

    def settle(self) -> None:
        """Keep one process, which retries after each rejection: it must become ready."""
        last = self.random.choice(self.lives)
        for life in self.lives:
            if life is not last:
                life.gone()
        for _ in range(3):
            if last.registered:
                break
            incarnation = last.hello.incarnation + 1000 * (1 + last.connections)
            last.hello = msgspec.structs.replace(last.hello, incarnation=incarnation)
            last.connect()
        last.beat()
        self.bench.feed(Tick())
        found = self.bench.core.registry.by_identity(last.identity)
        assert found is not None and found.state is WorkerState.READY


def play(seed: int) -> None:
    world = World(seed)
    try:
        for _ in range(STEPS):
            world.step()
        world.settle()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def test_a_healthy_life_of_a_name_is_never_lost():
    for seed in range(RUNS):
        play(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_healthy_life_of_a_name_is_never_lost_in_100_000_runs():
    for seed in range(1_000_000, 1_000_000 + FULL_RUNS):
        play(seed)
