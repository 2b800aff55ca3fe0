from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.deploy.autoscale.policy import Governor


def play(governor, wants, start=0.0):
    return [governor.want(up, down, start + t) for t, (up, down) in enumerate(wants)]


def test_it_grows_at_once_and_shrinks_after_the_calm_time():
    governor = Governor(1, 8, 60.0, 2)
    assert governor.want(5, 5, 0.0) == 5
    seen = play(governor, [(1, 2)] * 61, start=1.0)
    assert seen[:59] == [5] * 59
    assert seen[-1] == 2


def test_it_shrinks_only_to_what_sufficed_throughout():
    governor = Governor(1, 8, 60.0, 6)
    wants = [(1, 2)] * 30 + [(1, 4)] + [(1, 2)] * 30
    assert play(governor, wants)[-1] == 4


def test_between_enough_and_too_few_nothing_moves():
    governor = Governor(1, 8, 10.0, 3)
    assert set(play(governor, [(2, 4)] * 500)) == {3}


def test_a_fall_that_was_a_mistake_makes_it_patient():
    governor = Governor(1, 8, 60.0, 4)
    assert play(governor, [(1, 3)] * 61)[-1] == 3
    assert governor.want(4, 4, 62.0) == 4
    assert play(governor, [(1, 3)] * 118, start=63.0)[-1] == 4  # 120 s now
    assert play(governor, [(1, 3)] * 65, start=181.0)[-1] == 3


def test_an_operator_is_obeyed_for_the_calm_time():
    governor = Governor(1, 8, 60.0, 2)
    play(governor, [(1, 1)] * 59)
    governor.adopt(6, 59.0)
    assert play(governor, [(1, 1)] * 58, start=60.0)[-1] == 6
    assert play(governor, [(1, 1)] * 5, start=118.0)[-1] == 1


def test_an_unknown_moment_begins_the_calm_time_anew():
    governor = Governor(1, 8, 60.0, 4)
    play(governor, [(1, 2)] * 59)
    governor.hold()
    assert set(play(governor, [(1, 2)] * 60, start=60.0)) == {4}


WANTS = st.lists(
    st.tuples(st.integers(-5, 50), st.integers(-5, 50), st.floats(0.5, 40)), max_size=300
)


@settings(max_examples=200)
@given(least=st.integers(1, 4), more=st.integers(0, 9), first=st.integers(-3, 99), wants=WANTS)
def test_never_outside_the_bounds(least, more, first, wants):
    governor = Governor(least, least + more, 20.0, first)
    now = 0.0
    for up, down, seconds in wants:
        now += seconds
        assert least <= governor.want(up, max(up, down), now) <= least + more


@settings(max_examples=200)
@given(wants=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 90)), max_size=300))
def test_direction_changes_are_bounded_whatever_is_wanted(wants):
    calm = 60.0
    governor = Governor(1, 9, calm, 5)
    now, turns, rising, before = 0.0, 0, None, 5
    for want, seconds in wants:
        for _ in range(seconds):
            now += 1
            target = governor.want(want, want, now)
            if target != before:
                turns += rising is not None and rising != (target > before)
                rising, before = target > before, target
    assert turns <= 2 + now / calm


@pytest.mark.parametrize("period", [40, 90, 130, 200, 400, 1000])
def test_a_square_wave_is_not_followed_for_ever(period):
    governor = Governor(1, 9, 60.0, 5)
    seen = [governor.want(w, w, t) for t in range(7200) for w in [8 if t % period < 20 else 2]]
    changes = [b - a for a, b in pairwise(seen) if a != b]
    assert len(changes) <= 2 + 7200 / 60
