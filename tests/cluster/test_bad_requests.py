"""Wrong requests: each is refused with a clear typed error, by the client or by the router."""

import math

import numpy as np
import pytest

from baton.proto.contexts.text import TextContext
from baton.proto.errors import (
    BatonError,
    DeadlineExceeded,
    DuplicateRequest,
    InputError,
    TaskMismatch,
)
from baton.proto.sampling import SamplingParams
from baton.proto.wire.messages import Submit
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens

from .driver import Job, ask, greedy
from .raw import RawPeer
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
CASES = cases_of(MODEL)
VOCABULARY, CONTEXT = 256, 2048


@pytest.fixture(scope="module")
def running(lasting_cluster):
    return lasting_cluster(model=DATA / MODEL, prefill=1, decode=2)


@pytest.fixture
def client(running):
    with running.client() as client:
        yield client


def wire(tokens=(5, 6, 7), **fields) -> WireContext:
    fields = {"max_length": 64, **fields}
    return WireContext(tokens=WireTokens(np.array(tokens, fields.pop("dtype", np.int32))), **fields)


BAD_CONTEXTS = {
    "empty": (wire([]), "prompt is empty"),
    "negative id": (wire([5, -1]), "token id -1 at position 1 is outside"),
    "large id": (wire([VOCABULARY]), "token id 256 at position 0 is outside"),
    "too long": (wire([5] * CONTEXT, max_length=CONTEXT), "too long: 2048 tokens"),
    "much too long": (wire([5] * 100_000, max_length=CONTEXT), "too long: 100000 tokens"),
    "no room": (wire(max_length=3), "leaves no room"),
    "longer than the model": (wire(max_length=CONTEXT + 1), "over the served"),
    "wrong dtype": (wire([5.0], dtype=np.float32), "one-dimensional int32"),
    "wrong shape": (wire([[5, 6]]), "one-dimensional int32"),
    "other model": (wire(model_name="another"), "is not served, only"),
    "endpoint": (wire(target_endpoint="nowhere"), "must start with tcp:// or ipc://"),
    "log-probs": (wire(log_probabilities=21), "must be 0 to 20"),
    "stop id": (wire(eos_sequences=[[VOCABULARY]]), "outside the vocabulary"),
    "min tokens": (wire(sampling=WireSampling(min_new_tokens=62)), "min_new_tokens 62"),
}
BAD_SAMPLING = {
    "temperature": [-0.1, math.nan, math.inf],
    "top_p": [-0.1, 1.1, math.nan],
    "top_k": [-2, 256],
    "min_p": [-0.1, 1.5, math.nan],
    "repetition_penalty": [0.0, -1.0, math.inf, math.nan],
    "frequency_penalty": [math.nan, math.inf],
    "presence_penalty": [math.nan, -math.inf],
    "max_new_tokens": [0, -1],
    "min_new_tokens": [-1],
    "seed": [-1],
    "stop": [[""], ["x" * 129]],
}
for _field, _values in BAD_SAMPLING.items():
    for _value in _values:
        _sampling = WireSampling(**{_field: _value})
        BAD_CONTEXTS[f"{_field}={_value!r:.12}"] = (wire(sampling=_sampling), _field)


def refusal(peer: RawPeer, submit: Submit) -> dict:
    """The terminal a request gets; it must be the only answer."""
    peer.say(submit)
    (answer,) = peer.answers()
    assert answer["type"] == "Terminal"
    assert answer.get("request_id", "") == submit.request_id
    assert "status" not in answer
    return answer


@pytest.mark.parametrize("name", BAD_CONTEXTS)
def test_the_router_refuses_a_wrong_request(running, name):
    context, message = BAD_CONTEXTS[name]
    with RawPeer(running.address) as peer:
        answer = refusal(peer, Submit(request_id="r", context=context))
    assert answer["code"] == ("context_length_exceeded" if "too long" in message else "input")
    assert message in answer["message"]
    assert len(answer["message"]) < 300


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"deadline": -3.0}, "deadline_exceeded", "passed 3 s before"),
        ({"deadline": 0.0}, "deadline_exceeded", "passed 0 s before"),
        ({"deadline": math.nan}, "input", "not a number"),
        ({"pin": "hard"}, "input", "must be prefer or strict"),
        ({"request_id": ""}, "input", "1 to 256 characters"),
        ({"request_id": "x" * 257}, "input", "1 to 256 characters"),
    ],
)
def test_the_router_refuses_a_wrong_submit(running, fields, code, message):
    with RawPeer(running.address) as peer:
        submit = Submit(**{"request_id": "r", "context": wire(), **fields})
        answer = refusal(peer, submit)
    assert answer["code"] == code
    assert message in answer["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.empty(0, np.int32), "prompt is empty"),
        ([5, VOCABULARY], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1 << 40], "does not fit 32 bits"),
        ([0.5], "must be integers"),
        (np.ones((1, 2), int), "one-dimensional"),
        ([5] * CONTEXT, "too long: 2048 tokens"),
    ],
)
def test_the_client_refuses_a_wrong_prompt(client, prompt, message):
    with pytest.raises(InputError, match=message):
        ask(client, Job(prompt, greedy(4)))


def test_the_client_refuses_what_cannot_be_asked(client):
    job = Job([5, 6], greedy(4))
    for deadline in (0, -1.0):
        with pytest.raises(DeadlineExceeded):
            ask(client, Job(job.prompt, job.params, {"deadline": deadline}))
    with pytest.raises(InputError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=0)
    with pytest.raises(InputError, match="cannot be sent"):
        ask(client, Job(job.prompt, SamplingParams(logits_processors=[lambda row: None])))
    with pytest.raises(BatonError, match="takes prompts as token ids"):
        client.generate("text for a model without a tokenizer")
    with pytest.raises(TaskMismatch, match="generation model"):
        client.embed([[5, 6]])


def test_a_deadline_that_passes_ends_the_request(running, client):
    long = Job(CASES[7].prompt, greedy(500), {"deadline": 0.05})
    with pytest.raises(DeadlineExceeded):
        ask(client, long)


def test_one_id_with_two_contents(running, client):
    params = greedy(1500)
    with client.generate([5, 6, 7], params, request_id="same") as first:
        tokens = list(next(first).tokens)
        with pytest.raises(InputError):
            ask(client, Job([5, 6, 8], params, {"request_id": "same"}))
        tokens += [t for output in first for t in output.tokens]
    assert len(tokens) == 1500
    with RawPeer(running.address) as peer:
        peer.say(Submit(request_id="same", context=wire(max_length=CONTEXT)))
        peer.hear_until(lambda m: m["type"] == "Tokens")
        peer.say(Submit(request_id="same", context=wire([9], max_length=CONTEXT)))
        refused = peer.hear_until(lambda m: m.get("code") is not None)[-1]
        assert refused["code"] == DuplicateRequest.code
        assert not refused.get("request")  # the key would end the stream that runs
        end = peer.hear_until(lambda m: m["type"] == "Terminal")[-1]
        assert end["status"] == "maximum_length"


def test_what_is_no_context_object(client):
    with pytest.raises(InputError):
        client.generate(TextContext(max_length=64, tokens=[5]), greedy(4))


def test_it_serves_on_after_all_of_them(client):
    assert ask(client, Job(CASES[4].prompt, greedy(64))).tokens == CASES[4].greedy
    requests = client.status()["router"]["requests"]
    assert (requests["in_flight"], requests["queued"]) == (0, 0)
