"""The subschemas of a JSON schema that its instances can meet, with their places. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")

Key = str | int


@dataclass(slots=True, eq=False)
class Node:
    """A subschema. ``container``, ``key``: where it stands in the schema.

    ``parts``: numbers of its own subschemas, by the keyword and the place below it.
    """

    schema: Any
    container: Any
    key: Key
    parts: dict[str, dict[Key, int]] = field(default_factory=dict)

    def remove(self) -> None:
        """Put the schema without instances in this one's place."""
        self.schema = self.container[self.key] = False

    def one(self, keyword: str) -> int | None:
        """Return the subschema that the keyword's value is, None if it is none."""
        return self.parts.get(keyword, {}).get(keyword)

    def listed(self, keyword: str) -> Sequence[int]:
        """Return the subschemas of the keyword's list."""
        found = self.parts.get(keyword, {})
        return [] if keyword in found else list(found.values())

    def named(self, keyword: str) -> Mapping[Any, int]:
        """Return the subschemas of the keyword's mapping, by name."""
        return self.parts.get(keyword, {})


class Subschemas:
    """All subschemas that the ``root`` uses, itself first, also by references to any place in it.

    ``users``: the subschemas that each one is a part or the target of. If a reference names no
    place (an anchor, another document), all definitions count as used.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}  # numbers by identity: a schema is a tree
        self.nodes: list[Node] = []
        self.users: list[list[int]] = []
        self.has_references = False
        self._add(Node(root, [root], 0))
        at = 0
        while at < len(self.nodes):
            self._add_parts(at)
            at += 1

    def target(self, node: Node) -> int | None:
        """Return the subschema that a node refers to, None if it is not known."""
        return node.parts["$ref"].get("$ref")

    def applied(self, at: int) -> list[dict[str, Any]]:
        """Return the subschemas that apply to the same value as a node, itself included."""
        found, waiting = {at}, [at]
        while waiting:
            parts = self.nodes[waiting.pop()].parts
            for keyword in ("allOf", "anyOf", "oneOf", "$ref"):
                new = set(parts.get(keyword, {}).values()) - found
                found |= new
                waiting += new
        schemas = [self.nodes[one].schema for one in found]
        return [one for one in schemas if isinstance(one, dict)]

    def _add(self, node: Node) -> int:
        if isinstance(node.schema, dict):
            known = self._known.setdefault(id(node.schema), len(self.nodes))
            if known < len(self.nodes):
                return known
        self.nodes.append(node)
        self.users.append([])
        return len(self.nodes) - 1

    def _add_parts(self, at: int) -> None:
        node = self.nodes[at]
        if not isinstance(node.schema, dict):
            return
        for keyword, part in _parts(node.schema):
            number = self._add(part)
            node.parts.setdefault(keyword, {})[part.key] = number
            self.users[number].append(at)
        reference = node.schema.get("$ref")
        if reference is not None:
            self.has_references = True
            found = node.parts.setdefault("$ref", {})
            target = self._resolved(reference)
            if target is None:
                for part in _definitions(self._root):
                    self._add(part)
            else:
                number = found["$ref"] = self._add(target)
                self.users[number].append(at)

    def _resolved(self, reference: object) -> Node | None:
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            return None
        if reference == "#":
            return self.nodes[0]
        place: Any = self._root
        node: Node | None = None
        for step in reference[2:].split("/"):
            key: Key = unquote(step).replace("~1", "/").replace("~0", "~")
            inner: Any = None
            if isinstance(place, dict):
                inner = place.get(key)
            elif isinstance(place, list) and str(key).isdecimal() and len(str(key)) < 9:
                key = int(key)
                inner = place[key] if key < len(place) else None
            if inner is None:
                return None
            node = Node(inner, place, key)
            place = inner
        return node


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Node]]:
    for keyword in _ONE:
        if isinstance(schema.get(keyword), dict | bool):
            yield keyword, Node(schema[keyword], schema, keyword)
    for keyword in (*_LISTS, *_MAPS):
        inner = schema.get(keyword)
        if isinstance(inner, list) and keyword in _LISTS:
            yield from ((keyword, Node(one, inner, at)) for at, one in enumerate(inner))
        elif isinstance(inner, dict) and keyword in _MAPS:
            yield from ((keyword, Node(one, inner, name)) for name, one in inner.items())


def _definitions(root: Any) -> Iterator[Node]:
    for keyword in _DEFINITIONS:
        inner = root.get(keyword) if isinstance(root, dict) else None
        if isinstance(inner, dict):
            yield from (Node(one, inner, name) for name, one in inner.items())
