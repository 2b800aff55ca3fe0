"""Checks of a request's JSON schema or grammar: syntax and limits.

The grammar compiler (:mod:`baton.engine.grammar.constraint`) checks the meaning. A grammar travels
in the place of a schema, as the option ``lark`` of ``x-guidance``: workers that do not know this
option refuse the request instead of ignoring the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import InputError
from .limits import MAX_JSON_SCHEMA_CHARS, MAX_JSON_SCHEMA_DEPTH

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between JSON tokens is the model's choice; the limit stops endless whitespace."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


def json_schema_text(schema: str | Mapping[str, Any]) -> str:
    """Return the checked JSON text of ``schema``. Text is not changed; mappings keep their order.

    Raises InputError as :func:`check_json_schema`.
    """
    if isinstance(schema, str):
        text = schema
    else:
        try:
            text = msgspec.json.encode(schema).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"json_schema is not JSON: {error}") from None
    check_json_schema(text)
    return text


def grammar_as_schema(grammar: str) -> str:
    """Return the JSON text by which a grammar in Lark syntax travels as ``json_schema``.

    Raises InputError if the text is empty, not valid Unicode or too long.
    """
    try:
        text = msgspec.json.encode({"x-guidance": {"lark": grammar}}).decode()
    except UnicodeEncodeError as error:
        raise InputError(f"grammar is not valid Unicode: {error}") from None
    if not grammar.strip():
        raise InputError("grammar is empty")
    if len(text) > MAX_JSON_SCHEMA_CHARS:
        raise InputError(
            f"grammar has {len(grammar)} characters, at most {MAX_JSON_SCHEMA_CHARS} are allowed"
        )
    return text


def grammar_of(schema: object) -> str | None:
    """Return the grammar of a decoded ``json_schema``, or None if it is a schema of JSON."""
    options = schema.get("x-guidance") if isinstance(schema, dict) and len(schema) == 1 else None
    grammar = options.get("lark") if isinstance(options, dict) and len(options) == 1 else None
    return grammar if isinstance(grammar, str) else None


def check_json_schema(text: str) -> None:
    """Raise InputError unless ``text`` is a JSON object or boolean within the limits."""
    if len(text) > MAX_JSON_SCHEMA_CHARS:
        raise InputError(
            f"json_schema has {len(text)} characters, at most {MAX_JSON_SCHEMA_CHARS} are allowed"
        )
    if _depth(text) > MAX_JSON_SCHEMA_DEPTH:
        raise InputError(f"json_schema is nested deeper than {MAX_JSON_SCHEMA_DEPTH} levels")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InputError(f"json_schema is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise InputError("json_schema must be a JSON object or a boolean")


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets outside strings; any number for invalid JSON."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest
