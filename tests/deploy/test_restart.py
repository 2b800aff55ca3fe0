import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.deploy.restart import RestartLimits, RestartPolicy


def test_delays_double_then_it_gives_up():
    policy = RestartPolicy()
    assert [policy.delay(float(t)) for t in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_a_quiet_window_forgives():
    policy = RestartPolicy()
    for t in range(5):
        policy.delay(float(t))
    assert policy.delay(70.0) == 0.5


def test_delay_is_capped():
    policy = RestartPolicy(RestartLimits(restarts=20, max_delay=3.0))
    assert [policy.delay(0.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.lists(st.floats(0.0, 200.0), max_size=60), st.integers(1, 6))
def test_never_more_than_the_limit_in_any_window(gaps, restarts):
    limits = RestartLimits(restarts=restarts, window=60.0)
    policy = RestartPolicy(limits)
    now, granted = 0.0, []
    for gap in gaps:
        now += gap
        if policy.delay(now) is not None:
            granted.append(now)
    for start in granted:
        inside = [t for t in granted if start <= t <= start + limits.window]
        assert len(inside) <= restarts


@pytest.mark.parametrize("restarts", [0])
def test_zero_restarts_means_never(restarts):
    assert RestartPolicy(RestartLimits(restarts=restarts)).delay(0.0) is None
