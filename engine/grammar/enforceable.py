"""Turns a schema into one that llguidance enforces completely. Pure.

Invariant: an instance of the new schema is an instance of the old one. What cannot be enforced is
refused by name: see :mod:`.numbers`, :mod:`.patterns` and :mod:`.finite`.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from baton.proto.errors import InputError
from baton.proto.json_schema import ANY_WHITESPACE, checked_whitespace

from .finite import drop_endless
from .numbers import check_listed, check_multiples, tighten_bounds
from .patterns import as_library_pattern
from .subschemas import Subschemas

_LARK_PART = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*|%json\s*(?P<schema>\{)'
)  # texts, regular expressions and comments have no schemas
_OPTIONS = frozenset({"coerce_one_of", "lenient", "whitespace_flexible", "whitespace_pattern"})
"""Options that keep the answer JSON; the other options change its spelling."""
_decoder = json.JSONDecoder()


def enforceable(schema: Any) -> Any:
    """Return the schema to compile in place of ``schema``, a decoded schema of limited depth.

    Without options its instances have no whitespace. Raises InputError for a number that cannot be
    written exactly, for a schema that has no finite instance, and for an unknown option.
    """
    if isinstance(schema, bool):  # options can only be added to an object
        schema = {} if schema else {"enum": []}
    found = {**copy.deepcopy(schema), "x-guidance": _options_of(schema)}
    parts = Subschemas(found)
    for at, node in enumerate(parts.nodes):
        if isinstance(node.schema, dict):
            _rewrite_numbers(node.schema)
            if "allOf" in node.schema or "multipleOf" in node.schema:
                check_multiples(one.get("multipleOf") for one in parts.applied(at))
    if not drop_endless(parts):
        raise InputError(
            "json_schema: no finite value is an instance, because its references require each "
            "other without end"
        )
    for node in parts.nodes:
        if isinstance(node.schema, dict):
            _rewrite_patterns(node.schema)
    return found


def enforceable_parts(grammar: str) -> str:
    """Return a grammar in Lark syntax whose parts in JSON schema are :func:`enforceable`."""
    found: list[str] = []
    at = 0
    while part := _LARK_PART.search(grammar, at):
        begin, end = part.start("schema"), part.end()
        text = grammar[at:end]
        if begin >= 0:
            try:
                schema, end = _decoder.raw_decode(grammar, begin)
            except (ValueError, RecursionError):  # the compiler names the error
                schema = None
            if schema is not None:
                text = grammar[at:begin] + json.dumps(enforceable(schema))
        found.append(text)
        at = end
    return "".join([*found, grammar[at:]])


def _options_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler's options. Raises InputError for one that changes JSON's spelling."""
    given = schema.get("x-guidance")
    options = {} if given is None else given
    if not isinstance(options, dict) or not options.keys() <= _OPTIONS:
        known = ", ".join(sorted(_OPTIONS))
        raise InputError(f"json_schema: x-guidance supports only the options {known}")
    found = {"whitespace_flexible": False, **options}
    if found.get("whitespace_pattern") is not None:
        found["whitespace_pattern"] = checked_whitespace(found["whitespace_pattern"])
    elif found["whitespace_flexible"]:
        found["whitespace_pattern"] = ANY_WHITESPACE
    return found


def _rewrite_numbers(schema: dict[str, Any]) -> None:
    for keyword in ("enum", "const"):
        if keyword in schema:
            check_listed(keyword, schema[keyword])
    tighten_bounds(schema)


def _rewrite_patterns(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = as_library_pattern(schema["pattern"])
    names = schema.get("patternProperties")
    if isinstance(names, dict):
        renamed = {as_library_pattern(name): one for name, one in names.items()}
        names.clear()
        names.update(renamed)
