"""The timers and expiring tables, each against a plain model."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.tables import SLACK, SLOT_S, ExpiringMap, KeyedHeap, RecentMap, TimerWheel

ROUNDING_S = 1e-5
WAITS = st.floats(0.0, 600.0) | st.floats(0.0, 3.0)


class Owner:
    def __init__(self) -> None:
        self.slot, self.due_at = -1, 0.0


# ---------------------------------------------------------------------- the timer wheel


@given(
    st.lists(
        st.tuples(st.sampled_from(["arm", "cancel", "due"]), st.integers(0, 4), WAITS), max_size=40
    )
)
def test_the_wheel_returns_each_owner_once_and_at_most_a_slot_late(steps):
    wheel: TimerWheel[Owner] = TimerWheel()
    owners, plain, now = [Owner() for _ in range(5)], {}, 0.0
    for step, number, wait in steps:
        if step == "arm":
            wheel.arm(owners[number], now + wait, now)
            plain[number] = now + wait
        elif step == "cancel":
            wheel.cancel(owners[number])
            plain.pop(number, None)
        else:
            now += wait
            fired = wheel.due(now)
            for owner in fired:
                assert plain.pop(owners.index(owner)) <= now + ROUNDING_S
            assert all(when > now - SLOT_S - ROUNDING_S for when in plain.values())
        assert len(wheel) == len(plain)
        if plain:
            assert wheel.next_time() <= min(plain.values()) + SLOT_S + ROUNDING_S
        else:
            assert wheel.next_time() is None


def test_the_wheel_wakes_its_caller_in_time():
    wheel: TimerWheel[Owner] = TimerWheel()
    owners = {}
    for when in [0.003, 0.5, 1.999, 2.001, 37.123, 600.0]:
        owner = Owner()
        wheel.arm(owner, when, 0.0)
        owners[id(owner)] = (owner, when)
    now = 0.0
    while owners:
        now = max(now + 1e-6, wheel.next_time())
        for owner in wheel.due(now):
            _, when = owners.pop(id(owner))
            assert when - ROUNDING_S <= now <= when + 2 * SLOT_S


def test_the_wheel_moves_a_timer_both_ways():
    wheel: TimerWheel[Owner] = TimerWheel()
    owner = Owner()
    wheel.arm(owner, 5.0, 0.0)
    wheel.arm(owner, 1.0, 0.0)
    wheel.arm(owner, 3.0, 0.5)
    assert wheel.due(2.0) == []
    assert wheel.due(3.01) == [owner]


def test_cancelled_timers_take_no_memory():
    wheel: TimerWheel[Owner] = TimerWheel()
    for i in range(20_000):
        owner = Owner()
        wheel.arm(owner, i * 0.001 + 600.0, i * 0.001)
        wheel.cancel(owner)
    assert len(wheel._slots) < 100


# ---------------------------------------------------------------------- the keyed heap


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "drop", "pop", "due"]), st.integers(0, 6), st.integers(0, 9)
        )
    )
)
def test_the_heap_returns_each_key_once_and_in_order(steps):
    heap: KeyedHeap[int] = KeyedHeap()
    plain: dict[int, int] = {}
    for step, key, at in steps:
        in_order = sorted(plain, key=lambda one: plain[one])  # stable: in put order
        due = [one for one in in_order if plain[one] <= at]
        if step == "put":
            heap.put(key, at)
            plain.pop(key, None)
            plain[key] = at
        elif step == "drop":
            heap.drop(key)
            plain.pop(key, None)
        elif step == "pop":
            assert heap.pop(at) == (due[0] if due else None)
            due = due[:1]
        else:
            assert heap.due(at) == due
        if step in ("pop", "due"):
            plain = {one: when for one, when in plain.items() if one not in due}
        assert len(heap) == len(plain)
        assert all(one in heap for one in plain)
        assert heap.first() == min(plain.values(), default=None)


def test_dropped_and_moved_keys_take_no_memory():
    heap: KeyedHeap[object] = KeyedHeap()
    for number in range(10_000):
        heap.put(number, number)
        heap.put("again", number)
        heap.drop(number - 3)
    assert len(heap) == 4
    assert len(heap._heap) <= 2 * len(heap) + SLACK + 1


# ---------------------------------------------------------------------- the expiring map


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "keep", "expire", "wait"]),
            st.integers(0, 6),
            st.integers(0, 9),
        )
    ),
    st.integers(1, 5),
)
def test_the_map_equals_a_plain_dictionary(steps, capacity):
    table: ExpiringMap[int, int] = ExpiringMap(capacity)
    plain: dict[int, tuple[int, float]] = {}
    now, swept, evicted = 0.0, -math.inf, 0
    for number, (step, key, wait) in enumerate(steps):
        if step in ("put", "keep"):
            until = now + wait if step == "put" else math.inf
            table.put(key, number, until)
            plain.pop(key, None)
            plain[key] = (number, until)
            if len(plain) > capacity:
                first = min(plain, key=lambda one: plain[one][1])  # of equal ones the oldest
                evicted += plain.pop(first)[1] > swept
        elif step == "expire":
            table.expire(now)
            swept = now
            plain = {one: entry for one, entry in plain.items() if entry[1] > now}
        else:
            now += wait / 2
        assert (len(table), table.evicted) == (len(plain), evicted)
        for one in range(7):
            value, until = plain.get(one, (None, -1.0))
            assert table.get(one, now) == (value if until > now else None)
            assert table.holds(one, now) == (until > now)


def test_an_entry_ends_at_its_last_time():
    table: ExpiringMap[str, int] = ExpiringMap(10)
    table.put("a", 1, 2.5)
    assert table.get("a", 2.4) == 1
    assert table.get("a", 2.5) is None
    table.put("a", 2, 9.0)
    table.expire(5.0)
    assert table.get("a", 8.9) == 2
    table.put("a", 3, 6.0)
    table.expire(6.0)
    assert len(table) == 0
    table.put("b", 4, math.inf)
    table.expire(1e18)
    assert table.get("b", 1e18) == 4


def test_replaced_and_evicted_entries_take_no_memory():
    table: ExpiringMap[int, int] = ExpiringMap(capacity=100)
    for step in range(20_000):
        table.put(step % 7, step, 1000.0 + step)
    for step in range(20_000):
        table.put(step, step, 50_000.0 + step % 1000)
        assert len(table._heap) <= 2 * (len(table) + 1) + SLACK
    assert len(table) == 100
    assert table.get(19_999, 0.0) == 19_999  # among those that expire last
    assert table.evicted == 20_000 - 100
    table.expire(60_000.0)
    assert len(table) == 0
    table.put(1, 1, 59_000.0)
    for step in range(2, 102):
        table.put(step, step, 70_000.0)
    assert table.evicted == 20_000 - 100  # of an expired entry it is no loss


def test_a_long_entry_outlives_many_short_ones():
    """The oldest entry was evicted first: a long request was forgotten before the short ones."""
    table: ExpiringMap[str, int] = ExpiringMap(capacity=100)
    table.put("long", 0, 600.0)
    for step in range(1000):
        table.put(f"short {step}", step, 60.0 + step / 100)
    assert table.get("long", 10.0) == 0
    assert table.evicted == 901


# ---------------------------------------------------------------------- the recent map


@given(st.lists(st.integers(0, 12)), st.integers(1, 5))
def test_the_recent_map_returns_the_last_keys_and_few_older_ones(keys, size):
    table: RecentMap[int, int] = RecentMap(size)
    plain: dict[int, int] = {}
    for number, key in enumerate(keys):
        table.put(key, number)
        plain.pop(key, None)
        plain[key] = number
        assert len(table) < 2 * size
        for one in list(plain)[-size:]:
            assert table.get(one) == plain[one]
        assert all(table.get(one) in (None, plain[one]) for one in plain)
    assert table.get(13) is None
