"""Vectors from a real cluster: prefill workers alone, exact, and in spite of what dies."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from baton.cli.command import main
from baton.client import AsyncClient
from baton.engine.loading.loader import load_embedder
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import DeadlineExceeded, InputError, TaskMismatch
from baton.proto.ids import RequestID
from baton.text.tokenizer import Tokenizer

from ..processes import wait_until
from ..suite.short import some_long
from .conftest import command_environment
from .http import Gateway

pytestmark = pytest.mark.cluster
DATA = Path(__file__).resolve().parents[1] / "data"
TEXTS = ["the cat sat on the mat", "a", "sitting, waited.", "mat " * 20, "zebra 12345"]


def expected(name, texts, task=""):
    """The same vectors, computed here."""
    folder = DATA / name
    tokenizer = Tokenizer.from_folder(folder)
    pipeline = load_embedder(RunnerConfig(model=str(folder), task=task)).pipeline
    ids = [tokenizer.encode(t) if isinstance(t, str) else np.asarray(t) for t in texts]
    batch = {
        RequestID(str(i)): TextContext(max_length=4096, tokens=TokenBuffer(t.astype(np.int64)))
        for i, t in enumerate(ids)
    }
    return np.stack([out.embeddings for out in pipeline.encode(batch).values()])


@pytest.fixture
def embedder(start_cluster):
    """Start an embedding model on prefill workers; ended cleanly with the test."""
    started = []

    def start(name="embedders/bert", prefill=1, **settings):
        one = start_cluster(prefill=prefill, model=DATA / name, **settings)
        one.size = (prefill, 0)
        started.append(one)
        return one.wait_ready()

    yield start
    for one in started:
        one.end_clean()


@pytest.fixture(scope="module")
def bert(start_cluster):
    """Two prefill workers, for all tests that leave them as they were."""
    one = start_cluster(prefill=2, model=DATA / "embedders/bert")
    one.size = (2, 0)
    yield one.wait_ready()
    one.end_clean()


def test_vectors_are_those_of_the_engine_alone(bert):
    check_vectors(bert, "embedders/bert")


@pytest.mark.long
def test_vectors_of_qwen3_are_those_of_the_engine_alone(embedder):
    check_vectors(embedder("embedders/qwen3", prefill=2), "embedders/qwen3")


def check_vectors(cluster, name):
    assert sorted(cluster.pids()) == ["prefill-0", "prefill-1", "router"]
    wanted = expected(name, TEXTS)
    with cluster.client() as client:
        found = client.embed(TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)
        many = client.embed(TEXTS * 150)  # more than may be in flight at a time
        np.testing.assert_array_equal(many, np.tile(wanted, (150, 1)))
        ids = [[5, 6, 7], np.array([9, 8], np.int32)]
        np.testing.assert_array_equal(client.embed(ids), expected(name, ids))
        assert client.embed([]).shape == (0, 32)
        status = client.status()
        assert status["handoffs"]["count"] == 0
        wait_until(
            lambda: {w["requests_running"] for w in cluster.workers().values()} == {0},
            what="idle workers",
        )

    async def ask():
        async with AsyncClient(cluster.address, connect_timeout=20) as client:
            return await client.embed(TEXTS)

    np.testing.assert_array_equal(asyncio.run(ask()), wanted)


def test_what_is_asked_of_the_wrong_model_is_one_clear_error(bert):
    with bert.client() as client:
        with pytest.raises(TaskMismatch, match="embedding model"):
            list(client.generate("the cat"))
        with pytest.raises(InputError, match="limit 100"):
            client.embed(["fits", [5] * 101])
        with pytest.raises(InputError, match="outside the vocabulary"):
            client.embed([[96]])
        with pytest.raises(InputError, match="empty"):
            client.embed([[]])
        with pytest.raises(InputError, match="list of texts"):
            client.embed("one text")
        with pytest.raises(InputError, match="log_probabilities"):
            client.embed(["a"], log_probabilities=2)
        with pytest.raises(DeadlineExceeded):
            client.embed(["a"], deadline=-1.0)
        assert client.embed(["a"]).shape == (1, 32)


def test_a_text_model_embeds_when_it_is_served_for_that(embedder):
    cluster = embedder("checkpoints/qwen3", task="embed")
    ids = [[5, 6, 7], [8] * 40]
    pipeline = load_embedder(
        RunnerConfig(model=str(DATA / "checkpoints" / "qwen3"), task="embed")
    ).pipeline
    batch = {
        RequestID(str(i)): TextContext(max_length=99, tokens=TokenBuffer(np.array(t)))
        for i, t in enumerate(ids)
    }
    wanted = np.stack([out.embeddings for out in pipeline.encode(batch).values()])
    with cluster.client() as client:
        np.testing.assert_array_equal(client.embed(ids), wanted)


@pytest.mark.parametrize("victim", some_long("prefill-0", "router"))
def test_deaths_cost_no_vector(bert, victim):
    cluster = bert
    wanted = expected("embedders/bert", TEXTS)
    rounds, results = 60, []
    with cluster.client() as client:
        client.embed(TEXTS)

        def ask():
            results.extend(client.embed(TEXTS) for _ in range(rounds))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: len(results) > 5, what="the first vectors")
        pid = cluster.pids()[victim]
        os.kill(pid, signal.SIGKILL)
        asking.join(100)
        assert not asking.is_alive()
    assert len(results) == rounds
    for found in results:
        np.testing.assert_array_equal(found, wanted)
    wait_until(lambda: cluster.pids().get(victim) not in (None, pid), what=f"another {victim}")
    cluster.wait_ready()


def test_embeddings_over_http_as_numbers_and_as_base64(bert, tmp_path, capsys):
    gateway = Gateway(bert, tmp_path).wait_ready()
    try:
        wanted = expected("embedders/bert", TEXTS)
        found = gateway.post("/v1/embeddings", input=TEXTS)
        vectors = np.array([entry["embedding"] for entry in found["data"]], np.float32)
        np.testing.assert_allclose(vectors, wanted, atol=1e-6)
        packed = gateway.post("/v1/embeddings", input=TEXTS, encoding_format="base64")
        texts = [base64.b64decode(entry["embedding"]) for entry in packed["data"]]
        assert np.array_equal(np.stack([np.frombuffer(text, "<f4") for text in texts]), vectors)
        assert found["usage"]["prompt_tokens"] > len(TEXTS)
        assert gateway.ask("GET", "/ready")[0] == 200
        chat = {"messages": [{"role": "user", "content": "Who are you?"}]}
        status, body, _ = gateway.ask("POST", "/v1/chat/completions", chat)
        assert (status, body["error"]["code"]) == (400, "task_mismatch"), body
        said = "'bert' is an embedding model and generates no text; use embed"
        assert body["error"]["message"] == said
        with bert.client() as client, pytest.raises(TaskMismatch, match=said):
            client.chat(chat["messages"])
        status, body, _ = gateway.ask("POST", "/v1/responses", {"input": "Who are you?"})
        assert body["error"]["message"] == said
        status, body, _ = gateway.ask("POST", "/v1/embeddings", {"input": "a", "dimensions": 3})
        assert (status, body["error"]["param"]) == (400, "dimensions")
        url = f"http://127.0.0.1:{gateway.port}/v1"
        over_http = [url, "--endpoint=embeddings", "--vocabulary=40"]
        for address in (over_http, [bert.address]):
            file = tmp_path / "bench.json"
            load = ["--concurrency=2", "--requests=6", "--input=5-9", "--texts=3", "--warmup=1"]
            assert main(["bench", *address, *load, f"--json={file}"]) == 0
            (run,) = json.loads(file.read_text())["runs"]
            assert (run["outcomes"]["ok"], run["texts"], run["end_to_end"]["count"]) == (6, 18, 6)
            assert 6 * 3 * 5 <= run["prompt_tokens"] <= 6 * 3 * 9
        assert main(["bench", bert.address, "--slo-itl=1"]) == 2
        assert "--slo-itl has no meaning for embeddings" in capsys.readouterr().err
    finally:
        assert gateway.end() == 0


def test_a_deadline_is_for_all_texts_of_a_call(bert):
    with bert.client() as client:
        with pytest.raises(DeadlineExceeded):
            client.embed(["mat " * 20] * 20_000, deadline=0.3)
        wait_until(lambda: in_flight(client) == 0, what="the others to be cancelled")
        assert client.embed(["a"], deadline=30.0).shape == (1, 32)


def in_flight(client) -> int:
    return client.status()["router"]["requests"]["in_flight"]


@pytest.mark.long
def test_ten_thousand_texts_among_cancels_deadlines_and_a_death(embedder):
    cluster = embedder(prefill=2)
    wanted = expected("embedders/bert", TEXTS)
    ends = Counter()

    async def many(client):
        found = await client.embed(TEXTS * 2000)
        np.testing.assert_array_equal(found, np.tile(wanted, (2000, 1)))
        ends["whole"] += 1

    async def cancelled(client, seconds):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await client.embed(TEXTS * 400)
        ends["cancelled"] += 1

    async def late(client, seconds):
        with pytest.raises(DeadlineExceeded):
            await client.embed(TEXTS * 400, deadline=seconds)
        ends["late"] += 1

    async def kill(client):
        status = await client.status()
        while status["router"]["requests"]["finished"] < 2000:
            status = await client.status()
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    async def body():
        async with (
            asyncio.timeout(100),
            AsyncClient(cluster.address) as one,
            AsyncClient(cluster.address) as other,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(many(one))
            group.create_task(kill(other))
            for number in range(8):
                group.create_task(cancelled(other, 0.05 * number))
                group.create_task(late(one, 0.01 + 0.01 * number))

    pid = cluster.pids()["prefill-0"]
    asyncio.run(body())
    assert ends == {"whole": 1, "cancelled": 8, "late": 8}
    wait_until(lambda: cluster.pids().get("prefill-0") not in (None, pid), what="another worker")
    cluster.wait_ready()
    with cluster.client() as client:
        wait_until(lambda: in_flight(client) == 0, what="nothing in flight")
        wait_until(
            lambda: all(
                not worker[figure]
                for worker in cluster.workers().values()
                for figure in ("requests_running", "requests_waiting", "assigned_requests")
            ),
            what="idle workers",
        )


def test_the_commands_know_that_no_decode_worker_will_come(bert):
    waited = bert.command("wait-ready", "--timeout=20")
    assert (waited.returncode, waited.stdout) == (0, "ready: 2 prefill, 0 decode\n"), waited.stderr
    wrong = bert.command("wait-ready", "--timeout=20", "--decode=2")
    assert wrong.returncode == 1
    assert "embedding model" in wrong.stderr


def test_the_command_prints_vectors(bert):
    command = [sys.executable, "-P", "-m", "baton.cli", "embed", *TEXTS[:2]]
    answer = subprocess.run(
        [*command, "--address", bert.address],
        env=command_environment(bert.folder),
        capture_output=True,
        check=True,
    )
    vectors = np.array([json.loads(line) for line in answer.stdout.splitlines()])
    np.testing.assert_allclose(vectors, expected("embedders/bert", TEXTS[:2]), atol=1e-7)
    lines = ["a\u2028b\x0b\x85", "", "mat"]  # what Unicode ends a line by is part of it
    answer = subprocess.run(
        [*command[:5], "--address", bert.address],
        env=command_environment(bert.folder),
        input="\n".join([*lines, ""]).encode(),
        capture_output=True,
        check=True,
    )
    vectors = np.array([json.loads(line) for line in answer.stdout.splitlines()])
    np.testing.assert_allclose(vectors, expected("embedders/bert", lines), atol=1e-7)
