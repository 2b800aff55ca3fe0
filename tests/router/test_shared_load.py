"""Two routers share workers, and learn each other's load from heartbeats."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.proto.wire.messages import Assign, Heartbeat, Share, WorkerLoad
from baton.router.config import AdmissionConfig, PolicyConfig


class Both:
    """Two routers with the same two prefill and two decode workers."""

    def __init__(self, make_bench, policy="least_loaded", **settings):
        self.benches = [
            make_bench(name=f"router-{n}", policy=PolicyConfig(name=policy), **settings)
            for n in range(2)
        ]
        for bench in self.benches:
            for number in range(2):
                bench.join("prefill", number, max_batch=2)
                bench.join("decode", number, max_batch=2)
        self.given: Counter[str] = Counter()
        self.asked = 0

    def submit(self, router, **fields):
        """Submit a request at a router; return the name of its decode worker."""
        bench = self.benches[router]
        self.asked += 1
        bench.submit(f"r{self.asked}", **fields)
        _, assign = bench.find(Assign)
        name = assign.decode.removeprefix("ipc:///run/")
        self.given[name] += 1
        return name

    def beat(self):
        """Send heartbeats with every router's share from all workers to all routers."""
        for bench in self.benches:
            for worker in bench.workers:
                shares = {
                    other.config.name: Share(len(known.requests), known.outstanding)
                    for other in self.benches
                    if (known := other.core.registry.find(worker.endpoint)) is not None
                }
                load = WorkerLoad(shares=shares)
                worker.say(Heartbeat(incarnation=worker.hello.incarnation, progress=0, load=load))


@pytest.fixture
def both(make_bench):
    return Both(make_bench)


def test_a_router_leaves_alone_what_the_other_has_filled(both):
    for _ in range(6):
        both.submit(0, target_endpoint="ipc:///run/decode-0")
    both.beat()
    assert [both.submit(1) for _ in range(6)] == ["decode-1"] * 6
    both.beat()
    assert {both.submit(router) for router in (0, 1)} == {"decode-0", "decode-1"}


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware", "round_robin"])
def test_two_routers_spread_what_they_are_given_together(make_bench, policy):
    both = Both(make_bench, policy)
    for number in range(28):
        both.submit(number % 2, prompt=70 + number)
        if number % 8 == 7:
            both.beat()
    assert max(both.given.values()) - min(both.given.values()) <= 4, both.given


def test_two_routers_begin_with_different_workers(both):
    assert {both.submit(0), both.submit(1)} == {"decode-0", "decode-1"}


def test_what_another_router_has_counts_against_the_cap(make_bench):
    both = Both(make_bench, admission=AdmissionConfig(requests_per_slot=2.0))
    for _ in range(3):
        both.submit(1)
    both.beat()
    for _ in range(5):  # the limit is 8 requests for 4 slots
        both.submit(0)
    first = both.benches[0]
    key = first.submit("one more")
    assert first.terminals(key)[0].code == "overloaded"


def test_every_router_may_fill_the_slots_whatever_the_others_have(make_bench):
    both = Both(make_bench, admission=AdmissionConfig(requests_per_slot=2.0))
    for _ in range(8):
        both.submit(1)
    both.beat()
    for _ in range(4):
        both.submit(0)


def test_a_workers_own_share_is_not_counted_twice(both):
    both.submit(0)
    both.beat()
    registry = both.benches[0].core.registry
    assert registry.others == 0
    assert all(worker.others == 0 for worker in registry.live())
