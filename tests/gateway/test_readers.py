"""Reading messages: any split of a text gives the same message; malformed calls are content."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.json_scanner import JsonScanner, Malformed
from baton.gateway.reader import Call, MessageReader, ReadMessage, read_message
from baton.gateway.reasoning import ReasoningSplitter
from baton.gateway.tool_calls import (
    PARSERS,
    CallArguments,
    CallBegin,
    CallBroken,
    HermesParser,
    Text,
)

NAMES = ("add", "get_weather")
GET = '{"name": "get_weather", "arguments": {"city": "Köln\\n"}}'
ADD = '{"arguments": {"a": [1, {"b": -2.5e3}], "c": null}, "name": "add"}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'


COLOGNE = ("get_weather", '{"city": "Köln\\n"}')
SUM = ("add", '{"a": [1, {"b": -2.5e3}], "c": null}')


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def reader(form: str, *, is_open=False, thinks=True) -> MessageReader:
    splitter = ReasoningSplitter(is_open=is_open) if thinks else None
    return MessageReader(splitter, PARSERS[form](NAMES))


def read(form: str, *parts: str, cut=False, **options) -> ReadMessage:
    one, message = reader(form, **options), ReadMessage()
    for part in parts:
        message.add(one.push(part))
    message.add(one.finish(cut=cut))
    return message


# --------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", hermes(GET), "", [COLOGNE]),
        ("hermes", f"I look.\n{hermes(GET)}\n", "I look.", [COLOGNE]),
        (
            "hermes",
            f"{hermes(ADD)}\n{hermes(GET)}\nDone.",
            "Done.",
            [SUM, COLOGNE],
        ),
        ("hermes", '<tool_call>{"name":"add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", f"<tool_call>{LLAMA}", "", [("add", '{"a": 1}')]),
        ("llama3_json", LLAMA, "", [("add", '{"a": 1}')]),
        ("llama3_json", f" <|python_tag|>{LLAMA}", "", [("add", '{"a": 1}')]),
        ("llama3_json", f"{LLAMA}; {LLAMA}\n", "", [("add", '{"a": 1}')] * 2),
        ("llama3_json", f"{LLAMA} there", "there", [("add", '{"a": 1}')]),
        ("llama3_json", '{"type": "function", "name": "add"}', "", [("add", "{}")]),
    ],
)  # fmt: skip
def test_calls_are_found(form, text, content, calls):
    wanted = ReadMessage(content, calls=[Call(*call) for call in calls])
    assert read(form, text) == wanted
    assert read(form, *text) == wanted


MALFORMED = [
    "<tool_call>",
    "<tool_call> no",
    "<tool_call>\n{bad}\n</tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": [1}}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
    '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 70 + "1" + "}" * 71 + "</tool_call>",
    "a <tool_calls> b",
    " white \n space \n",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_calls_are_content(text):
    for parts in ([text], text):
        assert read("hermes", *parts) == ReadMessage(text)
    assert read("llama3_json", *text) == ReadMessage(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "parameters": {}}', '{"answer": 5}', "[]", "{", f"so: {LLAMA}",
        '{"name": "add", "parameters": {"a": }}', "<|python_tag|>print(5)", "<|pyt", "{}", "  ",
    ],
)  # fmt: skip
def test_what_is_no_call_of_llama_is_content(text):
    for parts in ([text], text):
        assert read("llama3_json", *parts) == ReadMessage(text)


def test_a_malformed_call_hides_none_behind_it():
    text = f"<tool_call>{{bad}}</tool_call>{hermes(GET)}"
    message = read("hermes", *text)
    assert message.content == "<tool_call>{bad}</tool_call>"
    assert [call.name for call in message.calls] == ["get_weather"]


def test_arguments_arrive_with_their_text():
    parser = HermesParser(NAMES)
    assert parser.push('<tool_call>{"name": "add", "arg') == []
    assert parser.push('uments": {"a') == [CallBegin("add"), *_arguments('{"a')]
    assert parser.push('": 1') == _arguments('": 1')
    assert parser.push("}}") == _arguments("}")
    assert parser.push("</tool_call>") == parser.finish(cut=False) == []


def _arguments(text):
    return [CallArguments(text)]


def test_a_cut_call_stays_and_an_abandoned_one_is_content():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert read("hermes", text, cut=True).calls == [Call("add", '{"a": 1')]
    assert read("hermes", text) == ReadMessage(text)
    parser = HermesParser(NAMES)
    parser.push(text)
    assert parser.finish(cut=False) == [CallBroken(text)]
    assert read("hermes", text[:20], cut=True) == ReadMessage(text[:20])
    assert read("hermes", hermes(GET)[:-5], cut=True).content == ""


def test_too_many_calls_are_text():
    message = read("hermes", hermes(GET) * 70)
    assert len(message.calls) == 64
    assert message.content == hermes(GET) * 6


# --------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\n<think>why</think>so", False, "why", "so"),
        ("why </think> so </think>", True, "why", "so </think>"),
        ("why </t", True, "why </t", ""),
        ("<think>why", False, "why", ""),
        ("<think></think>so", False, "", "so"),
        ("  so <think>x</think>", False, "", "  so <think>x</think>"),
        ("<thin", False, "", "<thin"),
        (" \n", False, "", " \n"),
        ("a<b> < /think></think>c", True, "a<b> < /think>", "c"),
    ],
)
def test_reasoning_is_split_off(text, is_open, reasoning, content):
    for parts in ([text], text):
        message = read("hermes", *parts, is_open=is_open)
        assert (message.reasoning, message.content) == (reasoning, content)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", GET, ADD, LLAMA, '{"name": "add"', "}",
     "{", ', "arguments": {', '"', "\\", " ", "\n", ";", "a", "5", ":", "<", "<|python_tag|>", "ö"]
)  # fmt: skip


@pytest.mark.parametrize("form", sorted(PARSERS))
def test_a_token_of_a_long_call_copies_nothing_that_came_before(form):
    """A call of a megabyte whose text was copied for each token took a minute."""
    parser = PARSERS[form](NAMES)
    opening = "<tool_call>" if form == "hermes" else ""
    parser.push(opening + '{"name": "add", "arguments": {"x": "' + "a" * 500_000)
    tracemalloc.start()
    try:
        for _ in range(10):
            assert parser.push("b") == [CallArguments("b")]
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    (broken,) = parser.finish(cut=False)
    assert isinstance(broken, CallBroken)
    assert broken.text.endswith("a" * 500_000 + "b" * 10)


@given(st.data(), st.lists(PIECES, max_size=12).map("".join), st.sampled_from(sorted(PARSERS)))
def test_any_split_gives_the_same_message(data, text, form):
    is_open, cut = data.draw(st.booleans()), data.draw(st.booleans())
    marks = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]
    whole = read(form, text, is_open=is_open, cut=cut)
    assert read(form, *parts, is_open=is_open, cut=cut) == whole
    assert read(form, *text, is_open=is_open, cut=cut) == whole
    if not cut:
        assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls)
    plain = read_message(reader(form, thinks=False), text, cut=False)
    if not plain.calls:
        assert plain.content == text


def test_without_tags_nothing_is_held_back():
    assert reader("hermes").push("plain text") == [Text("plain text")]
    assert reader("llama3_json").push("plain text") == [Text("plain text")]


# --------------------------------------------------------------------------- JSON


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def accepts(text: str) -> bool:
    scanner = JsonScanner()
    try:
        for char in text:
            scanner.feed(char)
    except Malformed:
        return False
    return scanner.done


@given(st.lists(JSON, max_size=3), st.booleans())
def test_the_scanner_accepts_json(value, ascii_only):
    assert accepts(json.dumps(value, ensure_ascii=ascii_only, indent=1))


@given(st.text(alphabet='{}[]",:0-.e1truefalsn\\u \n', max_size=12).map(lambda text: f"[{text}]"))
def test_the_scanner_accepts_nothing_else(text):
    try:
        json.loads(text)
    except ValueError:
        valid = False
    else:
        valid = True
    assert accepts(text) == valid
