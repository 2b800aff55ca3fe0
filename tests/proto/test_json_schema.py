import pytest

from baton.proto.errors import InputError
from baton.proto.json_schema import check_json_schema, json_schema_text
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
