"""Random changes of the bodies of recorded requests."""

from __future__ import annotations

import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 17, 0.5, -0.0, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63),
    "", "x", "x" * 3000, "\u0000", "\ud800", "\U0001f600" * 50, "<|im_start|>", "{{ 1 }}", "null",
    [], [[]], [[[[]]]], [None], [1, "a"], [1, 2, 3], [-1], [2**40], ["a"] * 40, {}, {"a": {}},
    {"type": "object"}, {"type": "json_object"}, {"type": "json_schema"}, {"role": "user"},
    [{"role": "user", "content": "x"}], {"$ref": "#"}, {"include_usage": True},
)  # fmt: skip


def mutated(body: bytes, names: list[str], draw: random.Random) -> bytes:
    """Return the body with a few changes. ``names``: fields that may be added."""
    if draw.random() < 0.15:
        return _bytes(body, draw)
    tree = json.loads(body)
    for _ in range(draw.choice((1, 1, 2, 3))):
        tree = _tree(tree, names, draw)
    content = json.dumps(tree, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.05:
        content = content.replace(
            b"null", draw.choice((b"NaN", b"Infinity", b"[" * 3000, b"1e999"))
        )
    return content


def _tree(tree: Any, names: list[str], draw: random.Random) -> Any:
    """Change one place of decoded JSON."""
    if not isinstance(tree, dict | list) or draw.random() < 0.05:
        alike = [value for value in VALUES if type(value) is type(tree)]
        return draw.choice(alike if alike and draw.random() < 0.8 else VALUES)
    if isinstance(tree, list):
        if not tree or draw.random() < 0.3:
            return [*tree, draw.choice(VALUES)]
        at = draw.randrange(len(tree))
        return [*tree[:at], _tree(tree[at], names, draw), *tree[at + 1 :]]
    act = draw.random()
    if act < 0.2 or not tree:
        return {**tree, draw.choice(names): draw.choice(VALUES)}
    name = draw.choice(list(tree))
    if act < 0.3:
        return {key: value for key, value in tree.items() if key != name}
    if act < 0.35:
        return {(draw.choice(names) if key == name else key): one for key, one in tree.items()}
    return {**tree, name: _tree(tree[name], names, draw)}


def _bytes(body: bytes, draw: random.Random) -> bytes:
    at, end = sorted(draw.randrange(len(body) + 1) for _ in range(2))
    insert = bytes(draw.randrange(256) for _ in range(draw.randrange(4)))
    middle = draw.choice((b"", insert, body[at:end] * 2, bytes(reversed(body[at:end]))))
    return draw.choice((body[:at], body[:at] + middle + body[end:]))
