"""Pools whose KV blocks differ in type and size: the tokens of one worker, also after kills."""

from __future__ import annotations

import os
import signal

import pytest

from baton.deploy.config import demo_model_folder
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig

from .driver import Answer, Job, ask, ask_all, collect, greedy, lost_requests
from .test_gguf import expected

pytestmark = pytest.mark.cluster

POOLS = {
    "wide to narrow": {
        "prefill_kv_type": "float32",
        "prefill_block_size": 16,
        "decode_kv_type": "int8",
        "decode_block_size": 6,
    },
    "narrow to wide": {
        "prefill_kv_type": "int8",
        "prefill_block_size": 5,
        "decode_kv_type": "bfloat16",
        "decode_block_size": 16,
    },
}
"""Keys and values are int8 numbers in both."""
PROMPT = list(range(5, 245))
JOBS = [
    Job(PROMPT[:1], greedy(20)),
    Job(PROMPT[:37], greedy(40)),
    Job(PROMPT[::-1], greedy(40)),
    Job(PROMPT, greedy(60)),
    Job([*PROMPT, 9, 8, 7], greedy(60)),  # shares its prefix
]


@pytest.fixture(scope="module", params=POOLS, ids=lambda name: name.replace(" ", "-"))
def cluster(request, shared_cluster):
    return shared_cluster(
        prefill=1,
        decode=2,
        kv_memory="16MiB",
        max_num_batched_tokens=64,
        worker_timeout=1.0,
        **POOLS[request.param],
    )


@pytest.fixture(scope="module")
def engine():
    """One process with int8 keys and values."""
    config = RunnerConfig(model=str(demo_model_folder()), kv_type="int8", num_blocks=256)
    return LLMEngine(load_runner(config))


@pytest.fixture(scope="module")
def wanted(engine):
    return [expected(engine, job) for job in JOBS]


def test_tokens_are_those_of_one_worker(cluster, wanted):
    with cluster.client() as client:
        assert [answer.tokens for answer in ask_all(client, JOBS)] == wanted
        again = [ask(client, job) for job in JOBS]  # one at a time, from the prefix caches
        assert [answer.tokens for answer in again] == wanted
        assert all(answer.prefill.startswith("prefill") for answer in again)
        assert any(answer.cached_tokens for answer in again)
        status = client.status()
    assert " and " in status["router"]["kv_dtype"]
    assert "kv-int8" in status["router"]["numerics"]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_changes_no_token(cluster, engine, role):
    cluster.wait_ready()
    before = lost_requests(cluster)
    long = Job(PROMPT[:200], greedy(300))
    for _ in range(3):  # on a busy machine all may be over before the kill
        answer = Answer()
        with cluster.client() as client:
            stream = iter(long.start(client))
            others = [job.start(client) for job in JOBS]
            while len(answer.tokens) < (20 if role == "decode" else 1):
                answer.tokens += next(stream).tokens
            names = [name for name in cluster.pids() if name.startswith(role)]
            pids = {name: cluster.pids()[name] for name in names}
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
            answers = [collect(other) for other in others]
            collect(stream, answer)
        assert answer.tokens == expected(engine, long)
        assert [a.tokens for a in answers] == [expected(engine, job) for job in JOBS]
        for name, pid in pids.items():
            cluster.wait_replaced(name, pid)
        if lost_requests(cluster) > before:
            return
    pytest.fail("nothing ran on the lost workers")


def test_prompts_of_a_decode_worker_alone_have_the_same_tokens(shared_cluster, wanted):
    """Without prefill workers, decode workers compute prompts, and nothing is converted."""
    alone = shared_cluster(
        prefill=0,
        decode=1,
        mode="adaptive",
        kv_memory="16MiB",
        prefill_kv_type="int8",
        decode_kv_type="bfloat16",
    )
    with alone.client() as client:
        answers = ask_all(client, JOBS)
    assert [answer.tokens for answer in answers] == wanted
    assert not any(answer.prefill.startswith("prefill") for answer in answers)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_wider_memory_of_rounded_numbers_changes_no_token(wanted, kind):
    config = RunnerConfig(
        model=str(demo_model_folder()), kv_type=kind, kv_types=("int8",), num_blocks=256
    )
    runner = load_runner(config)
    assert runner.card.layout.dtype == kind
    assert [expected(LLMEngine(runner), job) for job in JOBS] == wanted


def test_workers_that_round_differently_refuse_each_other():
    cards = [
        load_runner(
            RunnerConfig(model=str(demo_model_folder()), num_blocks=4, kv_type=kind, kv_types=all_)
        ).card
        for kind, all_ in [("int8", ()), ("bfloat16", ()), ("bfloat16", ("int8",))]
    ]
    assert cards[0].mismatch(cards[1])[0] == "numerics"
    assert cards[1].mismatch(cards[2])[0] == "numerics"
    assert cards[0].mismatch(cards[2]) is None
