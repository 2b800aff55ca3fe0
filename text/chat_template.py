"""Renders chat messages into prompt text with the model's chat template.

Templates from a folder on this machine belong to the operator. They are rendered in this process
with an output limit. Templates received over the network run in a killable process
(:mod:`.guarded`). In both cases a failure is an :class:`InputError` whose message may be shown to
the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..proto.errors import InputError
from .guarded import GuardedRenderer
from .sandbox import MAX_OUTPUT_CHARS, RenderError, render

Message = Mapping[str, Any]

MAX_MESSAGES = 4096


class ChatTemplate:
    """The named templates of one model.

    Args:
        templates: Jinja sources by name. ``default`` is the usual template, ``tool_use`` is for
            requests with tools.
        variables: variables for every rendering, such as ``bos_token``.
        guard: renders templates that are not the operator's; None renders in this process.
        max_output_chars: limit of the rendered text.

    """

    def __init__(
        self,
        templates: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        *,
        guard: GuardedRenderer | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        self._templates = dict(templates)
        self._variables = dict(variables or {})
        self._guard = guard
        self._max_output_chars = max_output_chars

    @property
    def names(self) -> list[str]:
        """Names of the templates; empty if the model is not a chat model."""
        return sorted(self._templates)

    @property
    def is_guarded(self) -> bool:
        """Whether templates are rendered in another process."""
        return self._guard is not None

    def close(self) -> None:
        """End the guard's process, if any."""
        if self._guard is not None:
            self._guard.close()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of ``messages``, each a mapping with ``role`` and ``content``.

        Raises:
            InputError: the model has no template, messages have the wrong shape, the template
                rejects a message, or the template fails or exceeds a limit.

        """
        check_messages(messages)
        source = self.source(with_tools=bool(tools))
        everything = {
            **self._variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        renderer = render if self._guard is None else self._guard.render
        try:
            return renderer(source, everything, self._max_output_chars)
        except RenderError as error:
            raise InputError(f"chat template: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"chat messages must be plain JSON values: {error}") from None

    def source(self, *, with_tools: bool = False) -> str:
        """Return the template that renders a request. Raises InputError without a template."""
        wanted = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if wanted in self._templates:
            return self._templates[wanted]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        if not self._templates:
            raise InputError("the model has no chat template; use generate with the prompt as text")
        raise InputError(f"the model has no default chat template, only {', '.join(self.names)}")


def check_messages(messages: Sequence[Message]) -> None:
    """Check the shape of chat messages before rendering.

    Raises:
        InputError: not a list of 1 to ``MAX_MESSAGES`` mappings with a string ``role``.

    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InputError("messages must be a list of {role, content} objects")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InputError(f"a chat must have 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}] must be an object with a role")
