import re

import pytest

from baton.proto.errors import InputError, SchemaTooComplex
from baton.proto.json_schema import _shortest, check_json_schema, json_schema_text
from baton.proto.limits import MAX_JSON_SCHEMA_CHARS, MAX_JSON_SCHEMA_DEPTH


def nested(levels: int) -> str:
    return "{" + '"a":{' * (levels - 1) + "}" * levels


def test_text_stays_as_it_is():
    text = ' {"type" :\n"integer"} '
    assert json_schema_text(text) == text


def test_mappings_keep_their_order_and_characters():
    schema = {"properties": {"z": {}, "ä": True}, "type": "object"}
    assert json_schema_text(schema) == '{"properties":{"z":{},"ä":true},"type":"object"}'


@pytest.mark.parametrize("text", ["{}", "true", "false", '{"a":"]]]]"}', '{"a":"\\"[["}'])
def test_objects_and_booleans_pass(text):
    check_json_schema(text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"a": NaN}', "not JSON"),
        ('{"a": 1} x', "not JSON"),
        ('{"a": "\ud800"}', "not JSON"),
        ({"a": object()}, "not JSON"),
        ("3", "object or a boolean"),
        ("null", "object or a boolean"),
        ("[{}]", "object or a boolean"),
        ('"text"', "object or a boolean"),
    ],
)
def test_what_is_no_schema_is_refused(schema, message):
    with pytest.raises(InputError, match=message):
        json_schema_text(schema)


def test_the_longest_text():
    check_json_schema("{}" + " " * (MAX_JSON_SCHEMA_CHARS - 2))
    with pytest.raises(InputError, match=f"{MAX_JSON_SCHEMA_CHARS + 1} characters"):
        check_json_schema("{}" + " " * (MAX_JSON_SCHEMA_CHARS - 1))


def test_the_deepest_nesting():
    check_json_schema(nested(MAX_JSON_SCHEMA_DEPTH))
    with pytest.raises(InputError, match=f"{MAX_JSON_SCHEMA_DEPTH} levels"):
        check_json_schema(nested(MAX_JSON_SCHEMA_DEPTH + 1))


@pytest.mark.parametrize("bracket", ["[", "{", '{"a":', "[{}"])
def test_nesting_is_found_before_it_is_followed(bracket):
    text = (bracket * MAX_JSON_SCHEMA_CHARS)[:MAX_JSON_SCHEMA_CHARS]
    with pytest.raises(InputError, match=r"levels|not JSON"):
        check_json_schema(text)


def shortest_match(pattern: str) -> int:
    """Return the length of the shortest match, by Python's own parser of patterns."""
    return re._parser.parse(pattern).getwidth()[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "pattern",
    [
        "", "^abc$", "a|bcd|", "ab{3}", "(ab{3}c){2,5}|x{99}", "(?:a+b*c?){7,}", r"\d{4}-\d{2}",
        r"[a\]b]{3}[]x]{2}[^]x]{4}", r"(\(a\)){3}", r"\\{3}", "((a{3}){4}b){5}", "(a|bc{9}|){8}",
        "a{2}?b+?", r"\bab\B", "(?i:ab){2}", "(?P<n>ab){3}", "x{2,}y{0,9}z{0}",
    ],
)  # fmt: skip
def test_the_shortest_text_of_a_pattern(pattern):
    assert _shortest(pattern) == shortest_match(pattern)


def test_a_pattern_that_matches_only_huge_texts_is_refused_at_once():
    nested = "a"
    for _ in range(2000):
        nested = f"({nested}){{9}}"
    for pattern in ("(a{1000}){1000}", "^(((x|yz){100}){100}){100}$", nested, "a{999999999}"):
        schemas: list[object] = [
            {"type": "string", "pattern": pattern},
            {"anyOf": [{"properties": {"pattern": {"pattern": pattern}}}]},
            {"patternProperties": {pattern: {}}},
        ]
        for schema in schemas:
            with pytest.raises(SchemaTooComplex, match="use smaller repetitions"):
                json_schema_text(schema)  # type: ignore[arg-type]
    for pattern in ("(a{1,1000}){1,1000}", "((a{1000}){1000})*", "(a{1000}){1000}|b", "a{500000}"):
        json_schema_text({"type": "string", "pattern": pattern})
    for wrong in ("(", ")", "a)){9}", "{9}", "[", "a{,3}", "\\", "x{9999999999}"):
        json_schema_text({"type": "string", "pattern": wrong})  # the compiler names the error
    for endless in ("[a" * 50000 + "{3}", "\\p{" * 30000, "(?<a" * 20000 + "{"):
        _shortest(endless)  # in linear time, not in minutes
        json_schema_text({"type": "string", "pattern": endless})
