"""The threaded client through a real router to scripted workers."""

from __future__ import annotations

import gc
import math
import random
import threading
import time

import numpy as np
import pytest

from baton.client import AsyncClient, Client
from baton.proto import (
    CapacityError,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    DuplicateRequest,
    EndpointUnknown,
    GenerationStatus,
    InputError,
    RequestFailed,
    RequestID,
    SamplingParams,
    SamplingParamsInput,
    TextContext,
)
from baton.proto.wire.messages import Terminal
from baton.runtime.net.sockets import RouterChannel

from ..processes import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def client(cluster):
    with Client(cluster.address) as client:
        yield client


def greedy(n, **kwargs):
    return SamplingParams(temperature=0, max_new_tokens=n, **kwargs)


def expect(start, n):
    return [10 + p % 1000 for p in range(start, start + n)]


def tokens_of(outputs):
    return [token for output in outputs for token in output.tokens]


def test_what_no_message_can_carry_is_refused_at_once(client):
    context = TextContext(tokens=np.array([4]), max_length=9, eos_token_ids={1 << 40})
    with pytest.raises(InputError, match=r"cannot be sent.*eos_token_ids"):
        client.generate(context)


def test_a_text_beyond_any_context_is_refused_without_tokenizing(client):
    """Tokenizing three megabytes would take seconds and half a gigabyte."""
    limit = 64 * client.describe().card.max_length
    with pytest.raises(InputError, match=f"text too long: {limit + 1} characters"):
        client.generate("x" * (limit + 1))
    with pytest.raises(InputError, match="characters"):
        client.chat([{"role": "user", "content": "x" * (limit + 1)}])


def test_closing_with_words_still_to_be_sent_is_no_fault(cluster, capsys):
    for _ in range(20):
        client = Client(cluster.address)
        client.describe()
        with client.generate([1, 2, 3], greedy(8)):
            pass
        client.close()
    assert "callback_failed" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3])])
def test_token_ids(client, prompt):
    outputs = list(client.generate(prompt, greedy(8)))
    assert tokens_of(outputs) == expect(3, 8)
    assert all(o.text == "" and o.final_status is None for o in outputs[:-1])
    last = outputs[-1]
    assert last.final_status is GenerationStatus.MAXIMUM_LENGTH and last.is_done
    assert (last.prefill, last.decode, last.cached_tokens) == ("prefill-0", "decode-0", 3)
    assert last.position == 11
    assert next(o.position for o in outputs if o.tokens) == 3


def test_text_in_text_out(cluster, client, tokenizer, say):
    prompt = "Once upon a time"
    cluster.prefill.answer = say("there was a café. 🎈 The end.", len(tokenizer.encode(prompt)))
    outputs = list(client.generate(prompt, greedy(100)))
    assert "".join(o.text for o in outputs) == "there was a café. 🎈 The end."
    assert outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE


def test_chat_renders_the_template(cluster, client, tokenizer, say):
    messages = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.encode_chat(messages)
    cluster.prefill.answer = say("Good day!", len(prompt))
    outputs = list(client.chat(messages, greedy(50)))
    assert "".join(o.text for o in outputs) == "Good day!"
    assert cluster.prefill.assigned[0].context.tokens.array.tolist() == prompt.tolist()


def test_a_stop_string_ends_the_text_before_it(cluster, client, tokenizer, say):
    length = len(tokenizer.encode("Hi"))
    cluster.prefill.answer = say("one two STOP three four five", length)
    outputs = list(client.generate("Hi", greedy(100, stop=["STOP"])))
    assert "".join(o.text for o in outputs) == "one two "
    last = outputs[-1]
    assert last.final_status is GenerationStatus.END_OF_SEQUENCE and last.decode == "decode-0"
    assert "STOP" in tokenizer.decode(tokens_of(outputs))
    assert "three" not in tokenizer.decode(tokens_of(outputs))
    wait_until(lambda: not cluster.prefill.running)


def test_a_stop_string_the_worker_cannot_see_is_found_here(cluster, client, tokenizer, say):
    """The stop string arrives in other tokens than the tokenizer would choose."""
    length = len(tokenizer.encode("Hi"))
    spelled = [
        *tokenizer.encode("one", add_special_tokens=False).tolist(),
        *(tokenizer.encode(c, add_special_tokens=False).tolist()[0] for c in " the"),
    ]
    rest = tokenizer.encode(" and much more", add_special_tokens=False).tolist() * 50
    answer = spelled + rest
    cluster.prefill.answer = lambda position: answer[position - length]
    assert len(tokenizer.encode(" the", add_special_tokens=False)) < 4
    outputs = list(client.generate("Hi", greedy(200, stop=[" the"])))
    assert "".join(o.text for o in outputs) == "one"
    assert outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE
    assert tokens_of(outputs) == spelled
    wait_until(lambda: cluster.prefill.aborted)


def test_log_probabilities(client):
    outputs = list(client.generate([1, 2], greedy(4), log_probabilities=1))
    entries = [e for o in outputs if o.log_probabilities for e in o.log_probabilities]
    assert len(entries) == 4
    assert entries[0].token_log_probabilities == [-0.5]
    assert entries[0].top_log_probabilities == [{12: -0.5}]


def test_a_context_brings_everything(cluster, client):
    context = TextContext(
        tokens=np.array([4, 5, 6]),
        max_length=9,
        request_id=RequestID("mine"),
        eos_token_ids={15},
        sampling_params=SamplingParams(temperature=0),
    )
    generation = client.generate(context)
    assert generation.request_id == "mine"
    outputs = list(generation)
    assert tokens_of(outputs) == [13, 14, 15]
    assert outputs[-1].final_status is GenerationStatus.END_OF_SEQUENCE
    with pytest.raises(InputError, match="cannot be combined with a context"):
        client.generate(context, greedy(3))


def test_sampling_defaults_come_from_the_model(cluster, client):
    list(client.generate([1], SamplingParamsInput(max_new_tokens=2, top_k=7)))
    list(client.generate([1], SamplingParams(max_new_tokens=2)))
    list(client.generate([1], SamplingParams(max_new_tokens=2, temperature=1.0, top_p=None)))
    list(client.generate(TextContext(tokens=np.array([4]), max_length=6)))
    merged, unset, given, own = (assign.context.sampling for assign in cluster.prefill.assigned)
    assert (merged.temperature, merged.top_p, merged.top_k) == (0.6, 0.9, 7)
    assert (unset.temperature, unset.top_p, unset.max_new_tokens) == (0.6, 0.9, 2)
    assert (given.temperature, given.top_p) == (1.0, 0.9)
    assert (own.temperature, own.top_p) == (1.0, 1.0), "a context is complete"


def test_many_threads_share_a_connection(cluster, client):
    results = {}

    def work(n):
        prompt = [1] * (n + 1)
        results[n] = tokens_of(client.generate(prompt, greedy(30)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: expect(n + 1, 30) for n in range(16)}
    assert client._background.connection.connections == 1


# --------------------------------------------------------------------------- cancel


def endless(client):
    generation = client.generate([1, 2], SamplingParams(temperature=0, max_new_tokens=2000))
    next(generation)
    return generation


def test_close_cancels(cluster, client):
    generation = endless(client)
    generation.close()
    wait_until(lambda: cluster.prefill.aborted)
    assert list(generation) == []
    generation.close()


def test_leaving_with_or_a_loop_cancels(cluster, client):
    with endless(client):
        pass
    wait_until(lambda: len(cluster.prefill.aborted) == 1)
    for output in client.generate([1, 2], greedy(2000)):
        if output.position > 5:
            break
    del output
    gc.collect()
    wait_until(lambda: len(cluster.prefill.aborted) == 2)


def test_a_dropped_iterator_cancels(cluster, client):
    generation = endless(client)
    del generation
    gc.collect()
    wait_until(lambda: cluster.prefill.aborted)


def test_closing_the_client_ends_its_streams(cluster):
    client = Client(cluster.address)
    generation = endless(client)
    errors = []

    def read():
        try:
            list(generation)
        except ConnectionLost as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    client.close()
    reader.join(30)
    assert errors
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        client.status()
    wait_until(lambda: cluster.prefill.aborted)


def test_a_dropped_client_ends_its_thread(cluster):
    client = Client(cluster.address)
    client.status()
    thread = client._background._thread
    del client
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_stream_keeps_its_client_alive(cluster):
    assert tokens_of(Client(cluster.address).generate([1], greedy(5))) == expect(1, 5)


# --------------------------------------------------------------------------- errors


def test_nobody_there(tmp_path):
    with Client(f"ipc://{tmp_path}/none", connect_timeout=0.3) as client:
        for call in (lambda: client.generate([1]), client.status, client.describe):
            with pytest.raises(ConnectionLost, match="baton serve"):
                call()
        context = TextContext(tokens=np.array([4]), max_length=9)
        with pytest.raises(ConnectionLost, match="none"):
            list(client.generate(context))


def test_a_bad_address():
    with pytest.raises(ConfigError, match="must start with"):
        Client("localhost:4000")
    for address in (5, b"ipc:///x"):
        with pytest.raises(ConfigError, match="is text or a list of texts, not"):
            Client(address)


@pytest.mark.parametrize("seconds", ["5", None, math.nan, [1], True, -1])
@pytest.mark.parametrize("name", ["connect_timeout", "reconnect_timeout"])
def test_a_bad_timeout(name, seconds):
    for kind in (Client, AsyncClient):
        with pytest.raises(
            ConfigError, match=f"{name} must be a number of seconds, 0 or more, not"
        ):
            kind("ipc:///nowhere", **{name: seconds})


def test_bad_questions_are_refused_before_they_are_asked(client):
    for timeout in ("5", math.nan, [1]):
        with pytest.raises(InputError, match="timeout must be a number"):
            client.status(timeout=timeout)
    for handoffs in ("x", None, -1, 1 << 70):
        with pytest.raises(InputError, match="handoffs must be"):
            client.status(handoffs=handoffs)
    with pytest.raises(InputError, match="worker must be text"):
        client.drain(None)


def test_no_worker_yet(cluster):
    cluster.prefill.end()
    cluster.decode.end()
    cluster.kill_router()
    cluster.restart_router()
    with Client(cluster.address, connect_timeout=2.0) as client:
        with pytest.raises(CapacityError, match="no worker"):
            client.describe()
        assert client.status()["workers"] == []


@pytest.mark.parametrize(
    ("prompt", "sampling", "options", "error"),
    [
        (np.empty(0, np.int32), None, {}, InputError),
        ([5000], None, {}, InputError),
        ([1.5], None, {}, InputError),
        (np.ones((2, 2), int), None, {}, InputError),
        ([1] * 3000, None, {}, InputError),
        ("bad \ud800", None, {}, InputError),
        ([1], None, {"target_endpoint": "http://x"}, InputError),
        ([1], None, {"deadline": 0.0}, DeadlineExceeded),
        ([1], None, {"request_id": "x" * 300}, InputError),
        ([1], 5, {}, InputError),
        ([1], {"temperature": 0}, {}, InputError),
        ([1], None, {"deadline": math.nan}, InputError),
        ([1], None, {"deadline": "5"}, InputError),
        ([1], None, {"target_endpoint": 5}, InputError),
        ([1], None, {"pool": 5}, InputError),
        ([1], None, {"pin": 5}, InputError),
        ([1], None, {"fallback": "yes"}, InputError),
        ([1], None, {"request_id": 5}, InputError),
        ([1], None, {"cache_salt": 5}, InputError),
        ([1], None, {"log_probabilities": "all"}, InputError),
        ([1], None, {"target_endpont": "ipc:///x"}, InputError),
    ],
)
def test_wrong_requests_are_refused_at_once(client, prompt, sampling, options, error):
    with pytest.raises(error):
        client.generate(prompt, sampling, **options)


def test_the_routers_refusal_is_typed(client):
    with pytest.raises(EndpointUnknown):
        list(client.generate([1], greedy(2), target_endpoint="ipc:///nobody"))
    with pytest.raises(InputError, match="pin"):
        list(client.generate([1], greedy(2), pin="maybe"))
    outputs = client.generate([1], greedy(2), target_endpoint="ipc:///nobody", fallback=True)
    assert tokens_of(outputs) == expect(1, 2)


def test_a_workers_failure_is_typed(cluster, client):
    cluster.prefill.refusal = Terminal(request=b"", code="failed", message="broken")
    with pytest.raises(RequestFailed, match="broken"):
        list(client.generate([1], greedy(2)))


def test_an_id_in_use(client):
    with client.generate([1], greedy(2000), request_id="same") as first:
        next(first)
        with pytest.raises(DuplicateRequest):
            list(client.generate([1], greedy(2), request_id="same"))
        assert next(first).tokens


def test_a_deadline_ends_the_request(cluster, client):
    with pytest.raises(DeadlineExceeded):
        list(client.generate([1], greedy(2000), deadline=0.15))
    wait_until(lambda: cluster.prefill.aborted)


# --------------------------------------------------------------------------- faults


def test_a_lost_token_is_fetched_again(cluster, client):
    cluster.prefill.swallow = {7, 12}
    assert tokens_of(client.generate([1, 2, 3], greedy(20))) == expect(3, 20)


def test_streams_outlast_the_router(cluster, client):
    generations = [client.generate([1] * n, greedy(300)) for n in (1, 2, 3)]
    got = {g: [*next(g).tokens] for g in generations}
    wait_until(lambda: all(p.position > 30 for p in cluster.prefill.running.values()))
    cluster.kill_router()
    cluster.restart_router()
    for n, generation in zip((1, 2, 3), generations, strict=True):
        got[generation] += tokens_of(generation)
        assert got[generation] == expect(n, 300)
    # The same attempt continued: nothing was computed again.
    assert len(cluster.prefill.assigned) == 3


def test_a_call_during_the_routers_absence_waits_for_it(cluster, client):
    assert tokens_of(client.generate([1], greedy(2))) == expect(1, 2)
    cluster.kill_router()
    restart = threading.Timer(0.3, cluster.restart_router)
    restart.start()
    assert tokens_of(client.generate([1], greedy(2))) == expect(1, 2)
    restart.join()


def test_a_silent_router_is_left_and_the_stream_resumed(cluster, client, monkeypatch):
    """A router whose sockets answer but whose loop hangs: only missing pongs show it."""
    monkeypatch.setattr("baton.client.link.SILENCE_S", 0.3)
    monkeypatch.setattr("baton.client.link.PING_S", 0.1)
    generation = client.generate([1], greedy(800))
    got = [*next(generation).tokens]
    cluster.router.loop.post(lambda: time.sleep(0.7))
    got += tokens_of(generation)
    assert got == expect(1, 800)
    assert client._background.connection.connections >= 2


def test_noise_instead_of_a_router(tmp_path, on_thread):
    chaos = random.Random(1)
    rogue = RouterChannel(on_thread.context, f"ipc://{tmp_path}/rogue")

    def answer(identity, _frames):
        for _ in range(20):
            noise = b"BT\x03" * chaos.randrange(2) + chaos.randbytes(chaos.randrange(60))
            rogue.send(identity, [noise] * chaos.randrange(1, 4))

    on_thread.call(lambda: rogue.attach(on_thread.loop, answer))
    with Client(rogue.endpoint, connect_timeout=0.3) as client:
        with pytest.raises(ConnectionLost):
            client.status()
        assert client._background._loop.callback_errors == 0
    on_thread.call(rogue.close)


# --------------------------------------------------------------------------- questions


def test_describe_brings_card_and_files(client):
    description = client.describe()
    assert description.card.name == "demo"
    assert {"tokenizer.json", "generation_config.json"} <= set(description.files)
    assert description.files.keys() <= set(description.available)


def test_status_and_drain(cluster, client):
    workers = {w["id"]: w for w in client.status()["workers"]}
    assert workers["decode-0"]["kv_blocks_total"] == 100
    assert client.drain("decode-0", force=True) in ("draining", "drained")
    wait_until(lambda: _state(client, "decode-0") == "draining")
    with pytest.raises(EndpointUnknown):
        client.drain("nobody")


def _state(client, name):
    return {w["id"]: w["state"] for w in client.status()["workers"]}[name]
