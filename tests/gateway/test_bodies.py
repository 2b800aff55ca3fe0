"""Bodies: each field is used, or refused with its name; wrong values name the field."""

import json
from pathlib import Path

import pytest

from baton.gateway import bodies
from baton.gateway.bodies import (
    REFUSED,
    BodyReader,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    TokenizeBody,
)
from baton.gateway.errors import ParameterError
from baton.gateway.parameters import list_of, messages_of, options_of, sampling_of
from baton.proto.errors import InputError
from baton.proto.sampling import SamplingParams

MESSAGES = [{"role": "user", "content": "hello"}]
READERS = {kind: BodyReader(kind) for kind in (ChatBody, CompletionBody, EmbeddingBody)}


def chat(**fields) -> ChatBody:
    return READERS[ChatBody].read(json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields) -> CompletionBody:
    return READERS[CompletionBody].read(json.dumps({"prompt": "hello", **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "parameter", "said"),
    [
        ({"foo": 1}, "foo", "foo is not a known parameter"),
        ({"temperature": "hot"}, "temperature", "got str"),
        ({"temperature": True}, "temperature", "got bool"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 2.5}, "max_tokens", "got float"),
        ({"n": 17}, "n", "<= 16"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "<= 20"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "hello"}, "messages", "got str"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo", "not a known parameter"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"stop": [1]}, "stop[0]", "got int"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields, parameter, said):
    with pytest.raises(ParameterError, match=said.replace("[", r"\[")) as raised:
        chat(**fields)
    assert raised.value.parameter.startswith(parameter.split("[", maxsplit=1)[0])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"\xff", b'{"a":' * 5000, b"null"])
def test_what_is_no_body_is_an_input_error(content):
    with pytest.raises(InputError):
        READERS[ChatBody].read(content)


def test_a_missing_field_is_named():
    with pytest.raises(ParameterError, match="messages is missing"):
        READERS[ChatBody].read(b"{}")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_without_effect_is_refused_unless_it_is_neutral(name):
    kinds = [kind for kind in (ChatBody, CompletionBody) if name in kind.__struct_fields__]
    assert kinds, f"{name} is in no body"
    neutral, reason = REFUSED[name]
    make = chat if kinds[0] is ChatBody else completion
    for value in (None, *neutral):
        make(**{name: value})
    if not reason:
        return
    with pytest.raises(ParameterError, match=f"{name} is not supported: ") as raised:
        make(**{name: "something"})
    assert raised.value.parameter == name
    with pytest.raises(ParameterError):
        make(**{name: 0.5})


def test_every_field_of_a_generation_is_used_or_refused():
    """A field that is neither in the code that uses fields nor in the table does nothing."""
    used = {
        "model", "user", "metadata", "stream", "stream_options", "n", "temperature", "top_p",
        "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed",
        "response_format", "cache_salt", "messages", "max_completion_tokens", "logprobs",
        "top_logprobs", "chat_template_kwargs", "add_generation_prompt", "prompt", "echo",
        "add_special_tokens",
    }  # fmt: skip
    for kind in (GenerationBody, ChatBody, CompletionBody):
        assert set(kind.__struct_fields__) <= used | set(REFUSED)


def test_parameters_are_those_of_the_native_client():
    body = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3,
        repetition_penalty=1.1, max_completion_tokens=9, min_tokens=2, stop="x", seed=5,
        stop_token_ids=[3], ignore_eos=True,
    )  # fmt: skip
    assert sampling_of(body, 0) == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3,
        repetition_penalty=1.1, max_new_tokens=9, min_new_tokens=2, stop=["x"], seed=5,
        stop_token_ids=[3], ignore_eos=True,
    )  # fmt: skip
    assert sampling_of(body, 2).seed == 7
    assert sampling_of(chat(seed=-1), 0).seed == 2**64 - 1


def test_what_is_not_given_is_left_to_the_model():
    assert sampling_of(chat(), 0)._given in (None, ())
    assert sampling_of(completion(), 0).max_new_tokens == bodies.DEFAULT_COMPLETION_TOKENS
    assert options_of(chat(), {}) == {}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ],
    ids=str,
)
def test_an_impossible_value_is_named_as_in_the_body(fields, parameter):
    with pytest.raises(ParameterError) as raised:
        sampling_of(chat(**fields), 0)
    assert raised.value.parameter == parameter
    assert parameter in str(raised.value)


def test_options_come_from_headers_and_body():
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    body = chat(response_format=form, cache_salt="s", logprobs=True, top_logprobs=3)
    assert options_of(body, {"x-target-endpoint": "tcp://h:1"}) == {
        "target_endpoint": "tcp://h:1",
        "cache_salt": "s",
        "json_schema": schema,
        "log_probabilities": 3,
    }
    assert options_of(chat(logprobs=True), {}) == {"log_probabilities": 1}
    assert options_of(chat(response_format={"type": "json_object"}), {}) == {
        "json_schema": {"type": "object"}
    }
    for wrong in ({"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(ParameterError, match="response_format"):
            options_of(chat(response_format=wrong), {})
    with pytest.raises(ParameterError, match="top_logprobs needs"):
        options_of(chat(top_logprobs=2), {})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
    ids=str,
)
def test_prompts_of_every_form(given, wanted):
    assert list_of(given, "prompt", 2) == wanted


@pytest.mark.parametrize("given", [[], "", [""], [[]], [1, "a"], ["a", [1]], [[1], [2], [3]]])
def test_wrong_prompts_are_refused(given):
    with pytest.raises(ParameterError, match="prompt"):
        list_of(given, "prompt", 2)


def test_parts_of_text_become_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "a\nb"}
    ]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ParameterError, match=r"messages\[0\].*'image_url'"):
        messages_of([{"role": "user", "content": image}])
    with pytest.raises(ParameterError, match=r"messages\[1\]\.role"):
        messages_of([*MESSAGES, {"content": "x"}])


def test_tokenize_bodies():
    reader = BodyReader(TokenizeBody)
    assert reader.read(b'{"prompt": "x"}').prompt == "x"
    with pytest.raises(ParameterError, match="foo"):
        reader.read(b'{"foo": 1}')


def test_the_page_has_every_field():
    page = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text()
    for kind in (ChatBody, CompletionBody):
        for name in kind.__struct_fields__:
            if name == "spaces_between_special_tokens":  # all its values give the same text
                continue
            assert f"`{name}`" in page, name
    for name, (neutral, reason) in REFUSED.items():
        shown = ", ".join(f"`{json.dumps(value)}`" for value in neutral) or "null"
        assert not reason or f"| `{name}` | {reason} | {shown} |" in page, name
