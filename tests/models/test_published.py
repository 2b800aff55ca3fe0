"""Published models on a real cluster: ``make test-models`` downloads them (1.4 GB)."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.gguf_folder import local_folder
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.runtime.process.memory import family_of, share_of
from baton.text.tokenizer import Tokenizer

from ..cluster import conftest as clusters
from ..cluster.conftest import Cluster
from ..cluster.driver import Answer, Job, ask, collect, greedy
from ..cluster.http import Http
from ..engine.test_models import logits_of
from ..processes import wait_until
from .fetch import GEMMA, QWEN
from .mixed_texts import RECORD, digests, mixed_texts

FOLDER = os.environ.get("BATON_MODELS", "")
pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FOLDER, reason="make test-models"),
]
CHAT = "/v1/chat/completions"
TEXT = Path(__file__).with_name("fetch.py").read_text()
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module", params=[QWEN, GEMMA], ids=["qwen", "gemma"])
def file(request):
    return Path(FOLDER) / request.param.file


@pytest.fixture(scope="module")
def cluster(file, tmp_path_factory):
    """One prefill and two decode workers, with a gateway."""
    folder = tmp_path_factory.mktemp("m")
    settings = {"gateways": 1, "http_port": 0, "max_model_len": 2048, "kv_memory": "512MiB"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(clusters, "READY_TIMEOUT", 300.0)
        running = Cluster(folder, 1, 2, file, settings)
        try:
            yield running.wait_ready()
            running.wait_idle()
        finally:
            running.end_clean()


@pytest.fixture(scope="module")
def http(cluster):
    found = re.search(r"^  http +http://127.0.0.1:(\d+)/v1 ", cluster.text(), re.M)
    return Http(int(found[1]))


def prompt_of(cluster: Cluster, text: str) -> list[int]:
    with cluster.client() as client:
        return client.model().tokenizer.encode(text).tolist()


def decoding(cluster: Cluster) -> str | None:
    workers = cluster.workers().items()
    return next((n for n, w in workers if n[0] == "d" and w["requests_running"]), None)


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_three_workers_need_little_more_than_one_copy_of_the_file(cluster, file):
    """At most 1.25 times the file and 150 MB for each process, KV blocks not counted.

    llguidance keeps 385 MB for the 262,144 tokens and 514,847 merges of Gemma, in each worker.
    """
    shares = {pid: share_of(pid) for pid in family_of(cluster.process.pid)}
    total, size = sum(shares.values()), file.stat().st_size
    print(f"{file.name}: {total / 1e6:.0f} MB in {len(shares)} processes, file {size / 1e6:.0f} MB")
    assert all(shares.values())
    grammars = 3 * 400e6 if "gemma" in file.name else 0
    assert total < 1.25 * size + 150e6 * len(shares) + grammars


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_killed_worker_serves_again_within_seconds(cluster, file, name):
    """On an idle machine; a busy one adds waits to the processor time.

    Gemma has 262,144 tokens, which llguidance reads in about a second more than those of Qwen.
    """
    idle = os.getloadavg()[0] < 1.5
    pid = cluster.pids()[name]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    cluster.wait_replaced(name, pid)
    seconds = time.monotonic() - began
    used = processor_time(cluster.pids()[name])
    print(f"{name}: serves again after {seconds:.2f} s, {used:.2f} s of processor time")
    assert (seconds if idle else used) < (5.0 if "gemma" in file.name else 3.0)


def test_a_killed_decode_worker_changes_no_token(cluster):
    job = Job(prompt_of(cluster, "def reverse(text):\n    "), greedy(300))
    with cluster.client() as client:
        expected = ask(client, job)
        answer, stream = Answer(), iter(job.start(client))
        while len(answer.tokens) < 10:
            answer.tokens += next(stream).tokens
        name = wait_until(lambda: decoding(cluster), what="a decode worker with the request")
        pid = cluster.pids()[name]
        os.kill(pid, signal.SIGKILL)
        collect(stream, answer)
        again = ask(client, job)
    assert answer.tokens == expected.tokens == again.tokens
    cluster.wait_replaced(name, pid)


def test_a_chat_answers_in_code(cluster, http, file):
    if file.name != QWEN.file:
        pytest.skip("a base model without a chat template")
    asked = "Write a Python one-liner that reverses a string s. Only code."
    messages = [{"role": "user", "content": asked}]
    answer = http.post(CHAT, messages=messages, temperature=0, max_tokens=48)
    assert "s[::-1]" in answer["choices"][0]["message"]["content"]


def test_a_forced_tool_call_and_a_schema(cluster, http, file):
    if file.name != QWEN.file:
        pytest.skip("a base model without a chat template")
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 100, "temperature": 0}
    (call,) = http.post(CHAT, messages=messages, **forced)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "Paris" in json.loads(call["function"]["arguments"])["city"]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    kind = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages = [{"role": "user", "content": "Alice is 25 years old. Extract her data."}]
    answer = http.post(CHAT, messages=messages, response_format=kind, temperature=0, max_tokens=64)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"name": "Alice", "age": 25}


def test_2000_mixed_texts_have_the_tokens_of_llama_cpp(file, tmp_path, monkeypatch):
    """The tokens were recorded from llama.cpp with the same file (mixed_texts.py)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = Tokenizer.from_folder(local_folder(file))
    texts, recorded = mixed_texts(), json.loads(RECORD.read_text())[file.name]
    found = digests(tokenizer.encode(text).tolist() for text in texts)
    expected = [recorded[at : at + 8] for at in range(0, len(recorded), 8)]
    pairs = zip(texts, found, expected, strict=True)
    assert [text for text, ours, theirs in pairs if ours != theirs] == []


def test_integers_stay_near_the_floats_of_the_file(file, tmp_path, monkeypatch):
    """The file's own values in float32 are the definition; 500 tokens of source code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids = Tokenizer.from_folder(local_folder(file)).encode(TEXT)[:500].astype(np.int32)
    rows = np.arange(len(ids))
    exact, found = (
        logits_of(
            load_runner(
                RunnerConfig(model=str(file), backend=kernels, num_blocks=40, max_length=600)
            ),
            ids,
            rows,
            len(ids),
        )
        for kernels in ("cpu-floats", "cpu")
    )
    exact, found = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (exact, found))
    distances = (np.exp(exact) * (exact - found)).sum(axis=1)
    agreed = np.mean(exact.argmax(axis=1) == found.argmax(axis=1))
    text = f"KL mean {distances.mean():.5f}, worst {distances.max():.4f}, top-1 {agreed:.4f}"
    print(f"{file.name}: {len(ids)} positions, {text}")
    assert 0 < distances.mean() < 0.02
    assert agreed > 0.9
