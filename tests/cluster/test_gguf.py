"""A quantized GGUF file through a prefill and a decode worker: the tokens of one process."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from baton.engine.llm import LLMEngine
from baton.engine.loading import gguf_folder
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.sampling import SamplingParams

from ..engine.gguf_models import write_file
from .driver import Answer, Job, ask_all, collect, greedy, lost_requests

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file and its cache."""
    made = tmp_path_factory.mktemp("g")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(made / "cache"))
        gguf_folder._made.cache_clear()
        write_file(made, "Tiny-Q4_K_M.gguf")
        yield made
    gguf_folder._made.cache_clear()


@pytest.fixture(scope="module")
def cluster(shared_cluster, folder):
    return shared_cluster(
        prefill=2,
        decode=1,
        address=f"ipc://{folder}/a.sock",
        model=folder / "Tiny-Q4_K_M.gguf",
        worker_timeout=1.0,
    )


@pytest.fixture(scope="module")
def engine(folder):
    return LLMEngine(
        load_runner(RunnerConfig(model=str(folder / "Tiny-Q4_K_M.gguf"), num_blocks=64))
    )


def expected(engine: LLMEngine, job: Job) -> list[int]:
    context = TextContext(max_length=1024, tokens=np.array(job.prompt), sampling_params=job.params)
    engine.add(context)
    while engine.has_work:
        engine.step()
    return context.tokens.all[len(job.prompt) :].tolist()


def test_a_file_is_served_with_its_tokens_and_name(cluster, engine):
    with cluster.client() as client:
        model = client.model()
        assert model.card.name == "Tiny-Q4_K_M"
        assert "Q4_K" in model.card.numerics
        assert model.tokenizer.chat_template.names == ["default"]
        prompts = [model.tokenizer.encode("Once upon a time").tolist(), list(range(5, 95))]
        jobs = [Job(prompt, greedy(40)) for prompt in prompts]
        answers = [answer.tokens for answer in ask_all(client, jobs)]
    assert answers == [expected(engine, job) for job in jobs]


def test_a_killed_decode_worker_changes_no_token(cluster, engine):
    job, answer = Job(list(range(5, 30)), greedy(400)), Answer()
    before = lost_requests(cluster)
    with cluster.client() as client:
        stream = iter(job.start(client))
        while len(answer.tokens) < 20:
            answer.tokens += next(stream).tokens
        os.kill(cluster.pids()["decode-0"], signal.SIGKILL)
        collect(stream, answer)
    assert answer.tokens == expected(engine, job)
    assert lost_requests(cluster) == before + 1


def test_a_worker_that_changes_its_role_has_the_files_tokenizer(cluster):
    """The settings name the file; the tokenizer is in the folder made from it."""
    cluster.command("role", "prefill-1", "decode", "--wait")
    options = {
        "json_schema": '{"enum": [7]}',
        "target_endpoint": cluster.workers()["prefill-1"]["endpoint"],
    }
    with cluster.client() as client:
        (answer,) = ask_all(
            client, [Job(list(range(5, 30)), SamplingParams(max_new_tokens=8, top_k=1), options)]
        )
        text = client.model().tokenizer.decode(answer.tokens)
    assert (text, answer.decode) == ("7", "prefill-1")
    cluster.command("role", "prefill-1", "prefill", "--wait")
