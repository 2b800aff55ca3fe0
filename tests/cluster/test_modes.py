"""Clusters that serve without prefill workers: the same tokens, also through kills."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from baton.proto.sampling import SamplingParams

from ..processes import wait_until
from .driver import Job, ask_all, greedy, lost_requests
from .speaker import assert_same, make_speaker, samples_here, speak_all
from .streams import begun, jobs, run, tokens
from .vision_model import reference, vision_folder

pytestmark = pytest.mark.cluster

WORK = jobs(8, prompt=300, new=200)
SETTINGS = {"kv_memory": "64MiB", "worker_timeout": 1.0}


@pytest.fixture(scope="module")
def disaggregated(shared_cluster):
    return shared_cluster(prefill=1, decode=2, **SETTINGS)


@pytest.fixture(scope="module")
def colocated(shared_cluster):
    return shared_cluster(mode="colocated", workers=2, **SETTINGS)


@pytest.fixture(scope="module")
def wanted(disaggregated):
    return tokens(run(disaggregated.address, WORK))


def local_of(cluster) -> int:
    with cluster.client() as client:
        return client.status()["router"]["requests"]["local"]


def test_colocated_tokens_are_those_of_a_disaggregated_cluster(colocated, wanted):
    assert {worker["role"] for worker in colocated.workers().values()} == {"decode"}
    assert tokens(run(colocated.address, WORK)) == wanted
    alone = [tokens(run(colocated.address, [job]))[0] for job in WORK[:2]]
    assert alone == wanted[:2]
    assert local_of(colocated) >= len(WORK) + 2
    colocated.wait_idle()


def test_colocated_streams_survive_a_kill(colocated, wanted):
    before = lost_requests(colocated)
    for _ in range(3):  # on a busy machine the blow may come when all is over
        pid = colocated.pids()["decode-0"]

        async def strike(streams, pid=pid) -> None:
            await begun(streams, len(WORK), tokens=5)
            os.kill(pid, signal.SIGKILL)

        assert tokens(run(colocated.address, WORK, strike)) == wanted
        colocated.wait_replaced("decode-0", pid)
        if lost_requests(colocated) > before:
            break
    else:
        pytest.fail("nothing ran on the killed worker")
    colocated.wait_idle()


def test_answers_name_the_worker_that_served_them_alone(colocated):
    with colocated.client() as client:
        (answer,) = ask_all(client, [Job([5, 6, 7], greedy(3))])
    assert answer.prefill == answer.decode != ""


def test_schemas_and_log_probabilities_are_the_same_without_a_prefill_worker(
    colocated, disaggregated
):
    prompt, sampled = list(range(20, 90)), SamplingParams(max_new_tokens=60, seed=7)
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
    found = []
    for running in (disaggregated.wait_ready(), colocated.wait_ready()):
        with running.client() as client:
            scored = client.complete(
                prompt, greedy(9), log_probabilities=3, prompt_log_probabilities=2
            )
            shaped = client.complete(prompt, sampled, json_schema=schema)
        scores = [(one.token_id, one.rank, one.top) for one in scored.prompt_logprobs]
        found.append((scored.token_ids, scores, scored.logprobs, shaped.token_ids))
    assert found[0] == found[1]


def test_without_a_prefill_worker_requests_are_served_at_once(disaggregated, wanted):
    disaggregated.wait_ready()
    before = local_of(disaggregated)
    pid = disaggregated.pids()["prefill-0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: disaggregated.workers()["prefill-0"]["state"] != "ready",
            what="the prefill worker to be missed",
        )
        assert tokens(run(disaggregated.address, WORK)) == wanted
    finally:
        with contextlib.suppress(ProcessLookupError):  # its supervisor may have replaced it
            os.kill(pid, signal.SIGCONT)
    assert local_of(disaggregated) > before
    shown = disaggregated.command("status").stdout + disaggregated.command("trace").stdout
    assert "local (mode disaggregated)" in shown
    disaggregated.wait_ready()
    disaggregated.wait_idle()


def test_enforced_disaggregation_waits_for_a_prefill_worker(cluster, wanted):
    running = cluster(prefill=1, decode=1, enforce_disaggregation=None, **SETTINGS)
    pid = running.pids()["prefill-0"]
    os.kill(pid, signal.SIGKILL)
    assert tokens(run(running.address, WORK[:2])) == wanted[:2]
    running.wait_replaced("prefill-0", pid)
    assert local_of(running) == 0
    running.wait_idle()


def test_adaptive_tokens_are_the_same_whatever_way_each_request_took(cluster, wanted):
    running = cluster(mode="adaptive", prefill=1, decode=1, **SETTINGS)
    for _ in range(2):  # the second time the prefill worker's speed is known
        assert tokens(run(running.address, WORK)) == wanted
    running.wait_idle()
    with running.client() as client:
        status = client.status()
    assert status["router"]["requests"]["local"] + status["handoffs"]["count"] == 2 * len(WORK)


def test_colocated_workers_see_images(cluster, tmp_path):
    running = cluster(mode="colocated", workers=2, model=vision_folder(tmp_path / "seer"))
    params = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    cases = reference()
    work = [Job(list(prompt), params, {"images": list(images)}) for prompt, images, _ in cases]
    with running.client() as client:
        for _ in range(2):  # the second time with prefixes from the caches
            assert [one.tokens for one in ask_all(client, work)] == [case[2] for case in cases]
        features = client.model().card.features
    assert "prompts:TextAndVisionContext" in features
    assert local_of(running) == 2 * len(work)
    running.wait_idle()


@pytest.mark.long
def test_colocated_workers_speak_through_a_kill(cluster, tmp_path):
    folder = make_speaker(tmp_path / "speaker")
    running = cluster(mode="colocated", workers=2, model=folder, worker_timeout=1.0)
    with running.client() as client:
        wanted = samples_here(folder, client.model())
    assert_same(speak_all(running.address), wanted)
    pid = running.pids()["decode-0"]
    kill = threading.Timer(0.2, lambda: os.kill(pid, signal.SIGKILL))
    kill.start()
    assert_same(speak_all(running.address), wanted)
    kill.join()
    running.wait_replaced("decode-0", pid)
    running.wait_idle()
