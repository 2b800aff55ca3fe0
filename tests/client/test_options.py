"""Every option of a call, and every field of its parameters, with wrong types and values."""

from __future__ import annotations

import asyncio
import json
import math
from typing import get_type_hints

import msgspec
import numpy as np
import pytest

from baton.client import AsyncClient, Client
from baton.client.calls import Draft
from baton.client.description import Description
from baton.client.model import ServedModel, prepare
from baton.client.options import (
    LONGEST_WAIT_S,
    MAX_GATEWAY_CHARS,
    RequestOptions,
    check_options,
)
from baton.proto import InputError, RequestID, SamplingParams, TextContext
from baton.proto.errors import DeadlineExceeded, FeatureMissing
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_CONTEXT_TOKENS,
    MAX_JSON_SCHEMA_CHARS,
    MAX_LOG_PROBABILITIES,
    MAX_LOGIT_BIASES,
    MAX_POOL_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_TOKEN_IDS,
)
from baton.proto.sampling import MAX_SEED
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import ClientToRouter, Submit

from .conftest import CARD

NO_TEXT = [5, 0.5, True, b"x", ["x"], {"x": 1}, object()]
LONG = "x" * 5000
WRONG = {
    "target_endpoint": [*NO_TEXT, "", "http://x", "tcp://:", "tcp://a:0", f"ipc://{LONG}"],
    "deadline": ["5", b"5", True, [1], math.nan, np.float64("nan"), 1j],
    "slo_ttft": ["5", True, [1], 0, -1, math.nan, math.inf, LONGEST_WAIT_S + 1, 10**400],
    "slo_itl": ["5", b"5", True, 0.0, -0.5, math.nan, 1j, math.inf],
    "pool": [*NO_TEXT, LONG, "\ud800"],
    "pin": [*NO_TEXT, "", "maybe", "STRICT"],
    "fallback": ["yes", 0, 1, 1.0, [], object()],
    "show_text": ["yes", 0, 1, 1.0, [], object()],
    "whole": ["yes", 0, 1, 1.0, [], object()],
    "max_retries": ["1", 1.5, True, -1, [1], math.nan],
    "request_id": [*NO_TEXT, "", LONG, "\ud800"],
    "log_probabilities": ["1", 1.0, True, -1, 21, [1], math.nan],
    "prompt_log_probabilities": ["1", 1.0, True, -1, 21, [1], math.nan],
    "cache_salt": [*NO_TEXT, LONG, "\ud800"],
    "traceparent": [*NO_TEXT, "", LONG, "00-1-2-01", f"00-{'0' * 32}-{'5c' * 8}-01"],
    "gateway": [*NO_TEXT, LONG, "\ud800"],
    "json_schema": [5, 0.5, b"{}", ["x"], "{", "5", {"x": object()}, "\ud800"],
    "images": [5, "x.png", b"x", True, {"a": 1}, object(), np.zeros((2, 2, 3), np.uint8)],
    "disable_any_whitespace": [1, "yes", []],
    "whitespace_pattern": [5, "x", "[^ ]", b" ", "( {9999}){9999}{9999}x"],
    "grammar": [5, b"start: A", ["x"], {}, "", " ", "\ud800", "x" * (128 << 10)],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def test_every_option_is_tried():
    assert WRONG.keys() == get_type_hints(RequestOptions).keys()


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=[f"{name}-{at}" for at, (name, _) in enumerate(CASES)]
)
def test_a_wrong_option_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"^{name}") as caught:
        check_options({name: value})
    assert len(str(caught.value)) < 300


def test_good_options_have_the_declared_types_and_none_leaves_out():
    assert check_options(dict.fromkeys(WRONG)) == {}
    checked = check_options(
        {
            "deadline": np.float32(2),
            "slo_ttft": np.float32(0.5),
            "slo_itl": 1,
            "log_probabilities": np.int64(3),
            "request_id": RequestID("mine"),
            "json_schema": {"type": "object"},
            "fallback": np.True_,
        }
    )
    assert checked == {
        "deadline": 2.0,
        "slo_ttft": 0.5,
        "slo_itl": 1.0,
        "log_probabilities": 3,
        "request_id": "mine",
        "json_schema": '{"type":"object"}',
        "fallback": True,
    }
    grammar = check_options({"grammar": 'start: "é"'})
    assert grammar == {"json_schema": '{"x-guidance":{"lark":"start: \\"é\\""}}'}
    with pytest.raises(InputError, match="grammar cannot be combined"):
        check_options({"grammar": "start: A", "json_schema": "{}"})
    assert check_options({"deadline": math.inf}) == {"deadline": LONGEST_WAIT_S}
    assert check_options({"deadline": 10**400}) == {"deadline": LONGEST_WAIT_S}
    with pytest.raises(DeadlineExceeded, match="-1 s has already passed"):
        check_options({"deadline": -1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("target_endpont", "did you mean target_endpoint"),
        ("temperature", "temperature has no effect in this call"),
        ("logprobs", "write log_probabilities=..."),
        ("timeout", "write deadline=..."),
        ("zzz", "known are .*deadline"),
    ],
)
def test_an_unknown_option_gets_the_right_spelling(name, message):
    with pytest.raises(InputError, match=message):
        check_options({name: 5})


SAMPLING = [
    ({"temperature": 0}, r"not {'temperature': 0} \(dict\); write SamplingParams\(\*\*values\)"),
    (0.7, r"SamplingParams\(temperature=0.7\)"),
    ("hot", "must be SamplingParams"),
    ([SamplingParams()], "must be SamplingParams"),
]
PROMPTS = [None, 5, 0.5, b"abc", {"a": 1}, {1, 2}, object(), iter([1]), [None], [1, None], ["a", 1]]


def assigned_wrongly(field, value):
    params = SamplingParams(max_new_tokens=2)
    setattr(params, field, value)
    return params


ASSIGNED = [
    ("temperature", "hot"),
    ("top_k", 0.7),
    ("seed", 1.5),
    ("ignore_eos", "yes"),
    ("stop", [1]),
    ("stop_token_ids", ["a"]),
    ("max_new_tokens", 5.0),
    ("top_p", math.nan),
]


def calls(client):
    """Calls that must be refused, each with the words that the error must contain."""
    for name, value in CASES:
        yield lambda n=name, v=value: client.generate([1], **{n: v}), name
    for sampling, message in SAMPLING:
        yield lambda s=sampling: client.generate([1], s), message
    for prompt in PROMPTS:
        yield lambda p=prompt: client.generate(p), "prompt|token"
    for field, value in ASSIGNED:
        params = assigned_wrongly(field, value)
        yield lambda p=params: client.generate([1], p), field
        context = TextContext(tokens=np.array([4]), max_length=9, sampling_params=params)
        yield lambda c=context: client.generate(c), field
    messages = [{"role": "user", "content": "Hi"}]
    yield lambda: client.chat(messages, variables=5), "variables"
    yield lambda: client.chat(messages, variables={"messages": []}), "variables"
    yield lambda: client.chat(5), "messages"
    yield lambda: client.chat(messages, variables={"tools": 5}), "tools"


def test_the_largest_values_of_all_options_fit_one_message():
    """So a request whose options and parameters passed their checks is never refused as a whole."""
    card = ModelCard(
        name="demo", architecture="a", fingerprint="f", numerics="n", vocab_size=1 << 17,
        max_length=MAX_CONTEXT_TOKENS - 1, eos_token_ids=[2], features=["logit_bias"],
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16),
    )  # fmt: skip
    wide = "\U0001f600"
    params = SamplingParams(
        stop_token_ids=list(range(MAX_STOP_TOKEN_IDS)), seed=MAX_SEED, max_new_tokens=1,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), -99.5), temperature=1e38,
    )  # fmt: skip
    schema = json.dumps({"const": wide * (MAX_JSON_SCHEMA_CHARS - 20)}, ensure_ascii=False)
    options = check_options(
        {
            "request_id": wide * MAX_REQUEST_ID_CHARS, "pool": wide * MAX_POOL_CHARS,
            "cache_salt": wide * MAX_CACHE_SALT_CHARS, "json_schema": schema,
            "log_probabilities": MAX_LOG_PROBABILITIES, "deadline": 1.0, "pin": "strict",
            "fallback": True, "gateway": wide * MAX_GATEWAY_CHARS,
            "traceparent": f"00-{'5c' * 16}-{'5c' * 8}-01", "target_endpoint": "tcp://host:65535",
        }
    )  # fmt: skip
    model = ServedModel(Description(card, "", {}))
    prompt = np.full(MAX_CONTEXT_TOKENS - 2, (1 << 17) - 1, np.int32)
    spec = prepare(prompt, params, options, model).spec
    submit = Submit(
        request_id=spec.request_id, context=spec.context, deadline=spec.deadline, pool=spec.pool,
        pin=spec.pin, fallback=spec.fallback, serial=1 << 60, gateway=spec.gateway,
        traceparent=spec.traceparent,
    )  # fmt: skip
    frames = EnvelopeEncoder().encode([submit])
    (decoded,) = EnvelopeDecoder(ClientToRouter).decode([bytes(frame) for frame in frames])
    assert decoded.context.json_schema == schema
    assert decoded.request_id == spec.request_id


@pytest.mark.integration
def test_a_live_cluster_gives_one_typed_error_at_once_and_goes_on(cluster):
    with Client(cluster.address) as client:
        client.describe()
        for call, message in calls(client):
            with pytest.raises(InputError, match=message):
                list(call())
        assert not cluster.prefill.assigned
        assert list(client.generate([1], SamplingParams(max_new_tokens=2)))


@pytest.mark.integration
def test_the_asyncio_client_gives_the_same_errors(cluster):
    async def first(call):
        generation = call()
        if isinstance(generation, list):
            generation = generation[-1]  # the wrong prompt is the last one
        return await asyncio.wait_for(anext(generation), 60)

    async def main():
        async with AsyncClient(cluster.address) as client:
            for call, message in calls(client):
                with pytest.raises(InputError, match=message):
                    await first(call)
            return [o async for o in client.generate([1], SamplingParams(max_new_tokens=2))]

    assert asyncio.run(main())
    assert cluster.prefill.assigned


def test_a_bias_is_refused_before_it_reaches_a_router_that_would_lose_it():
    """A router of an older release hides the features of the workers from the model's card."""
    model = ServedModel(Description(msgspec.structs.replace(CARD, features=[]), "", {}))
    params = SamplingParams(max_new_tokens=2, logit_bias={3: 5.0})
    context = TextContext(tokens=np.array([4]), max_length=9, sampling_params=params)
    plain = TextContext(tokens=np.array([4]), max_length=9)
    assert Draft("r", plain, None, {}, None).is_context  # sent without a look at the card
    for prompt, sampling in ((context, None), ([4], params)):
        draft = Draft("r", prompt, sampling, {}, None)
        assert not draft.is_context
        with pytest.raises(FeatureMissing, match="logit_bias needs newer workers"):
            draft.prepare(model)
    assert Draft("r", context, None, {}, None).prepare(ServedModel(Description(CARD, "", {})))
