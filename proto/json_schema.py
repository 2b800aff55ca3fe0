"""Checks of a request's JSON schema: syntax and limits.

The grammar compiler (:mod:`baton.engine.grammar.constraint`) checks the meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import InputError
from .limits import MAX_JSON_SCHEMA_CHARS, MAX_JSON_SCHEMA_DEPTH

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
