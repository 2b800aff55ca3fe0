"""The clock of a process turns whatever a turn raises, and proves that it turns."""

from __future__ import annotations

import pytest

from baton.runtime.net.loop import Loop
from baton.runtime.process import clock as clock_module
from baton.runtime.process.clock import MAX_FAILED, Clock

STEP_S = 0.001


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def signs(monkeypatch):
    """The turns that the signs of life carry."""
    seen: list[int] = []
    monkeypatch.setattr(clock_module, "say_alive", seen.append)
    monkeypatch.setattr(clock_module, "SIGN_EVERY_S", 0.0)
    monkeypatch.setattr(clock_module, "PAUSE_S", STEP_S)
    return seen


class Turns:
    """Turns of which some raise; the loop stops after the last."""

    def __init__(self, loop, last, fails, broken=None):
        self.loop, self.last, self.fails = loop, last, fails
        self.number = self.failures = 0
        self.reasons: list[str] = []
        self.clock = Clock(loop, self.turn, lambda: self.failures, self.reasons.append)
        self.clock.start()
        loop.asyncio_loop.run_forever()

    def turn(self):
        self.number += 1
        if self.number >= self.last:
            self.loop.stop()
            return None
        if self.fails(self.number):
            raise KeyError("planted")
        return self.loop.now() + STEP_S


def test_a_turn_that_raises_is_followed_by_the_next(loop, signs):
    turns = Turns(loop, 100, lambda number: number % 3 == 0)
    assert turns.number == 100 and not turns.reasons
    assert turns.clock.turns == len(signs) == 67


def test_a_failed_turn_gives_no_sign_of_life(loop, signs):
    Turns(loop, 10, lambda number: number >= 5)
    assert signs == [1, 2, 3, 4, 5]  # the fifth is the last turn, which did not fail


def test_a_clock_that_fails_in_a_row_is_broken_once(loop, signs):
    turns = Turns(loop, 3 * MAX_FAILED, lambda number: number > 1)
    (reason,) = turns.reasons
    assert f"{MAX_FAILED} times in a row" in reason
    assert Turns(loop, 3 * MAX_FAILED, lambda number: number % MAX_FAILED).reasons == []


def test_errors_that_the_turn_contained_count_as_failures(loop, signs):
    turns = Turns(loop, 2, lambda number: False)
    turns.failures += 1
    turns.last, turns.number = 2, 0
    turns.clock._fire()
    assert turns.clock.failed == 1 and signs == [1, 2]


def test_a_periodic_callback_that_raises_goes_on_until_it_is_cancelled(loop):
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 5:
            periodic.cancel()
            loop.call_later(0.02, loop.stop)
        raise KeyError("planted")

    periodic = loop.every(STEP_S, call, first=0.0)
    loop.asyncio_loop.run_forever()
    assert len(calls) == loop.callback_errors == 5
