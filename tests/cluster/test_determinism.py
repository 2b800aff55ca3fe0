"""The same seed gives the same tokens and log-probabilities, whatever else happens.

Sampled at temperature 0.8 and top-p 0.9 on the compiled kernels. What a request gives alone
on one prefill and two decode workers is what it must give in every other way.
"""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from baton.deploy.config import demo_model_folder
from baton.proto.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer

from ..processes import wait_until
from ..suite.short import some_long
from .driver import Answer, Job, ask, ask_all, collect, worker_figures
from .reference import DATA

pytestmark = pytest.mark.cluster
pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")

MODELS = {"mistral": DATA / "mistral", "demo": demo_model_folder()}
QUESTIONS = ("Tell me a story about a fox.", "What is the KV cache?", "Tell me a story.")
NEW_TOKENS = 80
LONG = 1600


def sampled(seed: int, count: int) -> SamplingParams:
    """Every other request adds biases to its logits."""
    biases = dict.fromkeys(range(40, 200, 7), 2.0) | dict.fromkeys(range(40), -100.0)
    return SamplingParams(
        temperature=0.8, top_p=0.9, seed=seed, max_new_tokens=count, ignore_eos=True,
        logit_bias=biases if seed % 2 else None,
    )  # fmt: skip


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 256, length).tolist()


def salted(jobs: list[Job], salt: str) -> list[Job]:
    """The same requests, strangers to everything that is cached."""
    return [replace(job, options={**job.options, "cache_salt": salt}) for job in jobs]


class Subjects:
    """Some requests of one model, and their tokens alone."""

    def __init__(self, model: str, running) -> None:
        self.model, self.running = model, running
        self.jobs = [
            Job(prompt, sampled(100 + i, NEW_TOKENS), {"log_probabilities": 3})
            for i, prompt in enumerate(self.prompts())
        ]
        self.long = Job(self.jobs[1].prompt, sampled(7, LONG))
        with running.client() as client:
            self.alone = [ask(client, job) for job in self.jobs]
            self.long_alone = ask(client, self.long)

    def prompts(self) -> list[list[int]]:
        if self.model == "demo":
            tokenizer = Tokenizer.from_folder(MODELS["demo"])
            chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
            return [tokenizer.encode_chat(chat).tolist() for chat in chats]
        return [random_prompt(length, length) for length in (1, 61, 300)]


OTHERS = [Job(random_prompt(3 + 7 * n, 20 + n), sampled(n, 20 + 5 * (n % 7))) for n in range(16)]


def mixed(jobs: list[Job]) -> tuple[list[Job], slice]:
    """The jobs in the middle of 16 others, and where their answers are."""
    return [*OTHERS[:8], *jobs, *OTHERS[8:]], slice(8, 8 + len(jobs))


def same(answers: list[Answer], alone: list[Answer]) -> bool:
    """Bitwise: log-probabilities are floats that travelled as such."""
    return [(a.tokens, a.logprobs) for a in answers] == [(a.tokens, a.logprobs) for a in alone]


@pytest.fixture(scope="module", params=some_long(*MODELS))
def subjects(request, shared_cluster) -> Subjects:
    running = shared_cluster(model=MODELS[request.param], prefill=1, decode=2)
    return Subjects(request.param, running)


def test_the_draws_vary(subjects):
    for job, answer in zip(subjects.jobs, subjects.alone, strict=True):
        assert len(answer.tokens) == len(answer.logprobs) == NEW_TOKENS
        likeliest = [max(top, key=top.get) for _, top in answer.logprobs]
        assert sum(a != b for a, b in zip(answer.tokens, likeliest, strict=True)) > 0
        with subjects.running.client() as client:
            other = ask(client, replace(job, params=sampled(999, NEW_TOKENS)))
        assert other.tokens != answer.tokens


def test_among_sixteen_others(subjects):
    jobs, ours = mixed(salted(subjects.jobs, "among"))
    with subjects.running.client() as client:
        answers = ask_all(client, jobs, in_flight=len(jobs))[ours]
    assert all(answer.cached_tokens == 0 for answer in answers)
    assert same(answers, subjects.alone)


def test_after_a_prefix_hit(subjects):
    with subjects.running.client() as client:
        answers = [ask(client, job) for job in subjects.jobs]
    for job, answer in zip(subjects.jobs, answers, strict=True):
        assert answer.cached_tokens == (len(job.prompt) - 1) // 16 * 16
    assert same(answers, subjects.alone)


def test_with_other_workers_and_chunks(subjects, cluster):
    running = cluster(
        model=MODELS[subjects.model],
        prefill=2, decode=2, max_num_batched_tokens=0, step_time=0, max_num_seqs=3,
    )  # fmt: skip
    jobs, ours = mixed(subjects.jobs)
    with running.client() as client:
        answers = ask_all(client, jobs, in_flight=len(jobs))
    assert {a.prefill for a in answers} == {"prefill-0", "prefill-1"}
    assert same(answers[ours], subjects.alone)


def test_in_small_chunks_and_blocks_and_after_preemption(subjects, cluster):
    """Blocks for less than two of the requests that grow, however late the second one comes."""
    running = cluster(
        model=MODELS[subjects.model],
        prefill=1, decode=1, max_num_batched_tokens=16, block_size=8, kv_blocks=80, kv_memory="",
    )  # fmt: skip
    jobs, ours = mixed(subjects.jobs)
    growing = [Job(random_prompt(40, 50 + n), sampled(n, 400)) for n in range(4)]
    with running.client() as client:
        assert same(ask_all(client, jobs, in_flight=len(jobs))[ours], subjects.alone)
        answers = ask_all(client, [*subjects.jobs, *growing], in_flight=9)
        wait_until(
            lambda: worker_figures(client, "decode", "preemptions") > 0,
            what="a report of preemptions",
        )
    assert same(answers[: len(subjects.jobs)], subjects.alone)
    with subjects.running.client() as client:
        calm = ask_all(client, growing, in_flight=1)
    assert [a.tokens for a in answers[len(subjects.jobs) :]] == [a.tokens for a in calm]


def test_after_the_death_of_the_decode_worker(subjects):
    victim = subjects.running.workers()["decode-1"]
    pinned = replace(
        subjects.long, options={"target_endpoint": victim["endpoint"], "request_id": "pinned"}
    )
    answer = Answer()
    with subjects.running.client() as client:
        before = client.status()["router"]["requests"]["replayed"]
        stream = pinned.start(client)
        answer.tokens += next(stream).tokens
        os.kill(victim["pid"], signal.SIGKILL)
        collect(stream, answer)
        status = client.status()
    assert answer.tokens == subjects.long_alone.tokens
    assert answer.decode == "decode-0"
    assert status["router"]["requests"]["replayed"] == before + 1
    assert status["handoffs"]["last"][-1]["attempt"] > 1
    subjects.running.wait_replaced("decode-1", victim["pid"])
