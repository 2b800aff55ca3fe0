"""Which parts of a schema have finite instances, by the kinds of JSON values. Pure.

A schema whose references require each other without end has no finite instance: the grammar
would let an answer begin that can never end. The kinds of a schema's instances are the least
solution of one equation per subschema; the greatest solution has the endless values too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from .subschemas import Node, Subschemas

KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
_NONE: frozenset[str] = frozenset()
_PYTHON_KINDS = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip
_REQUIRING = ("required", "minProperties", "minItems")

Kinds = frozenset[str]


def drop_endless(parts: Subschemas) -> bool:
    """Replace subschemas without finite instances by false. Return False if the root is one.

    A subschema of which only the objects or arrays are endless keeps its other types.
    """
    if not parts.has_references:
        return True
    finite, any_length = _solution(parts, _NONE), _solution(parts, KINDS)
    for at, node in enumerate(parts.nodes):
        endless = any_length[at] - finite[at]
        if not endless:
            continue
        if not finite[at]:
            if at == 0:
                return False
            node.remove()
        elif isinstance(node.schema, dict) and any(name in node.schema for name in _REQUIRING):
            declared = _declared(node.schema.get("type"))
            node.schema["type"] = [one for one in declared if one not in endless]
    return True


def _declared(types: object) -> list[Any]:
    if isinstance(types, str):
        return [types]
    return types if isinstance(types, list) else sorted(KINDS)


def _solution(parts: Subschemas, start: Kinds) -> list[Kinds]:
    """Return the kinds of each subschema's instances: from no kinds the least solution."""
    found = [start] * len(parts.nodes)
    waiting = deque(reversed(range(len(parts.nodes))))  # inner ones first
    is_waiting = [True] * len(parts.nodes)
    while waiting:
        at = waiting.popleft()
        is_waiting[at] = False
        kinds = _kinds(parts.nodes[at], parts, found)
        if kinds != found[at]:
            found[at] = kinds
            for user in parts.users[at]:
                if not is_waiting[user]:
                    is_waiting[user] = True
                    waiting.append(user)
    return found


def _kinds(node: Node, parts: Subschemas, found: list[Kinds]) -> Kinds:
    """Return the kinds of a subschema's instances, by those ``found`` of its parts."""
    schema = node.schema
    if not isinstance(schema, dict):
        return _NONE if schema is False else KINDS
    kinds = KINDS
    if "type" in schema:
        kinds &= {"number" if one == "integer" else one for one in _declared(schema["type"])}
    if "const" in schema:
        kinds &= {_PYTHON_KINDS[type(schema["const"])]}
    if isinstance(schema.get("enum"), list):
        kinds &= {_PYTHON_KINDS[type(one)] for one in schema["enum"]}
    if "$ref" in schema:
        target = parts.target(node)
        kinds &= KINDS if target is None else found[target]
    for one in node.listed("allOf"):
        kinds &= found[one]
    for name in ("anyOf", "oneOf"):
        if options := node.listed(name):
            kinds &= _NONE.union(*(found[one] for one in options))
    if "object" in kinds and not _has_object(schema, node, found):
        kinds -= {"object"}
    if "array" in kinds and not _has_array(schema, node, found):
        kinds -= {"array"}
    return kinds


def _has_object(schema: Mapping[str, Any], node: Node, found: list[Kinds]) -> bool:
    properties = node.named("properties")
    patterns = node.named("patternProperties").values()
    others = node.one("additionalProperties")
    other = others is None or bool(found[others])
    for name in _texts(schema.get("required")):
        at = properties.get(name)
        if not (other or patterns if at is None else found[at]):
            return False
    if other or any(found[at] for at in patterns):
        return True
    possible = sum(bool(found[at]) for at in properties.values())
    return possible >= _count(schema.get("minProperties"))


def _has_array(schema: Mapping[str, Any], node: Node, found: list[Kinds]) -> bool:
    least = _count(schema.get("minItems"))
    in_front = node.listed("prefixItems") or node.listed("items")
    rest = node.one("additionalItems" if isinstance(schema.get("items"), list) else "items")
    if not all(found[at] for at in in_front[:least]):
        return False
    return least <= len(in_front) or rest is None or bool(found[rest])


def _texts(value: object) -> Iterable[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else ()


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
