"""Fifty JSON schemas of all usual kinds, small enough for a short answer."""

from __future__ import annotations

import calendar
import copy
import json
import re
from typing import Any

import jsonschema


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """A closed object; all its properties are required unless ``required`` is given."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: Any, least: int = 0, most: int = 4) -> dict[str, Any]:
    """An array with bounds."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WORD: dict[str, Any] = {"type": "string", "maxLength": 12}
SMALL: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
BOOL: dict[str, Any] = {"type": "boolean"}
COLOUR: dict[str, Any] = {"enum": ["red", "green", "blue"]}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 99}
POINT = record(x=SMALL, y=SMALL)
TO_POINT: dict[str, Any] = {"$ref": "#/$defs/p"}

TREE: dict[str, Any] = {
    "$defs": {
        "node": record(
            value=SMALL,
            children={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3},
        ),
        "leaf": record(value=SMALL),
    },
    "$ref": "#/$defs/node",
}
LINKED: dict[str, Any] = {  # recursive; the model chooses where it ends
    "$defs": {
        "list": {
            "anyOf": [{"type": "null"}, record(head=SMALL, tail={"$ref": "#/$defs/list"})],
        }
    },
    "$ref": "#/$defs/list",
}

SCHEMAS: dict[str, dict[str, Any]] = {
    # scalars
    "null": {"type": "null"},
    "boolean": BOOL,
    "short string": WORD,
    "string with bounds": {"type": "string", "minLength": 3, "maxLength": 8},
    "digit": SMALL,
    "integer range": {"type": "integer", "minimum": -17, "maximum": 4711},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "negative number": {"type": "number", "exclusiveMaximum": 0, "minimum": -1},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
    "constant": {"const": "exactly this"},
    "constant object": {"const": {"a": [1, None, True], "b": "c"}},
    "enum": COLOUR,
    "enum of kinds": {"enum": [1, "one", None, True, [1], {"one": 1}]},
    "unicode enum": {"enum": ["größer", "naïve", "日本語", "🦀", "ß\u00a0ẞ"]},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
    "pattern of choices": {"type": "string", "pattern": "^(yes|no|maybe)(!|\\?)?$"},
    "unicode pattern": {"type": "string", "pattern": "^[äöü]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "time of day": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    # objects
    "empty object": record(),
    "flat object": record(name=WORD, age=SMALL, member=BOOL),
    "optional property": record(["a"], a=SMALL, b=BOOL),
    "all optional": record([], a=SMALL, b=BOOL, c=COLOUR),
    "nested object": record(outer=record(inner=record(value=SMALL))),
    "deep object": record(a=record(b=record(c=record(d=record(e=record(f=BOOL)))))),
    "unicode names": record(**{"größe": SMALL, "名前": COLOUR, 'with "quotes"\\': BOOL}),
    "many properties": record(**{f"field_{i}": BOOL for i in range(12)}),
    "typed rest": {
        "type": "object",
        "properties": {"id": SMALL},
        "required": ["id"],
        "additionalProperties": BOOL,
        "maxProperties": 2,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": SMALL},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    # arrays
    "bounded array": array(SMALL, 2, 4),
    "array of one": array(BOOL, 1, 1),
    "array of objects": array(POINT, 1, 3),
    "array of arrays": array(array(BOOL, 1, 2), 1, 3),
    "tuple": {
        "type": "array",
        "prefixItems": [COLOUR, SMALL, BOOL],
        "items": False,
        "minItems": 3,
    },
    "tuple with a tail": {
        "type": "array",
        "prefixItems": [COLOUR],
        "items": SMALL,
        "minItems": 1,
        "maxItems": 4,
    },
    "array of enums": array(COLOUR, 3, 3),
    # unions and references
    "several types": {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 99},
    "any of": {"anyOf": [SMALL, COLOUR, POINT]},
    "one of": {
        "oneOf": [
            record(kind={"const": "circle"}, radius=SMALL),
            record(kind={"const": "square"}, side=SMALL),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOL}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    },
    "references": {"$defs": {"p": POINT}, **record(a=TO_POINT, b=TO_POINT)},
    "tree": TREE,
    "linked list": LINKED,
    "nullable": record(text={"anyOf": [WORD, {"type": "null"}]}, n={"type": ["integer", "null"],
                       "minimum": 1, "maximum": 5}),
    # as in applications
    "tool call": record(
        name={"enum": ["search", "open"]},
        arguments=record(query={"type": "string", "minLength": 1, "maxLength": 16}, limit=SMALL),
    ),
    "order": record(
        id={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        items=array(record(sku=COLOUR, count=COUNT), 1, 2),
        paid=BOOL,
        total={"type": "number", "minimum": 0, "maximum": 1000},
    ),
}  # fmt: skip


def repeated(schema: dict[str, Any], count: int) -> dict[str, Any]:
    """An array of ``count`` instances, for answers of any length."""
    definitions = schema.get("$defs", {})
    items = {key: value for key, value in schema.items() if key != "$defs"}
    return {"$defs": definitions, **array(items, count, count)}


FORMATS = copy.deepcopy(jsonschema.Draft202012Validator.FORMAT_CHECKER)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


@FORMATS.checks("date-time")
def _is_moment(value: object) -> bool:
    return not isinstance(value, str) or _MOMENT.fullmatch(value) is not None


@FORMATS.checks("date")
def _is_date(value: object) -> bool:
    """A date of RFC 3339: the year 0 is valid, and leap years are not checked."""
    if not isinstance(value, str):
        return True
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
        return False
    month, day = int(value[5:7]), int(value[8:])
    return 1 <= month <= 12 and 1 <= day <= calendar.monthrange(2000, month)[1]


def check_instance(text: str, schema: dict[str, Any]) -> None:
    """Raise unless ``text`` is strict JSON, without NaN, and an instance, formats included."""
    value = json.loads(text, parse_constant=_refuse)
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
