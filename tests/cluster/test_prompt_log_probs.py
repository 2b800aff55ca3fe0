"""Log-probabilities of prompts through a cluster: exact, once, and after kills."""

import math
import os
import signal

import numpy as np
import pytest

from baton.proto.errors import InputError

from ..processes import wait_until
from .driver import greedy
from .reference import DATA

pytestmark = pytest.mark.cluster

MODEL = DATA / "qwen3"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def pools(shared_cluster):
    """One prefill worker, whose chunks are small, and two decode workers."""
    settings = {"max_num_batched_tokens": 64, "worker_timeout": 1.0}
    return shared_cluster(prefill=1, decode=2, model=MODEL, **settings)


@pytest.fixture(scope="module")
def cases():
    """Prompts, and the log-softmax of transformers' logits after some of their tokens."""
    cases = []
    with np.load(MODEL / "reference.npz") as data:
        for i in range(2, 7):
            rows = data[f"logits_{i}"].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            known = dict(zip(data[f"rows_{i}"].tolist(), rows, strict=True))
            cases.append((data[f"prompt_{i}"].tolist(), known))
    return cases


def check(prompt, wanted, records, top):
    assert [one.token_id for one in records] == prompt
    assert math.isnan(records[0].logprob) and records[0].rank == 0 and records[0].top == []
    for row, values in wanted.items():
        if row == len(prompt) - 1:
            continue
        record, target = records[row + 1], prompt[row + 1]
        assert abs(record.logprob - values[target]) < TOLERANCE
        assert record.rank == 1 + (values > values[target]).sum()
        best = np.argsort(-values, kind="stable")[:top].tolist()
        assert [one.token_id for one in record.top] == best


def test_prompts_get_the_log_probabilities_of_transformers(pools, cases):
    with pools.client() as client:
        for count in (1, 9):  # the first ends on the prefill worker, the second is handed over
            for prompt, wanted in cases:
                result = client.complete(prompt, greedy(count), prompt_log_probabilities=3)
                check(prompt, wanted, result.prompt_logprobs, 3)
                assert result.logprobs is None, "only those of the prompt were requested"
                assert len(result.token_ids) == count
        prompt, wanted = cases[-1]
        both = client.complete(prompt, greedy(4), prompt_log_probabilities=0, log_probabilities=2)
        check(prompt, wanted, both.prompt_logprobs, 0)
        assert [len(one.top) for one in both.logprobs] == [2] * 4
        plain = client.complete(prompt, greedy(4))
        assert plain.prompt_logprobs is None and plain.token_ids == both.token_ids
    pools.wait_idle()


@pytest.mark.parametrize("victim", ["prefill-0", "decode", "router"])
def test_records_arrive_once_when_a_process_is_killed(pools, cases, victim):
    prompt, wanted = cases[-1]
    pools.wait_ready()
    with pools.client() as client:
        stream = client.generate(prompt, greedy(150), prompt_log_probabilities=1)
        found, tokens = [], []
        if victim == "prefill-0":  # the prompt is being computed, or has just been
            os.kill(pools.pids()[victim], signal.SIGKILL)
        for output in stream:
            tokens += output.tokens
            if output.prompt_log_probabilities is not None:
                found.append(output.prompt_logprobs)
            if victim and victim != "prefill-0" and len(tokens) > 20:
                serving = client.status()["workers"]
                name = victim
                if victim == "decode":
                    name = next(
                        (w["id"] for w in serving if w["role"] == "decode" and w["kv_blocks_used"]),
                        "decode-0",
                    )
                os.kill(pools.pids()[name], signal.SIGKILL)
                victim = ""
        assert len(found) == 1
        check(prompt, wanted, found[0], 1)
        assert tokens == client.complete(prompt, greedy(150)).token_ids
    pools.wait_ready()
    wait_until(lambda: len(pools.workers()) == 3, what="all workers")


def test_more_alternatives_than_are_kept_are_refused(pools):
    with pools.client() as client, pytest.raises(InputError, match="prompt_log_probabilities must"):
        client.complete([1, 2], greedy(1), prompt_log_probabilities=21)
