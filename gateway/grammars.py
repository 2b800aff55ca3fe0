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
from types import MappingProxyType
from typing import Any

from baton.client.options import RequestOptions

from .errors import ParameterError
from .tool_calls import MAX_CALLS
from .tools import NO_PARAMETERS, Tools

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
    whitespace: Mapping[str, Any] = MappingProxyType({}),
) -> RequestOptions:
    """Return the options that constrain an answer to its content, after reasoning, or to calls.

    ``tools``: their calls, in the format ``form``, are a part of the language. ``whitespace``: the
    schemas' options for it; none: JSON has none. Raises ParameterError for a content that cannot be
    combined with tools.
    """
    write = _Writer(whitespace)
    if tools is not None and (tools.constrained or content is not None):
        if content is not None and content.grammar:
            text = "structured_outputs.grammar cannot be combined with tools"
            raise ParameterError(text, "structured_outputs")
        return {"grammar": _after(thought, write.main(thought, tools, form, content))}
    if content is None:
        return {}
    if content.grammar:
        return {"grammar": content.grammar}
    if thought is not Thought.NONE:
        return {"grammar": _after(thought, [f"main: {write.rule(content)}"])}
    if content.schema is not None:
        return {"json_schema": _with(content.schema, whitespace)}
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


class _Writer:
    """Writes the rules of grammars. ``whitespace``: options of all their schemas."""

    def __init__(self, whitespace: Mapping[str, Any]) -> None:
        self._whitespace = whitespace

    def rule(self, content: Content) -> str:
        """Return the right side of the rule of a content."""
        return (
            content.rule
            if content.schema is None
            else self._json(content.schema, "response_format")
        )

    def main(self, thought: Thought, tools: Tools, form: str, content: Content | None) -> list[str]:
        """Return the rule ``main``, for an answer after its reasoning, and those it needs."""
        separator = _text("\n" if form == "hermes" else "; ")
        calls = f"call ({separator} call){{0,{MAX_CALLS - 1}}}" if tools.parallel else "call"
        if tools.forced:
            return [f"main: {calls}", *self._calls(tools, form)]
        if content is not None:
            return [
                f"main: content | {calls}",
                f"content: {self.rule(content)}",
                *self._calls(tools, form),
            ]
        if form != "hermes":
            return [f"main: TEXT? | {calls}", r"TEXT: /[^{<\s](?s:.*)/", *self._calls(tools, form)]
        times = f"{{1,{MAX_CALLS}}} TEXT?" if tools.parallel else ""
        not_thought = r" & ~/<think>(?s:.*)/" if thought is Thought.POSSIBLE else ""
        return [
            f"main: TEXT? | (before call){times}",
            "before[lazy]: BEFORE",
            f"BEFORE: /(?s:.*)<tool_call>/{not_thought}",
            f"TEXT: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/{not_thought}",
            *self._calls(tools, form, tag=""),
        ]

    def _calls(self, tools: Tools, form: str, tag: str = "<tool_call>") -> list[str]:
        """Return the rule ``call`` and those of the functions; ``tag``: what begins a call."""
        rules = ["call: " + " | ".join(f"call_{at}" for at in range(len(tools.allowed)))]
        for at, name in enumerate(tools.allowed):
            exact = tools.forced or name in tools.strict or tools.schemas[name] is NO_PARAMETERS
            schema = tools.schemas[name] if exact else {"type": "object"}
            if form == "hermes":
                begin, end = f'{tag}\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
            else:
                begin, end = f'{{"name": "{name}", "parameters": ', "}"
            rules.append(f"call_{at}: {_text(begin)} {self._json(schema, name)} {_text(end)}")
        return rules

    def _json(self, schema: Schema, name: str) -> str:
        """Return the part of a grammar that is JSON by a schema. Raises ParameterError."""
        if not isinstance(schema, bool) and "x-guidance" in schema:
            raise ParameterError(
                f"the schema of {name} has x-guidance, which is only supported alone", "tools"
            )
        return "%json " + json.dumps(_with(schema, self._whitespace))


def _with(schema: Schema, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with these options of ``x-guidance``."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not options:
        return schema
    given = schema.get("x-guidance")
    own = given if isinstance(given, dict) else {}
    return {**schema, "x-guidance": {**own, **options}}


def _text(text: str) -> str:
    # The engine's grammar refuses a plain U+007F, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
