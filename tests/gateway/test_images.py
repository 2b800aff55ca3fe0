"""Images in chat requests: parts of messages, data URLs, and fetches from allowed hosts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request

from baton.client.options import BATCH_RETRIES
from baton.gateway import image_fetch
from baton.gateway.errors import GatewayBusy, ParameterError, error_json, status_of
from baton.gateway.image_fetch import (
    MAX_FETCHES,
    ImageFetcher,
    ImageHostRefused,
    ImageNotFetched,
    _is_public,
    _same_host,
    parse_hosts,
)
from baton.gateway.messages import ImageUrl, Unknown, messages_of
from baton.gateway.served import Served
from baton.gateway.text_routes import chat
from baton.proto.errors import CapacityError, ConfigError, InputError
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults

CONTENT = b"\x89PNG" + bytes(5000)
URL = "data:image/png;base64," + base64.b64encode(CONTENT).decode()


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def image(url=URL, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


TEXT = {"type": "text", "text": "What?"}


class TestMessages:
    def test_images_keep_their_place_among_texts(self):
        urls = []
        found = messages_of(user(image("a"), TEXT, image("b", detail="auto")), urls)
        assert found[0]["content"] == [{"type": "image"}, TEXT, {"type": "image"}]
        assert urls == [
            ("messages[0].content[0].image_url.url", "a", 0),
            ("messages[0].content[2].image_url.url", "b", 0),
        ]

    def test_contents_without_images_stay_text(self):
        assert messages_of(user(TEXT, TEXT), [])[0]["content"] == "What?\nWhat?"

    def test_a_url_may_be_text(self):
        urls = []
        messages_of(user({"type": "image_url", "image_url": "a"}), urls)
        assert [one.url for one in urls] == ["a"]

    def test_low_detail_limits_the_sides(self):
        urls = []
        parts = [image("a", detail=one) for one in ("low", "high", "auto", None)]
        messages_of(user(*parts), urls)
        assert [one.max_side for one in urls] == [512, 0, 0, 0]

    @pytest.mark.parametrize(
        ("part", "parameter"),
        [
            ({"type": "image_url"}, "messages[0].content[0].image_url.url"),
            (image(5), "messages[0].content[0].image_url.url"),
            (image("a", detail="lowest"), "messages[0].content[0].image_url.detail"),
            (image("a", size=4), "messages[0].content[0].image_url.size"),
        ],
    )  # fmt: skip
    def test_wrong_parts(self, part, parameter):
        with pytest.raises(ParameterError) as caught:
            messages_of(user(part), [], Unknown(strict=True))
        assert caught.value.parameter == parameter

    def test_unknown_members_of_parts_are_named(self):
        unknown, urls = Unknown(), []
        parts = [{**image("a", size=4), "id": 1}, {**TEXT, "cache_control": {}}]
        assert messages_of(user(*parts), urls, unknown) == messages_of(user(image("a"), TEXT), [])
        assert [one.partition(" ")[0] for one in unknown.warnings] == [
            "messages[0].content[0].id", "messages[0].content[1].cache_control",
            "messages[0].content[0].image_url.size",
        ]  # fmt: skip

    def test_other_parts_and_routes_without_images_refuse_as_before(self):
        for urls, part in (([], {"type": "input_audio"}), (None, image())):
            with pytest.raises(ParameterError, match="parts of type text"):
                messages_of(user(part), urls)


# --------------------------------------------------------------------------- served


SEER = SimpleNamespace(takes_images=True)


def images(*urls, model=SEER, fetcher=None):
    served = Served(None, fetcher=fetcher)
    served._known = ("seer",)
    named = [ImageUrl(f"at[{at}]", url) for at, url in enumerate(urls)]
    return [one.content for one in asyncio.run(served.images(model, named))]


def test_data_urls():
    assert images(URL, URL) == [CONTENT, CONTENT]


@pytest.mark.parametrize(
    "url", ["data:", "data:,", "data:image/png,abc", "data:image/png;base64,?", "ftp://a/b", "",
            "//a/b", "/etc/passwd", "file:///etc/passwd", "https://", "https://a b/c",
            "http://[::1", "http://a:99999/", "http://u:p@a/", "https://é/", "http://a/\n"],
)  # fmt: skip
def test_wrong_urls_name_their_place(url):
    with pytest.raises(ParameterError, match=r"at\[0\]") as caught:
        images(url, fetcher=ImageFetcher(["a"]))
    assert caught.value.parameter == "at[0]"
    assert status_of(caught.value) == 400


class Refused(Exception):
    pass


@pytest.mark.parametrize("number", [1, 3])
def test_several_answers_share_the_images_of_a_request(number):
    asked, retries = [], []

    class Cluster:
        async def model(self):
            description, card = SimpleNamespace(folder="/seer"), SimpleNamespace(name="seer")
            return SimpleNamespace(
                takes_images=True,
                description=description,
                card=card,
                check_generates=lambda: None,
                is_quick=lambda _: False,
                defaults=SamplingParamsGenerationConfigDefaults(),
            )

        def begin(self, tokens, params, options):
            asked.append(options["images"])
            retries.append(options.get("max_retries"))
            if len(asked) == number:
                raise Refused

    plan = SimpleNamespace(tokens=[1], constraint={}, new_reader=None)
    served = Served(Cluster(), planner=SimpleNamespace(plan=lambda *_, **__: plan))
    body = {"messages": user(image(), TEXT), "n": number}
    message = {"type": "http.request", "body": json.dumps(body).encode()}

    async def receive():
        return message

    app = SimpleNamespace(served=served)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "app": app}
    with pytest.raises(Refused):
        asyncio.run(chat(Request(scope, receive)))
    assert retries == [None, *[BATCH_RETRIES] * (number - 1)]  # a full cluster refuses the first
    decoded = []

    def prepare(one):
        decoded.append(one.content)
        return object()

    prepared = [one.prepared(prepare) if number > 1 else prepare(one) for (one,) in asked]
    assert len(prepared) == number and len(set(map(id, prepared))) == 1
    assert decoded == [CONTENT]


def test_a_text_model_fetches_nothing():
    with pytest.raises(ParameterError, match="takes no images"):
        images("http://a/b", model=SimpleNamespace(takes_images=False))


def test_too_many_images():
    with pytest.raises(ParameterError, match="61 images, at most 60"):
        images(*[URL] * 61)


def test_without_hosts_nothing_is_fetched():
    for fetcher in (None, ImageFetcher(())):
        with pytest.raises(ImageHostRefused, match="fetches no images") as caught:
            images("https://example.com/a.png", fetcher=fetcher)
        assert status_of(caught.value) == 400
        assert b"image_host_refused" in error_json(caught.value)


# --------------------------------------------------------------------------- fetches


def reply(body=CONTENT, status="200 OK", head=""):
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{head}\r\n".encode() + body


CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
)  # fmt: skip
REPLIES = {
    "/plain": reply(),
    "/chunked": CHUNKED,
    "/until-close": b"HTTP/1.1 200 OK\r\n\r\n" + CONTENT,
    "/query?a=1": reply(b"query"),
    "/near": reply(b"", "302 Found", "location: /plain\r\n"),
    "/spaces": reply(b"", "302 Found", "location:  /plain \t\r\n"),
    "/cut-with-spaces": reply()[:-10].replace(b"\r\n\r\n", b" \r\n\r\n", 1),
    "/loop": reply(b"", "307 Temporary Redirect", "location: /loop\r\n"),
    "/far": reply(b"", "302 Found", "location: http://example.com/\r\n"),
    "/inside": reply(b"", "302 Found", "location: http://169.254.169.254/\r\n"),
    "/file": reply(b"", "302 Found", "location: file:///etc/passwd\r\n"),
    "/missing": reply(b"", "404 Not Found"),
    "/truncated": reply()[:-10],
    "/truncated-chunk": CHUNKED[:-100],
    "/nothing": b"",
    "/garbage": b"\0\1\2\3 not http\r\n\r\n",
    "/announced": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
    "/endless": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(300_000),
    "/headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
    "/trailers": CHUNKED[:-2] + b"x: y\r\n" * 20_000,
    "/trailing-location": CHUNKED[:-2] + b"location: /missing\r\n\r\n",
    "/second-answer": reply() + reply(b"", "302 Found", "location: /missing\r\n"),
    "/hints": b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + reply(),
    "/silent": None,
}


async def serve(reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    content = REPLIES[head.split()[1].decode()]
    if content is None:
        await reader.read()
    else:
        writer.write(content)
    writer.close()


def fetched(path, hosts=("127.0.0.1",), host="127.0.0.1", **options):
    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            fetcher = ImageFetcher(hosts, **options)
            return await fetcher.fetch(f"http://{host}:{port}{path}", 100_000)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "path",
    [
        "/plain",
        "/chunked",
        "/until-close",
        "/near",
        "/spaces",
        "/trailing-location",
        "/second-answer",
        "/hints",
    ],
)
def test_an_image_of_an_allowed_host(path):
    assert fetched(path) == CONTENT


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_https_checks_the_certificate_of_the_host(tmp_path):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)

    async def run(trusted):
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side)
        port = server.sockets[0].getsockname()[1]
        async with server:
            fetcher = ImageFetcher(["127.0.0.1"], tls=trusted)
            return await fetcher.fetch(f"https://127.0.0.1:{port}/plain")

    assert asyncio.run(run(ssl.create_default_context(cafile=certificate))) == CONTENT
    with pytest.raises(ImageNotFetched, match="certificate"):
        asyncio.run(run(None))


def test_the_query_is_sent():
    assert fetched("/query?a=1") == b"query"


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/far", ImageHostRefused, "example.com"),
        ("/inside", ImageHostRefused, "169.254.169.254"),
        ("/file", InputError, "must be data:, http: or https:"),
        ("/loop", ImageNotFetched, "redirects more than 3 times"),
        ("/missing", ImageNotFetched, "status 404"),
        ("/truncated", ImageNotFetched, "closed the connection"),
        ("/cut-with-spaces", ImageNotFetched, "closed the connection"),
        ("/truncated-chunk", ImageNotFetched, "closed the connection"),
        ("/nothing", ImageNotFetched, "closed the connection"),
        ("/garbage", ImageNotFetched, "127.0.0.1"),
        ("/announced", ImageNotFetched, "more than 100000 bytes"),
        ("/endless", ImageNotFetched, "more than 100000 bytes"),
        ("/headers", ImageNotFetched, "too many headers"),
        ("/trailers", ImageNotFetched, "too many trailers"),
    ],
)
def test_what_a_host_may_not_do(path, kind, message):
    with pytest.raises(kind, match=message):
        fetched(path)


def test_a_redirect_between_allowed_hosts_is_refused():
    with pytest.raises(ImageHostRefused, match="redirects to another host"):
        fetched("/inside", hosts=("127.0.0.1", "169.254.0.0/16"))


def test_a_silent_host_times_out():
    with pytest.raises(ImageNotFetched, match=r"no image within 0\.2 s"):
        fetched("/silent", timeout=0.2)


def test_slow_hosts_leave_room_for_others_and_a_wait_is_no_failed_fetch():
    """Twice as many fetches of a silent host as run at a time; another host, then the first."""

    async def run() -> None:
        answers = False

        async def silent(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            if answers:
                writer.write(reply())
            else:
                await reader.read()
            writer.close()

        slow = await asyncio.start_server(silent, "127.0.0.1", 0)
        fast = await asyncio.start_server(serve, "127.0.0.1", 0)
        slow_port, fast_port = (one.sockets[0].getsockname()[1] for one in (slow, fast))
        async with slow, fast:
            fetcher = ImageFetcher(["127.0.0.1"], timeout=1.0)
            waiting = [
                asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{slow_port}/x"))
                for _ in range(2 * image_fetch.MAX_FETCHES)
            ]
            await asyncio.sleep(0)
            assert await fetcher.fetch(f"http://127.0.0.1:{fast_port}/plain") == CONTENT
            assert not any(one.done() and one.exception() is None for one in waiting)
            done = await asyncio.gather(*waiting, return_exceptions=True)
            kinds = {type(one) for one in done}
            assert kinds <= {ImageNotFetched, GatewayBusy}
            assert sum(type(one) is GatewayBusy for one in done) >= image_fetch.MAX_FETCHES
            answers = True
            assert await fetcher.fetch(f"http://127.0.0.1:{slow_port}/x") == CONTENT
            assert fetcher._hosts == {}

    asyncio.run(run())


def test_the_time_of_a_fetch_begins_when_it_has_a_slot(monkeypatch):
    monkeypatch.setattr(image_fetch, "MAX_HOST_FETCHES", 1)

    async def run() -> None:
        async def late(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.6)
            writer.write(reply())
            writer.close()

        server = await asyncio.start_server(late, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            fetcher = ImageFetcher(["127.0.0.1"], timeout=1.0)
            url = f"http://127.0.0.1:{port}/x"
            assert await asyncio.gather(fetcher.fetch(url), fetcher.fetch(url)) == [CONTENT] * 2

    asyncio.run(run())


@pytest.fixture
def little_room(monkeypatch):
    """Fetched images of all requests have room for two, and a bit."""
    monkeypatch.setattr(image_fetch, "MAX_FETCHED_BYTES", 2 * len(CONTENT) + 100)


def test_fetched_images_are_limited_together(little_room):
    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        served = Served(None, fetcher=ImageFetcher(["127.0.0.1"]))
        served._known = ("seer",)

        def fetch(*paths):
            named = [ImageUrl("at", f"http://127.0.0.1:{port}{path}", 512) for path in paths]
            return served.images(SEER, named)

        async with server:
            held = await fetch("/plain", "/near")
            assert [(one.content, one.max_side) for one in held] == [(CONTENT, 512)] * 2
            assert served.fetcher.held_bytes == 2 * len(CONTENT)
            with pytest.raises(CapacityError, match="fetched images") as caught:
                await fetch("/plain")
            assert status_of(caught.value) == 429
            del caught
            assert served.fetcher.held_bytes == 2 * len(CONTENT)
            held.pop()
            with pytest.raises(CapacityError):
                await fetch("/plain", "/plain")  # the first of them is freed too
            assert served.fetcher.held_bytes == len(CONTENT)
            held += await fetch("/chunked")
            held.clear()
            for path in ("/truncated", "/garbage", "/missing", "/loop"):
                with pytest.raises(ImageNotFetched):
                    await fetch("/plain", path)
            assert served.fetcher.held_bytes == 0

    asyncio.run(run())


def test_a_fetch_that_gets_no_slot_in_time_is_refused_as_busy():
    async def run():
        fetcher = ImageFetcher(["127.0.0.1"], timeout=0.2)
        for _ in range(MAX_FETCHES):
            await fetcher._room.acquire()
        with pytest.raises(GatewayBusy, match=r"no room .* within 0\.2 s") as caught:
            await fetcher.fetch("http://127.0.0.1:9/")
        assert (status_of(caught.value), fetcher._hosts) == (429, {})

    asyncio.run(run())


def test_a_closed_port_looks_like_any_other_failure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ImageNotFetched) as caught:
        asyncio.run(ImageFetcher(["127.0.0.1"]).fetch(f"http://127.0.0.1:{port}/"))
    assert str(caught.value) == "127.0.0.1 cannot be reached"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [("http://h/", "https://h/", True), ("http://h/", "http://h:80/a", True),
     ("https://h/", "http://h/", False), ("http://h/", "http://h:81/", False),
     ("http://h:81/", "https://h/", False), ("http://h/", "http://i/", False)],
)  # fmt: skip
def test_redirects_that_stay_at_their_host(before, after, same):
    assert _same_host(urlsplit(before), urlsplit(after)) == same


@pytest.mark.parametrize("address", [
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:a9fe:a9fe::1", "::10.0.0.1", "fec0::1",
    "168.63.129.16", "192.0.0.192", "169.254.169.254", "10.0.0.1", "::1", "224.0.0.1",
])  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not _is_public(ipaddress.ip_address(address))
    assert _is_public(ipaddress.ip_address("2a00:1450:4001:81b::200e"))


def test_a_name_at_a_private_address_needs_that_address_too():
    with pytest.raises(ImageHostRefused, match="private address"):
        fetched("/plain", hosts=("localhost",), host="localhost")
    both = ("localhost", "127.0.0.0/8", "::1")
    assert fetched("/plain", hosts=("localhost,127.0.0.1",), host="127.0.0.1") == CONTENT
    assert fetched("/chunked", hosts=both, host="127.0.0.1") == CONTENT


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://10.0.0.1/",
     "http://a.example.com/", "http://example.com.evil/", "http://2130706433/", "http://0/"],
)  # fmt: skip
def test_hosts_that_are_not_in_the_list(url):
    with pytest.raises(ImageHostRefused):
        ImageFetcher(["example.com"]).check(url)


def test_hosts_in_the_list():
    fetcher = ImageFetcher(["Example.com, 10.0.0.0/8", "::1"])
    for url in ("https://EXAMPLE.com/a", "http://10.9.8.7/", "http://[::1]:80/"):
        fetcher.check(url)


@pytest.mark.parametrize("entry", ["http://a", "a/b", "10.0.0.1/8", "*", "-a", "999.1.1.1", "a:80"])
def test_entries_that_are_no_hosts(entry):
    with pytest.raises(ConfigError, match="image hosts"):
        parse_hosts([entry])


def test_a_cancelled_fetch_closes_its_connection():
    async def run():
        closed = asyncio.Event()

        async def hold(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            closed.set()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            fetcher = ImageFetcher(["127.0.0.1"])
            task = asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{port}/"))
            while fetcher._room._value == image_fetch.MAX_FETCHES:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(closed.wait(), 30)

    asyncio.run(run())
