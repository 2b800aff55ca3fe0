"""Tools of a request: their check, the template's format, and grammars of the answers."""

import json
from pathlib import Path

import pytest

from baton.engine.grammar.compiler import compile_schema, load_tokenizer
from baton.gateway.chat_style import ChatStyle, style_of
from baton.gateway.errors import ParameterError
from baton.gateway.grammars import Content, Thought, constraint_of
from baton.gateway.messages import messages_of
from baton.gateway.reader import read_message
from baton.gateway.tools import tools_of
from baton.proto.json_schema import grammar_as_schema

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
EOS = 2
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


# --------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("tools", "choice", "parameter"),
    [
        ([{}], None, "tools[0]"),
        ([5], None, "tools[0]"),
        ([NOW, {"type": "web", "function": {"name": "x"}}], None, "tools[1].type"),
        ([{"function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"function": {"name": "a", "parameters": []}}], None, "tools[0]"),
        ([NOW, NOW], None, "tools"),
        ([{"function": {"name": f"f{at}"}} for at in range(129)], None, "tools"),
        ([NOW], "maybe", "tool_choice"),
        ([NOW], {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ([NOW], {"type": "allowed_tools"}, "tool_choice"),
        (None, "required", "tool_choice"),
        (None, {"type": "function", "function": {"name": "now"}}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_tools_are_refused(tools, choice, parameter):
    with pytest.raises(ParameterError) as raised:
        tools_of(tools, choice, None)
    assert raised.value.parameter == parameter


def test_the_choice_of_a_tool():
    assert tools_of(None, "auto", True) is None
    assert tools_of([NOW], "none", None) is None
    both = tools_of([WEATHER, NOW], None, None)
    assert (both.forced, both.allowed, both.constrained) == (False, ("weather", "now"), False)
    assert tools_of([WEATHER, NOW], "auto", False).constrained
    assert tools_of([STRICT], "auto", True).constrained
    named = tools_of([WEATHER, NOW], {"type": "function", "function": {"name": "now"}}, None)
    assert (named.forced, named.allowed) == (True, ("now",))
    assert len(named.definitions) == 2


EMPTY = [
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "required": [], "title": "now", "description": "none"},
]


@pytest.mark.parametrize("parameters", EMPTY, ids=str)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_function_without_parameters_gets_no_arguments(tokenizer, parameters, choice):
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    tools = tools_of([tool], choice, False)
    grammar = constraint_of(None, tools=tools, form="llama3_json")["grammar"]
    assert accepts(tokenizer, grammar, '{"name": "now", "parameters": {}}')
    assert not accepts(tokenizer, grammar, '{"name": "now", "parameters": {"a":1}}')


def test_a_function_that_takes_any_arguments_gets_them(tokenizer):
    tool = {"type": "function", "function": {
        "name": "now", "parameters": {"type": "object", "additionalProperties": True}}}  # fmt: skip
    grammar = constraint_of(None, tools=tools_of([tool], "required", False), form="llama3_json")
    assert accepts(tokenizer, grammar["grammar"], '{"name": "now", "parameters": {"a":1}}')


def test_the_template_gets_no_null_members():
    tool = {"type": "function", "function": {"name": "f", "description": None, "strict": None},
            "cache": None}  # fmt: skip
    (found,) = tools_of([tool], None, None).definitions
    assert found == {"type": "function", "function": {"name": "f"}}


def test_calls_of_messages_become_objects():
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]}
    found = messages_of([asked, result])
    assert found[0]["content"] == ""
    assert found[0]["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}
    assert found[1] == {**result, "content": "noon"}
    assert asked["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    told = {"role": "developer", "content": "Be brief."}
    assert messages_of([told]) == [{"role": "system", "content": "Be brief."}]
    bad = [[{"function": {"name": "now", "arguments": text}}] for text in ("[]", "{", None)]
    for wrong in (5, [5], [{}], [{"function": {}}], *bad):
        with pytest.raises(ParameterError, match=r"messages\[0\]\.tool_calls"):
            messages_of([{"role": "assistant", "tool_calls": wrong}])
    with pytest.raises(ParameterError, match="use tool_calls"):
        messages_of([{"role": "assistant", "function_call": {"name": "now"}}])


# --------------------------------------------------------------------------- templates

LOOP = "{%- for tool in tools %}{{ tool | tojson }}{% endfor %}"
LLAMA = 'Respond with {"name": function name, "parameters": dictionary of names and values}.'
PLAIN = "{{ messages[0]['content'] }} has no tools"


@pytest.mark.parametrize(
    ("template", "parsers", "style"),
    [
        (f"{LOOP}<tool_call>", ("auto", "auto"), ("hermes", False)),
        (f"{LOOP}<tool_call>{{{{ '</think>' }}}}", ("auto", "auto"), ("hermes", True)),
        (f"{LOOP}{LLAMA}", ("auto", "auto"), ("llama3_json", False)),
        (f"{LOOP}<|python_tag|>", ("auto", "auto"), ("llama3_json", False)),
        (f"{LOOP}<tool_call><function=", ("auto", "auto"), ("", False)),
        (f"{LOOP}[TOOL_CALLS]</think>", ("auto", "off"), ("", False)),
        (f"{LOOP}[TOOL_CALLS]", ("hermes", "think"), ("hermes", True)),
        (f"{LOOP}<tool_call>", ("off", "auto"), ("", False)),
        (PLAIN, ("hermes", "auto"), ("", False)),
    ],
)
def test_the_template_shows_the_style(template, parsers, style):
    found = style_of(template, *parsers)
    assert (found.form, found.thinks) == style
    found.check(None)
    if not found.form:
        with pytest.raises(ParameterError, match="tools are not supported: ") as raised:
            found.check(tools_of([NOW], None, None))
        assert raised.value.parameter == "tools"


def test_a_prompt_shows_whether_reasoning_has_begun():
    style = ChatStyle("hermes", True)
    assert style.thought("assistant\n<think>\n") is Thought.OPEN
    assert style.thought("assistant\n<think>\n\n</think>\n\n") is Thought.POSSIBLE
    assert ChatStyle("hermes", False).thought("<think>") is Thought.NONE


# --------------------------------------------------------------------------- grammars


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL, 1024, [EOS])


def accepts(tokenizer, grammar: str, text: str) -> bool:
    matcher = compile_schema(tokenizer, grammar_as_schema(grammar))
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def call(form: str, name: str, arguments: str) -> str:
    if form == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def grammar(form, tools, choice="auto", parallel=True, thought=Thought.NONE, content=None):
    chosen = tools_of(tools, choice, parallel)
    return constraint_of(content, thought, chosen, form).get("grammar")


FORMS = {"hermes": "\n", "llama3_json": "; "}
GOOD, WRONG = '{"city":"Oslo"}', '{"town":"Oslo"}'
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("form", FORMS)
def test_required_calls(tokenizer, form):
    rules = grammar(form, [WEATHER, NOW], "required")
    good, empty = call(form, "weather", GOOD), call(form, "now", "{}")
    several = FORMS[form].join([good, empty, good])
    for text in (good, empty, several):
        assert accepts(tokenizer, rules, text), text
        style = ChatStyle(form, False)
        reader = style.reader(Thought.NONE, tools_of([WEATHER, NOW], "required", None))
        message = read_message(reader, text, cut=False)
        assert message.content == ""
        assert [one.name for one in message.calls] in (
            ["weather"],
            ["now"],
            ["weather", "now", "weather"],
        )
        assert all(json.loads(one.arguments) in ({}, {"city": "Oslo"}) for one in message.calls)
    for text in ("hello", "", call(form, "weather", WRONG), call(form, "other", "{}"),
                 call(form, "now", GOOD), good + "x"):  # fmt: skip
        assert not accepts(tokenizer, rules, text), text
    one = grammar(form, [WEATHER, NOW], "required", parallel=False)
    assert accepts(tokenizer, one, good)
    assert not accepts(tokenizer, one, several)
    named = grammar(form, [WEATHER, NOW], NAMED)
    assert accepts(tokenizer, named, good)
    assert not accepts(tokenizer, named, empty)


@pytest.mark.parametrize("form", FORMS)
def test_free_answers_with_strict_calls(tokenizer, form):
    assert grammar(form, [WEATHER, NOW]) is None
    free = {"type": "function", "function": {"name": "free", "parameters": {"required": ["any"]}}}
    rules = grammar(form, [STRICT, NOW, free])
    good = call(form, "weather", GOOD)
    for text in ("hello", "", "a b < c", good, call(form, "free", '{"any":[1]}')):
        assert accepts(tokenizer, rules, text), text
    for text in (call(form, "weather", WRONG), call(form, "other", "{}"), good[:-2]):
        assert not accepts(tokenizer, rules, text), text
    several = FORMS[form].join([good, good])
    assert accepts(tokenizer, rules, several)
    assert accepts(tokenizer, rules, f"I look.\n{good}")
    one = grammar(form, [WEATHER], parallel=False)
    assert accepts(tokenizer, one, call(form, "weather", WRONG))
    assert not accepts(tokenizer, one, several)


@pytest.mark.parametrize("form", FORMS)
def test_reasoning_comes_before_the_grammar(tokenizer, form):
    good = call(form, "weather", GOOD)
    rules = grammar(form, [WEATHER], "required", thought=Thought.POSSIBLE)
    for text in (good, f"<think>a <tool_call> {{b</think>\n\n{good}", f"<think></think>{good}"):
        assert accepts(tokenizer, rules, text), text
    for text in ("<think>a</think>b", f"<think>{good}", f"a</think>{good}"):
        assert not accepts(tokenizer, rules, text), text
    opened = grammar(form, [WEATHER], "required", thought=Thought.OPEN)
    assert accepts(tokenizer, opened, f"a\n</think>{good}")
    assert not accepts(tokenizer, opened, good)
    free = grammar(form, [STRICT], thought=Thought.POSSIBLE)
    for text in ("hello", f"<think>a <tool_call> b</think>{good}", "<think>a</think>so"):
        assert accepts(tokenizer, free, text), text
    schema = Content({"type": "integer"})
    json_too = constraint_of(schema, Thought.POSSIBLE)["grammar"]
    for text in ("5", "<think>5?</think>\n5"):
        assert accepts(tokenizer, json_too, text), text
    assert not accepts(tokenizer, json_too, "<think>5</think>a")
    either = grammar(form, [WEATHER], content=schema)
    for text in ("5", good):
        assert accepts(tokenizer, either, text), text
    assert not accepts(tokenizer, either, "five")


def test_patterns_texts_and_grammars(tokenizer):
    pattern = constraint_of(Content(rule=r"/[a-z]\/[0-9]{2}/"))["grammar"]
    assert accepts(tokenizer, pattern, "a/55")
    assert not accepts(tokenizer, pattern, "a/5")
    with pytest.raises(ParameterError, match="cannot be combined with tools"):
        grammar("hermes", [WEATHER], content=Content(grammar="start: A"))
    option = {"type": "function", "function": {"name": "f", "parameters": {"x-guidance": {}}}}
    with pytest.raises(ParameterError, match="x-guidance"):
        grammar("hermes", [option], "required")
