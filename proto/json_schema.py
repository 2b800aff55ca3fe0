"""Checks of a request's JSON schema or grammar: syntax and limits.

The grammar compiler (:mod:`baton.engine.grammar.constraint`) checks the meaning. A grammar travels
in the place of a schema, as the option ``lark`` of ``x-guidance``: workers that do not know this
option refuse the request instead of ignoring the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from .errors import InputError, SchemaTooComplex
from .limits import MAX_JSON_SCHEMA_CHARS, MAX_JSON_SCHEMA_DEPTH, MAX_PATTERN_TEXT_CHARS

ANY_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Whitespace between JSON tokens where the model may choose it; the limit stops endless ones."""
_BLANK = r"(?:[ \n\r\t]|\\[nrts]|\\x(?:20|09|0[aA]|0[dD]))"
_WHITESPACE_PATTERN = re.compile(
    rf"(?:{_BLANK}|\[{_BLANK}+\]|\((?:\?:)?|[)|?*+]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})*"
)
_PATTERN_PART = re.compile(
    r"(?P<none>\\[bBAzZ]|[\^$]|\(\?[a-zA-Z-]+\))"
    r"|(?P<open>\((?:\?(?:[a-zA-Z-]*:|P?<\w+>|<?[=!]))?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<times>[*+?]|\{(?P<least>\d{1,9})(?:,\d*)?\})\??"
    r"|\\[pPxu]\{[^}]*+\}?|\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|.",
    re.DOTALL,
)  # An unclosed bracket takes the rest: searching the end of each one would take minutes.
_SCANNED_CHARS = 1 << 14  # of the patterns of a schema: more would hold up an event loop
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


def whitespace_options(
    disable_any_whitespace: bool | None = None, whitespace_pattern: str | None = None
) -> dict[str, Any]:
    """Return the options of ``x-guidance`` for whitespace between JSON tokens, none by default.

    Raises InputError for a pattern of other characters than JSON's whitespace, and for both.
    """
    if whitespace_pattern is not None:
        if disable_any_whitespace:
            raise InputError("whitespace_pattern cannot be combined with disable_any_whitespace")
        return {"whitespace_pattern": checked_whitespace(whitespace_pattern)}
    return {} if disable_any_whitespace in (None, True) else {"whitespace_flexible": True}


def checked_whitespace(pattern: object) -> str:
    """Return a pattern of JSON's whitespace. Raises InputError for one of other characters."""
    if not isinstance(pattern, str) or not _WHITESPACE_PATTERN.fullmatch(pattern):
        raise InputError(
            "whitespace_pattern must be a regular expression of blanks, \\n, \\r, \\t and \\s, "
            f"not {str(pattern)[:80]!r}"
        )
    check_pattern(pattern)
    return pattern.replace(r"\s", r"[\x20\n\r\t]")


def with_whitespace(schema: str, options: Mapping[str, Any]) -> str:
    """Return a schema's JSON text with these options, checked as :func:`check_json_schema`."""
    value = msgspec.json.decode(schema)
    if isinstance(value, bool):
        value = {} if value else {"enum": []}
    known = value.get("x-guidance")
    own = known if isinstance(known, dict) else {}
    return json_schema_text({**value, "x-guidance": {**own, **options}})


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
    if '"pattern' in text:
        left = _SCANNED_CHARS
        for pattern in _patterns(value):
            left -= len(pattern)
            if left < 0:
                break
            check_pattern(pattern)


def check_pattern(pattern: str) -> None:
    """Raise SchemaTooComplex if every text that matches a regular expression is too long.

    Nested repetitions multiply: the compiler would write out millions of characters. Very long
    patterns are left to the limits of the compiler.
    """
    if (
        len(pattern) <= _SCANNED_CHARS
        and "{" in pattern
        and _shortest(pattern) > MAX_PATTERN_TEXT_CHARS
    ):
        raise SchemaTooComplex(
            f"the pattern {pattern[:80]!r} matches only texts of more than"
            f" {MAX_PATTERN_TEXT_CHARS} characters: use smaller repetitions"
        )


def _patterns(schema: object) -> Iterator[str]:
    """Yield the regular expressions of a schema whose depth is limited."""
    if isinstance(schema, dict):
        pattern, names = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str):
            yield pattern
        if isinstance(names, dict):
            yield from names
        for one in schema.values():
            yield from _patterns(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from _patterns(one)


def _shortest(pattern: str) -> int:
    """Return the length of the shortest match, or a length over the limit.

    A wrong pattern has any length: the compiler names the error.
    """
    most = MAX_PATTERN_TEXT_CHARS + 1
    outer: list[tuple[int, int]] = []  # of the open groups, as the two values below
    shortest, length = most, 0  # of the alternatives that have ended, and of the current one
    last = 0  # length of the last unit, which a repetition repeats
    for part in _PATTERN_PART.finditer(pattern):
        kind = part.lastgroup
        if kind == "times" or kind == "least":
            times = int(part["least"]) if part["least"] else int(part[0][0] == "+")
            repeated = min(last * times, most)
            length, last = min(length - last + repeated, most), repeated
        elif kind == "open":
            outer.append((shortest, length))
            shortest, length, last = most, 0, 0
        elif kind == "close" and outer:
            last = min(shortest, length)
            shortest, length = outer.pop()
            length = min(length + last, most)
        elif kind == "or":
            shortest, length, last = min(shortest, length), 0, 0
        else:
            last = int(kind is None)
            length = min(length + last, most)
    return min(shortest, length)


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
