"""Bodies of ``/v1/responses``: each field is used, or refused with its name."""

import json

import pytest

from baton.gateway.bodies import MOST_UNKNOWN, BodyReader
from baton.gateway.errors import ParameterError
from baton.gateway.field_rules import IGNORED, RECORDS, REFUSED
from baton.gateway.grammars import Content
from baton.gateway.messages import Unknown
from baton.gateway.parameters import content_of, options_of, sampling_of
from baton.gateway.responses_bodies import (
    RESPONSES_IGNORED,
    RESPONSES_REFUSED,
    ResponsesBody,
    messages_of_input,
    tools_of_body,
)
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults

DEFAULTS = SamplingParamsGenerationConfigDefaults()

NOW = {"type": "function", "name": "now"}
CALL = {"type": "function_call", "call_id": "1", "name": "now", "arguments": '{"a": 1}'}
READER = BodyReader(ResponsesBody, RESPONSES_REFUSED, RESPONSES_IGNORED)


def read(fields, *, strict=False):
    content = json.dumps({"input": "hello", **fields}).encode()
    found, warnings = READER.read(content, strict=strict)
    return found, [*warnings, *found.check(strict=strict)]


def body(**fields) -> ResponsesBody:
    return read(fields, strict=True)[0]


def input_image(**fields):
    return {"type": "input_image", "image_url": "data:image/png;base64,AAAA", **fields}


class TestImages:
    def test_images_keep_their_place_among_texts(self):
        urls = []
        content = [input_image(detail="low"), {"type": "input_text", "text": "What?"},
                   input_image(file_id=None, detail="auto")]  # fmt: skip
        found = messages_of_input(
            body(input=[{"role": "user", "content": content}]), urls, Unknown()
        )
        assert found == [
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "text", "text": "What?"},
                    {"type": "image"},
                ],
            }
        ]
        assert [(one.place, one.max_side) for one in urls] == [
            ("input[0].content[0].image_url", 512), ("input[0].content[2].image_url", 0),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("part", "parameter"),
        [
            ({"type": "input_image"}, "input[0].content[0].image_url"),
            (input_image(image_url={"url": "x"}), "input[0].content[0].image_url"),
            (input_image(detail="original"), "input[0].content[0].detail"),
            (input_image(file_id="f"), "input[0].content[0].file_id"),
            (input_image(size=5), "input[0].content[0].size"),
        ],
    )
    def test_wrong_parts_are_named(self, part, parameter):
        with pytest.raises(ParameterError) as raised:
            messages_of_input(
                body(input=[{"role": "user", "content": [part]}]), [], Unknown(strict=True)
            )
        assert raised.value.parameter == parameter

    def test_outputs_of_functions_are_texts(self):
        item = {"type": "function_call_output", "call_id": "1", "output": [input_image()]}
        with pytest.raises(ParameterError, match="the model takes text"):
            messages_of_input(body(input=[item]), [], Unknown(strict=True))


def test_every_field_is_used_or_refused():
    used = {
        "model", "user", "metadata", "stream", "stream_options", "temperature", "top_p", "top_k",
        "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens",
        "stop", "stop_token_ids", "ignore_eos", "seed", "cache_salt", "structured_outputs",
        "slo_ttft", "slo_itl",
        "logit_bias", "input", "instructions",
        "max_output_tokens", "text", "include", "top_logprobs", "prompt_cache_key",
        "safety_identifier", "reasoning", "chat_template_kwargs", "tools", "tool_choice",
        "parallel_tool_calls",
    }  # fmt: skip
    rules = {*REFUSED, *RESPONSES_REFUSED, *IGNORED, *RESPONSES_IGNORED, *RECORDS}
    assert set(ResponsesBody.__struct_fields__) <= used | rules


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"include": ["reasoning.encrypted_content"]}, "include 'reasoning.encrypted_content'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"foo": 1}, "foo"),
    ],
    ids=str,
)
def test_what_changes_no_token_is_named_among_the_warnings(fields, named):
    (warning,) = read(fields)[1]
    assert warning.startswith(named)
    with pytest.raises(ParameterError):
        read(fields, strict=True)


@pytest.mark.parametrize("name", sorted(RESPONSES_REFUSED))
def test_a_field_without_effect_is_refused_unless_it_is_neutral(name):
    neutral, _ = RESPONSES_REFUSED[name]
    for value in (None, *neutral):
        body(**{name: value})
    with pytest.raises(ParameterError, match=f"{name} is not supported: ") as raised:
        body(**{name: "something"})
    assert raised.value.parameter == name


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"foo": 1}, "foo"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{**CALL, "namespace": "n"}]}, "input[0].namespace"),
        ({"input": [{**CALL, "name": 5}]}, "input[0].name"),
        ({"input": [{**CALL, "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "reasoning", "content": [{"type": "text"}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [NOW, {"name": "f"}]}, "tools[1].type"),
        ({"tools": [{**NOW, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "function", "function": {"name": "now"}}]}, "tools[0].function"),
        ({"tools": [{**NOW, "parameters": []}]}, "tools[0]"),
        ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"stream_options": {}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ids=str,
)
def test_what_is_not_offered_is_named(fields, parameter):
    with pytest.raises(ParameterError) as raised:
        found = body(**fields)
        (
            sampling_of(found, 0, DEFAULTS),
            options_of(found),
            messages_of_input(found, [], Unknown(strict=True)),
        )
        tools_of_body(found)
    assert raised.value.parameter == parameter


def test_input_becomes_messages():
    assert messages_of_input(body(), [], Unknown()) == [{"role": "user", "content": "hello"}]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]
    given = [
        {"role": "developer", "content": "x"},
        {"type": "message", "role": "user", "content": parts},
        {"id": "msg-1", "status": "completed", "role": "assistant", "content": answer},
    ]
    assert messages_of_input(body(input=given, instructions="i"), [], Unknown()) == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "x"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]


def test_parameters_and_options():
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    found = body(
        max_output_tokens=9, seed=5, top_p=0.5, text={"format": form},
        include=["message.output_text.logprobs"], top_logprobs=4,
    )  # fmt: skip
    params = sampling_of(found, 0, DEFAULTS)
    assert (params.max_new_tokens, params.seed, params.top_p) == (9, 5, 0.5)
    assert options_of(found) == {"log_probabilities": 4}
    assert content_of(found) == Content({"type": "object"})
    assert content_of(body(text={"format": {"type": "text"}})) is None
    assert content_of(body(text={"format": {"type": "json_object"}})) == Content({"type": "object"})


def test_the_items_of_a_turn_become_one_message():
    """As a client sends them again: the items of an answer, the results of its calls."""
    told = {"type": "message", "id": "msg-1", "role": "assistant", "content": "I look."}
    given = [
        {"role": "user", "content": "When?"},
        {"type": "reasoning", "id": "rs-1", "summary": [], "status": "completed",
         "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None},
        told, {**CALL, "id": "fc-1", "status": "completed"}, {**CALL, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
        {"type": "function_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "night"}]},
        {**CALL, "arguments": ""},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        told, told,
    ]  # fmt: skip

    def call(name: str, **arguments) -> dict:
        function = {"name": "now", "arguments": arguments}
        return {"id": name, "type": "function", "function": function}

    assert messages_of_input(body(input=given), [], Unknown(strict=True)) == [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.",
         "tool_calls": [call("1", a=1), call("2", a=1)]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "night"},
        {"role": "assistant", "tool_calls": [call("1")], "content": ""},
        {"role": "assistant", "reasoning_content": "So.", "content": "I look."},
        {"role": "assistant", "content": "I look."},
    ]  # fmt: skip


def test_tools_become_those_of_chats():
    strict = {**NOW, "parameters": {"type": "object"}, "strict": True, "output_schema": None}
    named = {"type": "function", "name": "now"}
    found = tools_of_body(body(tools=[strict], tool_choice=named, parallel_tool_calls=False))
    shown = {"name": "now", "parameters": {"type": "object"}, "strict": True}
    assert found.definitions == [{"type": "function", "function": shown}]
    assert (found.forced, found.allowed, found.parallel) == (True, ("now",), False)
    assert not tools_of_body(body(tools=[NOW])).strict
    assert tools_of_body(body(tools=[NOW], tool_choice="none")) is None
    assert tools_of_body(body(tools=[], tool_choice="auto", parallel_tool_calls=True)) is None


def test_unknown_members_of_items_and_parts_are_named():
    part = {"type": "input_text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    items = [
        {"role": "user", "content": [part], "phase": "commentary", "agent": None},
        {**CALL, "namespace": "n"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "x", "created_by": "me"},
    ]
    bare = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        CALL,
        {"type": "reasoning", "summary": []},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    unknown, nothing = Unknown(), Unknown()
    found = messages_of_input(body(input=items), [], unknown)
    assert found == messages_of_input(body(input=bare), [], nothing)
    places = ["input[0].phase", "input[0].content[0].cache_control", "input[1].namespace",
              "input[2].encrypted_content", "input[3].created_by"]  # fmt: skip
    said = [f"{place} is ignored: it is not a known parameter" for place in places]
    assert sorted(unknown.warnings) == sorted(said) and nothing.warnings == []


def test_the_warnings_of_unknown_members_are_limited():
    unknown = Unknown()
    items = [{"role": "user", "content": "x", **{f"{'x' * 500}{i}": 1 for i in range(1000)}}]
    messages_of_input(body(input=items * 3), [], unknown)
    assert len(unknown.warnings) == MOST_UNKNOWN and max(map(len, unknown.warnings)) < 200
