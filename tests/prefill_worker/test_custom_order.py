"""Prompts by rank: in order, without starvation, and by arrival if there is no rank."""

import itertools
import random
from pathlib import Path

import pytest

from baton.extend import ExtensionError
from baton.prefill_worker.custom_order import CustomOrder
from baton.proto.wire.messages import Reserve
from baton.worker.start_order import LATE_TURN, RankedOrder

from .test_core import Bench, make_context, queue, served

ROOT = Path(__file__).parents[2]
FAULTY = str(ROOT / "tests" / "extend")
EXAMPLES = str(ROOT / "examples" / "extend")


def filled(ranks):
    order = RankedOrder(lambda key, _now: ranks[key])
    for place, key in enumerate(ranks):
        order.put(key, place)
    return order


def drained(order):
    return "".join(iter(lambda: order.pop(0.0) or "", ""))


def test_smaller_ranks_start_earlier_and_equal_ones_by_arrival():
    assert drained(filled({"a": 3.0, "b": 1.0, "c": 3.0, "d": -1.0})) == "dbac"


def test_without_ranks_the_arrival_decides():
    assert drained(filled(dict.fromkeys("abcd"))) == "abcd"


def test_a_prompt_without_a_rank_starts_before_all_that_came_later():
    assert drained(filled({"a": 5.0, "b": None, "c": 1.0})) == "bca"
    assert drained(filled({"a": 5.0, "b": None, "c": 9.0})) == "abc"


def test_no_prompt_waits_for_ever():
    order = RankedOrder(lambda key, _now: float(key))
    order.put(10**9, 0)
    for place in range(1, LATE_TURN + 1):
        order.put(place, place)
        if order.pop(0.0) == 10**9:
            return
    pytest.fail("the first prompt did not start")


def test_a_key_is_contained_once_whatever_happens():
    rng = random.Random(5)
    order, known = RankedOrder(lambda _key, _now: rng.choice((None, rng.random()))), set()
    for step in range(3000):
        if rng.random() < 0.5:
            order.put(step, step)
            known.add(step)
        elif rng.random() < 0.5 and known:
            key = rng.choice(sorted(known))
            order.drop(key)
            known.discard(key)
        else:
            key = order.pop(0.0)
            assert (key is None) == (not known)
            known.discard(key)
        assert len(order) == len(known)


def ordered(name, folder=FAULTY):
    """Return a worker with one slot and this order, and the reports of the order."""
    reports = []
    order = CustomOrder(name, folder, lambda *given: reports.append(given))
    return Bench(max_active=1, slo_ttft=2.0, order=order), reports


@pytest.mark.parametrize("name", ["Raises", "Nonsense"])
def test_prompts_of_an_order_that_fails_start_by_arrival(name):
    bench, reports = ordered(f"faulty_classes:{name}")
    names = queue(bench, a=1.5, b=2.5, c=0.0)
    bench.open()
    assert served(bench) == names
    assert {event for event, *_ in reports} == {"prefill_order.failed"}
    bench.core.check_integrity()


def test_a_slow_order_rests_and_prompts_start_by_arrival():
    reports = []
    seconds = itertools.count().__next__  # each call takes a second
    order = CustomOrder("faulty_classes:Slow", FAULTY, lambda *g: reports.append(g[0]), seconds)
    bench = Bench(max_active=1, slo_ttft=2.0, order=order)
    names = queue(bench, a=1.5, b=2.5, c=0.0)
    bench.open()
    assert served(bench) == names
    assert order.guard.skipped > 0 and order.guard.calls >= 1
    assert set(reports) == {"prefill_order.slow"}
    bench.core.check_integrity()


def test_the_example_starts_the_shortest_first():
    bench, reports = ordered("short_first:ShortFirst", EXAMPLES)
    bench.committed(bench.handing_over(key=b"0" * 16))  # 10 tokens in 10 ms
    bench.to_peer(Reserve)
    bench.assign(key=b"x" * 16)
    (first,) = bench.to_peer(Reserve)
    for name, prompt in (("l", 90), ("m", 50), ("s", 20)):
        context = make_context(prompt)
        context.tokens.array[:] = prompt  # no prefix is shared
        bench.assign(key=name.encode() * 16, context=context)
    bench.grant(first)
    bench.step()
    bench.committed(bench.commit())
    assert served(bench) == [b"s" * 16, b"m" * 16, b"l" * 16]
    assert reports == []


def test_a_missing_class_is_an_error():
    with pytest.raises(ExtensionError, match="has no Gone"):
        CustomOrder("faulty_classes:Gone", FAULTY, print)
