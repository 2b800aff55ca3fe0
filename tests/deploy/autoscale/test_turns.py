"""Changes of role: which loads move a worker to the other pool, and how often."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.deploy.autoscale.policy import Autoscaler, Governor, Room
from baton.deploy.autoscale.settings import ScaleSettings
from baton.deploy.plan.bounds import Bounds

from .fluid import BLOCKS, HELD, Fluid

CALM = 90.0
SPARE = 20.0
FULL = BLOCKS / HELD  # running requests that fill a decode worker


def room(hosts: int) -> Room:
    return Room(lambda targets: sum(targets.values()) <= hosts, turns=True)


def fluid(prefill=1, decode=3, hosts=4, cold_s=30.0, **changes) -> Fluid:
    bounds = changes.pop("bounds", Bounds(prefill_max=9, decode_max=9))
    wanted = ScaleSettings(
        bounds=bounds,
        cold_start=cold_s,
        calm=CALM,
        window=60.0,
        spare=SPARE,
        slo_itl=0.1,
        **changes,
    )
    first = {"prefill": prefill, "decode": decode}
    return Fluid(Autoscaler(wanted, first), cold_s, room=room(hosts))


def run(cluster: Fluid, seconds: int, tokens: float, running: float) -> dict[str, int]:
    for _ in range(seconds):
        targets = cluster.second(tokens, running)
    return targets


def test_without_room_a_spare_worker_changes_its_role():
    cluster = fluid()
    run(cluster, 60, 500, 0.3 * FULL)
    assert cluster.moves == []
    assert run(cluster, 25, 1500, 0.3 * FULL) == {"prefill": 2, "decode": 2}
    ((_, role),) = cluster.moves
    assert role == "prefill"


def test_the_reason_names_both_pools():
    cluster = fluid()
    run(cluster, 60, 500, 0.3 * FULL)
    reasons = set()
    for _ in range(25):
        cluster.second(1500, 0.3 * FULL)
        reasons.add(cluster.scaler.why)
    (reason,) = reasons - {""}
    assert reason.startswith("prefill needs 2 workers and has 1, no further worker has room, and ")
    assert reason.endswith("decode needed 2 of 3 in the last 20 s")


def test_a_start_that_is_as_fast_is_preferred_while_there_is_room():
    cluster = fluid(hosts=8, cold_s=6.0)
    run(cluster, 60, 500, 0.3 * FULL)
    assert run(cluster, 25, 1500, 0.3 * FULL) == {"prefill": 2, "decode": 3}
    assert cluster.moves == []


def test_a_change_of_role_replaces_a_start_that_takes_much_longer():
    cluster = fluid(hosts=8, cold_s=120.0)
    run(cluster, 60, 500, 0.3 * FULL)
    assert run(cluster, 25, 1500, 0.3 * FULL) == {"prefill": 2, "decode": 2}
    assert [role for _, role in cluster.moves] == ["prefill"]


def test_the_time_of_a_change_is_learned_and_is_no_start():
    cluster = fluid(cold_s=120.0)
    run(cluster, 60, 500, 0.3 * FULL)
    run(cluster, 25, 1500, 0.3 * FULL)
    scaler = cluster.scaler
    assert scaler._cold["prefill"].seconds == 120.0
    assert 4.0 <= scaler._turns.seconds < 5.0


@pytest.mark.parametrize("least", [2, 3])
def test_a_pool_keeps_its_minimum(least):
    cluster = fluid(bounds=Bounds(prefill_max=9, decode_max=9, decode_min=least))
    run(cluster, 60, 500, 0)
    assert run(cluster, 200, 9000, 0) == {"prefill": 4 - least, "decode": least}


def test_a_pool_that_is_short_itself_gives_nothing():
    cluster = fluid()
    run(cluster, 60, 500, 2.5 * FULL)
    assert run(cluster, 120, 3000, 2.5 * FULL) == {"prefill": 1, "decode": 3}


def test_a_worker_must_have_been_spare_for_a_while():
    cluster = fluid()
    run(cluster, 100, 500, 2.0 * FULL)  # all three are needed
    ended = cluster.now
    run(cluster, 120, 1900, 0.3 * FULL)
    assert cluster.moves[0][0] - ended >= SPARE


def test_without_changes_of_role_pools_stay_within_the_room():
    cluster = fluid()
    cluster.room = Room(cluster.room.fits)
    run(cluster, 60, 500, 0)
    assert run(cluster, 25, 3000, 0)["prefill"] == 1
    assert cluster.moves == []


def alternating(period: int, seconds: int = 1200) -> Fluid:
    """Prompts for three workers, then streams for three, by turns."""
    cluster = fluid(prefill=2, decode=2)
    while cluster.now < seconds:
        run(cluster, period, 2500, 0.3 * FULL)
        run(cluster, period, 300, 2.2 * FULL)
    return cluster


@settings(max_examples=6)
@given(st.integers(10, 400))
def test_a_load_that_alternates_moves_a_worker_once_per_window_at_most(period):
    cluster = alternating(period)
    directions = [role for _, role in cluster.moves]
    changes = sum(a != b for a, b in pairwise(directions))
    assert changes <= cluster.now / CALM
    assert sum(cluster.scaler.targets.values()) == 4


def test_a_load_that_alternates_faster_is_followed_more_and_more_seldom():
    """The second pool is short again soon after each move, so the windows double."""
    cluster = alternating(80, 2400)
    early = sum(when <= 1200 for when, _ in cluster.moves)
    assert early > 0 and len(cluster.moves) - early < early


def test_slow_changes_of_the_load_are_followed():
    cluster = alternating(400)
    assert [role for _, role in cluster.moves][:3] == ["prefill", "decode", "decode"]


def test_a_worker_returns_at_the_earliest_one_window_later():
    pool = Governor(1, 9, CALM, 3)
    for second in range(60):
        pool.want(1, 1, float(second))
    assert pool.spare(60.0, SPARE) == 2
    pool.take(1, 60.0)
    for second in range(61, 60 + int(CALM)):
        pool.want(1, 1, float(second))
        assert pool.spare(float(second), SPARE) == 0
    assert pool.spare(60.0 + CALM, SPARE) == 3


def test_a_gap_in_the_record_frees_nobody():
    pool = Governor(1, 9, CALM, 3)
    for second in range(60):
        pool.want(1, 1, float(second))
    pool.hold()
    pool.want(1, 1, 61.0)
    assert pool.spare(62.0, SPARE) == 0
