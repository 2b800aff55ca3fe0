import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.deploy.supervise.restart import RestartLimits, RestartPolicy


@pytest.mark.parametrize(
    ("served", "waits"),
    [(None, [0.5, 1, 2, 4, 8, 16, 32, 60, 60]), (1.0, [0.5, 1, 2, 4, 5, 5, 5, 5, 5])],
)
def test_waits_double_up_to_a_limit_that_is_lower_if_it_served(served, waits):
    policy = RestartPolicy()
    assert [policy.delay(served) for _ in waits] == waits
    assert policy.ends == len(waits)


def test_a_long_life_ends_the_series():
    policy = RestartPolicy()
    for _ in range(5):
        policy.delay(None)
    assert policy.delay(60.0) == 0.5
    assert policy.ends == 1


def test_kills_while_it_loads_do_not_continue_the_delays_of_earlier_crashes():
    policy = RestartPolicy()
    assert [policy.delay(1.0) for _ in range(5)] == [0.5, 1, 2, 4, 5]
    assert [policy.delay(None) for _ in range(2)] == [0.5, 1]
    assert policy.ends == 7


def test_a_start_that_serves_ends_the_series_of_failed_starts():
    policy = RestartPolicy()
    assert [policy.delay(None) for _ in range(3)] == [0.5, 1, 2]
    assert policy.delay(1.0) == 0.5
    assert policy.delay(None) == 0.5


@given(st.lists(st.none() | st.floats(0.0, 200.0), max_size=3000))
def test_however_often_it_ends_it_is_started_again_within_the_limit(lives):
    limits = RestartLimits()
    policy = RestartPolicy(limits)
    for served in lives:
        longest = limits.max_delay if served is None else limits.max_delay_served
        assert limits.first_delay <= policy.delay(served) <= longest
