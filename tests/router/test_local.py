"""Requests that a decode worker serves alone: colocated clusters, and without a prefill worker."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from baton.proto.requests import prompt_feature
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Buckets,
    Busy,
    Cancel,
    HandoffReport,
    PeerLost,
    RequestState,
    Terminal,
    WorkerLoad,
    WorkerTimes,
)
from baton.proto.wire.proofs import Holder, assignment_proof
from baton.router.config import RouterConfig
from baton.router.decider import (
    ADAPTIVE,
    CLUSTERS,
    COLOCATED,
    Decider,
    HandoffTails,
    Limits,
    alone_at,
    at_prefill,
)
from baton.router.placement import NO_PREFILL
from baton.router.states import State
from baton.router.story_report import request_line
from baton.router.story_slices import slices_of

from .conftest import CARD, make_context
from .test_stories import told

ALONE = replace(CARD, features=[*CARD.features, prompt_feature("TextContext")])


@pytest.fixture
def colocated(make_bench):
    bench = make_bench(mode="colocated")
    bench.join("decode", 0, model=ALONE)
    bench.join("decode", 1, model=ALONE)
    return bench


def test_a_colocated_request_is_assigned_to_a_decode_worker_without_a_ticket(colocated):
    key = colocated.submit()
    worker, assign = colocated.find(Assign)
    holder = Holder(worker.hello.incarnation)
    assert (assign.decode_incarnation, assign.decode) == (holder.incarnation, worker.endpoint)
    assert assign.proof == assignment_proof(colocated.config.key, key, 1, holder)
    assert (assign.ticket, assign.decode_proof) == (b"", b"")
    worker.accept(assign)
    request = colocated.core.table.requests[key]
    assert request.state is State.DECODING
    worker.tokens(key, 10, 5, 6)
    worker.end(key, 12, prefill=worker.id, decode=worker.id)
    assert colocated.streamed(key) == [(10, 5), (11, 6)]
    (terminal,) = colocated.terminals(key)
    assert (terminal.prefill, terminal.decode) == (worker.id, worker.id)
    colocated.ack(key)
    colocated.advance(2.0)
    colocated.assert_nothing_kept()


def test_the_story_and_the_metrics_show_the_way_and_why(colocated):
    key, assign = colocated.run()
    worker = colocated.decode_of(assign)
    colocated.advance(1.0)
    worker.tokens(key, 10, 5)
    times = WorkerTimes(computing=0.25, computed=1.0, ended=1.0)
    worker.end(key, 11, prefill=worker.id, decode=worker.id, times=times)
    (story,) = told(colocated, "r")
    (attempt,) = story["attempts"]
    route = attempt["route"]
    assert (attempt["prefill"], route["way"], route["why"]) == ("", "local", COLOCATED)
    assert story["queue_s"] == pytest.approx(0.25)
    names = [part.name for part in slices_of(story)]
    assert names[-3:] == ["wait for batch", "compute", "generate"]
    assert slices_of(story)[1].details["why"] == COLOCATED
    assert colocated.core.metrics.local == {COLOCATED: 1}


@pytest.mark.parametrize("outcome", ["finished", "cancelled"])
def test_the_line_of_a_local_request_names_its_decode_worker_alone(outcome, make_bench):
    bench = make_bench(mode="colocated", fresh_stories=True)
    worker = bench.join("decode", model=ALONE)
    key, _ = bench.run()
    if outcome == "finished":
        worker.tokens(key, 10, 5)
        worker.end(key, 11, prefill=worker.id, decode=worker.id)
    else:
        bench.client(Cancel(request_id="r"))
    (story,) = bench.core.stories.take_fresh()
    line = request_line(story)
    assert (line.outcome, line.way) == (outcome, "local")
    assert (line.prefill, line.decode) == ("", worker.id)


def test_colocated_requests_are_spread_over_the_workers(colocated):
    for number in range(4):
        colocated.submit(f"r{number}")
    assert [len(colocated.take(worker, Assign)) for worker in colocated.workers] == [2, 2]


def test_a_colocated_cluster_uses_no_prefill_worker(colocated):
    prefill = colocated.join("prefill")
    colocated.run()
    assert not colocated.take(prefill, Assign)


def test_embeddings_of_a_colocated_cluster_use_prefill_workers(make_bench):
    bench = make_bench(mode="colocated")
    prefill = bench.join("prefill", model=replace(CARD, task="embed", embedding_size=8))
    bench.submit(context=make_context(new=None, task="embed", max_length=10))
    assert bench.one(prefill, Assign).decode == ""


def test_tokens_before_accepted_count(colocated):
    key = colocated.submit()
    worker, _ = colocated.find(Assign)
    worker.tokens(key, 10, 5)
    assert colocated.streamed(key) == [(10, 5)]


def test_the_assign_is_repeated_until_it_is_answered(colocated):
    colocated.submit()
    worker, _ = colocated.find(Assign)
    colocated.advance(0.5)
    assert colocated.take(worker, Assign)


def test_a_busy_worker_is_avoided_and_a_late_busy_changes_nothing(colocated):
    key = colocated.submit()
    first, assign = colocated.find(Assign)
    first.say(Busy(request=key, attempt=1, reason="queue full"))
    second, assign = colocated.find(Assign)
    assert (second is not first, assign.attempt) == (True, 2)
    second.accept(assign)
    second.say(Busy(request=key, attempt=2, reason="queue full"))  # to an earlier Assign
    assert not colocated.take(second, Abort)
    second.tokens(key, 10, 5, attempt=2)
    assert colocated.streamed(key) == [(10, 5)]


def test_a_worker_that_does_not_have_it_loses_it(colocated):
    key = colocated.submit()
    worker, _ = colocated.find(Assign)
    worker.say(Aborted(request=key, attempt=1))
    _, assign = colocated.find(Assign)
    assert assign.attempt == 2


def test_a_replay_after_a_kill_continues_at_another_worker(colocated):
    key, assign = colocated.run()
    worker = colocated.decode_of(assign)
    worker.tokens(key, 10, 5, 6)
    worker.gone()
    other, again = colocated.find(Assign)
    assert (other is not worker, again.attempt, again.emitted) == (True, 2, [5, 6])


def test_a_waiting_prompt_leaves_a_suspect_worker_and_a_stream_stays(colocated):
    keys = {}
    for name in ("waits", "streams"):
        keys[name], assign = colocated.run(name, target_endpoint=None)
        keys[name + " at"] = colocated.decode_of(assign)
    waits, streams = keys["waits at"], keys["streams at"]
    streams.tokens(keys["streams"], 10, 5)
    for quiet in (waits, streams):
        other = next(w for w in colocated.workers if w is not quiet)
        for _ in range(12):
            colocated.advance(0.1, beats=False)
            other.beat()
        if quiet is waits:
            moved, assign = colocated.find(Assign)
            assert (moved, assign.request) == (other, keys["waits"])
            moved.accept(assign)
            quiet.beat()
            other.beat()
            break


def test_another_router_finds_it_by_its_proof(make_bench, submitted):
    bench = make_bench(mode="colocated", recovery_s=0.0)
    worker = bench.join("decode", 0, model=ALONE)
    bench.client(bench.resume_message(submitted, []))
    adopt = bench.one(worker, Adopt)
    proof = assignment_proof(bench.config.key, adopt.request, 3, Holder(worker.hello.incarnation))
    worker.say(Accepted(request=adopt.request, attempt=3, proof=proof))
    request = bench.core.table.requests[adopt.request]
    assert (request.state, request.attempt.server.id, request.attempt.number) == (
        State.DECODING, "decode-0", 3,
    )  # fmt: skip


def test_a_hello_without_it_loses_it(colocated):
    key, assign = colocated.run()
    worker = colocated.decode_of(assign)
    worker.say(replace(worker.hello, requests=[]))
    _, again = colocated.find(Assign)
    assert (again.request, again.attempt) == (key, 2)
    worker.say(replace(worker.hello, requests=[RequestState(key, 1, 10, 10)]))


def test_two_deaths_alone_poison_a_local_request(make_bench):
    bench = make_bench(mode="colocated")
    key = bench.submit()
    for number in range(2):
        worker = bench.join("decode", number, model=ALONE)
        _, assign = bench.find(Assign)
        worker.accept(assign)
        worker.gone()
        bench.advance(6.0)
    (terminal,) = bench.terminals(key)
    assert terminal.code == "poisoned"


# --------------------------------------------------------------------------- fallback


def test_without_a_prefill_worker_a_decode_worker_serves_at_once(make_bench):
    bench = make_bench()
    decode = bench.join("decode", model=ALONE)
    bench.run()
    assert bench.core.metrics.local == {NO_PREFILL: 1}
    prefill = bench.join("prefill")
    bench.run("next")
    assert bench.core.metrics.local == {NO_PREFILL: 1}
    assert not bench.take(decode, Assign)
    assert len(prefill.bench.core.registry.ready("prefill")) == 1


@pytest.mark.parametrize("settings", [{"enforce_disaggregation": True}, {}])
def test_requests_wait_if_they_must_or_if_no_worker_can_serve_them_alone(make_bench, settings):
    bench = make_bench(**settings)
    decode = bench.join("decode", model=ALONE if settings else CARD)
    key = bench.submit()
    bench.advance(59.0)
    assert not bench.take(decode, Assign)
    bench.advance(2.0)
    terminal = bench.terminals(key)[0]
    assert (terminal.code, "no prefill worker was ready" in terminal.message) == (
        "overloaded",
        True,
    )


def test_a_prompt_at_the_last_prefill_worker_moves_when_that_worker_is_lost(make_bench):
    bench = make_bench()
    prefill = bench.join("prefill")
    decode = bench.join("decode", model=ALONE)
    key, _ = bench.run()
    prefill.gone()
    worker, assign = bench.find(Assign)
    assert (worker, assign.request, assign.ticket) == (decode, key, b"")


def test_a_pin_to_a_prefill_worker_forces_the_handoff_and_one_to_a_decode_worker_the_place(
    make_bench,
):
    bench = make_bench()
    prefill = bench.join("prefill")
    decodes = [bench.join("decode", number, model=ALONE) for number in range(2)]
    strict = bench.submit("strict", target_endpoint=prefill.endpoint, pin="strict")
    assert bench.one(prefill, Assign).request == strict
    bench.advance(1.5, beats=False)  # suspect
    for worker in decodes:
        worker.beat()
    bench.submit("again", target_endpoint=prefill.endpoint, pin="strict")
    for worker in decodes:
        assert not bench.take(worker, Assign)
    key = bench.submit("there", target_endpoint=decodes[1].endpoint)
    assert bench.one(decodes[1], Assign).request == key


def test_an_image_needs_a_worker_with_its_tower(make_bench):
    """Features decide, not the name of the model."""
    bench = make_bench(mode="colocated")
    bench.join("decode", 0, model=CARD)
    able = bench.join("decode", 1, model=ALONE)
    for number in range(3):
        bench.submit(f"r{number}")
    assert len(bench.take(able, Assign)) == 3


def test_reports_of_handoffs_and_lost_peers_do_not_touch_a_local_request(colocated):
    key, assign = colocated.run()
    worker = colocated.decode_of(assign)
    rogue = colocated.join("prefill")
    report = HandoffReport(
        request=key, attempt=1, prefill=rogue.id, decode=worker.id, transport="zmq",
        bytes_sent=1, bytes_received=1, blocks=1, cached_tokens=0,
    )  # fmt: skip
    rogue.say(report, PeerLost(endpoint=worker.endpoint, request=key, attempt=1))
    rogue.say(Terminal(request=key, attempt=1, position=10, status="end_of_sequence"))
    worker.tokens(key, 10, 5)
    assert colocated.streamed(key) == [(10, 5)]
    assert not colocated.core.placement.failed_pairs.known


def test_the_context_of_the_bench_is_text():
    assert make_context().__struct_config__.tag == "TextContext"


# --------------------------------------------------------------------------- adaptive


def worker(name="w", **fields):
    """What the predictions read of a router's record: an idle worker, but for these fields."""
    idle = {
        "id": name, "uncached": 0, "late": 0, "prompts": 0, "turned": 0.0,
        "others": 0, "others_requests": 0,
        "stream_step_s": 0.0, "added_s": -1.0, "local_s": 0.0, "requests": {}, "load": WorkerLoad(),
    }  # fmt: skip
    return SimpleNamespace(**{**idle, **fields})


def streams(count, **fields):
    return worker(requests=dict.fromkeys(range(count)), **fields)


MEASURED = WorkerLoad(prompt_tokens=1000, compute_seconds=1.0)
"""A token takes a millisecond."""


@pytest.mark.parametrize(
    ("prefill", "seconds"),
    [
        (worker(), 0.1),
        (worker(uncached=400, turned=10.0), 0.5),
        (worker(uncached=400, turned=9.8), 0.3),  # 200 ms of its present prompt are over
        (worker(uncached=400, turned=0.0), 0.1),  # it is slower than predicted, not faster
        (worker(others=300), 0.4),  # prompts of other routers
        (worker(uncached=400, turned=10.0, late=9000, prompts=4), 0.5),  # begun last
        (worker(late=900, prompts=3, turned=10.0), 0.4),  # it has begun one of them
    ],
)
def test_a_prefill_worker_computes_its_prompts_first(prefill, seconds):
    assert at_prefill(prefill, 100, 0.001, now=10.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("decode", "target", "seconds"),
    [
        (worker(), 0.05, 0.1),
        (worker(uncached=200, prompts=1), 0.05, 0.3),  # another local prompt is before it
        (streams(4, stream_step_s=0.01), 0.05, 0.1 + 3 * 0.01),  # 40 ms of prompt a step
        (streams(4, stream_step_s=0.01), 0.0, 0.1 + 0.01),  # one step of the whole prompt
        (streams(2, stream_step_s=0.01, prompts=2), 0.05, 0.1),  # both compute their prompts
        # 30 ms hold less than 32 tokens. One prompt may try, which takes 4 steps of 32 ms.
        (streams(4, stream_step_s=0.02), 0.05, 0.1 + 4 * 0.02),
        (streams(4, stream_step_s=0.02, prompts=1), 0.05, float("inf")),
        (streams(4, stream_step_s=0.02, added_s=0.001), 0.05, float("inf")),
        (worker(stream_step_s=0.02, added_s=0.001), 0.05, float("inf")),  # the next stream waits
        (streams(4, stream_step_s=0.06), 0.05, float("inf")),  # nothing is left
        # Measured: prompt tokens cost less beside streams, and a prompt takes three times as long.
        (streams(4, stream_step_s=0.02, added_s=0.0005, local_s=0.003), 0.05, 0.3),
        (streams(4, stream_step_s=0.02, added_s=0.0, local_s=0.0001), 0.05, 0.1),
        (worker(load=WorkerLoad(tokens_waiting=300)), 0.05, 0.1),  # they are its own
        (worker(load=WorkerLoad(tokens_waiting=300), others_requests=2), 0.05, 0.4),
    ],
)
def test_a_decode_worker_computes_a_prompt_beside_its_streams(decode, target, seconds):
    assert alone_at(decode, 100, 0.001, target) == pytest.approx(seconds)


def ways(prefills, decodes, uncached=100, *, handoff=0.0, limit=0.0, now=0.0, own=CLUSTERS):
    config = RouterConfig(
        client_address="ipc:///c", worker_address="ipc:///w", mode="adaptive", slo_ttft_s=limit
    )
    tails = HandoffTails()
    tails.learn(prefills[0].id, decodes[0].id, handoff)
    tokens = uncached if callable(uncached) else lambda _: uncached
    pair = prefills[0], decodes[0]
    return Decider(config, tails).costs(prefills, decodes, pair, tokens, now, own)


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "local"),
    [
        ({}, {}, {}, False),  # a prefill worker is there for it
        ({}, {}, {"handoff": 0.05}, True),
        ({"uncached": 200}, {}, {}, True),  # it is busy
        ({"uncached": 200}, {"uncached": 200}, {}, False),
        # It would delay its streams.
        ({"uncached": 200}, {"stream_step_s": 0.02, "added_s": 0.001}, {}, False),
        ({"uncached": 200}, {}, {"limit": 0.05}, False),  # late on either way
        ({"uncached": 200}, {}, {"limit": 0.2}, True),
    ],
)
def test_the_way_with_the_earlier_first_token_is_chosen(prefill, decode, options, local):
    found = ways([worker("p", load=MEASURED, **prefill)], [worker("d", **decode)], **options)
    assert found.prefers_local is local
    assert found.explain().startswith("adaptive: ")
    assert (found.over_prefill > found.limit) is ("limit" in options)


@pytest.mark.parametrize(
    ("own", "streams_itl", "prompts", "local"),
    [
        (Limits(), 0.0, 0, True),
        (Limits(ttft=0.05), 0.0, 0, False),  # late on either way
        (Limits(ttft=0.2), 0.0, 0, True),
        (Limits(itl=0.01), 0.0, 0, True),  # no other prompt is there
        (Limits(itl=0.01), 0.0, 1, False),  # its tokens would wait for steps of 50 ms
        (Limits(itl=0.0625), 0.0, 1, True),  # 80 % of it are 50 ms
        (Limits(itl=1.0), 0.05, 0, False),  # a stream's limit has no time for the least chunk
        (Limits(itl=1.0), 0.053, 0, True),  # with smaller chunks
    ],
)
def test_own_limits_of_the_request_and_of_streams_decide_its_way(own, streams_itl, prompts, local):
    stream = SimpleNamespace(slo_itl=streams_itl)
    prefill = worker("p", load=MEASURED, uncached=400)
    decode = worker(
        "d", requests={1: stream, 2: SimpleNamespace(slo_itl=0.0)}, prompts=prompts,
        stream_step_s=0.01, added_s=0.001,
    )  # fmt: skip
    found = ways([prefill], [decode], own=own)
    assert found.prefers_local is local
    shorter = 0.8 * min(streams_itl or math.inf, own.itl if prompts and own.itl else math.inf)
    assert found.target == (min(0.05, shorter) if local else found.target)
    assert found.limit == (own.ttft or math.inf)


def test_the_best_worker_of_each_way_is_found():
    prefills = [worker("busy", load=MEASURED, uncached=500), worker("free", load=MEASURED)]
    decodes = [streams(4, name="slow", stream_step_s=0.015), worker("idle"), worker("queue")]
    decodes[2].uncached = 50
    found = ways(prefills, decodes)
    assert (found.prefill.id, found.decode.id) == ("free", "idle")
    cached = ways(prefills, decodes, lambda one: 10 if one.id in ("busy", "queue") else 400)
    assert (cached.prefill.id, cached.decode.id) == ("free", "queue")
    assert cached.prefers_local


def test_without_a_measured_speed_the_policy_decides():
    found = ways([worker("q"), worker("p")], [worker("d")])
    assert (found.prefill.id, found.decode.id, found.prefers_local) == ("q", "d", False)
    assert "has measured its speed" in found.explain()


@pytest.fixture
def adaptive(make_bench):
    bench = make_bench(mode="adaptive", slo_ttft_s=1.0)
    bench.join("prefill")
    bench.join("decode", model=ALONE)
    return bench


def test_an_adaptive_router_sends_a_prompt_around_a_busy_prefill_worker(adaptive):
    prefill, decode = adaptive.workers
    adaptive.submit("unmeasured", prompt=500)
    assert adaptive.take(prefill, Assign)  # whose speed is unknown
    prefill.beat(load=MEASURED)
    adaptive.submit("behind it", prompt=500)
    assert adaptive.one(decode, Assign).ticket == b""
    assert adaptive.core.metrics.local == {ADAPTIVE: 1}
    (story,) = told(adaptive, "behind it")
    # The decode worker got this prompt with the first request, all but 52 tokens in whole blocks.
    assert "0.552 s with handoff, 0.052 s alone" in story["attempts"][0]["route"]["why"]
    adaptive.submit("pinned", prompt=50, target_endpoint=prefill.endpoint)
    assert adaptive.take(prefill, Assign)


def test_the_limits_of_a_request_reach_worker_decider_and_story(adaptive):
    prefill, decode = adaptive.workers
    prefill.beat(load=MEASURED)
    adaptive.submit("first", prompt=500)
    first = adaptive.one(prefill, Assign)
    assert (first.slo_ttft, first.step_limit) == (0.0, 0.0)
    adaptive.submit("late", prompt=505, slo_ttft=0.001, slo_itl=0.5)
    late = adaptive.one(prefill, Assign)  # too late to be local
    assert (late.slo_ttft, late.step_limit) == (0.001, 0.4)
    (story,) = told(adaptive, "late")
    assert (story["slo_ttft_s"], story["slo_itl_s"]) == (0.001, 0.5)
    adaptive.submit("local", prompt=505)
    assert adaptive.one(decode, Assign).slo_ttft == 0.0


@pytest.mark.parametrize("name", ["slo_ttft", "slo_itl"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 86_401.0])
def test_a_limit_that_is_none_is_refused(adaptive, name, value):
    adaptive.submit("r", prompt=50, **{name: value})
    refused = adaptive.one(b"client", Terminal)
    assert refused.code == "input" and refused.message.startswith(f"{name} must be a number of")


def test_a_prompt_counts_from_its_placement_to_its_first_token(adaptive):
    prefill, _ = adaptive.workers
    prefill.beat(load=MEASURED)
    key, _ = adaptive.run(prompt=100)
    known = {one.id: one for one in adaptive.core.registry.live()}
    assert (known[prefill.id].uncached, known[prefill.id].prompts) == (100, 1)
    adaptive.advance(0.25)
    prefill.tokens(key, 100, 5)
    assert (known[prefill.id].uncached, known[prefill.id].prompts) == (0, 0)
    assert known[prefill.id].turned == adaptive.now
    prefill.beat(load=MEASURED)
    adaptive.submit("late", prompt=1500)
    assert known[prefill.id].prompts == 1
    assert known[prefill.id].uncached == 0  # it is computed after prompts that can be in time
    assert known[prefill.id].late == 1500 - 64  # its first block is cached
    adaptive.core.check_integrity()


def loaded(steps, seconds, prompt_tokens, generated, waiting=0):
    return WorkerLoad(
        prompt_tokens=prompt_tokens, generated_tokens=generated, compute_seconds=seconds,
        tokens_waiting=waiting, histograms={"step_seconds": Buckets([steps], seconds)},
    )  # fmt: skip


def test_reports_tell_how_prompts_are_computed_beside_streams(adaptive):
    decode = adaptive.workers[1]
    known = {one.id: one for one in adaptive.core.registry.live()}[decode.id]
    decode.beat(load=loaded(10, 0.2, 0, 40), step_s=0.02)
    decode.beat(load=loaded(14, 0.4, 0, 56, 400))  # no prompt token yet
    assert (known.added_s, known.local_s) == (-1.0, 0.0)
    decode.beat(load=loaded(18, 0.6, 200, 72, 200))  # 4 steps of 50 ms, 20 of them without
    assert known.added_s == pytest.approx(0.12 / 200)
    assert known.local_s == pytest.approx(0.2 / 200)
    decode.beat(load=loaded(22, 0.8, 260, 88))  # some steps may have had no chunk
    assert known.added_s == pytest.approx((3 * 0.12 / 200 + 0.12 / 60) / 4)
    assert known.local_s == pytest.approx(0.2 / 200)
    before = known.added_s
    decode.beat(load=loaded(26, 1.2, 500, 88))  # no stream
    assert known.added_s == before


def test_only_a_step_without_prompts_tells_how_long_streams_take(adaptive):
    decode = adaptive.workers[1]
    known = {one.id: one for one in adaptive.core.registry.live()}[decode.id]
    decode.beat(step_s=0.02)
    decode.beat(step_s=0.05, load=WorkerLoad(tokens_waiting=10))
    assert (known.step_s, known.stream_step_s) == (0.05, 0.02)


def test_the_time_of_handoffs_is_learned_from_their_reports():
    tails = HandoffTails()
    report = HandoffReport(
        request=b"r" * 16, attempt=1, prefill="p", decode="d", transport="zmq", bytes_sent=1,
        bytes_received=1, blocks=1, cached_tokens=0, times=WorkerTimes(computed=1.0, ended=1.5),
    )  # fmt: skip
    tails.add(report)
    tails.add(replace(report, times=WorkerTimes(computed=1.0, ended=1.0)))
    tails.add(replace(report, times=None))
    pair = (SimpleNamespace(id="p"), SimpleNamespace(id="d"))
    assert tails.of(*pair) == pytest.approx(0.4)
    assert tails.of(*reversed(pair)) == 0.0
