"""The gateway's ``/dashboard``: its page, its events and its keys, and in a real browser."""

import base64
import http.client
import json
import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from baton.client import Client
from baton.proto.sampling import SamplingParams

from .chromium import Chromium
from .conftest import wait_until
from .http import Gateway

pytestmark = pytest.mark.cluster
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def pools(lasting_cluster):
    return lasting_cluster(prefill=1, decode=2)


@pytest.fixture(scope="module")
def keyed(pools, tmp_path_factory):
    one = Gateway(pools, tmp_path_factory.mktemp("k"), BATON_API_KEY=KEY).wait_ready()
    yield one
    assert one.end() == 0, one.text()


def get(gateway: Gateway, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = gateway.connection()
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def first_event(gateway: Gateway, **headers: str) -> dict:
    with closing(get(gateway, "/dashboard/events", **headers)) as response:
        assert response.status == 200
        line = response.readline()
    assert line.startswith(b"data: ")
    return json.loads(line[6:])


def test_the_page_names_no_other_resource(gateway):
    with closing(get(gateway, "/dashboard")) as response:
        page = response.read().decode()
        assert response.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert " src=" not in page
    assert "<link" not in page


def test_the_events_have_workers_and_the_last_requests(gateway):
    gateway.post("/v1/completions", **COMPLETION)
    event = wait_until(
        lambda: (found := first_event(gateway))["requests"] and found, what="the request"
    )
    assert {worker["role"] for worker in event["workers"]} == {"prefill", "decode"}
    assert event["router"]["requests"]["finished"] >= 1
    assert event["requests"][-1]["attempts"]


def test_several_viewers_share_the_events_and_may_leave(gateway):
    streams = [get(gateway, "/dashboard/events") for _ in range(3)]
    assert all(stream.readline().startswith(b"data: ") for stream in streams)
    for stream in streams:
        stream.close()
    assert first_event(gateway)["workers"]


def test_the_dashboard_shows_all_routers(start_cluster, tmp_path):
    """The requests of both count, though the gateway sends its own to one."""
    with tempfile.TemporaryDirectory(prefix="baton-") as sockets:  # short paths
        address = f"ipc://{sockets}/a.sock,ipc://{sockets}/b.sock"
        several = start_cluster(prefill=1, decode=1, routers=2, address=address).wait_ready()
        gateway = Gateway(several, tmp_path).wait_ready()
        for one in address.split(","):
            with Client(one, connect_timeout=20) as client:
                list(client.generate([5, 6, 7], SamplingParams(max_new_tokens=2)))

        def both() -> dict:
            event = first_event(gateway)
            return event if event["router"]["requests"]["finished"] == 2 else {}

        found = wait_until(both, what="the requests of both routers")
        assert found["router"]["name"] == "router-0, router-1"
        assert len(found["workers"]) == 2
        assert gateway.end() == 0, gateway.text()
        several.end_clean()


def test_with_keys_the_page_and_its_events_need_one(keyed):
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    wrong = base64.b64encode(b"any:wrong").decode()
    for path in ("/dashboard", "/dashboard/events"):
        for headers in ({}, {"Authorization": f"Basic {wrong}"}, {"Authorization": "Basic ?"}):
            with closing(get(keyed, path, **headers)) as response:
                assert response.status == 401
                assert response.headers["www-authenticate"].startswith("Basic ")
    with closing(get(keyed, "/dashboard", Authorization=f"Basic {basic}")) as response:
        assert response.status == 200
    assert first_event(keyed, Authorization=f"Bearer {KEY}")["workers"]
    with closing(get(keyed, "/v1/models", Authorization=f"Basic {basic}")) as response:
        assert response.status == 401  # only the page is for browsers
        assert "www-authenticate" not in response.headers


@pytest.mark.long
def test_a_browser_shows_live_numbers_and_opens_a_request(gateway, tmp_path):
    """BATON_SCREENSHOTS=FOLDER keeps the screenshots."""
    folder = Path(os.environ.get("BATON_SCREENSHOTS", tmp_path))
    gateway.post("/v1/completions", **COMPLETION)
    hostile = "<img src=x onerror=document.title='x'>"
    gateway.ask("POST", "/v1/completions", COMPLETION, {"X-Request-Id": hostile})
    browser = Chromium(tmp_path)
    rows = "document.querySelectorAll('#requests tr.request').length"
    newest = "document.querySelector('#requests tr.request').dataset.request"
    points = "document.querySelector('#tokens polyline').getAttribute('points')"
    names = (
        "[...document.querySelectorAll('.story div > span:first-child')].map(x => x.textContent)"
    )
    body = "getComputedStyle(document.body).backgroundColor"
    try:
        for scheme, color in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(17, 19, 21)")):
            browser.prefer(scheme)
            browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
            wait_until(lambda: browser.run(rows) >= 2, what="requests on the page")
            before = browser.run(newest)  # the page may have all the rows that it shows already
            gateway.stream("/v1/completions", **COMPLETION)
            wait_until(lambda old=before: browser.run(newest) != old, what="the next request")
            assert browser.run("document.querySelectorAll('#workers tr').length") == 3
            assert browser.run("document.getElementById('state').textContent") == "live"
            browser.run("document.querySelector('#requests tr.request').click()")
            steps = ["queue", "prefill", "transfer", "decode"]  # the handoff's report may be late
            wait_until(lambda wanted=steps: browser.run(names) == wanted, what="the timeline")
            wait_until(lambda: len(browser.run(points).split()) >= 3, what="a curve")
            browser.screenshot(folder / f"dashboard-{scheme}.png")
            assert browser.run(body) == color
        assert browser.run("document.title") == "Baton"
        assert browser.run("document.querySelectorAll('main img').length") == 0
        assert "<img src=x" in browser.run("document.getElementById('requests').textContent")
        assert [one for one in browser.problems if "favicon" not in one] == []
    finally:
        browser.end()
