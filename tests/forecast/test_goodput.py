"""Goodput and plans on small traces."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from baton.forecast.cluster import Slo
from baton.forecast.goodput import EDF, KEEP, STEP, Cluster, Trials, clusters, unloaded
from baton.forecast.plan import make_plan, shortened
from baton.loadgen.traces import Arrival

from .test_cluster import PLAIN

STEADY = [Arrival(0.1 * number, 100, 2) for number in range(200)]
"""Ten prompts of 100 ms a second: as much as one prefill worker computes."""
ONE_OF_EACH = Cluster("disaggregated", 1, 1)


@pytest.mark.parametrize("near", [-100, 0, 100])
def test_the_goodput_is_the_rate_that_workers_can_do(near):
    trials = Trials(STEADY, PLAIN)
    found = trials.goodput(ONE_OF_EACH, Slo(1.0, 1.0), near)
    # 5 % of the prompts may be late by any time: the last ones wait for 19 s of 100 ms prompts.
    late = (0.95 * len(STEADY) * 0.1 - 0.9) / (0.95 * len(STEADY) * 0.1)
    assert found == pytest.approx(1 / late, rel=0.03)
    power = round(math.log(found, STEP))
    assert trials.kept(ONE_OF_EACH, Slo(1.0, 1.0), power) >= KEEP
    assert trials.kept(ONE_OF_EACH, Slo(1.0, 1.0), power + 1) < KEEP


def test_the_best_cluster_is_found_with_its_goodput():
    trials, slo = Trials(STEADY, PLAIN), Slo(1.0, 1.0)
    candidates = [ONE_OF_EACH, Cluster("disaggregated", 3, 1), Cluster("disaggregated", 2, 1)]
    rates = [trials.goodput(cluster, slo) for cluster in candidates]
    assert trials.best(candidates, slo) == (max(rates), candidates[1])
    assert trials.best(candidates, Slo(0.05, 1.0)) == (0.0, None)


def test_limits_that_no_rate_keeps_give_no_goodput():
    assert Trials(STEADY, PLAIN).goodput(ONE_OF_EACH, Slo(0.05, 1.0)) == 0.0


def test_a_cluster_is_played_once_for_all_limits_on_which_it_does_not_depend():
    trials = Trials(STEADY, PLAIN)
    tight, loose = Slo(0.2, 0.05), Slo(2.0, 0.05)
    assert trials.latencies(ONE_OF_EACH, tight) is trials.latencies(ONE_OF_EACH, loose)
    by_deadline = Cluster("disaggregated", 1, 1, EDF)
    assert trials.latencies(by_deadline, tight) is not trials.latencies(by_deadline, loose)
    alone = Cluster("colocated", 0, 2)
    assert trials.latencies(alone, tight) is trials.latencies(alone, loose)
    assert trials.latencies(alone, tight) is not trials.latencies(alone, Slo(2.0, 0.5))


def test_steps_leave_time_for_the_second_token_of_short_answers():
    short = Trials([Arrival(0.0, 1, 3)], PLAIN)
    long = Trials([Arrival(0.0, 1, 101)], PLAIN)
    assert short.step_s(Slo(1.0, 0.3)) == pytest.approx(0.97 * 0.2)
    assert long.step_s(Slo(1.0, 0.3)) == pytest.approx(0.97 * 0.3 / 1.01)
    assert Trials([Arrival(0.0, 1, 1)], PLAIN).step_s(Slo(1.0, math.inf)) == 0.0


def test_an_unloaded_run_has_no_queue():
    trace = [Arrival(0.0, 100 * (1 + number), 3) for number in range(100)]
    base = unloaded(trace, PLAIN)
    assert base.itl == pytest.approx(0.02)
    assert base.ttft == pytest.approx(9.505, rel=0.01)


def test_every_split_is_tried():
    names = [str(cluster) for cluster in clusters(3)]
    assert names == [
        "colocated:3", "disaggregated:1:2", "disaggregated:1:2", "disaggregated:2:1",
        "disaggregated:2:1", "adaptive:0:3", "adaptive:1:2", "adaptive:2:1", "adaptive:0:3",
    ]  # fmt: skip


def test_a_plan_ranks_the_modes_and_says_how_to_start_the_best():
    slo = Slo(0.5, 0.03)  # 10 ms beside a step hold no chunk
    trace = [replace(one, output=20) for one in STEADY]
    plan = make_plan(trace, PLAIN, 2, slo)
    assert [one.goodput for one in plan.choices] == sorted(
        (one.goodput for one in plan.choices), reverse=True
    )
    assert plan.best.mode != "colocated"
    (colocated,) = (one for one in plan.choices if one.mode == "colocated")
    assert colocated.worse == pytest.approx(1 - colocated.goodput / plan.best.goodput)
    assert colocated.worse > 0.1
    assert (plan.requests, plan.best.worse) == (200, 0.0)
    assert f"--mode {plan.best.mode} --prefill 1 --decode 1" in plan.command("m")
    assert msgspec.json.decode(msgspec.json.encode(plan))["choices"][0]["mode"] == plan.best.mode


def test_a_plan_prefers_colocated_workers_if_only_prompts_cost():
    trace = [replace(one, output=1) for one in STEADY]
    plan = make_plan(trace, PLAIN, 2, Slo(2.0, 0.5))
    colocated = next(one for one in plan.choices if one.mode == "colocated")
    apart = next(one for one in plan.choices if one.mode == "disaggregated")
    assert colocated.goodput > 1.5 * apart.goodput
    alone = msgspec.structs.replace(plan, choices=[colocated])
    assert alone.command("m") == (
        "baton serve m --mode colocated --workers 2 --slo-ttft 2 --slo-itl 0.5 --step-time 0.2425"
        " --max-num-batched-tokens 4096"
    )


def test_requests_are_shortened_to_a_context_with_their_blocks():
    blocks = (b"a", b"b", b"c")
    (one,) = shortened([Arrival(1.0, 1600, 500, blocks)], 1124)
    assert (one.prompt, one.output, one.blocks) == (624, 500, (b"a",))
    assert shortened([Arrival(1.0, 1600, 500, blocks)], 0)[0].blocks == blocks
