"""Every option of a call, and every field of its parameters, with wrong types and values."""

from __future__ import annotations

import asyncio
import math
from typing import get_type_hints

import numpy as np
import pytest

from baton.client import AsyncClient, Client
from baton.client.options import LONGEST_WAIT_S, RequestOptions, check_options
from baton.proto import InputError, RequestID, SamplingParams, TextContext
from baton.proto.errors import DeadlineExceeded

NO_TEXT = [5, 0.5, True, b"x", ["x"], {"x": 1}, object()]
LONG = "x" * 5000
WRONG = {
    "target_endpoint": [*NO_TEXT, "", "http://x", "tcp://:", "tcp://a:0", f"ipc://{LONG}"],
    "deadline": ["5", b"5", True, [1], math.nan, np.float64("nan"), 1j],
    "pool": [*NO_TEXT, LONG, "\ud800"],
    "pin": [*NO_TEXT, "", "maybe", "STRICT"],
    "fallback": ["yes", 0, 1, 1.0, [], object()],
    "show_text": ["yes", 0, 1, 1.0, [], object()],
    "request_id": [*NO_TEXT, "", LONG, "\ud800"],
    "log_probabilities": ["1", 1.0, True, -1, 21, [1], math.nan],
    "cache_salt": [*NO_TEXT, LONG, "\ud800"],
    "json_schema": [5, 0.5, b"{}", ["x"], "{", "5", {"x": object()}, "\ud800"],
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
            "log_probabilities": np.int64(3),
            "request_id": RequestID("mine"),
            "json_schema": {"type": "object"},
            "fallback": np.True_,
        }
    )
    assert checked == {
        "deadline": 2.0,
        "log_probabilities": 3,
        "request_id": "mine",
        "json_schema": '{"type":"object"}',
        "fallback": True,
    }
    assert check_options({"deadline": math.inf}) == {"deadline": LONGEST_WAIT_S}
    assert check_options({"deadline": 10**400}) == {"deadline": LONGEST_WAIT_S}
    with pytest.raises(DeadlineExceeded, match="-1 s has already passed"):
        check_options({"deadline": -1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("target_endpont", "did you mean target_endpoint"),
        ("temperature", r"SamplingParams\(temperature=...\)"),
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
