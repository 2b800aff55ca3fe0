"""The gateway's ``/dashboard``: its page, its events and its keys, and in a real browser."""

import base64
import http.client
import json
import os
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.client import Client
from baton.proto.errors import DeadlineExceeded
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
    sampled = wait_until(
        lambda: first_event(gateway)["history"]["columns"]["requests_per_s"], what="a sample"
    )
    assert len(first_event(gateway)["history"]["columns"]["ttft_p50_s"]) >= len(sampled)


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


@contextmanager
def traffic(gateway: Gateway, per_second: float):
    """Short requests at a rate, while the block runs."""
    over, workers = threading.Event(), 4

    def send() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            gateway.post("/v1/completions", prompt="Once", max_tokens=2, ignore_eos=True)
            due = max(due + workers / per_second, time.monotonic())

    threads = [threading.Thread(target=send) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def browser(tmp_path, gateway):
    found = Chromium(tmp_path)
    try:
        yield found
        assert [one for one in found.problems if "favicon" not in one] == []
    finally:
        found.end()


def show(browser: Chromium, gateway: Gateway) -> None:
    """Open the page and wait for its first rows."""
    browser.open(f"http://127.0.0.1:{gateway.port}/dashboard")
    wait_until(lambda: browser.run(ROWS) >= 2, what="requests on the page")


def keep_screenshot(browser: Chromium, name: str) -> None:
    """Write a screenshot into the folder BATON_SCREENSHOTS, if it is set."""
    if folder := os.environ.get("BATON_SCREENSHOTS"):
        browser.screenshot(Path(folder) / name)


ROWS = "document.querySelectorAll('#requests tr.request').length"
OPENED = "[...document.querySelectorAll('tr[aria-expanded=true]')].map(x => x.dataset.request)"
NEW = "document.getElementById('new').hidden ? '' : document.getElementById('new').textContent"


@pytest.mark.long
def test_a_browser_shows_live_numbers_and_opens_a_request(gateway, browser):
    """BATON_SCREENSHOTS=FOLDER keeps the screenshots."""
    gateway.post("/v1/completions", **COMPLETION)
    hostile = "<img src=x onerror=document.title='x'>"
    gateway.ask("POST", "/v1/completions", COMPLETION, {"X-Request-Id": hostile})
    newest = "document.querySelector('#requests tr.request').dataset.request"
    curve = "document.querySelector('#tokens .curve').getAttribute('d')"
    names = (
        "[...document.querySelectorAll('.story div > span:first-child')].map(x => x.textContent)"
    )
    boxes = "[...document.querySelectorAll('[data-worker]')].map(x => x.dataset.worker)"
    body = "getComputedStyle(document.body).backgroundColor"
    for scheme, color in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(17, 19, 21)")):
        browser.prefer(scheme)
        show(browser, gateway)
        before = browser.run(newest)  # the page may have all the rows that it shows already
        gateway.stream("/v1/completions", **COMPLETION)
        wait_until(lambda old=before: browser.run(newest) != old, what="the next request")
        assert browser.run("document.querySelectorAll('#workers tr').length") == 3
        assert browser.run(boxes) == ["prefill-0", "decode-0", "decode-1"]
        assert browser.run("document.getElementById('state').textContent") == "live"
        browser.run("document.querySelector('#requests tr.request').click()")
        steps = ["queue", "prefill", "transfer", "decode"]  # the handoff's report may be late
        wait_until(lambda wanted=steps: browser.run(names) == wanted, what="the timeline")
        wait_until(lambda: browser.run(curve), what="a curve")
        keep_screenshot(browser, f"dashboard-{scheme}.png")
        assert browser.run(body) == color
    assert browser.run("document.title") == "Baton"
    assert browser.run("document.querySelectorAll('main img').length") == 0
    assert "<img src=x" in browser.run("document.getElementById('requests').textContent")


@pytest.mark.long
def test_no_click_is_lost_and_an_opened_request_stays(gateway, browser):
    """Under 20 requests per second, which replace all rows within three seconds."""
    gateway.post("/v1/completions", **COMPLETION)
    gateway.post("/v1/completions", **COMPLETION)
    show(browser, gateway)
    with traffic(gateway, 20):
        wait_until(lambda: browser.run(ROWS) == 50, what="a full list")
        clicked = []
        for number in range(20):
            row = f"document.querySelectorAll('#requests tr.request')[{number % 7}]"
            browser.run(f"{row}.scrollIntoView({{block: 'center'}})")
            x, y = browser.run(
                f"(b => [b.x + 20, b.y + b.height / 2])({row}.getBoundingClientRect())"
            )
            browser.mouse("mouseMoved", x, y)
            under = f"document.elementFromPoint({x}, {y}).closest('tr.request').dataset.request"
            key = browser.run(under)
            browser.mouse("mousePressed", x, y)
            time.sleep(0.1)  # as long as a finger takes; rows must not move meanwhile
            browser.mouse("mouseReleased", x, y)
            wait_until(lambda key=key: key in browser.run(OPENED), what=f"click {number}")
            clicked.append(key)
            if number < 19:
                browser.mouse("mousePressed", x, y)
                browser.mouse("mouseReleased", x, y)
                wait_until(lambda key=key: key not in browser.run(OPENED), what="it to close")
                browser.mouse("mouseMoved", 5, 5)
        browser.mouse("mouseMoved", 5, 5)
        wait_until(lambda: int((browser.run(NEW) or "0").split()[0]) >= 60, what="60 new requests")
        assert browser.run(OPENED) == clicked[-1:]
        keep_screenshot(browser, "dashboard-open.png")
    first = "document.querySelector('#requests tr.request').dataset.request"
    before = browser.run(first)
    browser.run("document.getElementById('new').click()")
    wait_until(lambda: browser.run(first) != before, what="the newer requests")
    assert browser.run(OPENED) == clicked[-1:]


@pytest.mark.long
def test_the_list_stands_still_under_the_pointer_alone(gateway, browser):
    gateway.post("/v1/completions", **COMPLETION)
    gateway.post("/v1/completions", **COMPLETION)
    show(browser, gateway)
    row = "document.querySelector('#requests tr.request')"
    browser.run(f"{row}.scrollIntoView({{block: 'center'}})")
    x, y = browser.run(f"(b => [b.x + 20, b.y + b.height / 2])({row}.getBoundingClientRect())")
    browser.mouse("mouseMoved", x, y)
    before = browser.run(f"{row}.dataset.request")
    with traffic(gateway, 20):
        wait_until(lambda: browser.run(NEW) != "", what="new requests")
        assert browser.run(f"{row}.dataset.request") == before
        browser.mouse("mouseMoved", 5, 5)
        wait_until(
            lambda: browser.run(f"{row}.dataset.request") != before, what="the list to go on"
        )


@pytest.mark.long
def test_the_failed_tile_leads_to_the_failed_requests(pools, gateway, browser):
    with Client(pools.address, connect_timeout=20) as client:
        slow = SamplingParams(max_new_tokens=400, ignore_eos=True)
        with pytest.raises(DeadlineExceeded):
            list(client.generate([5, 6, 7], slow, deadline=0.01, request_id="too-slow"))
    for _ in range(55):
        gateway.post("/v1/completions", prompt="Once", max_tokens=1)
    show(browser, gateway)
    text = "document.getElementById('requests').textContent"
    wait_until(lambda: "finished" in browser.run(text), what="the requests")
    assert "too-slow" not in browser.run(text)
    browser.run("document.querySelector('[data-filter=failed]').click()")
    wait_until(lambda: "too-slow" in browser.run(text), what="the failed request")
    assert "finished" not in browser.run(text)
    keep_screenshot(browser, "dashboard-failed.png")
    browser.run("document.getElementById('all').click()")
    wait_until(lambda: "finished" in browser.run(text), what="all requests again")


MANY_WORKERS = """(() => {
  source.close();
  const [prefill, decode] = ["prefill", "decode"].map(
    role => latest.workers.find(one => one.role === role));
  const states = ["ready", "suspect", "draining", "dead"];
  const pool = Array.from({length: COUNT}, (_, i) =>
    ({...decode, id: `decode-${i}`, incarnation: i, state: states[i % 4], kv_blocks_used: 99}));
  show({...latest, workers: [prefill, ...pool]});
})()"""
BOXES = """[...document.querySelectorAll("[data-worker]")].map(node => {
  const box = node.getBoundingClientRect(), all = byId("flow").getBoundingClientRect();
  const inside = (one, other) => one.left >= other.left && one.right <= other.right &&
    one.top >= other.top && one.bottom <= other.bottom;
  const texts = [...document.querySelectorAll("#flow text")].map(x => x.getBoundingClientRect());
  const starts = texts.filter(one => one.left > box.left && one.left < box.right &&
    one.top > box.top - 9 && one.top < box.bottom);
  const fits = inside(box, all) && starts.every(one => one.right <= box.right);
  return [node.dataset.state, fits, box.left, box.top];
})"""


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4, 16, 32, 64])
def test_the_picture_has_a_box_with_a_state_for_each_worker(gateway, browser, count):
    gateway.post("/v1/completions", **COMPLETION)
    gateway.post("/v1/completions", **COMPLETION)
    for width in (1400, 390):
        browser.resize(width, 900)
        show(browser, gateway)
        browser.run(MANY_WORKERS.replace("COUNT", str(count)))
        boxes = browser.run(BOXES)
        states = ["ready", "suspect", "draining", "restarting"] * 16
        assert [state for state, *_ in boxes] == ["ready", *states[:count]]
        assert all(fits for _, fits, *_ in boxes)
        assert len({tuple(place) for _, _, *place in boxes}) == count + 1
        keep_screenshot(browser, f"dashboard-{count}-{width}.png")


@pytest.mark.long
def test_on_a_phone_the_list_is_short_and_fits(gateway, browser):
    gateway.post("/v1/completions", **COMPLETION)
    gateway.post("/v1/completions", **COMPLETION)
    browser.resize(390, 844)
    show(browser, gateway)
    cells = (
        "[...document.querySelector('#requests tr.request').cells]"
        ".filter(x => x.offsetWidth).map(x => x.textContent)"
    )
    when, task, state, tokens, duration = browser.run(cells)
    assert (len(when), task, state) == (8, "generate", "finished")
    assert tokens.endswith("→ 40")
    assert float(duration.replace(",", "")) > 0
    assert browser.run("document.documentElement.scrollWidth") <= 390
    too_wide = "[...document.querySelectorAll('.card')].filter(x => x.scrollWidth > x.clientWidth)"
    assert browser.run(f"{too_wide}.map(x => x.textContent)") == []
    keep_screenshot(browser, "dashboard-phone.png")
