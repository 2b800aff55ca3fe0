"""Which requests a gateway refuses without asking the router."""

from __future__ import annotations

import random
from collections import deque

import pytest

from baton.gateway.shedding import FLOOR, Shedding


def run(
    shedding: Shedding, rate: float, capacity: float, begin: float, seconds: float, delay: float
) -> tuple[float, float]:
    """Return the rates passed on and accepted in the last half of the time.

    The router accepts ``capacity`` requests per second and refuses others ``delay`` seconds later.
    """
    draw, answers = random.Random(7), deque[float]()
    passed = accepted = 0
    room, last, half = 1.0, begin, begin + seconds / 2
    for number in range(int(rate * seconds)):
        now = begin + number / rate
        while answers and answers[0] <= now:
            answers.popleft()
            shedding.refused(0.5)
        room, last = min(8.0, room + (now - last) * capacity), now
        if not shedding.admits(now, draw.random()):
            continue
        passed += now >= half
        if room >= 1.0:
            room -= 1.0
            accepted += now >= half
        else:
            answers.append(now + delay)
    return passed / seconds * 2, accepted / seconds * 2


@pytest.mark.parametrize("delay", [0.01, 0.5])
@pytest.mark.parametrize("times", [1.5, 4, 10, 50])
def test_the_router_gets_enough_and_not_much_more(times, delay):
    capacity = 300.0
    passed, accepted = run(Shedding(), capacity * times, capacity, 100.0, 20.0, delay)
    assert accepted >= 0.98 * capacity
    assert passed <= 2.6 * capacity + FLOOR


def test_what_the_router_accepts_is_never_refused_here():
    shedding = Shedding()
    run(shedding, 5000.0, 1e9, 100.0, 5.0, 0.1)
    assert shedding.shed == 0


def test_few_requests_are_always_passed_on():
    shedding = Shedding()
    run(shedding, FLOOR * 0.9, 0.0, 100.0, 20.0, 0.1)
    assert shedding.shed == 0


def test_a_cluster_that_has_room_again_gets_all_requests_soon():
    shedding = Shedding()
    run(shedding, 1000.0, 0.0, 100.0, 20.0, 0.1)
    assert shedding.shed
    passed, _ = run(shedding, 1000.0, 1e9, 120.0, 20.0, 0.1)
    assert passed >= 999
    assert shedding.retry_after == 0.5
