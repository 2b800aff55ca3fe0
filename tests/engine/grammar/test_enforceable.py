"""What a schema means is what its grammar enforces: numbers, patterns, references without end."""

import json
import random
import re

import pytest

from baton.engine.grammar.compiler import compile_schema
from baton.engine.grammar.enforceable import enforceable, enforceable_parts
from baton.engine.grammar.patterns import as_library_pattern
from baton.proto.errors import InputError

from ...suite.short import some_long
from .random_schemas import (
    TOKENIZER,
    accepts,
    answers,
    is_instance,
    mixed_schema,
    number_schema,
)


@pytest.mark.parametrize("count", some_long(300, 3000))
def test_no_number_ends_that_its_bounds_forbid(count):
    ended = refused = 0
    for seed in range(count):
        rnd = random.Random(seed)
        schema = number_schema(rnd)
        try:
            for text in answers(schema, rnd, 3):
                assert is_instance(schema, text), (schema, text)
                ended += 1
        except InputError:
            refused += 1
    assert ended > count
    assert refused < count / 3


@pytest.mark.parametrize("count", some_long(100, 1000))
def test_no_answer_ends_that_its_schema_forbids(count):
    ended = 0
    for seed in range(count):
        rnd = random.Random(seed)
        schema = mixed_schema(rnd)
        try:
            for text in answers(schema, rnd, 3):
                assert is_instance(schema, text), (schema, text)
                ended += 1
        except InputError:
            continue
    assert ended > count


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.2", "1.5", "1.01"], ["1", "1.0", "1.6"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 2}, ["1.5"], ["1", "2", "2.0"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5", "-0.1"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25"], ["0", "0.0", "0.5"]),
        ({"exclusiveMinimum": 0.3}, ["0.4", "0.31"], ["0.3", "0.30000000000000000001"]),
        ({"minimum": 1, "exclusiveMinimum": True}, ["2", "1.5"], ["1"]),  # of draft 4
        ({"maximum": 1e308}, ["5", "-5"], []),
        ({"type": "integer", "exclusiveMinimum": 1.5, "maximum": 3}, ["2", "3"], ["1", "4"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["0", "123456789"], ["-1"]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
         [str(2**53 + 2)], [str(2**53), str(2**53 + 4)]),
        ({"type": "integer", "minimum": 10**18}, [str(10**18)], [str(10**18 - 1), "9" * 20]),
        ({"enum": [2**60, 7]}, [str(2**60), "7"], [str(2**60 + 1)]),
        ({"const": 5.0}, ["5"], ["6"]),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_bounds(schema, inside, outside):
    for text in inside:
        assert accepts({"type": "number", **schema}, text), text
    for text in outside:
        assert not accepts({"type": "number", **schema}, text), text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"enum": [1, 1234567890123456789]}, "enum has 1234567890123456789, which"),
        ({"const": 2**53 + 1}, "const has 9007199254740993"),
        ({"const": {"a": [12345678901234567890]}}, "const has 12345678901234567890"),
        ({"enum": [-1e20], "type": "integer"}, "enum has -1e"),  # the library would overflow
        ({"const": 1.9999999999999998}, "const has 1.9999999999999998"),
        ({"type": "integer", "minimum": 2**63}, "no number of minimum 9223372036854775808"),
        ({"type": "integer", "minimum": 1e20, "maximum": 1e20}, "no number of minimum 1e"),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, "no number of minimum 9007199254740993"),
        ({"allOf": [{"multipleOf": 70000}, {"multipleOf": 70001}]}, "multipleOf 70000 and 70001"),
        ({"properties": {"a": {"const": 2**53 + 1}}}, "const has"),
        ({"$ref": "#/x/y", "x": {"y": {"const": 2**53 + 1}}}, "const has"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "const": 2**53 + 1}}}, "const has"),
    ],
    ids=json.dumps,
)
def test_what_cannot_be_written_is_refused_by_name(schema, said):
    with pytest.raises(InputError, match=re.escape(said)):
        compile_schema(TOKENIZER, json.dumps(schema))
    call = f'start: "%json {{}}" /%json {{/ %json {json.dumps(schema)}'
    with pytest.raises(InputError, match=re.escape(said)):
        compile_schema(TOKENIZER, json.dumps({"x-guidance": {"lark": call}}))


def test_two_multiples_apply_together():
    schema = {"type": "integer", "allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}
    assert [text for text in ("4", "6", "12", "24") if accepts(schema, text)] == ["12", "24"]


# ------------------------------------------------------------------ references without end


def closed(required=("n",), **properties):
    return {"type": "object", "properties": properties, "required": list(required),
            "additionalProperties": False}  # fmt: skip


SELF = {"$ref": "#/$defs/N"}
ENDLESS = {
    "itself": {"$ref": "#"},
    "two that refer to each other": {"$defs": {"N": {"$ref": "#/$defs/M"}, "M": SELF}, **SELF},
    "a required property": {"$defs": {"N": closed(n=SELF)}, **SELF},
    "all of": {"allOf": [{"$ref": "#"}]},
    "all parts together": {"allOf": [{"type": "object"}, closed(n={"$ref": "#"})]},
    "any of": {"$defs": {"N": {"anyOf": [closed(n=SELF), closed(n={"$ref": "#"})]}}, **SELF},
    "an item": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "the second item": {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
    "any property": {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_finite_instance_is_refused(name):
    with pytest.raises(InputError, match="no finite value is an instance"):
        compile_schema(TOKENIZER, json.dumps(ENDLESS[name]))


def test_a_part_without_a_finite_instance_is_never_begun():
    defs = {"$defs": {"N": closed(n=SELF)}}
    optional = {**defs, **closed((), a=SELF, b={"type": "null"})}
    assert accepts(optional, '{"b":null}')
    assert not any('"a"' in text for text in answers(optional, random.Random(1), 20))
    either = {**defs, "anyOf": [SELF, {"const": 7}]}
    assert set(answers(either, random.Random(1), 5)) == {"7"}
    nullable = {"$defs": {"N": {**closed(n=SELF), "type": ["object", "null"]}}, **SELF}
    assert {'{"n":null}', "null"} <= {
        "".join(text.split()) for text in answers(nullable, random.Random(1), 60)
    }
    lists = {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}
    assert accepts(lists, "[null]")
    lists_of_objects = {"type": ["array", "null"], "minItems": 1, "items": closed(n=SELF)}
    only_null = {"$defs": {"N": lists_of_objects}, **SELF}
    assert accepts(only_null, '[{"n":null}]')
    no_items = {"type": ["array", "null"], "minItems": 1, "items": {"allOf": [
        {"type": "array"}, {"$ref": "#"}]}}  # fmt: skip
    assert enforceable(no_items)["type"] == ["null"]
    assert set(answers(no_items, random.Random(1), 3)) == {"null"}


def test_a_long_chain_of_references_is_solved_once():
    """Each definition needs the next one, in either order of the definitions."""
    for step in (1, -1):
        count = 2000
        names = {f"d{at}": closed(n={"$ref": f"#/$defs/d{at + step}"}) for at in range(count)}
        last = "d-1" if step < 0 else f"d{count}"
        schema = {"$defs": {**names, last: {"type": "null"}}, "$ref": "#/$defs/d0"}
        assert enforceable(schema) == schema | {"x-guidance": {"whitespace_flexible": False}}
        schema["$defs"][last] = {"$ref": "#/$defs/d0"}
        with pytest.raises(InputError, match="no finite"):
            enforceable(schema)


# ------------------------------------------------------------------ patterns

SPACES = {*"\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"} | {
    chr(at) for at in range(0x2000, 0x200B)
}
"""WhiteSpace and LineTerminator of ECMA-262."""
TRIED = [
    *map(chr, range(0x20, 0x180)),
    *SPACES,
    "\u0085",
    "\u180e",
    "\u200b",
    "\u0663",
    "ä",
    "\U0001d7d7",
]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r"^\s$", lambda one: one in SPACES),
        (r"^[\s]$", lambda one: one in SPACES),
        (r"^\S$", lambda one: one not in SPACES),
        (r"^[\S]$", lambda one: one not in SPACES),
        (r"^[^\s]$", lambda one: one not in SPACES),
        (r"^[^\Sa]$", lambda one: one in SPACES),
        (r"^.$", lambda one: one not in "\n\r\u2028\u2029"),
        (r"^\.$", lambda one: one == "."),
        (r"^[.]$", lambda one: one == "."),
        (r"^\d$", lambda one: one in "0123456789"),
        (r"^\w$", lambda one: re.fullmatch(r"\w", one, re.ASCII)),
        (r"^[[a]$", lambda one: one in "[a"),
        (r"^[a&&b]$", lambda one: one in "a&b"),
        (r"^[+--]$", lambda one: one in "+,-"),
        (r"^[--/]$", lambda one: one in "-./"),
    ],
)
def test_patterns_match_as_in_ecma_262(pattern, matches):
    tried = [one for one in TRIED if one != "\x7f"]
    matcher = compile_schema(TOKENIZER, json.dumps({"type": "string", "pattern": pattern}))
    found = set()
    for one in tried:
        copy, text = matcher.deep_copy(), json.dumps(one, ensure_ascii=False)
        tokens = TOKENIZER.tokenize_str(text)
        if all(map(copy.consume_token, tokens)) and copy.is_accepting():
            found.add(one)
    assert found == {one for one in tried if matches(one)}


def test_a_boundary_of_words_is_refused():
    with pytest.raises(InputError, match="lookarounds"):
        compile_schema(TOKENIZER, json.dumps({"type": "string", "pattern": r"\bfoo"}))


def test_names_of_properties_match_as_in_ecma_262():
    schema = {"type": "object", "patternProperties": {r"^\s$": {"const": 1}},
              "additionalProperties": False}  # fmt: skip
    assert accepts(schema, '{"\ufeff":1}')
    assert not accepts(schema, '{"\x85":1}')


# ------------------------------------------------------------------ grammars


def test_schemas_inside_a_grammar_are_enforceable():
    grammar = (
        'start: "%json {" A %json {"exclusiveMinimum": 1} "x" %json {"type": "null"}\nA: /%json {/'
    )
    compact = '"x-guidance": {"whitespace_flexible": false}'
    rewritten = grammar.replace(
        '"exclusiveMinimum": 1}', compact + ', "minimum": 1.00000000000001}'
    ).replace('"null"}', f'"null", {compact}}}')
    assert enforceable_parts(grammar) == rewritten
    for same in (
        "",
        "start: X",
        "start: %json {",
        "// %json {1",
        'start: "\\"%json {}"',
        "%json {x}",
    ):
        assert enforceable_parts(same) == same


def test_a_pattern_without_such_parts_is_unchanged():
    for pattern in ("", "^a$", r"\\s", r"\\.", "[", "a]", r"\[s", "^[a-z]{2,5}-[0-9]{3}$", "\\"):
        assert as_library_pattern(pattern.replace(r"\\.", r"\\a")) == pattern.replace(
            r"\\.", r"\\a"
        )


# ------------------------------------------------------------------ whitespace

OBJECT = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("options", "inside", "outside"),
    [
        ({}, ['{"a":1}'], ['{"a": 1}', '{ "a":1}', '{"a":1 }', '{"a":\n1}']),
        (
            {"whitespace_flexible": True},
            ['{"a":1}', '{ "a" :\n\t1\r}'],
            ['{"a":' + 33 * " " + "1}"],
        ),
        ({"whitespace_pattern": " ?"}, ['{"a":1}', '{"a": 1}'], ['{"a":  1}', '{"a":\n1}']),
        ({"whitespace_pattern": r"[\n ]{1,2}"}, ['{"a":1}', '{"a":\n 1}'], ['{"a":   1}']),
        ({"whitespace_pattern": r"\s*"}, ['{"a":\t\n \r1}'], ['{"a":\u00a01}', '{"a":\u00851}']),
        ({"whitespace_pattern": ""}, ['{"a":1}'], ['{"a": 1}']),
    ],
    ids=str,
)
def test_whitespace_is_what_was_asked_for(options, inside, outside):
    schema = OBJECT | ({"x-guidance": options} if options else {})
    inner = {"x-guidance": {"lark": f"start: %json {json.dumps(schema)}"}}
    for tried in (schema, inner):
        assert [text for text in inside if not accepts(tried, text)] == []
        assert [text for text in outside if accepts(tried, text)] == []


def test_a_compact_answer_has_at_most_eight_tokens():
    for text in answers(OBJECT | {"additionalProperties": False}, random.Random(1), 20):
        assert text == '{"a":1}'
        assert len(TOKENIZER.tokenize_str(text)) <= 8


@pytest.mark.parametrize("pattern", ["x*", "[^a]", "[a-z]", r"\w", " |,", "(?i: )", 5, r"\S", "."])
def test_whitespace_of_other_characters_is_refused(pattern):
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": pattern}}
    with pytest.raises(InputError, match="whitespace_pattern must be"):
        compile_schema(TOKENIZER, json.dumps(schema))
