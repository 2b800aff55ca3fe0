"""Chat messages to prompt text, as the model's own template says.

The operator's templates (a folder on this machine) are rendered in this process with an output
cap; those that came over the network run in a killable process (:mod:`.guarded`). Either way a
failure is an :class:`InputError` whose message may be shown to the user.
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
        templates: Jinja sources by name; ``default`` is the usual one, ``tool_use`` the one for
            requests with tools.
        variables: what every render sees, such as ``bos_token``.
        guard: renders templates that are not the operator's own; None renders in this process.
        max_output_chars: cap of the rendered text.

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
        """The templates there are; empty for a model that is no chat model."""
        return sorted(self._templates)

    def close(self) -> None:
        """End the guard's process, if there is one."""
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
        """The prompt text of ``messages``, each a mapping with ``role`` and ``content``.

        Raises:
            InputError: no template, messages of the wrong shape, a message the template
                refuses, a template that is wrong or runs into a limit.

        """
        check_messages(messages)
        source = self._source(bool(tools))
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

    def _source(self, with_tools: bool) -> str:
        wanted = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if wanted in self._templates:
            return self._templates[wanted]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        if not self._templates:
            raise InputError("the model has no chat template; use generate with the prompt as text")
        raise InputError(f"the model has no default chat template, only {', '.join(self.names)}")


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what no template could render.

    Raises:
        InputError: not a list of 1 to ``MAX_MESSAGES`` mappings with a string ``role``.

    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InputError("messages must be a list of {role, content} objects")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InputError(f"a chat has 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{index}] must be an object with a role")
