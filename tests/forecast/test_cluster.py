"""Modelled clusters, against small cases computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.forecast.cluster import Replay, Setup, Slo, fixed
from baton.forecast.service import ServiceModel
from baton.loadgen.traces import Arrival

PLAIN = ServiceModel(
    prefill_s=0.0, prefill_token_s=0.001, prefill_pair_s=0.0, decode_s=0.02,
    decode_sequence_s=0.0, decode_token_s=0.0, hidden_s=0.0, kv_tokens=100_000, max_batch=8,
    kv_token_bytes=1, handoff_rate=1e9,
)  # fmt: skip
"""A prompt token takes 1 ms, a step of streams 20 ms, a handoff next to nothing."""
ONE_OF_EACH = {"prefill": 1, "decode": 1}
ALONE = {"prefill": 0, "decode": 1}
APART = Setup()
COLOCATED = Setup(mode="colocated", step_s=0.052, token_budget=0)


def served(trace, pools, setup=APART, service=PLAIN, speed=1.0):
    return fixed(trace, service, pools, setup, speed).requests


def test_a_local_prompt_alone_takes_what_a_prefill_worker_needs():
    service = replace(PLAIN, prefill_s=0.01, prefill_pair_s=1e-6)
    trace = [Arrival(0.0, 900, 1)]
    (apart,) = served(trace, ONE_OF_EACH, service=service)
    (local,) = served(trace, ALONE, COLOCATED, service)
    assert apart.ttft == pytest.approx(0.01 + 0.9 + 1e-6 * 900 * 450)
    assert local.ttft == pytest.approx(apart.ttft)


def test_every_chunk_of_a_prompt_launches_its_own_step():
    service = replace(PLAIN, chunk_s=0.01)
    trace = [Arrival(0.0, 900, 1)]
    (whole,) = served(trace, ONE_OF_EACH, service=service)
    (cut,) = served(trace, ONE_OF_EACH, Setup(chunk=service.chunk(0.074, 512)), service)
    assert whole.ttft == pytest.approx(0.91)
    assert cut.ttft == pytest.approx(0.9 + 15 * 0.01)  # of 64 tokens
    (local,) = served(trace, ALONE, replace(COLOCATED, step_s=0.0, token_budget=100), service)
    assert local.ttft == pytest.approx(0.9 + 9 * 0.01)
    assert [service.chunk(*limits) for limits in ((0.0, 7), (1.0, 512), (0.02, 0), (0.1, 0))] == [
        7, 512, 32, 80,
    ]  # fmt: skip


def test_chunks_fill_what_a_step_leaves_beside_its_streams():
    """The budget doubles from 64 to 128 tokens, but those of a step of 52 ms are 32."""
    trace = [Arrival(0.0, 10, 1000), Arrival(1.0, 320, 2)]
    stream, prompt = served(trace, ALONE, COLOCATED)
    start = math.ceil((1.0 - 0.01) / 0.02) * 0.02 + 0.01  # the running step ends
    # 64 tokens in 84 ms, by which the budget becomes 0.052 / (0.084 / 65), rounded to 32; the rest
    # in 8 steps of 32 tokens.
    assert prompt.first == pytest.approx(start + 0.084 + 8 * 0.052)
    assert stream.ended == pytest.approx(0.01 + 999 * 0.02 + 0.064 + 8 * 0.032)


def test_hidden_seconds_are_free_beside_streams_alone():
    service = replace(PLAIN, hidden_s=0.01)
    assert service.mixed(2, 100.0, 8, 0.0) == service.step(2, 100.0)
    assert service.mixed(2, 100.0, 25, 0.0) == pytest.approx(service.step(2, 100.0) + 0.015)
    assert service.mixed(0, 0.0, 25, 0.0) == pytest.approx(0.025)


def test_a_stream_waits_for_the_end_of_the_running_step():
    trace = [Arrival(0.0, 10, 100), Arrival(0.986, 5, 3)]
    _, second = served(trace, ONE_OF_EACH)
    assert second.first == pytest.approx(0.991)
    assert second.ended == pytest.approx(1.01 + 2 * 0.02)


@pytest.mark.parametrize(
    ("lacking", "computing_s", "seconds"),
    [
        (100, 10.0, 0.1),  # the last chunk leaves when it is computed
        (1000, 10.0, 0.512),
        (1000, 0.3, 0.7),  # the link is slower than the prompt
    ],
)
def test_the_blocks_of_a_handoff_travel_while_the_prompt_is_computed(lacking, computing_s, seconds):
    service = replace(PLAIN, kv_token_bytes=1000, handoff_rate=1e6)
    assert service.handoff(lacking, computing_s) == pytest.approx(seconds)


def test_a_prefix_is_computed_once_per_worker_and_moved_once():
    service = replace(PLAIN, kv_token_bytes=1000, handoff_rate=1e6)
    blocks = (b"a", b"b")
    trace = [Arrival(0.0, 1100, 2, blocks), Arrival(60.0, 1100, 2, blocks)]
    first, second = served(trace, ONE_OF_EACH, service=service)
    assert (first.ttft, second.ttft) == pytest.approx((1.1, 0.076))
    assert (first.itl, second.itl) == pytest.approx((0.512 + 0.02, 0.076 + 0.02))
    first, second = served(trace, ALONE, COLOCATED, service)
    assert (first.ttft, second.ttft) == pytest.approx((1.1, 0.076))


def test_a_request_waits_until_its_prompt_and_answer_fit():
    service = replace(PLAIN, kv_tokens=300)
    trace = [Arrival(0.0, 100, 101), Arrival(0.1, 100, 1)]
    for pools, setup in ((ALONE, COLOCATED), (ONE_OF_EACH, Setup())):
        first, second = served(trace, pools, setup, replace(service, kv_tokens=290))
        assert first.ended == pytest.approx(0.1 + 100 * 0.02, abs=0.01)
        assert (second.first > first.ended) == (pools is ALONE)  # a token, no place in the batch


def test_a_faster_trace_has_the_same_requests_earlier():
    trace = [Arrival(float(second), 10, 2) for second in range(10)]
    slow, fast = served(trace, ALONE, COLOCATED), served(trace, ALONE, COLOCATED, speed=4.0)
    assert [request.at for request in fast] == [request.at / 4 for request in slow]


# --------------------------------------------------------------------------- one host

HOST = replace(PLAIN, cores=2, prefill_beside=0.5, decode_beside=0.25)


def test_the_way_to_a_worker_counts_for_the_first_token_alone():
    service = replace(PLAIN, hop_s=0.003, handoff_s=0.004)
    trace = [Arrival(0.0, 100, 3), Arrival(0.001, 100, 1)]
    first, second = served(trace, ONE_OF_EACH, service=service)
    assert (first.ttft, second.ttft) == pytest.approx((0.103, 0.202))  # the second one waits
    assert first.itl == pytest.approx(0.02 + 0.004 / 2, abs=1e-6)
    (local,) = served(trace[:1], ALONE, COLOCATED, service)
    assert (local.ttft, local.itl) == pytest.approx((0.103, 0.02))


def test_workers_of_one_host_slow_each_other_down_while_both_compute():
    stream = Arrival(0.0, 10, 101)  # 0.01 s of prompt, 100 steps of 20 ms
    first, second = served([stream, Arrival(0.51, 300, 1)], ONE_OF_EACH, service=HOST)
    assert second.ttft == pytest.approx(1.5 * 0.3)
    steps_beside = math.ceil(0.45 / 0.025)
    assert first.ended == pytest.approx(0.01 + 2.0 + steps_beside * 0.005, abs=0.006)
    alone = served([stream, Arrival(0.51, 300, 1)], ONE_OF_EACH)
    assert (alone[0].ended, alone[1].ttft) == pytest.approx((2.01, 0.3))


def test_a_prompt_goes_on_faster_when_its_neighbour_has_nothing_left():
    """The stream ends 0.2 s after the prompt began, which then has 0.2 / 1.5 s of its work done."""
    trace = [Arrival(0.0, 10, 11), Arrival(0.06, 300, 1)]
    first, second = served(trace, ONE_OF_EACH, service=HOST)
    assert first.ended == pytest.approx(0.01 + 2 * 0.02 + 0.01 + 8 * 0.025, abs=0.02)
    left = 0.3 - (first.ended - 0.06) / 1.5
    assert second.first == pytest.approx(first.ended + left)


def test_steps_of_a_growing_context_take_twice_the_time_of_a_whole_core():
    """As a series, whose sum is computed at once: each step is longer than the one before."""
    service = replace(PLAIN, decode_token_s=1e-3)
    stream = Arrival(0.0, 8, 101)
    (alone,) = served([stream], ALONE, COLOCATED, service)
    assert alone.ended - alone.first == pytest.approx(100 * 0.02 + 1e-3 * sum(range(9, 109)))
    one_core = replace(service, cores=1)
    for half in served([stream, stream], {"prefill": 0, "decode": 2}, COLOCATED, one_core):
        assert half.ended - half.first == pytest.approx(2 * (alone.ended - alone.first))


def test_workers_beyond_the_cores_take_turns():
    service = replace(HOST, cores=1)
    first, second = served(
        [Arrival(0.0, 200, 1), Arrival(0.0, 200, 1)], {"prefill": 2, "decode": 1}, service=service
    )
    assert (first.ttft, second.ttft) == pytest.approx((0.4, 0.4))
    assert HOST.slowed(0.5, 3) == pytest.approx(1.5 * 2)
    assert replace(HOST, cores=0).slowed(0.5, 3) == 1.0


# --------------------------------------------------------------------------- changes of role


@pytest.mark.parametrize("turn_s", [2.0, 0.0])
def test_a_spare_worker_changes_its_role_after_its_last_request(turn_s):
    """Each decode worker has a stream, the last one the shortest.

    From 20.5 s on three prompts arrive per second, of one second each.
    """
    lengths = (2000, 2000, 1500)
    streams = [Arrival(float(n), 10, length) for n, length in enumerate(lengths)]
    prompts = [Arrival(20.5 + n / 3, 1000, 1) for n in range(60)]
    setup = Setup(turn_s=turn_s)
    replay = Replay([*streams, *prompts], PLAIN, 30.0, {"prefill": 1, "decode": 3}, setup)
    targets = [{"prefill": 1, "decode": 3}, {"prefill": 2, "decode": 2}]
    outcome = replay.run(lambda _metrics, now: targets[now >= 20.0])
    ended = streams[2].at + 0.01 + 1499 * 0.02
    mover = next(worker for worker in outcome.workers if worker.life.draining)
    assert mover.life.ended == pytest.approx(ended, abs=0.02)
    new = outcome.workers[-1]
    assert new.name == "prefill-1"
    if turn_s:
        assert outcome.moves == [(20.0, "prefill")]
        assert new.life.ordered == mover.life.ended
        assert outcome.hours() == pytest.approx(4 * outcome.end / 3600)
    else:
        assert outcome.moves == [] and new.life.ordered == 20.0
        assert outcome.hours() > 4 * outcome.end / 3600
    served_there = [r.first for r in outcome.requests if r.prefill is new]
    assert (min(served_there, default=math.inf) < 50.0) == bool(turn_s)


# --------------------------------------------------------------------------- adaptive

ADAPTIVE = Setup(mode="adaptive", slo=Slo(5.0, 0.1), slo_ttft=5.0, step_s=0.08, token_budget=0)


def test_an_adaptive_cluster_sends_a_burst_to_both_pools():
    burst = [Arrival(1.0 + 1e-3 * number, 1000, 2) for number in range(8)]
    trace = [Arrival(0.0, 100, 1), *burst]  # the first one measures the speed
    apart = served(trace, ONE_OF_EACH)
    mixed = served(trace, ONE_OF_EACH, ADAPTIVE)
    local = [request.prefill is None for request in mixed]
    assert not local[0]
    assert local.count(True) == 4
    assert max(request.ttft for request in mixed) < 0.6 * max(request.ttft for request in apart)


def test_prompts_stay_away_from_streams_that_have_no_time_left():
    tight = replace(ADAPTIVE, step_s=0.04)  # 20 ms are less than the least chunk
    stream, more = Arrival(0.0, 100, 1000), [Arrival(1.0, 1000, 2) for _ in range(6)]
    local = [
        sum(r.prefill is None for r in served([stream, *more], ONE_OF_EACH, setup))
        for setup in (tight, ADAPTIVE)
    ]
    assert local[0] <= 1 < local[1]  # one tries, before it is measured how long streams wait


def test_a_prompt_that_is_late_anyway_waits_at_a_prefill_worker_for_the_others():
    more = [Arrival(0.7 + 0.01 * number, 1000, 1) for number in range(6)]
    trace = [Arrival(0.0, 100, 1), Arrival(0.5, 1000, 1), Arrival(0.6, 9000, 1), *more]
    requests = served(trace, ONE_OF_EACH, ADAPTIVE)
    assert requests[2].prefill is not None
    assert all(request.ttft < 5.0 for request in requests if request is not requests[2])
    assert sum(request.prefill is None for request in requests) in range(2, 5)


def test_a_flipped_request_goes_the_other_way_alone():
    trace = [Arrival(0.0, 100, 1), *(Arrival(1.0 + number, 500, 2) for number in range(3))]
    ways = [r.prefill is None for r in served(trace, ONE_OF_EACH, ADAPTIVE)]
    other = [r.prefill is None for r in served(trace, ONE_OF_EACH, replace(ADAPTIVE, flipped=2))]
    assert [a != b for a, b in zip(ways, other, strict=True)] == [False, False, True, False]


def test_a_run_repeats_itself():
    trace = [
        Arrival(0.05 * number, 50 + 37 * number % 900, 1 + number % 40) for number in range(99)
    ]
    runs = [served(trace, {"prefill": 2, "decode": 2}, ADAPTIVE) for _ in range(2)]
    assert [(r.first, r.ended) for r in runs[0]] == [(r.first, r.ended) for r in runs[1]]
    assert all(request.ended >= request.first > request.at for request in runs[0])
