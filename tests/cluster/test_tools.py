"""Tool calls over HTTP, with the embedded model: the grammar alone makes its calls valid."""

import json

import jsonschema
import pytest

from baton.gateway.chat_plan import ChatPlanner
from baton.gateway.grammars import Content
from baton.gateway.tools import tools_of
from baton.proto.errors import InputError
from baton.proto.sampling import SamplingParams

from .http import Gateway

pytestmark = pytest.mark.cluster

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "What is 3 plus 4?"}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["three", "four"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"enum": ["seven", "eight"]}


@pytest.fixture(scope="module")
def cluster(lasting_cluster):
    return lasting_cluster(prefill=1, decode=2)


@pytest.fixture(scope="module")
def native(cluster):
    with cluster.client() as client:
        yield client


@pytest.fixture(scope="module")
def gateways(cluster, tmp_path_factory):
    """A gateway with the template's style of calls, and a gateway with another style."""
    flags = ["--tool-call-parser=llama3_json", "--reasoning-parser=think"]
    started = [
        Gateway(cluster, tmp_path_factory.mktemp("g")),
        Gateway(cluster, tmp_path_factory.mktemp("g"), *flags),
    ]
    yield [one.wait_ready() for one in started]
    assert [one.end() for one in started] == [0, 0]


@pytest.fixture(scope="module")
def gateway(gateways):
    return gateways[0]


def joined(events) -> dict:
    """The message that the deltas of a stream make, with the arguments of each call."""
    message: dict = {"content": "", "reasoning_content": "", "calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    assert call["function"]["arguments"] == ""
                    message["calls"].append([call["function"]["name"], ""])
                else:
                    message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def calls_of(message) -> list[list[str]]:
    calls = message.get("tool_calls", ())
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    return [[call["function"]["name"], call["function"]["arguments"]] for call in calls]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_valid_and_the_native_ones(gateways, native, choice):
    chosen = tools_of(TOOLS, choice, False)
    for gateway, planner in zip(
        gateways, [ChatPlanner(), ChatPlanner("llama3_json", "think")], strict=True
    ):
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "temperature": 1,
                "seed": 5, "parallel_tool_calls": False, "max_tokens": 400}  # fmt: skip
        whole = gateway.post(CHAT, **body)
        (choice_found,) = whole["choices"]
        message = choice_found["message"]
        plan = planner.plan(native.describe() and native._model(), MESSAGES, tools=chosen)
        params = SamplingParams(temperature=1, seed=5, max_new_tokens=400)
        outputs = list(native.generate(plan.tokens, params, show_text=True, **plan.constraint))
        text = "".join(output.text or "" for output in outputs)
        assert whole["usage"]["completion_tokens"] == sum(len(o.tokens) for o in outputs)
        streamed = joined(gateway.stream(CHAT, **body))
        assert streamed["calls"] == calls_of(message)
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        assert streamed["finish_reason"] == choice_found["finish_reason"]
        for name, arguments in calls_of(message):
            assert arguments in text
            if choice_found["finish_reason"] != "length":
                jsonschema.validate(
                    json.loads(arguments), ADD if name == "add" else {"type": "object"}
                )
        if gateway is gateways[0]:
            assert (choice_found["finish_reason"], message["content"]) == ("tool_calls", None)
            assert len(calls_of(message)) == 1


def test_reasoning_is_split_and_the_rest_follows_the_schema(gateways, native):
    """A model that thinks forever is cut; what follows its thoughts is an instance."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    plan = ChatPlanner("auto", "think").plan(native._model(), MESSAGES, content=Content(SCHEMA))
    for seed in range(4):
        body = {"messages": MESSAGES, "seed": seed, "max_tokens": 60, "temperature": 3}
        whole = gateways[1].post(CHAT, **body, response_format=form)["choices"][0]
        params = SamplingParams(temperature=3, seed=seed, max_new_tokens=60)
        outputs = list(native.generate(plan.tokens, params, show_text=True, **plan.constraint))
        text = "".join(output.text or "" for output in outputs)
        message = whole["message"]
        assert message["content"] in text
        assert message.get("reasoning_content", "") in text
        if whole["finish_reason"] == "stop":
            assert json.loads(message["content"]) in SCHEMA["enum"]
        streamed = joined(gateways[1].stream(CHAT, **body, response_format=form))
        assert streamed["content"] == message["content"]
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")


def test_an_answer_without_calls_is_text(gateway):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    plain = gateway.post(CHAT, **body)["choices"][0]
    none = gateway.post(CHAT, **body, tools=TOOLS, tool_choice="none")["choices"][0]
    assert none["message"] == plain["message"]
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for tools in (TOOLS, strict):
        events = gateway.stream(CHAT, **body, tools=tools)
        whole = gateway.post(CHAT, **body, tools=tools)["choices"][0]
        assert whole["message"]["content"] == joined(events)["content"]


def events_of_response(gateway, body) -> list[dict]:
    status, content, kind = gateway.raw("POST", RESPONSES, {**body, "stream": True})
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    lines = [line for line in content.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_responses_have_the_calls_and_the_reasoning_of_chats(gateways, choice):
    fixed = {"seed": 5, "temperature": 1, "parallel_tool_calls": False, "tool_choice": choice}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for gateway in gateways:
        body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400}
        wanted = gateway.post(CHAT, **body, **fixed)
        message = wanted["choices"][0]["message"]
        body = {"input": MESSAGES, "tools": flat, "max_output_tokens": 400, **fixed}
        found = gateway.post(RESPONSES, **body)
        assert found["usage"]["output_tokens"] == wanted["usage"]["completion_tokens"]
        assert found["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
        texts = {"message": "", "reasoning": ""}
        for item in found["output"]:
            if item["type"] != "function_call":
                texts[item["type"]] += item["content"][0]["text"]
        assert texts["message"] == (message["content"] or "")
        assert texts["reasoning"] == message.get("reasoning_content", "")
        calls = [[one["name"], one["arguments"]] for one in found["output"] if "call_id" in one]
        assert calls == calls_of(message)
        *events, last = events_of_response(gateway, body)
        assert last["type"] == f"response.{found['status']}"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = [one for one in events if one["type"].endswith("_arguments.delta")]
        streamed = [one for one in last["response"]["output"] if "call_id" in one]
        assert [[one["name"], one["arguments"]] for one in streamed] == calls
        assert "".join(one["delta"] for one in deltas) == "".join(pair[1] for pair in calls)
        assert last["response"]["usage"] == found["usage"]


def test_items_of_responses_go_to_the_template(gateway):
    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "noon"}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    function = {"name": "now", "arguments": "{}"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    body = {"input": [*MESSAGES, call, result], "tools": flat, "max_output_tokens": 1}
    found = gateway.post(RESPONSES, **body)
    wanted = gateway.post(CHAT, messages=messages, tools=TOOLS, max_tokens=1)
    assert found["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]


def test_the_results_of_calls_go_to_the_template(gateway):
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    ids = gateway.post("/tokenize", messages=messages, tools=TOOLS)["tokens"]
    prompt = gateway.post("/detokenize", tokens=ids)["prompt"]
    assert '{"name": "now", "arguments": {}}' in prompt
    assert "noon" in prompt
    assert '"description": "Add."' in prompt
    found = gateway.post(CHAT, messages=messages, tools=TOOLS, max_tokens=1)
    assert found["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"choice": ["red", "green"]}, ("red", "green")),
        ({"regex": "(a|b){2}"}, ("aa", "ab", "ba", "bb")),
        ({"grammar": 'start: "x" ("y" | "z")'}, ("xy", "xz")),
        ({"json": SCHEMA}, ('"seven"', '"eight"')),
    ],
    ids=str,
)
def test_structured_outputs(gateway, fields, content):
    for path, prompt in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "3"})):
        body = {**prompt, "structured_outputs": fields, "max_tokens": 20, "temperature": 1}
        (choice,) = gateway.post(path, **body)["choices"]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) in content


def test_a_grammar_that_is_wrong_is_an_input_error(gateway, native):
    body = {"messages": MESSAGES, "structured_outputs": {"grammar": "start: ("}}
    status, content, _ = gateway.ask("POST", CHAT, body)
    assert (status, content["error"]["code"]) == (400, "input")
    with pytest.raises(InputError, match=r"^grammar: "):
        list(native.generate("a", grammar="start: ("))
    unique = {"name": "f", "parameters": {"type": "array", "uniqueItems": True}}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": unique}]}
    status, content, _ = gateway.ask("POST", CHAT, {**body, "tool_choice": "required"})
    assert status == 400
    assert "uniqueItems" in content["error"]["message"]
