"""openai-python against a gateway: ``python openai_python.py URL MODEL``."""

import asyncio
import json
import sys

import openai
from openai import AsyncOpenAI, OpenAI

URL, MODEL = sys.argv[1:]
MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
]
SCHEMA = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}},
    "required": ["ready"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def main() -> None:
    client = OpenAI(base_url=URL, api_key="k", max_retries=0)
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "baton"
    chat(client)
    completions(client)
    responses(client)
    errors(client)
    asyncio.run(at_once())
    print(f"openai-python {openai.__version__}: ok")


def chat(client: OpenAI) -> None:
    create = client.chat.completions.create
    fixed = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "seed": 7, "user": "somebody"}
    whole = create(**fixed, max_completion_tokens=24, n=2, stop=["zzz"])
    text = whole.choices[0].message.content
    assert text
    assert [choice.message.content for choice in whole.choices] == [text] * 2
    assert whole.usage.completion_tokens > 0

    events = list(
        create(
            **fixed, max_completion_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    parts = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(parts) == text
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens // 2

    with client.chat.completions.stream(**fixed, max_completion_tokens=24) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == text
    assert {"chunk", "content.delta", "content.done"} <= kinds

    shown = create(**fixed, max_tokens=3, logprobs=True, top_logprobs=2)
    content = shown.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(entry.top_logprobs) == 2 for entry in content)

    formed = create(**{**fixed, "temperature": 1}, response_format=FORM, max_tokens=200)
    assert list(json.loads(formed.choices[0].message.content)) == ["ready"]
    long = {"min_tokens": 30, "ignore_eos": True}
    exact = create(**fixed, max_tokens=30, extra_body=long, extra_headers={"X-Request-Id": "mine"})
    assert exact.usage.completion_tokens == 30
    assert "mine" in exact.id
    raw = client.chat.completions.with_raw_response.create(**fixed, max_tokens=1)
    assert raw.headers["x-request-id"]


def completions(client: OpenAI) -> None:
    create = client.completions.create
    fixed = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0}
    whole = create(**fixed, max_tokens=8, echo=True, logprobs=1)
    assert whole.choices[0].text.startswith("Once upon a time")
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
    parts = create(**fixed, max_tokens=8, stream=True)
    text = "".join(part.choices[0].text for part in parts)
    assert "Once upon a time" + text == whole.choices[0].text


def responses(client: OpenAI) -> None:
    fixed = {
        "model": MODEL, "instructions": "You are brief.", "temperature": 0,
        "max_output_tokens": 24, "store": False,
    }  # fmt: skip
    whole = client.responses.create(**fixed, input="Who are you?")
    same = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24
    )
    assert whole.output_text == same.choices[0].message.content
    assert whole.usage.output_tokens == same.usage.completion_tokens
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "Who are you?"}]},
        whole.output[0],  # the answer as it came, as a conversation is continued
        {"role": "user", "content": "And now?"},
    ]
    again = client.responses.create(
        **fixed, input=said, include=["message.output_text.logprobs"], top_logprobs=2
    )
    shown = again.output[0].content[0].logprobs
    assert len(shown) == again.usage.output_tokens
    events = list(client.responses.create(**fixed, input="Who are you?", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(parts) == whole.output_text
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.usage == whole.usage
    long = {**fixed, "max_output_tokens": 500}
    with client.responses.stream(**long, input="Who are you?") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text.startswith(whole.output_text)
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    formed = client.responses.create(
        model=MODEL, input="Ready?", text={"format": form}, max_output_tokens=200
    )
    assert list(json.loads(formed.output_text)) == ["ready"]
    calls_of_responses(client)
    for ignored in ({"store": True}, {"truncation": "auto"}):
        answer = client.responses.create(**{**fixed, **ignored}, input="Who are you?")
        (warning,) = answer.model_extra["warnings"]
        assert warning.startswith(next(iter(ignored))), warning
    for refused in ({"previous_response_id": "resp-1"},):
        try:
            client.responses.create(**{**fixed, **refused}, input="Who are you?")
        except openai.BadRequestError as error:
            assert error.param == next(iter(refused)), error.param
        else:
            raise AssertionError(f"{refused} was accepted")


def calls_of_responses(client: OpenAI) -> None:
    """A call of a function, whole and streamed, and the next turn with its result."""
    tool = {"type": "function", "name": "check", "parameters": SCHEMA, "strict": True}
    fixed = {
        "model": MODEL, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False,
        "temperature": 0, "max_output_tokens": 400, "store": False,
    }  # fmt: skip
    asked = {"role": "user", "content": "Are you ready?"}
    whole = client.responses.create(**fixed, input=[asked])
    (call,) = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "check", "completed")
    assert list(json.loads(call.arguments)) == ["ready"]
    with client.responses.stream(**fixed, input=[asked]) as stream:
        parts = [
            event for event in stream if event.type == "response.function_call_arguments.delta"
        ]
        (streamed,) = stream.get_final_response().output
    assert "".join(part.delta for part in parts) == streamed.arguments == call.arguments
    assert parts[-1].snapshot == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "yes"}
    last = client.responses.create(
        **{**fixed, "tool_choice": "none", "max_output_tokens": 8}, input=[asked, call, result]
    )
    assert [item.type for item in last.output] == ["message"]


def errors(client: OpenAI) -> None:
    create = client.chat.completions.create
    cases = (
        (openai.NotFoundError, {"model": "other"}, "model"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
    )
    (warning,) = create(model=MODEL, messages=MESSAGES, extra_body={"foo": 1}).model_extra[
        "warnings"
    ]
    assert warning == "foo is ignored: it is not a known parameter"
    for kind, fields, parameter in cases:
        try:
            create(**{"model": MODEL, "messages": MESSAGES, **fields})
        except kind as error:
            assert error.param == parameter, error.param
        else:
            raise AssertionError(f"{fields} was accepted")
    try:
        client.embeddings.create(model=MODEL, input="text")
    except openai.BadRequestError as error:
        assert error.code == "task_mismatch", error.code
    else:
        raise AssertionError("the demo model gave embeddings")


async def at_once() -> None:
    async with AsyncOpenAI(base_url=URL, api_key="k", max_retries=0) as client:

        async def text(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=seed, max_tokens=16, stream=True
            )
            return "".join([event.choices[0].delta.content or "" async for event in stream])

        first = await asyncio.gather(*(text(seed % 4) for seed in range(16)))
        assert first[:4] == first[4:8] == first[12:]


main()
