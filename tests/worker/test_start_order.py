"""The order of waiting prompts: prompts in time first, now and then a late prompt."""

import itertools
import math
import random
from functools import partial

import pytest

from baton.simulator.own_errors import Plant, Planted
from baton.worker.start_order import LATE_TURN, LOOK, Pace, RankedOrder, StartOrder


def filled(start_by: dict[str, float]) -> StartOrder[str]:
    order = StartOrder(start_by.__getitem__)
    for place, key in enumerate(start_by):
        order.put(key, place)
    return order


def drained(order: StartOrder[str], now: float) -> str:
    return "".join(iter(lambda: order.pop(now) or "", ""))


def test_without_a_time_to_keep_the_order_of_coming_decides():
    order = StartOrder()
    for place, key in ((2, "c"), (0, "a"), (1, "b")):
        order.put(key, place)
    assert drained(order, math.inf) == "abc"


def test_who_is_late_waits_behind_all_that_are_in_time():
    order = filled({"a": 1.0, "b": 9.0, "c": 2.0, "d": 5.0})
    assert drained(order, now=5.0) == "bdac"  # each rank in the order of coming


def test_everybody_in_time_goes_in_the_order_of_coming():
    assert drained(filled({"a": 9.0, "b": 6.0, "c": 7.0}), now=5.0) == "abc"


def test_who_became_late_while_it_waited_is_overtaken():
    order = filled({"a": 5.0, "b": 9.0})
    order.put("c", 2.5)
    order.drop("c")
    assert order.pop(now=6.0) == "b"
    assert order.pop(now=6.0) == "a"
    assert order.pop(now=6.0) is None
    assert len(order) == 0


def test_late_ones_get_their_share_of_the_starts():
    """However many prompts in time arrive, a late prompt waits for so many starts at most."""
    order: StartOrder[str] = StartOrder(lambda key: 0.0 if key.startswith("late") else math.inf)
    for place in range(3):
        order.put(f"late {place}", place)
    taken = []
    for place in range(3, 3 + 4 * LATE_TURN):
        order.put(f"new {place}", place)
        taken.append(order.pop(1.0))
    turns = [at for at, key in enumerate(taken) if key.startswith("late")]
    assert [taken[at] for at in turns] == ["late 0", "late 1", "late 2"]
    assert turns[0] < LATE_TURN
    assert turns[1] - turns[0] == turns[2] - turns[1] == LATE_TURN
    new = [key for key in taken if key.startswith("new")]
    assert new == sorted(new, key=lambda key: int(key.split()[1]))


def costly(prompts: dict[str, tuple[float, float]]) -> StartOrder[str]:
    """Return an order of prompts with deadlines and seconds."""
    order = StartOrder(lambda key: prompts[key][0] - prompts[key][1], lambda key: prompts[key][1])
    for place, key in enumerate(prompts):
        order.put(key, place)
    return order


def in_time(order: StartOrder[str], prompts: dict[str, tuple[float, float]]) -> set[str]:
    """Start one prompt after the other; return those that end by their deadlines."""
    at, kept = 0.0, set()
    while (key := order.pop(at)) is not None:
        at += prompts[key][1]
        if at <= prompts[key][0]:
            kept.add(key)
    return kept


def test_of_a_burst_the_longest_prompts_are_late():
    prompts = {"a": (5.0, 1.0), "long": (5.0, 4.0), "b": (5.0, 2.0), "c": (5.0, 2.0)}
    assert drained(costly(prompts), 0.0) == "abclong"
    alone = {"long": (5.0, 4.0), "b": (6.0, 2.0)}
    assert in_time(costly(alone), alone) == {"long", "b"}  # it delays no other


@pytest.mark.parametrize("seed", range(20))
def test_as_many_prompts_as_possible_are_in_time(seed):
    """Beside all sets of prompts that could be in time, with deadlines in the order of coming."""
    chance = random.Random(seed)
    deadlines = sorted(chance.uniform(1, 8) for _ in range(8))
    prompts = {f"{n}": (by, chance.uniform(0.2, 4)) for n, by in enumerate(deadlines)}
    most = 0
    for chosen in itertools.product((False, True), repeat=len(prompts)):
        picked = [cost for cost, taken in zip(prompts.values(), chosen, strict=True) if taken]
        ends = itertools.accumulate(seconds for _, seconds in picked)
        if all(at <= by for at, (by, _) in zip(ends, picked, strict=True)):
            most = max(most, len(picked))
    assert len(in_time(costly(prompts), prompts)) == most


def test_a_late_prompt_waits_for_fifteen_times_its_own_seconds():
    """However long it is, and however many short ones arrive that can be in time."""
    seconds = {"long": 8.0}
    order: StartOrder[str] = StartOrder(
        lambda key: -1.0 if key == "long" else 1e9, lambda key: seconds.get(key, 1.0)
    )
    order.put("long", 0)
    for place in range(1, 200):
        order.put(f"{place}", place)
    taken = [order.pop(20.0) for _ in range(150)]
    assert taken.index("long") == (LATE_TURN - 1) * 8


def test_a_prompt_without_a_deadline_is_never_given_up():
    prompts = {"again": (math.inf, 9.0), "a": (5.0, 1.0), "b": (5.0, 1.0)}
    assert costly(prompts).pop(0.0) == "again"


def test_a_start_looks_at_few_of_many_prompts():
    prompts = {f"{n}": (1e9, 1.0) for n in range(20 * LOOK)}
    looked = []
    order = StartOrder(lambda key: 1e9, lambda key: looked.append(key) or 1.0)
    for place, key in enumerate(prompts):
        order.put(key, place)
    assert order.pop(0.0) == "0" and len(looked) == LOOK


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_lost_or_taken_twice(seed):
    """Beside a list that is searched anew each time."""
    chance = random.Random(seed)
    start_by: dict[int, float] = {}
    order = StartOrder(start_by.__getitem__)
    waiting: dict[int, int] = {}
    now = 0.0
    for place in range(400):
        now += chance.random()
        what = chance.random()
        if what < 0.5:
            start_by[place] = now + chance.uniform(-2, 20)
            waiting[place] = place
            order.put(place, place)
        elif what < 0.6 and waiting:
            gone = chance.choice(list(waiting))
            del waiting[gone]
            order.drop(gone)
        else:
            key = order.pop(now)
            assert (key is None) == (not waiting)
            if key is None:
                continue
            del waiting[key]
            in_time = [k for k in waiting if start_by[k] >= now]
            if start_by[key] >= now:
                assert all(key < other for other in in_time)
            elif in_time:  # it was a late one's turn
                assert all(key < other for other in waiting if start_by[other] < now - 20)
        assert len(order) == len(waiting)


def test_pace_follows_full_steps_and_hardly_short_ones():
    pace = Pace()
    assert pace.seconds_per_token == 0
    for _ in range(50):
        pace.learn(512, 0.512)
    assert pace.seconds_per_token == pytest.approx(1e-3)
    pace.learn(1, 1.0)  # a step of one token predicts no long step
    assert pace.seconds_per_token < 1.3e-3
    for _ in range(100):
        pace.learn(512, 1.024)
    assert pace.seconds_per_token == pytest.approx(2e-3, rel=0.01)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (-5, 1.0), (5, 0.0), (5, math.nan)])
def test_a_step_that_cannot_be_teaches_nothing(tokens, seconds):
    pace = Pace()
    pace.learn(tokens, seconds)
    assert pace.seconds_per_token == 0


@pytest.mark.parametrize("kind", ["arrival", "in time", "late", "ranked"])
def test_an_error_of_its_own_never_makes_a_key_start_twice(kind: str):
    """An exception at any line: the order ends, and has as many keys as its length says."""

    def made() -> StartOrder[str] | RankedOrder[str]:
        if kind == "ranked":
            return RankedOrder(lambda key, now: float(ord(key)))
        if kind == "arrival":
            return StartOrder()
        return StartOrder(lambda key: 1.0 if kind == "late" else 9.0, lambda key: 0.5)

    def used(order: StartOrder[str] | RankedOrder[str], taken: list[str | None]) -> list[object]:
        for place, key in enumerate("abc"):
            order.put(key, place)
        order.drop("b")
        taken.append(order.pop(2.0))
        return []

    for line in itertools.count(1):
        order, taken, plant = made(), list[str | None](), Plant(line)
        try:
            plant.run(partial(used, order, taken))
            assert line > 10
            return
        except Planted:
            pass
        counted = len(order)
        rest = [key for _ in range(9) if (key := order.pop(2.0)) is not None]
        starts = taken + rest
        assert len(set(starts)) == len(starts), plant.where
        assert counted == len(rest), plant.where  # else a key waits for ever, and nothing shows it
