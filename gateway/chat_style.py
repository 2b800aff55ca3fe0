"""How a model's chat template writes reasoning and calls, read from the template's text. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from baton.proto.errors import ConfigError

from .errors import ParameterError
from .grammars import Thought
from .reader import MessageReader
from .reasoning import CLOSE, OPEN, ReasoningSplitter
from .tool_calls import PARSERS
from .tools import Tools

TOOL_CALL_PARSERS = ("auto", "off", *sorted(PARSERS))
REASONING_PARSERS = ("auto", "off", "think")
_NAME_AND_PARAMETERS = re.compile(r'\{\s*\\?"name\\?":[^}]*\\?"parameters\\?":')
_TOOLS = re.compile(r"\{[%{][^%}]*\btools\b")


@dataclass(slots=True, frozen=True)
class ChatStyle:
    """``form``: the name of the format of calls, or empty; ``why_not``: the reason.

    ``thinks``: answers may have reasoning between the tags ``<think>`` and ``</think>``.
    """

    form: str
    thinks: bool
    why_not: str = ""

    def check(self, tools: Tools | None) -> None:
        """Raise ParameterError for tools that the model cannot have."""
        if tools is not None and not self.form:
            raise ParameterError(f"tools are not supported: {self.why_not}", "tools")

    def thought(self, prompt: str) -> Thought:
        """Return whether an answer to this prompt has reasoning."""
        if not self.thinks:
            return Thought.NONE
        return Thought.OPEN if prompt.rstrip().endswith(OPEN) else Thought.POSSIBLE

    def reader(self, thought: Thought, tools: Tools | None) -> MessageReader:
        """Return a reader for one answer."""
        splitter = None
        if thought is not Thought.NONE:
            splitter = ReasoningSplitter(is_open=thought is Thought.OPEN)
        parser = None if tools is None else PARSERS[self.form](frozenset(tools.allowed))
        return MessageReader(splitter, parser)


@lru_cache(maxsize=16)  # the templates of a model, read again by every request otherwise
def style_of(template: str, tool_call_parser: str, reasoning_parser: str) -> ChatStyle:
    """Return the style of a template. ``auto`` reads a setting from the template."""
    thinks = reasoning_parser == "think" or (reasoning_parser == "auto" and CLOSE in template)
    if tool_call_parser == "off":
        return ChatStyle("", thinks, "the gateway runs with --tool-call-parser off")
    if not _TOOLS.search(template):
        return ChatStyle("", thinks, "the model's chat template has no tools")
    form = _form_of(template) if tool_call_parser == "auto" else tool_call_parser
    why_not = "" if form else "the template's format of calls is unknown; see --tool-call-parser"
    return ChatStyle(form, thinks, why_not)


def _form_of(template: str) -> str:
    """Return the format of the calls that a template asks for, or an empty text."""
    if "<tool_call>" in template:
        return "" if "<function=" in template else "hermes"
    asks_for_json = "<|python_tag|>" in template or _NAME_AND_PARAMETERS.search(template)
    return "llama3_json" if asks_for_json else ""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for an unknown parser."""
    if tool_call_parser not in TOOL_CALL_PARSERS:
        raise ConfigError(f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}")
    if reasoning_parser not in REASONING_PARSERS:
        raise ConfigError(f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}")
