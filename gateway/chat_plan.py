"""Turns a chat request into a prompt, a constraint, and a reader of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.client.model import ServedModel, encode
from baton.client.options import RequestOptions, check_variables

from .chat_style import ChatStyle, style_of
from .grammars import Content, Thought, constraint_of
from .reader import MessageReader
from .tools import Tools


@dataclass(slots=True, frozen=True)
class ChatPlan:
    """``tokens``: the prompt, int32 ``[n]``. ``constraint``: options of the native requests.

    ``new_reader``: makes the reader of one answer; None if an answer is nothing but its text.
    """

    tokens: npt.NDArray[np.int32]
    constraint: RequestOptions
    new_reader: Callable[[], MessageReader] | None


@dataclass(slots=True, frozen=True)
class ChatPlanner:
    """Plans the chats of one model.

    ``tool_call_parser``, ``reasoning_parser``: names of parsers, ``auto`` or ``off``.
    """

    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def plan(
        self,
        model: ServedModel,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        content: Content | None = None,
        whitespace: Mapping[str, Any] = MappingProxyType({}),
    ) -> ChatPlan:
        """Render the prompt and choose constraint and reader; takes milliseconds.

        ``variables``: of the template, without tools. ``content``: of the answers. ``whitespace``:
        options of their schemas. Raises InputError for what the template refuses, ParameterError
        for tools that it has not.
        """
        given = dict(check_variables(variables))
        style = self._style(model, with_tools=tools is not None)
        style.check(tools)
        if tools is not None:
            given["tools"] = tools.definitions
        prompt = model.tokenizer.render_chat(messages, **given)
        thought = style.thought(prompt)
        plain = thought is Thought.NONE and tools is None
        return ChatPlan(
            tokens=encode(prompt, model, add_special_tokens=False),
            constraint=constraint_of(content, thought, tools, style.form, whitespace),
            new_reader=None if plain else lambda: style.reader(thought, tools),
        )

    def _style(self, model: ServedModel, *, with_tools: bool) -> ChatStyle:
        template = model.tokenizer.chat_template.source(with_tools=with_tools)
        return style_of(template, self.tool_call_parser, self.reasoning_parser)
