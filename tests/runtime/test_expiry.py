"""The table with expiring entries."""

from __future__ import annotations

from random import Random

from baton.runtime.expiry import Expiring


def test_an_entry_lives_until_its_time():
    table: Expiring[str, int] = Expiring()
    table.put("a", 1, 2.5)
    assert table.get("a", 2.4) == 1
    assert table.get("a", 2.5) is None
    assert table.get("b", 0.0) is None
    table.expire(2.4)
    assert len(table) == 1
    table.expire(3.0)
    assert len(table) == 0


def test_an_entry_put_again_ends_at_its_new_time():
    table: Expiring[str, int] = Expiring()
    table.put("a", 1, 2.0)
    table.put("a", 2, 9.0)
    table.expire(5.0)
    assert table.get("a", 8.9) == 2
    table.put("a", 3, 6.0)
    table.expire(6.0)
    assert len(table) == 0
    table.expire(20.0)


def test_the_oldest_makes_room():
    table: Expiring[int, int] = Expiring(capacity=3)
    for key in range(5):
        table.put(key, key, 100.0)
    assert [table.get(key, 0.0) for key in range(5)] == [None, None, 2, 3, 4]


def test_it_equals_a_plain_dictionary_under_random_use():
    random, table, plain, now = Random(3), Expiring[int, int](), {}, 0.0
    for step in range(5000):
        now += random.random() * 0.2
        key = random.randrange(50)
        if random.random() < 0.5:
            until = now + random.random() * 20
            table.put(key, step, until)
            plain[key] = (step, until)
        value, until = plain.get(key, (None, 0.0))
        assert table.get(key, now) == (value if until > now else None)
        if random.random() < 0.2:
            table.expire(now)
            assert len(table) <= sum(until > now - 1 for _, until in plain.values())


def test_what_was_replaced_or_evicted_takes_no_memory():
    table: Expiring[int, int] = Expiring(capacity=100)
    for step in range(20_000):
        table.put(step % 7, step, 1000.0 + step)
    for step in range(20_000):
        table.put(step, step, 50_000.0 + step % 1000)
        if step % 500 == 0:
            filed = sum(map(len, table._seconds.values()))
            assert filed == table._filed <= 2 * len(table) + 64
    assert len(table) == 100 and table.get(19_999, 0.0) == 19_999
    table.expire(60_000.0)
    assert len(table) == 0 and not table._seconds and table._filed == 0
