from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from baton.kv_transfer.grants import CreditPool

sys.path.insert(0, str(Path(__file__).parents[1]))
from work_counter import opcodes


def test_window_and_budget_bound_what_is_in_flight():
    pool = CreditPool(budget=100, window=60)
    assert pool.open(1, 500) == 60
    assert pool.open(2, 30) == 30
    assert pool.open(3, 500) == 0
    assert pool.outstanding == 90


def test_nobody_gets_crumbs_too_small_for_a_frame():
    """If the remainder were divided, all could wait for each other."""
    pool = CreditPool(budget=100, window=40)
    assert [pool.open(key, 500) for key in range(6)] == [40, 40, 0, 0, 0, 0]
    pool.close(0)
    assert pool.top_up() == [(2, 40)]
    pool.check_integrity()


def test_who_came_first_is_served_first():
    pool = CreditPool(budget=100, window=60)
    pool.open(1, 500)
    pool.open(2, 500)
    assert pool.open(3, 10) == 0
    pool.close(1)
    assert pool.top_up() == [(2, 60), (3, 10)]


def test_what_was_lost_no_longer_counts_and_is_given_again_within_the_budget():
    pool = CreditPool(budget=100, window=60)
    pool.open(1, 60)
    pool.receive(1, 20)
    pool.open(2, 40)
    assert pool.outstanding == 80
    assert pool.expect_again(1, 40) == 100
    assert pool.outstanding == 80
    pool.check_integrity()
    assert pool.receive(1, 40)
    assert not pool.receive(1, 1)


def test_what_is_asked_for_again_waits_for_its_turn_when_the_budget_is_full():
    pool = CreditPool(budget=100, window=60)
    pool.open(1, 60)
    pool.receive(1, 60)
    pool.open(2, 500)
    assert pool.expect_again(1, 60) == 60
    assert pool.top_up() == []
    pool.close(2)
    assert pool.top_up() == [(1, 120)]


def test_credit_is_raised_when_low_and_never_beyond_what_is_expected():
    pool = CreditPool(budget=100, window=60)
    pool.open(1, 70)
    assert not pool.receive(1, 61)
    assert pool.receive(1, 40)
    assert pool.top_up() == [(1, 70)]
    assert pool.receive(1, 30)
    assert pool.top_up() == []


def test_a_closed_account_feeds_the_starving():
    pool = CreditPool(budget=100, window=100)
    pool.open(1, 500)
    pool.open(2, 500)
    pool.close(1)
    assert pool.top_up() == [(2, 100)]


def test_bytes_read_in_place_need_no_budget():
    pool = CreditPool(budget=100, window=60)
    assert pool.open(1, 500, limited=False) == 500
    assert pool.open(2, 500) == 60
    assert pool.receive(1, 450) and not pool.receive(1, 51)
    pool.check_integrity()
    assert pool.expect_again(1, 80) == 580 and pool.counted(1) == 500
    assert pool.top_up() == [] and pool.outstanding == 60
    pool.close(1)
    pool.check_integrity()


def test_books_hold_under_random_use():
    random = Random(1)
    pool = CreditPool(budget=1000, window=300)
    credit: dict[int, int] = {}
    got: dict[int, int] = {}
    unlimited: set[int] = set()
    for step in range(5000):
        key = random.randrange(8)
        if key not in credit:
            credit[key], got[key] = pool.open(key, random.randrange(1, 900)), 0
        elif random.random() < 0.05:
            got[key] = credit[key]
            credit[key] = pool.expect_again(key, random.randrange(1, 300))
        elif random.random() < 0.02:
            got[key] = credit[key]
            credit[key] = pool.unlimit(key, random.randrange(1, 300))
            unlimited.add(key)
        elif random.random() < 0.1:
            pool.close(key)
            del credit[key], got[key]
            unlimited.discard(key)
        else:
            n = random.randrange(1, 120)
            fits = got[key] + n <= credit[key]
            assert pool.receive(key, n) == fits
            got[key] += n if fits else 0
        for raised, total in pool.top_up():
            assert total > credit[raised]
            pool.check_integrity()
            credit[raised] = total
        limited = credit.keys() - unlimited
        assert pool.outstanding == sum(credit[k] - got[k] for k in limited), step
        assert 0 <= pool.outstanding <= 1000


def frame_of(grants: int) -> int:
    """Work of booking one frame of one of ``grants`` accounts, with the credit that follows."""
    pool = CreditPool(budget=40 * grants, window=40)
    for key in range(grants):
        pool.open(key, 500)
    pool.top_up()

    def frame():
        assert pool.receive(grants // 2, 30)
        assert pool.top_up() == [(grants // 2, 70)]

    return opcodes(frame)


def test_a_frame_costs_the_same_among_1024_grants():
    assert frame_of(1024) == frame_of(16)
