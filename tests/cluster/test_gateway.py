"""The HTTP gateway beside a real cluster: the native client's answers, errors, limits, faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from baton.cli.command import main
from baton.proto.sampling import SamplingParams

from .conftest import command_environment, wait_until
from .http import Gateway

pytestmark = pytest.mark.cluster

CHAT = "/v1/chat/completions"
LONG_MESSAGES = [{"role": "user", "content": "x " * 5000}]
MESSAGES = [{"role": "user", "content": "Who are you?"}]
STORY = "Once upon a time there was a baton"


@pytest.fixture(scope="module")
def pools(shared_cluster):
    """The embedded model; small prefill chunks."""
    return shared_cluster(prefill=1, decode=2, kv_memory="64MiB", max_num_batched_tokens=64)


@pytest.fixture(autouse=True)
def clean(request):
    """Afterwards no worker holds a block or a request."""
    yield
    if "pools" in request.fixturenames:
        request.getfixturevalue("pools").wait_idle()


@pytest.fixture(scope="module")
def native(pools):
    with pools.client() as client:
        yield client


def native_text(client, prompt, params) -> str:
    make = client.generate if isinstance(prompt, str) else client.chat
    return "".join(output.text or "" for output in make(prompt, params))


def text_of(events, index=0) -> str:
    parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(p["delta"].get("content") or "" if "delta" in p else p["text"] for p in parts)


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=str)
def test_chat_gives_what_the_native_client_gives(gateway, native, sampling):
    params = SamplingParams(max_new_tokens=40, **sampling)
    wanted = native_text(native, MESSAGES, params)
    body = {"messages": MESSAGES, "max_completion_tokens": 40, **sampling}
    whole = gateway.post(CHAT, **body)
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted, "refusal": None}
    assert choice["finish_reason"] in ("stop", "length")
    events = gateway.stream(CHAT, **body, stream_options={"include_usage": True})
    assert text_of(events) == wanted
    *parts, last = events
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    assert last["choices"] == []
    assert whole["usage"].items() >= {k: last["usage"][k] for k in ("prompt_tokens",)}.items()
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_headers_name_the_workers_and_the_times(gateway, pools):
    names = set(pools.workers())
    whole = {"messages": MESSAGES, "max_completion_tokens": 30, "ignore_eos": True}
    status, _, headers = gateway.ask("POST", CHAT, whole)
    assert status == 200
    assert {headers["x-baton-prefill"], headers["x-baton-decode"]} < names
    times = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
    assert list(times) == ["queue", "prefill", "handoff", "first-token"]
    assert all(float(value) >= 0.0 for value in times.values())
    assert float(times["first-token"]) > float(times["prefill"])

    with closing(gateway.connection()) as connection:
        body = json.dumps({**whole, "stream": True}).encode()
        connection.request("POST", CHAT, body, gateway.headers)
        headers = connection.getresponse().headers
    assert {headers["x-baton-prefill"], headers["x-baton-decode"]} < names
    assert headers["server-timing"].startswith("first-token;dur=")


def test_responses_give_what_the_native_client_gives(gateway, native):
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    params = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True)
    wanted = native_text(native, messages, params)
    body = {"instructions": "Be brief.", "input": "Who are you?", "seed": 3, "ignore_eos": True}
    whole = gateway.post("/v1/responses", **body, max_output_tokens=20)
    (item,) = whole["output"]
    assert [part["text"] for part in item["content"]] == [wanted]
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    status, content, _ = gateway.ask("POST", "/v1/responses", {**body, "previous_response_id": "x"})
    assert (status, content["error"]["param"]) == (400, "previous_response_id")


def test_completions_of_texts_and_token_ids(gateway, native):
    ids = gateway.post("/tokenize", prompt=STORY)["tokens"]
    wanted = native_text(native, STORY, SamplingParams(max_new_tokens=12, temperature=0))
    found = gateway.post(
        "/v1/completions", prompt=[STORY, STORY], max_tokens=12, temperature=0, n=2, echo=True
    )
    assert [choice["text"] for choice in found["choices"]] == [STORY + wanted] * 4
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 2 * len(ids)
    for prompt in (ids, [ids]):
        found = gateway.post("/v1/completions", prompt=prompt, max_tokens=12, temperature=0)
        assert found["choices"][0]["text"] == wanted
    streamed = gateway.stream("/v1/completions", prompt=STORY, max_tokens=12, temperature=0, n=2)
    assert text_of(streamed, 0) == text_of(streamed, 1) == wanted
    short = gateway.post("/v1/completions", prompt=STORY, temperature=0)
    assert short["usage"]["completion_tokens"] <= 16


def test_several_answers_have_their_own_random_numbers(gateway, native):
    found = gateway.post("/v1/completions", prompt=STORY, max_tokens=12, seed=5, n=3)
    wanted = [
        native_text(native, STORY, SamplingParams(max_new_tokens=12, seed=seed))
        for seed in (5, 6, 7)
    ]
    assert [choice["text"] for choice in found["choices"]] == wanted
    assert len(set(wanted)) > 1


def test_log_probabilities_are_the_native_ones(gateway, native):
    params = SamplingParams(max_new_tokens=6, temperature=0)
    outputs = list(native.chat(MESSAGES, params, log_probabilities=3))
    wanted = [
        entry.token_log_probabilities[0] for o in outputs for entry in o.log_probabilities or ()
    ]
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    content = gateway.post(CHAT, **body, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(wanted)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    events = gateway.stream(CHAT, **body, top_logprobs=0)
    parts = [event["choices"][0]["logprobs"] for event in events]
    streamed = [entry for part in parts if part for entry in part["content"]]
    assert [entry["logprob"] for entry in streamed] == pytest.approx(wanted)
    assert all(entry["top_logprobs"] == [] for entry in streamed)
    fixed = {"max_tokens": 5, "temperature": 0}
    legacy = gateway.post("/v1/completions", prompt=STORY, **fixed, logprobs=2)["choices"][0]
    texts = legacy["logprobs"]["tokens"]
    offsets = [len(STORY) + sum(map(len, texts[:at])) for at in range(len(texts))]
    assert legacy["logprobs"]["text_offset"] == offsets
    ids = gateway.post("/tokenize", prompt=STORY)["tokens"]
    (bare,) = gateway.post("/v1/completions", prompt=ids, **fixed, logprobs=0)["choices"]
    assert bare["logprobs"]["top_logprobs"] is None
    assert bare["logprobs"]["text_offset"] == offsets


def test_log_probabilities_have_an_entry_per_counted_token_also_of_a_stop_string(gateway):
    body = {"prompt": STORY, "max_tokens": 30, "temperature": 0, "logprobs": 1}
    whole = gateway.post("/v1/completions", **body)["choices"][0]["text"]
    found = gateway.post("/v1/completions", **body, stop=whole[10:14])
    (choice,) = found["choices"]
    count, offsets = found["usage"]["completion_tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == whole[: whole.index(whole[10:14])]
    assert {len(one) for one in choice["logprobs"].values()} == {count}
    assert offsets[-1] + len(choice["logprobs"]["tokens"][-1]) > len(STORY + choice["text"])


def test_biases_of_logits_are_the_native_ones(gateway, native):
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 1, "seed": 5}
    plain = gateway.post(CHAT, **body)["choices"][0]["message"]["content"]
    ids = gateway.post("/tokenize", prompt=plain, add_special_tokens=False)["tokens"]
    biases = dict.fromkeys(ids, -100)
    found = gateway.post(CHAT, **body, logit_bias={str(token): -100 for token in ids})
    params = SamplingParams(max_new_tokens=12, temperature=1, seed=5, logit_bias=biases)
    outputs = list(native.chat(MESSAGES, params))
    text = "".join(output.text or "" for output in outputs)
    assert found["choices"][0]["message"]["content"] == text != plain
    assert not set(ids) & {token for output in outputs for token in output.tokens}
    status, content, _ = gateway.ask("POST", CHAT, {**body, "logit_bias": {"99999": 1}})
    assert (status, content["error"]["code"]) == (400, "input")
    assert "logit_bias has token id 99999" in content["error"]["message"]


def test_stop_strings_and_minimum_length(gateway, native):
    whole = native_text(native, MESSAGES, SamplingParams(max_new_tokens=30, temperature=0))
    stop = whole[10:14]
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    cut = gateway.post(CHAT, **body, stop=stop)["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"
    exact = gateway.post(CHAT, **body, ignore_eos=True, min_tokens=30)
    assert exact["usage"]["completion_tokens"] == 30
    assert exact["choices"][0]["finish_reason"] == "length"


EFFORT = "reasoning_effort is ignored: the model's chat template has none"
UNKNOWN = "foo is ignored: it is not a known parameter"


@pytest.mark.parametrize(
    ("path", "body", "warnings"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 2, "reasoning_effort": "low"},
         [UNKNOWN, EFFORT]),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, [UNKNOWN]),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16,
                           "reasoning": {"effort": "low"}, "metadata": {"a": "b"}},
         [UNKNOWN, EFFORT.replace("_", ".")]),
        ("/tokenize", {"prompt": "Hi"}, [UNKNOWN]),
        ("/detokenize", {"tokens": [5]}, [UNKNOWN]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_change_the_answer_is_named_among_the_warnings(gateway, path, body, warnings):
    plain = {name: value for name, value in body.items() if not name.startswith("reasoning")}
    assert gateway.post(path, **body, foo=1)["warnings"] == warnings
    assert "warnings" not in gateway.post(path, **plain)
    if path in (CHAT, "/v1/completions"):
        first, *others = gateway.stream(path, **body, foo=1, n=2)
        assert first["warnings"] == warnings
        assert not any("warnings" in one for one in others)


def test_strict_parameters_are_refused_and_all_names_are_listed(pools, tmp_path):
    names = ["one", "two"]
    flags = [f"--served-model-name={name}" for name in names]
    gateway = Gateway(pools, tmp_path, "--strict-parameters", *flags).wait_ready()
    listed = gateway.ask("GET", "/v1/models")[1]["data"]
    assert [one["id"] for one in listed] == names
    assert [gateway.ask("GET", f"/v1/models/{name}")[1] for name in names] == listed
    for fields in ({"foo": 1}, {"store": True}, {"reasoning_effort": "low"}):
        status, content, _ = gateway.ask("POST", CHAT, {"messages": MESSAGES, **fields})
        assert (status, content["error"]["param"]) == (400, min(fields))
    assert "warnings" not in gateway.post(CHAT, messages=MESSAGES, max_tokens=1, user="me")
    assert gateway.end() == 0


def test_answers_that_follow_a_schema(gateway):
    schema = {
        "type": "object",
        "properties": {"ready": {"type": "boolean"}},
        "required": ["ready"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 1, "response_format": form}
    for seed in range(3):
        (choice,) = gateway.post(CHAT, **body, seed=seed)["choices"]
        answer = json.loads(choice["message"]["content"])
        assert list(answer) == ["ready"]
        assert isinstance(answer["ready"], bool)


def test_tokens_there_and_back(gateway):
    found = gateway.post(
        "/tokenize", prompt=STORY, add_special_tokens=False, return_token_strs=True
    )
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert gateway.post("/detokenize", tokens=found["tokens"])["prompt"] == STORY
    chat = gateway.post("/tokenize", messages=MESSAGES)
    usage = gateway.post(CHAT, messages=MESSAGES, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == chat["count"]


# --------------------------------------------------------------------------- routes, errors, keys


def test_what_the_gateway_says_of_itself(gateway):
    status, models, headers = gateway.ask("GET", "/v1/models", headers={"X-Request-Id": "mine-1"})
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    name = models["data"][0]["id"]
    assert name == "demo_model"
    assert gateway.ask("GET", f"/v1/models/{name}")[1]["max_model_len"] == 2048
    assert gateway.ask("GET", "/v1/models/other")[1]["error"]["code"] == "model_not_found"
    for path in ("/live", "/ready", "/health", "/version", "/openapi.json"):
        assert gateway.ask("GET", path)[0] == 200, path


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("POST", "/v1/audio/speech", {}, 404, "not_found"),
        ("POST", "/v1/images/generations", {}, 404, "not_found"),
        ("POST", CHAT, b"{", 400, "input"),
        ("POST", CHAT, {"messages": MESSAGES, "model": "other"}, 404, "model_not_found"),
        ("POST", CHAT, {"messages": MESSAGES, "tools": [{}]}, 400, "input"),
        ("POST", CHAT, {"messages": LONG_MESSAGES}, 400, "context_length_exceeded"),
        ("POST", CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "input"),
        ("POST", "/v1/completions", {"prompt": [10**9]}, 400, "input"),
        ("POST", "/v1/embeddings", {"input": "x"}, 400, "task_mismatch"),
        ("POST", CHAT, {"messages": MESSAGES, "stream": True, "temperature": -1}, 400, "input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_have_their_status_and_shape(gateway, method, path, body, status, code):
    found, content, headers = gateway.ask(method, path, body)
    assert (found, content["error"]["code"]) == (status, code), content
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]


def test_the_target_endpoint_is_the_headers(gateway, pools):
    endpoint = pools.workers()["decode-1"]["endpoint"]
    body = {"messages": MESSAGES, "max_tokens": 2}
    assert gateway.ask("POST", CHAT, body, {"X-Target-Endpoint": endpoint})[0] == 200
    status, content, _ = gateway.ask("POST", CHAT, body, {"X-Target-Endpoint": "tcp://nobody:1"})
    assert (status, content["error"]["code"]) == (404, "endpoint_unknown")


def test_no_route_is_reachable_without_the_key(pools, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one-key\nother-key\n")
    keyed = Gateway(pools, tmp_path, f"--api-key-file={keys}", BATON_API_KEY="third-key")
    keyed.wait_ready()
    try:
        paths = [("GET", p) for p in ("/metrics", "/version", "/v1/models", "/x")]
        paths += [("POST", p) for p in (CHAT, "/v1/completions", "/v1/embeddings", "/tokenize")]
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic one-key"}):
            for method, path in paths:
                status, content, _ = keyed.ask(method, path, b"{}", wrong)
                assert (status, content["error"]["code"]) == (401, "invalid_api_key"), path
            assert keyed.ask("GET", "/ready", headers=wrong)[:2] == (200, {"status": "ready"})
        for key in ("one-key", "other-key", "third-key"):
            headers = {"Authorization": f"Bearer {key}"}
            assert keyed.ask("GET", "/v1/models", headers=headers)[0] == 200
        assert "one-key" not in keyed.text()
    finally:
        assert keyed.end() == 0


def test_a_gateway_for_other_machines_needs_a_key(pools, tmp_path):
    open_gateway = Gateway(pools, tmp_path, "--host=0.0.0.0")
    assert open_gateway.process.wait(60) == 2
    assert "give an API key" in open_gateway.text()


# --------------------------------------------------------------------------- limits and faults


def raw(gateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=60)


def test_heads_and_bodies_are_limited(gateway):
    for bomb in (
        b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200_000 + b"\r\n",
    ):
        with raw(gateway) as connection:
            try:
                connection.sendall(bomb)
                answer = connection.recv(100)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            assert not answer or answer.split()[1] in (b"400", b"431"), answer
    with raw(gateway) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n{"
        )
        assert connection.recv(100).split()[1] == b"413"
    with raw(gateway) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        try:
            for _ in range(1200):
                connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            answer = connection.recv(100)
        except (BrokenPipeError, ConnectionResetError):
            answer = b" 413"
        assert answer.split()[-1 if answer == b" 413" else 1] == b"413"
    assert gateway.ask("GET", "/live")[0] == 200


def test_a_client_that_is_gone_frees_its_request(gateway, pools):
    body = {"messages": MESSAGES, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    for stream in (True, False):
        content = json.dumps({**body, "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        before, connections = generated(pools), [raw(gateway) for _ in range(4)]
        for connection in connections:
            connection.sendall(head.encode() + content)
        wait_until(lambda: busiest_decode_worker(pools), what="a heartbeat of work")
        for connection in connections:
            connection.close()
        pools.wait_idle()
        assert generated(pools) - before < 4 * 1900, "the requests ran to their end"


def generated(pools) -> int:
    return sum(worker["generated_tokens"] for worker in pools.workers().values())


def busiest_decode_worker(pools):
    """The decode worker with most requests by its last heartbeat; None if none has any."""
    decodes = [worker for worker in pools.workers().values() if worker["role"] == "decode"]
    found = max(decodes, key=lambda worker: worker["requests_running"])
    return found if found["requests_running"] else None


def test_streams_go_on_when_their_decode_worker_dies(gateway, pools):
    body = {"messages": MESSAGES, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    wanted = gateway.post(CHAT, **body)["choices"][0]["message"]["content"]
    begun = threading.Semaphore(0)

    def read() -> str:
        events = []
        for event in gateway.events(CHAT, **body):
            events.append(event)
            if len(events) == 5:
                begun.release()
        assert "error" not in events[-1], events[-1]
        return text_of(events)

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(read) for _ in range(4)]
        for _ in range(4):
            assert begun.acquire(timeout=60)
        victim = wait_until(lambda: busiest_decode_worker(pools), what="a heartbeat of work")
        os.kill(victim["pid"], signal.SIGKILL)
        assert [answer.result(120) for answer in answers] == [wanted] * 4
    pools.wait_replaced(victim["id"], victim["pid"])


def test_a_slow_head_ends_the_connection(pools, tmp_path):
    config = tmp_path / "gateway.json"
    settings = {"routers": [pools.address], "port": 0, "head_timeout_s": 0.3}
    config.write_text(json.dumps(settings))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.gateway", "--config", str(config)],
        stderr=subprocess.PIPE,
        env=command_environment(tmp_path),
    )
    try:
        said = json.loads(process.stderr.readline())
        port = int(said["url"].rpartition(":")[2].removesuffix("/v1"))
        with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
            slow.sendall(b"GET /live HTTP/1.1\r\nx: ")
            assert b" 408 " in slow.recv(100)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
            assert silent.recv(100) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as kept:
            for _ in range(2):  # a kept connection may rest between two requests
                kept.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = b""
                while b'"live"' not in answer:
                    part = kept.recv(1000)
                    assert part, "the connection was closed"
                    answer += part
                time.sleep(0.5)
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


# --------------------------------------------------------------------------- stories


def test_an_http_request_is_traced_by_its_id(pools, gateway, tmp_path, capsys):
    parent = f"00-{'4b' * 16}-{'5c' * 8}-01"
    headers = {"x-request-id": "my-request-17", "traceparent": parent}
    body = {"messages": MESSAGES, "max_tokens": 9, "ignore_eos": True, "n": 2}
    status, _, answered = gateway.ask("POST", CHAT, body, headers)
    assert (status, answered["x-request-id"]) == (200, "my-request-17")

    def traced(*words: str) -> str:
        assert main(["trace", *words, "--address", pools.address]) == 0
        return capsys.readouterr().out

    def handed_over() -> bool:
        return all(one["attempts"][0]["handoff"] for one in json.loads(traced(name, "--json")))

    name = "my-request-17"
    wait_until(handed_over, what="the reports of the handoffs")  # may come after the end
    stories = json.loads(traced(name, "--json"))
    assert len(stories) == 2
    for story in stories:
        assert (story["gateway"], story["traceparent"]) == ("gateway", parent)
        assert (story["state"], story["new_tokens"]) == ("finished", 9)
        (attempt,) = story["attempts"]
        assert attempt["handoff"]["bytes_sent"] > 0
        assert attempt["decode_times"]["ended_s"] == pytest.approx(story["seconds"], abs=1e-5)
        assert f"over {attempt['handoff']['transport']}" in traced(name)
    assert name in traced("--last", "5")
    traced(name, "--perfetto", str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    _, _, answered = gateway.ask("POST", CHAT, {**body, "n": 1})  # a random id is found as well
    (story,) = json.loads(traced(answered["x-request-id"], "--json"))
    assert story["traceparent"] == ""
    with pools.client() as client:
        known = [one["request_id"] for one in client.status(requests=10)["requests"]]
    assert story["request_id"] in known


def test_limits_of_a_request_are_in_its_story_and_wrong_ones_are_refused(pools, gateway, capsys):
    body = {"messages": MESSAGES, "max_tokens": 9, "ignore_eos": True, "temperature": 0.0}
    _, plain, _ = gateway.ask("POST", CHAT, body)
    status, limited, headers = gateway.ask("POST", CHAT, {**body, "slo_ttft": 600, "slo_itl": 1e-9})
    assert status == 200 and limited["choices"] == plain["choices"]
    assert "warnings" not in limited
    assert main(["trace", headers["x-request-id"], "--address", pools.address]) == 0
    assert "own limits: TTFT 600000.0 ms, mean ITL 0.0 ms (missed)" in capsys.readouterr().out
    for name, value in (("slo_ttft", 0), ("slo_itl", -1.0), ("slo_ttft", 1e9)):
        status, refused, _ = gateway.ask("POST", CHAT, {**body, name: value})
        assert status == 400 and refused["error"]["param"] == name
        assert refused["error"]["message"].startswith(f"{name} must be a number of seconds")


@pytest.mark.long  # a minute of waiting in all
def test_a_request_waits_for_a_router_that_is_away_longer_than_a_client_would(gateway, pools):
    pid = pools.pids()["router"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(gateway.post, CHAT, messages=MESSAGES, max_completion_tokens=5)
            assert gateway.ask("GET", "/ready")[0] == 503
            time.sleep(1.5)
            assert not answer.done()
            os.kill(pid, signal.SIGCONT)
            assert answer.result(60)["choices"]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_echo_has_the_log_probabilities_of_the_prompt(gateway, native):
    ids = gateway.post("/tokenize", prompt=STORY)["tokens"]
    records = native.complete(
        STORY, SamplingParams(max_new_tokens=3, temperature=0), prompt_log_probabilities=2
    ).prompt_logprobs
    asked = {"prompt": STORY, "echo": True, "logprobs": 2, "temperature": 0}
    (choice,) = gateway.post("/v1/completions", max_tokens=3, **asked)["choices"]
    lists = choice["logprobs"]
    assert {len(one) for one in lists.values()} == {len(ids) + 3}
    assert "".join(lists["tokens"]) == choice["text"] and lists["text_offset"][0] == 0
    assert lists["text_offset"][len(ids)] == len(STORY)
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][1 : len(ids)] == [one.logprob for one in records[1:]]
    tops = [{one.text: one.logprob for one in [record, *record.top]} for record in records[1:]]
    assert lists["top_logprobs"][1 : len(ids)] == tops
    events = gateway.stream("/v1/completions", max_tokens=3, **asked)
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    streamed = {name: [one for part in parts if part for one in part[name]] for name in lists}
    assert streamed == lists and text_of(events) == choice["text"]

    found = gateway.post("/v1/completions", max_tokens=0, **asked)
    (alone,) = found["choices"]
    assert alone["text"] == STORY and alone["finish_reason"] == "length"
    assert alone["logprobs"] == {name: one[: len(ids)] for name, one in lists.items()}
    assert found["usage"]["completion_tokens"] == 0
    by_ids = gateway.post("/v1/completions", max_tokens=0, **{**asked, "prompt": ids})
    assert by_ids["choices"] == found["choices"]


def test_prompt_logprobs_have_the_form_of_vllm(gateway, native):
    records = native.complete(
        STORY, SamplingParams(max_new_tokens=1, temperature=0), prompt_log_probabilities=1
    ).prompt_logprobs
    body = {"prompt": STORY, "max_tokens": 2, "prompt_logprobs": 1, "temperature": 0, "n": 2}
    for choice in gateway.post("/v1/completions", **body)["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None and choice["logprobs"] is None and len(rest) == len(records) - 1
        for entry, record in zip(rest, records[1:], strict=True):
            own = entry[str(record.token_id)]
            wanted = {
                "logprob": record.logprob, "rank": record.rank, "decoded_token": record.text
            }  # fmt: skip
            assert own == wanted
            assert len(entry) == (1 if record.rank == 1 else 2)
    chat = gateway.post(CHAT, messages=MESSAGES, max_tokens=2, prompt_logprobs=0, temperature=0)
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert {len(entry) for entry in chat["prompt_logprobs"][1:]} == {1}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_a_prompt_cannot_be_scored_in_every_way(gateway, body, field):
    status, answer, _ = gateway.ask("POST", "/v1/completions", {"prompt": STORY, **body})
    assert (status, answer["error"]["param"]) == (400, field)
