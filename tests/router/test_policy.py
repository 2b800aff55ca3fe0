"""The policies, and the reason for the load term of prefix_aware."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from random import Random

import pytest

from baton.proto.errors import ConfigError
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import Assign, Hello
from baton.router.config import POLICIES, PolicyConfig
from baton.router.policy import LeastLoaded, PrefixAware, PrefixIndex, RoundRobin, make_policy
from baton.router.records import Worker

BLOCK = 64


def workers(card, count=4, role="prefill"):
    return [
        Worker(
            b"w%d" % i,
            Hello(
                version=PROTOCOL_VERSION, worker=f"w{i}", role=role, incarnation=i + 1, pid=i,
                endpoint=f"ipc:///w{i}", model=card,
            ),
            0.0,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_policy_that_chooses_one_of_the_workers(card, name):
    policy = make_policy(PolicyConfig(name=name))
    some = workers(card)
    for i in range(20):
        chosen = policy.choose(some[: 1 + i % 4], [b"h"])
        assert chosen in some[: 1 + i % 4]
        policy.placed(chosen, [b"h"], 64)
        policy.forget(some[i % 4])


def test_an_unknown_name_is_a_config_error():
    with pytest.raises(ConfigError, match="random"):
        make_policy(PolicyConfig(name="random"))


def test_round_robin_takes_everyone_in_turn_per_role(card):
    policy = RoundRobin()
    prefills, decodes = workers(card, 3), workers(card, 2, "decode")
    chosen = [policy.choose(prefills, ()).id for _ in range(6)]
    assert chosen == ["w0", "w1", "w2"] * 2
    assert [policy.choose(decodes, ()).id for _ in range(4)] == ["w0", "w1"] * 2


def test_least_loaded_takes_the_fewest_outstanding_tokens_and_equals_in_turn(card):
    policy = LeastLoaded()
    some = workers(card)
    assert Counter(policy.choose(some, ()).id for _ in range(40)) == dict.fromkeys(
        ("w0", "w1", "w2", "w3"), 10
    )
    for worker, load in zip(some, (500, 300, 100, 200), strict=True):
        worker.outstanding = load
    assert policy.choose(some, ()).id == "w2"


def test_the_prefix_index_counts_leading_blocks_and_forgets_the_oldest():
    index = PrefixIndex(4)
    chain = [b"%d" % i for i in range(6)]
    index.add(chain[:3])
    assert index.match(chain) == 3
    assert index.match([b"x", *chain]) == 0
    index.add([b"a", b"b"])
    assert len(index) == 4
    assert index.match(chain) == 2  # the tail of the older chain was evicted first


@pytest.mark.parametrize("capacity", [1, 7, 40, 1000])
def test_matches_of_random_conversations_are_the_leading_known_blocks(capacity):
    random = Random(capacity)
    index = PrefixIndex(capacity)
    chains: list[list[bytes]] = [[]]
    for _ in range(2000):
        base = random.choice(chains)
        chain = [*base[: random.randint(0, len(base))]]
        while len(chain) < 60 and random.random() < 0.9:
            chain.append(random.randbytes(8))
        leading = list(takewhile(index._blocks.__contains__, chain))
        assert index.match(chain) == len(leading)
        assert not {*chain[len(leading) :]} & {*index._blocks}
        index.add(chain)
        chains = [*chains[-20:], chain]


def test_prefix_aware_returns_to_the_worker_that_has_the_prefix(card):
    policy = PrefixAware(PolicyConfig())
    some = workers(card)
    chain = [b"%d" % i for i in range(16)]
    first = policy.choose(some, chain)
    policy.placed(first, chain, 16 * BLOCK)
    for _ in range(3):
        assert policy.choose(some, chain) is first
    policy.forget(first)
    first.outstanding = 1
    assert policy.choose(some, chain) is not first


def test_prefix_aware_leaves_a_worker_that_is_overloaded(card):
    policy = PrefixAware(PolicyConfig())
    some = workers(card)
    chain = [b"%d" % i for i in range(4)]
    first = policy.choose(some, chain)
    policy.placed(first, chain, 4 * BLOCK)
    first.outstanding = 100_000
    assert policy.choose(some, chain) is not first


def conversations(turns=6, users=150):
    """Yield block chains of interleaved conversations; all share block 0, each turn adds 8."""
    for turn in range(turns):
        for user in range(users):
            length = 8 * (turn + 1)
            yield [b"system", *(b"%d/%d" % (user, i) for i in range(length))]


def hit_share(card, config, capacity):
    """Return the share of blocks found in the chosen workers' LRU caches."""
    policy = make_policy(config)
    some = workers(card)
    caches = {worker.id: PrefixIndex(capacity) for worker in some}
    hits = total = 0
    for chain in conversations():
        worker = policy.choose(some, chain if policy.wants_hashes else ())
        policy.placed(worker, chain if policy.wants_hashes else (), len(chain) * BLOCK)
        hits += caches[worker.id].match(chain)
        caches[worker.id].add(chain)
        total += len(chain)
    return hits / total


def test_without_the_load_term_a_shared_first_block_ruins_every_cache(card):
    """Without the load term there are fewer hits than with round robin; with it, many more."""
    capacity = 2000  # of 7200 blocks in total
    greedy = PolicyConfig(prefill_load=0.0, index_blocks=1 << 20)
    turns = hit_share(card, PolicyConfig(name="round_robin"), capacity)
    collapsed = hit_share(card, greedy, capacity)
    balanced = hit_share(card, PolicyConfig(index_blocks=capacity), capacity)
    assert balanced > 2 * collapsed
    assert balanced > 1.5 * turns
    assert balanced > 0.5


def test_the_router_sends_a_repeated_prompt_where_it_was_computed(make_bench):
    bench = make_bench()
    for number in range(4):
        bench.join("prefill", number)
        bench.join("decode", number)
    seen = set()
    for i in range(5):
        key = bench.submit(f"r{i}", prompt=1000)
        worker, assign = bench.find(Assign)
        worker.accept(assign)
        worker.tokens(key, 1000, 5)
        worker.end(key, 1001)
        bench.ack(key)
        bench.advance(3.0)
        seen.add(worker.id)
    assert len(seen) == 1


def test_least_loaded_spreads_outstanding_work(make_bench):
    bench = make_bench(policy=PolicyConfig(name="least_loaded"))
    for number in range(2):
        bench.join("prefill", number)
        bench.join("decode", number)
    bench.submit("long", prompt=2000)
    heavy, _ = bench.find(Assign)
    light = set()
    for i in range(5):
        bench.submit(f"r{i}", prompt=50)
        light.add(bench.find(Assign)[0].id)
    assert heavy.id not in light
