"""What bodies ask for besides their prompts is checked once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.gateway.asked import Asked
from baton.gateway.bodies import ChatBody, CompletionBody
from baton.gateway.errors import ParameterError
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults

DEFAULTS = SamplingParamsGenerationConfigDefaults(temperature=0.5)


def asked(kind: Any = CompletionBody, defaults: Any = DEFAULTS, **fields: Any) -> Asked:
    prompt = {"prompt": "x"} if kind is CompletionBody else {"messages": [{}]}
    return Asked.of(msgspec.convert({**prompt, **fields}, kind), defaults)


def test_bodies_that_differ_in_prompt_seed_or_an_ignored_field_share_the_result():
    first = asked(prompt=[1], max_tokens=4)
    assert asked(prompt="y", seed=3, user="u", model="m", max_tokens=4) is first


@pytest.mark.parametrize(
    "field", [{"max_tokens": 5}, {"stream": True}, {"logprobs": 1}, {"cache_salt": "s"},
              {"temperature": 1.0}, {"n": 2}, {"ignore_eos": True}, {"stop": "x"}],
)  # fmt: skip
def test_other_fields_and_defaults_have_other_results(field):
    first = asked(max_tokens=4)
    assert asked(**{"max_tokens": 4, **field}) is not first
    assert asked(max_tokens=4, defaults=SamplingParamsGenerationConfigDefaults()) is not first
    assert asked(ChatBody, max_tokens=4) is not first


def test_the_options_are_those_of_the_body():
    found = asked(ChatBody, stream=True, cache_salt="s", logprobs=True, top_logprobs=3)
    assert found.options == {
        "cache_salt": "s", "log_probabilities": 3, "whole": False, "show_text": True,
    }  # fmt: skip
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    assert "json_schema" in asked(response_format=schema).options
    assert "json_schema" not in asked(ChatBody, response_format=schema).options  # of its plan


def test_each_answer_has_its_seed():
    body = msgspec.convert({"prompt": "x", "seed": 7, "n": 2}, CompletionBody)
    found = Asked.of(body, DEFAULTS)
    assert [found.sampling(body, index).seed for index in range(2)] == [7, 8]
    assert found.sampling(body, 0).temperature == 0.5
    body.seed = None
    assert found.sampling(body, 0).seed != found.sampling(body, 0).seed
    stops = msgspec.convert({"prompt": "x", "seed": 7, "stop": ["a"]}, CompletionBody)
    assert Asked.of(stops, DEFAULTS).sampling(stops, 1).stop == ["a"]


def test_a_wrong_body_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ParameterError, match="temperature"):
            asked(temperature=-1.0)
        with pytest.raises(ParameterError, match="top_logprobs needs logprobs"):
            asked(ChatBody, top_logprobs=3)
