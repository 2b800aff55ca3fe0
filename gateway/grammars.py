"""Grammars, in Lark syntax, of answers with reasoning, calls and content. Pure.

The text of a call is fixed up to its arguments, which follow the function's JSON schema. Each
schema is a separate part of the grammar, so its ``$ref`` keep their meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..client.options import RequestOptions
from ..proto.json_schema import JSON_WHITESPACE
from .errors import ParameterError
from .tool_calls import MAX_CALLS
from .tools import Tools

Schema = Mapping[str, Any] | bool


class Thought(Enum):
    """Whether an answer has reasoning: never, perhaps first, or from its first token on."""

    NONE = "none"
    POSSIBLE = "possible"
    OPEN = "open"


@dataclass(slots=True, frozen=True)
class Content:
    """What the content of an answer is: JSON by a schema, or a rule, or a whole grammar.

    ``rule``: the right side of a rule, in Lark syntax. A ``grammar`` is that of the whole answer.
    """

    schema: Schema | None = None
    rule: str = ""
    grammar: str = ""


def constraint_of(
    content: Content | None,
    thought: Thought = Thought.NONE,
    tools: Tools | None = None,
    form: str = "",
) -> RequestOptions:
    """Return the options that constrain an answer to its content, after reasoning, or to calls.

    ``tools``: their calls, in the format ``form``, are a part of the language. Raises
    ParameterError for a content that cannot be combined with tools.
    """
    if tools is not None and (tools.constrained or content is not None):
        if content is not None and content.grammar:
            text = "structured_outputs.grammar cannot be combined with tools"
            raise ParameterError(text, "structured_outputs")
        return {"grammar": _after(thought, _main(thought, tools, form, content))}
    if content is None:
        return {}
    if content.grammar:
        return {"grammar": content.grammar}
    if thought is not Thought.NONE:
        return {"grammar": _after(thought, [f"main: {_rule(content)}"])}
    if content.schema is not None:
        return {"json_schema": _plain(content.schema)}
    return {"grammar": f"start: {content.rule}"}


def regex_rule(pattern: str) -> str:
    """Return the rule of the texts that match a regular expression."""
    # An escape is one unit: in an escaped backslash and a slash, the slash still needs its own.
    return "/" + re.sub(r"\\.|[/\n]", _on_one_line, pattern, flags=re.DOTALL) + "/"


def _on_one_line(found: re.Match[str]) -> str:
    last = found[0][-1]
    return {"/": r"\/", "\n": r"\n"}.get(last, found[0])


def choice_rule(choices: Iterable[str]) -> str:
    """Return the rule of some texts."""
    return " | ".join(map(_text, choices))


def _after(thought: Thought, rules: list[str]) -> str:
    """Return the grammar of ``main`` after the reasoning."""
    if thought is Thought.NONE:
        return "\n".join(["start: main", *rules])
    opened = thought is Thought.OPEN
    return "\n".join(
        [
            f"start: thought{'' if opened else '?'} BLANK? main",
            rf"thought[lazy]: /{'' if opened else '<think>'}(?s:.*)<\/think>/",
            r"BLANK: /[ \n]{1,4}/",
            *rules,
        ]
    )


def _rule(content: Content) -> str:
    return content.rule if content.schema is None else _json(content.schema, "response_format")


def _main(thought: Thought, tools: Tools, form: str, content: Content | None) -> list[str]:
    """Return the rule ``main``, for an answer after its reasoning, and those it needs."""
    separator = _text("\n" if form == "hermes" else "; ")
    calls = f"call ({separator} call){{0,{MAX_CALLS - 1}}}" if tools.parallel else "call"
    if tools.forced:
        return [f"main: {calls}", *_calls(tools, form)]
    if content is not None:
        return [f"main: content | {calls}", f"content: {_rule(content)}", *_calls(tools, form)]
    if form != "hermes":
        return [f"main: TEXT? | {calls}", r"TEXT: /[^{<\s](?s:.*)/", *_calls(tools, form)]
    times = f"{{1,{MAX_CALLS}}} TEXT?" if tools.parallel else ""
    not_thought = r" & ~/<think>(?s:.*)/" if thought is Thought.POSSIBLE else ""
    return [
        f"main: TEXT? | (before call){times}",
        "before[lazy]: BEFORE",
        f"BEFORE: /(?s:.*)<tool_call>/{not_thought}",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/{not_thought}",
        *_calls(tools, form, tag=""),
    ]


def _calls(tools: Tools, form: str, tag: str = "<tool_call>") -> list[str]:
    """Return the rule ``call`` and those of the functions; ``tag``: what begins a call."""
    rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(tools.allowed)))]
    for at, name in enumerate(tools.allowed):
        exact = tools.forced or name in tools.strict
        schema = tools.schemas[name] if exact else {"type": "object"}
        if form == "hermes":
            begin, end = f'{tag}\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
        else:
            begin, end = f'{{"name": "{name}", "parameters": ', "}"
        rules.append(f"call_{at}: {_text(begin)} {_json(schema, name)} {_text(end)}")
    return rules


def _plain(schema: Schema) -> Mapping[str, Any]:
    """Return a schema to which options can be added."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return schema


def _text(text: str) -> str:
    # The engine's grammar refuses a plain U+007F, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _json(schema: Schema, name: str) -> str:
    """Return the part of a grammar that is JSON by a schema. Raises ParameterError."""
    schema = _plain(schema)
    if "x-guidance" in schema:
        raise ParameterError(
            f"the schema of {name} has x-guidance, which is only supported alone", "tools"
        )
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}})
