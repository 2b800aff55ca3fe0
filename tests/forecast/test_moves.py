"""Changes of role in plans: the first split, turns during the trace, and when there are none."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from baton.deploy.autoscale.policy import TURN_S
from baton.forecast.cluster import Slo
from baton.forecast.goodput import EDF, FCFS, Cluster, Trials
from baton.forecast.moves import Schedule, _cheapest, find_moves
from baton.forecast.plan import make_plan
from baton.loadgen.traces import Arrival

from .test_cluster import PLAIN

SERVICE = replace(PLAIN, decode_sequence_s=0.004, decode_s=0.01, max_batch=64)
SLO = Slo(2.0, 0.05)


def mornings(days=1):
    """Five minutes of long prompts, five of long answers."""
    trace = []
    for day in range(days):
        start = 600.0 * day
        trace += [Arrival(start + 2.0 * number, 1500, 2) for number in range(150)]
        trace += [Arrival(start + 300.0 + 2.0 * number, 20, 300) for number in range(150)]
    return trace


@pytest.fixture(scope="module")
def trials():
    return Trials(mornings(), SERVICE)


def test_workers_turn_when_the_load_shifts_and_win_goodput(trials):
    like = Cluster("disaggregated", 2, 2, FCFS)
    found = find_moves(trials, SLO, like)
    assert found.goodput == pytest.approx(found.goodput_now * (1 + found.gain))
    assert found.goodput > 1.15 * found.goodput_fixed
    assert found.goodput_now == found.goodput_fixed
    late = [move for move in found.moves if move.at]
    assert all(250.0 < move.at < 350.0 and move.role == "decode" for move in late)
    assert late
    assert found.moves[-1].command.startswith("baton role prefill-")


def test_workers_turn_back():
    twice = Trials(mornings(2), SERVICE)
    moves = find_moves(twice, SLO, Cluster("disaggregated", 2, 2, FCFS)).moves
    away = [move.worker for move in moves if 250 < move.at < 350 and move.role == "decode"]
    back = [move.worker for move in moves if 550 < move.at < 650 and move.role == "prefill"]
    assert away and sorted(back) == sorted(away)


def test_a_running_cluster_gets_its_best_split():
    trace = [Arrival(0.25 * number, 800, 2) for number in range(400)]
    now = Cluster("disaggregated", 1, 3, FCFS)
    found = find_moves(Trials(trace, PLAIN), Slo(2.0, 0.5), now, now)
    assert [move.command for move in found.moves] == [
        "baton role decode-2 prefill", "baton role decode-1 prefill"
    ]  # fmt: skip
    assert {move.at for move in found.moves} == {0.0}
    assert found.gain > 1.5 and found.kept > found.kept_now
    assert (
        find_moves(Trials(trace, PLAIN), Slo(2.0, 0.5), replace(now, prefill=3, decode=1)) is None
    )


def test_no_change_is_named_that_wins_nothing():
    steady = [Arrival(0.5 * number, 200, 20) for number in range(400)]
    trials = Trials(steady, PLAIN)
    splits = [Cluster("adaptive", p, 3 - p, EDF) for p in (1, 2)]
    best = max(splits, key=lambda one: trials.goodput(one, Slo(1.0, 0.1)))
    assert find_moves(trials, Slo(1.0, 0.1), best, best) is None
    two = Cluster("disaggregated", 1, 1, FCFS)
    assert find_moves(trials, Slo(1.0, 0.1), two, two) is None
    for now in splits:
        assert find_moves(trials, Slo(1e9, 1e9), now, now) is None  # limits that any split keeps
        assert find_moves(trials, Slo(1e-6, 1e-6), now, now) is None  # limits that no split keeps


def test_the_schedule_is_played_with_drains():
    """The mover finishes its streams and serves TURN_S later; requests are not lost."""
    from baton.forecast.cluster import Replay, Setup

    one, two = Cluster("disaggregated", 1, 2), Cluster("disaggregated", 2, 1)
    schedule = Schedule(one, [(0.0, one), (20.0, two)])
    trace = [Arrival(0.5 * number, 100, 50) for number in range(100)]
    replay = Replay(trace, PLAIN, 0.0, one.pools, Setup(turn_s=TURN_S))
    outcome = replay.run(schedule.scaler(1.0))
    assert outcome.moves == [(20.0, "prefill")]
    assert not any(math.isnan(request.ended) for request in outcome.requests)
    assert [(move.at, move.command) for move in schedule.moves()] == [
        (20.0, "baton role decode-1 prefill")
    ]
    fast = schedule.scaler(4.0)
    assert fast(None, 4.9) == one.pools and fast(None, 5.0) == two.pools


def test_the_path_with_the_highest_sum_is_found():
    wins = np.array([[5.0, 0.0], [0.0, 3.0], [5.0, 0.0]])
    apart = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert _cheapest(wins, apart, np.zeros(2)) == [0, 1, 0]
    assert _cheapest(wins, 2 * apart, np.zeros(2)) == [0, 0, 0]
    assert _cheapest(wins[:1], apart, np.array([9.0, 0.0])) == [1]


def test_a_plan_has_the_changes_of_its_cluster():
    trace = mornings()[::2]
    now = Cluster("disaggregated", 1, 2, FCFS)
    plan = make_plan(trace, SERVICE, 3, SLO, now)
    assert (plan.moves.mode, plan.moves.order) == ("disaggregated", FCFS)
    assert plan.moves.goodput > plan.moves.goodput_fixed >= plan.moves.goodput_now
    both = next(one for one in plan.choices if one.prefill and one.decode)
    assert both.mode == "adaptive"  # its decode workers compute prompts: no change wins anything
    assert make_plan(trace, SERVICE, 3, SLO).moves is None
