"""``/openapi.json`` describes the routes and bodies that the gateway has."""

import json

import jsonschema
import pytest

from baton.gateway.app import ROUTES
from baton.gateway.bodies import BodyReader
from baton.gateway.errors import ParameterError
from baton.gateway.field_rules import REFUSED
from baton.gateway.openapi import BODIES, document

DOCUMENT = json.loads(json.dumps(document(ROUTES)))
SCHEMAS = DOCUMENT["components"]["schemas"]


def test_every_route_is_described():
    described = {(path, method) for path, one in DOCUMENT["paths"].items() for method in one}
    wanted = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in ROUTES
        for method in route.methods - {"HEAD"}
    }
    assert described == wanted
    names = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_field_is_described(path):
    kind = BODIES[path]
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": f"#/components/schemas/{kind.__name__}"}
    schema = SCHEMAS[kind.__name__]
    assert set(schema["properties"]) == set(kind.__struct_fields__)
    assert "additionalProperties" not in schema  # unknown fields are ignored, with a warning
    for name in REFUSED.keys() & schema["properties"].keys():
        assert schema["properties"][name]["enum"] == [None, *REFUSED[name][0]], name


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 17}, {"foo": 1}, {"best_of": 2}, {"best_of": 1}, {"stop": [1]}, {"stop": "x"},
     {"prompt": [[1], [2]]}, {"prompt": [-1]}, {"suffix": "x"}, {"stream_options": {"x": 1}}],
    ids=str,
)  # fmt: skip
def test_the_description_accepts_what_the_reader_accepts(fields):
    body, whole = {"prompt": "x", **fields}, {**SCHEMAS["CompletionBody"], "components": {}}
    whole["components"] = {"schemas": SCHEMAS}
    try:
        BodyReader(BODIES["/v1/completions"]).read(json.dumps(body).encode())
        accepted = True
    except ParameterError:
        accepted = False
    assert jsonschema.Draft202012Validator(whole).is_valid(body) is accepted
