"""``GET /`` leads a browser to the dashboard, and a program to the addresses."""

from __future__ import annotations

import json

import pytest
from tests.gateway.test_keys import answer_of

from baton.gateway.app import make_app
from baton.gateway.served import Served
from baton.runtime.keys.api_keys import digest_of

PAGE = (b"accept", b"text/html,application/xhtml+xml,*/*;q=0.8")


def test_the_root_names_the_routes():
    app = make_app(Served(None))  # type: ignore[arg-type]
    for accept in ((b"accept", b"*/*"), (b"accept", b"application/json"), (b"x", b"text/html")):
        status, body = answer_of(app, "GET", "/", None, accept)
        assert (status, json.loads(body)["dashboard"]) == (200, "/dashboard")


@pytest.mark.parametrize("digests", [[], [digest_of("key")]])
def test_a_browser_is_led_to_the_dashboard(digests):
    """Without a key too: the dashboard then asks the browser for it."""
    app = make_app(Served(None), digests)  # type: ignore[arg-type]
    assert answer_of(app, "GET", "/", None, PAGE) == (307, b"")
