"""The tools of a chat request: their check, and which calls the answer may or must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .errors import ParameterError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""The schema of the arguments of a function without parameters: nothing but ``{}``."""
_EMPTY_KEYS = frozenset({"type", "properties", "required", "title", "description", "$schema"})
"""Keywords of a schema of objects that, without a property, allows any."""


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    function: _Named
    type: str = "function"


@dataclass(slots=True, frozen=True)
class Tools:
    """The tools of a request.

    ``definitions``: as the chat template gets them. ``schemas``: the JSON schema of the arguments
    by function. ``strict``: functions whose calls always match their schema. ``forced``: the answer
    consists of calls. ``allowed``: the functions that may be called. ``parallel``: an answer may
    have several calls.
    """

    definitions: list[dict[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str]
    forced: bool
    allowed: tuple[str, ...]
    parallel: bool

    @property
    def constrained(self) -> bool:
        """Whether a grammar must constrain the answer."""
        return self.forced or bool(self.strict) or not self.parallel


def tools_of(
    tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None
) -> Tools | None:
    """Return the tools that an answer may use, or None. Raises ParameterError.

    With the choice ``none`` the model does not learn of the tools.
    """
    functions: dict[str, _Function] = {}
    for at, tool in enumerate(tools or ()):
        function = _function(tool, f"tools[{at}]")
        if function.name in functions:
            raise ParameterError(f"tools has two functions {function.name!r}", "tools")
        functions[function.name] = function
    if len(functions) > MAX_TOOLS:
        raise ParameterError(f"tools has {len(functions)} entries, at most {MAX_TOOLS}", "tools")
    forced, allowed = _chosen(choice, tuple(functions))
    if choice == "none" or not functions:
        return None
    return Tools(
        definitions=[_without_null(tool) for tool in tools or ()],
        schemas={name: _schema_of(one.parameters) for name, one in functions.items()},
        strict=frozenset(name for name, one in functions.items() if one.strict),
        forced=forced,
        allowed=allowed,
        parallel=parallel is not False,
    )


def _schema_of(parameters: dict[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of arguments; a list of no parameters, as OpenAI has it, allows none."""
    given = parameters or {}
    is_empty = given.keys() <= _EMPTY_KEYS and not given.get("properties")
    if is_empty and given.get("type", "object") == "object" and not given.get("required"):
        return NO_PARAMETERS
    return given


def _without_null(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a definition without the null members that clients write, for the template."""
    found = {name: value for name, value in tool.items() if value is not None}
    function = found["function"]
    found["function"] = {name: value for name, value in function.items() if value is not None}
    return found


def _function(tool: Any, place: str) -> _Function:
    try:
        found = msgspec.convert(tool, _Tool)
    except msgspec.ValidationError as error:
        said = str(error).replace("`$.", f"`{place}.").replace("`", "")
        raise ParameterError(f"{place}: {said[:1].lower()}{said[1:]}", place) from None
    if found.type != "function":
        raise ParameterError(f"{place}.type must be function", f"{place}.type")
    if not _NAME.fullmatch(found.function.name):
        raise ParameterError(
            f"{place}.function.name must have 1 to 128 letters, digits or _.:-",
            f"{place}.function.name",
        )
    return found.function


def _chosen(choice: Any, names: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Return whether calls are forced, and the functions that may be called."""
    if choice in (None, "none", "auto"):
        return False, names
    if choice == "required":
        if not names:
            raise ParameterError("tool_choice required needs tools", "tool_choice")
        return True, names
    try:
        found = msgspec.convert(choice, _Choice)
    except msgspec.ValidationError:
        found = None
    if found is None or found.type != "function":
        raise ParameterError(
            "tool_choice must be none, auto, required, or the name of a function as in "
            '{"type": "function", "function": {"name": "f"}}',
            "tool_choice",
        )
    if found.function.name not in names:
        raise ParameterError(
            f"tool_choice names {found.function.name[:200]!r}, which is not in tools", "tool_choice"
        )
    return True, (found.function.name,)
