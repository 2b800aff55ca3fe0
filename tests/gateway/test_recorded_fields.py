"""Fields that real clients send, beside the tables of ``docs/http.md``.

``tests/cluster/test_recorded_clients.py`` compares the warnings of the answers with the tables.
"""

from pathlib import Path

import pytest

from baton.gateway.field_rules import IGNORED, RECORDS, REFUSED
from baton.gateway.images_route import IMAGES_IGNORED, IMAGES_REFUSED
from baton.gateway.responses_bodies import RESPONSES_IGNORED, RESPONSES_REFUSED

from ..clients.conformance import Row, ignored_in, rows_of
from ..clients.recorder import body_of, read_recording

FOLDER = Path(__file__).resolve().parents[1] / "data" / "http"
RECORDINGS = sorted(FOLDER.rglob("*.http"))
NOT_OF_AN_API = {"foo"}  # openai_python.py sends it to see the warning


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_each_field_that_a_client_sends_is_in_a_table(path):
    seen = 0
    for status, request in read_recording(path):
        method, route, _ = request.partition(b"\r\n")[0].decode().split(" ")
        rows = rows_of(route)
        if method != "POST" or rows is None:
            continue
        body = body_of(request)
        assert set(body) - set(rows) <= NOT_OF_AN_API, (route, set(body) - set(rows))
        if status == 200:
            ignored_in(route, body)
        seen += 1
    assert seen


@pytest.mark.parametrize(
    ("route", "kind", "rules"),
    [
        ("/v1/completions", "refused", REFUSED),
        ("/v1/completions", "ignored", IGNORED),
        ("/v1/responses", "refused", RESPONSES_REFUSED),
        ("/v1/responses", "ignored", RESPONSES_IGNORED),
        ("/v1/images/generations", "refused", IMAGES_REFUSED),
        ("/v1/images/generations", "ignored", IMAGES_IGNORED),
    ],
)
def test_the_tables_have_the_values_that_the_rules_accept(route, kind, rules):
    rows = rows_of(route)
    for name, (neutral, _) in rules.items():
        wanted = [None, *(one for one in neutral if one is not None)]
        assert rows[name].kind == kind, name
        assert all(one in rows[name].neutral for one in wanted), (name, rows[name], wanted)


def test_an_unknown_field_is_one_that_warnings_must_name():
    rows = rows_of("/v1/chat/completions")
    assert rows["user"] == Row("ignored", [None]) and set(RECORDS) <= set(rows)
    body = {"foo": 1, "store": False, "user": "x", "seed": 5, "suffix": ""}
    assert ignored_in("/v1/chat/completions", body) == {"foo", "user"}
    with pytest.raises(AssertionError, match="suffix"):
        ignored_in("/v1/chat/completions", {"suffix": "x"})
