"""The budget against machines that take a fixed time and a time per token."""

import random

import pytest

from baton.engine.scheduling.step_time import FIRST, GRAIN, LEAST, ChunkBudget


def settle(budget: ChunkBudget, fixed: float, per_token: float, steps: int = 60) -> None:
    for _ in range(steps):
        budget.learn(budget.tokens, fixed + per_token * budget.tokens)


def test_without_a_time_the_limit_alone_decides():
    for most in (0, 1, 512):
        budget = ChunkBudget(most)
        before = budget.tokens
        budget.learn(100, 5.0)
        assert budget.tokens == before and (not most or before == most)


@pytest.mark.parametrize(
    ("fixed", "per_token", "wanted"), [(0.0, 0.001, 48), (0.02, 0.0005, 80), (0.001, 0.00001, 512)]
)
def test_steps_come_to_take_the_time(fixed, per_token, wanted):
    budget = ChunkBudget(512, 0.06)
    settle(budget, fixed, per_token)
    assert abs(budget.tokens - wanted) <= GRAIN
    assert fixed + per_token * budget.tokens <= 0.06 * 1.01


def test_steps_beside_streams_come_to_take_the_time_too():
    """Without the streams' part, a step of 100 tokens beside 50 streams would take half more."""
    budget = ChunkBudget(512, 0.15)
    for _ in range(60):
        budget.learn(budget.tokens + 50, 0.001 * (budget.tokens + 50), 50)
    assert abs(budget.tokens - 100) <= GRAIN
    for _ in range(60):
        budget.learn(budget.tokens + 400, 0.001 * (budget.tokens + 400), 400)
    assert budget.tokens == LEAST


def test_it_follows_a_machine_that_becomes_slow_and_quick_again():
    budget = ChunkBudget(512, 0.06)
    settle(budget, 0.0, 0.0001)
    assert budget.tokens == 512
    settle(budget, 0.0, 0.001, steps=20)
    assert budget.tokens <= 64
    settle(budget, 0.0, 0.0001)
    assert budget.tokens == 512


def test_a_short_prompt_does_not_shrink_it():
    budget = ChunkBudget(512, 0.06)
    settle(budget, 0.02, 0.00005)
    before = budget.tokens
    for _ in range(20):
        budget.learn(3, 0.02)  # 7 ms per token, all of it fixed cost
    assert budget.tokens == before


def test_it_keeps_its_bounds_whatever_it_is_told():
    rng = random.Random(5)
    for most in (0, 8, 48, 512):
        budget = ChunkBudget(most, 0.06)
        assert budget.tokens == min(most or FIRST, FIRST)
        for _ in range(2000):
            before = budget.tokens
            budget.learn(rng.choice((0, 1, before, 40)), rng.choice((0.0, 1e-9, 0.01, 0.3, 60.0)))
            assert min(most or LEAST, LEAST) <= budget.tokens <= min(most or 1 << 62, 2 * before)
