"""API keys: every route but the probes asks for one, in constant time, and keeps none.

Without keys, every route refuses foreign hosts and origins.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, cast

import pytest

from baton.gateway.app import ROUTES, make_app
from baton.gateway.config import GatewayConfig
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.served import Served
from baton.proto.errors import ConfigError
from baton.runtime.keys import api_keys
from baton.runtime.keys.api_keys import api_key_digests, digest_of

KEYS = ("a-first-key", "another-key")
OPEN = ("/live", "/ready", "/health", "/")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
WRONG = (
    None, b"", b"Bearer", b"Bearer ", b"Bearer a-first-ke", b"Bearer a-first-key2", b"a-first-key",
    b"Basic a-first-key", b"Bearer a-first-key another-key", b"Bearer \xff\x00",
    b"Bearer " + b"a" * 10_000,
)  # fmt: skip


class NoCluster:
    """A client that no request may reach."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a request without a key has reached the cluster: {name}")


class Cluster:
    """A client whose cluster is away."""

    async def status(self, **_: Any) -> Any:
        return {"workers": [], "router": {"serving": False}}


def status_of(
    app, method: str, path: str, authorization: bytes | None, *more: tuple[bytes, bytes]
) -> int:
    """The status of one request. ``more``: further headers."""
    return answer_of(app, method, path, authorization, *more)[0]


def answer_of(
    app, method: str, path: str, authorization: bytes | None, *more: tuple[bytes, bytes]
) -> tuple[int, bytes]:
    """The status and the body of one request. ``more``: further headers."""
    headers = [] if authorization is None else [(b"authorization", authorization)]
    headers += more
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": b"/",
        "query_string": b"", "headers": headers, "scheme": "http", "server": None, "client": None,
        "root_path": "",
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_no_route_answers_without_a_key():
    app = make_app(Served(NoCluster()), [digest_of(key) for key in KEYS])
    paths = [route.path.replace("{name:path}", "demo_model") for route in ROUTES]
    paths += ["/docs", "/nothing", "/v1", "//live", "/live/", "/LIVE", "/v1/models/a/b"]
    assert len(paths) > 20
    for path in paths:
        for method in METHODS:
            if path not in OPEN or method not in ("GET", "HEAD"):
                assert status_of(app, method, path, None) == 401
                assert status_of(app, method, path, b"Bearer wrong") == 401, (method, path)
    for authorization in WRONG:
        assert status_of(app, "GET", "/version", authorization) == 401, authorization


def test_probes_need_no_key_and_get_only_the_status_without_one():
    counts = GatewayMetrics()
    app = make_app(Served(Cluster()), [digest_of(key) for key in KEYS], counts)
    for wrong in WRONG:
        assert answer_of(app, "GET", "/live", wrong) == (200, b'{"status":"live"}')
        for path in ("/ready", "/health"):
            assert answer_of(app, "GET", path, wrong) == (503, b'{"status":"not ready"}')
            assert status_of(app, "HEAD", path, wrong) == 503
    with_key = answer_of(app, "GET", "/ready", b"Bearer " + KEYS[0].encode())
    assert (with_key[0], b"ready_workers" in with_key[1]) == (503, True)
    assert b"ready_workers" in answer_of(make_app(Served(Cluster())), "GET", "/ready", None)[1]


def test_probes_at_the_same_time_ask_the_router_once():
    class Slow(Cluster):
        asked = 0

        async def status(self, **_: Any) -> Any:
            self.asked += 1
            await asyncio.sleep(0)
            return {"workers": [], "router": {"serving": False}}

    async def send(_: Any) -> None:
        pass

    async def run() -> None:
        def scope() -> dict[str, Any]:
            return {
                "type": "http", "http_version": "1.1", "method": "GET", "path": "/ready",
                "raw_path": b"/ready", "query_string": b"", "headers": [], "scheme": "http",
                "server": None, "client": None, "root_path": "",
            }  # fmt: skip

        await asyncio.gather(*(app(scope(), cast(Any, None), send) for _ in range(50)))

    cluster = Slow()
    app = make_app(Served(cluster), [digest_of(KEYS[0])])
    asyncio.run(run())
    assert cluster.asked == 1
    asyncio.run(run())
    assert cluster.asked == 2


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_the_routes(key):
    app = make_app(Served(Cluster()), [digest_of(known) for known in KEYS])
    for scheme in (b"Bearer ", b"bearer ", b"BEARER  "):
        assert status_of(app, "GET", "/version", scheme + key.encode()) == 200
    assert status_of(app, "GET", "/ready", b"Bearer " + key.encode()) == 503


def test_keys_are_compared_as_digests_in_constant_time_and_all_of_them(monkeypatch):
    compared, real = [], hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return real(given, known)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    app = make_app(Served(Cluster()), [digest_of(key) for key in KEYS])
    for key in (b"a-first-key", b"no key"):
        compared.clear()
        status_of(app, "GET", "/live", b"Bearer " + key)
        assert [known for _, known in compared] == [bytes.fromhex(digest_of(each)) for each in KEYS]
        assert {len(given) for given, _ in compared} == {32}


def test_a_config_holds_digests_alone_and_needs_one_off_loopback(tmp_path):
    file = tmp_path / "keys"
    file.write_text("a-first-key\n\n another-key \na-first-key\n")
    digests = api_key_digests(str(file), ["a-third-key", None, ""])
    assert digests == tuple(digest_of(k) for k in ("a-third-key", *KEYS))
    config = GatewayConfig(routers=("ipc:///x",), host="0.0.0.0", api_keys=digests)
    assert "key" not in str(config).replace("api_keys", "").replace("ssl_keyfile", "").replace(
        "keys=''", ""
    )
    for host in ("0.0.0.0", "::", "10.0.0.1", "gateway.example"):
        with pytest.raises(ConfigError, match="give an API key"):
            GatewayConfig(routers=("ipc:///x",), host=host)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"):
        assert GatewayConfig(routers=("ipc:///x",), host=host).api_keys == ()
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="has no key"):
        api_key_digests(str(tmp_path / "empty"), [])
    with pytest.raises(ConfigError, match="printable ASCII"):
        api_key_digests("", ["schlüssel"])


def test_a_comment_of_a_key_file_is_no_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        "# keys of the team\na-first-key # alice\n  # old: gone-key\n an#other-key\t#\n"
    )
    assert api_key_digests(str(file), []) == tuple(map(digest_of, ("a-first-key", "an#other-key")))
    file.write_text("# nothing but comments\n")
    with pytest.raises(ConfigError, match="has no key"):
        api_key_digests(str(file), [])
    file.write_text("a-key and more\n")
    with pytest.raises(ConfigError, match="without spaces, one per line"):
        api_key_digests(str(file), [])


OWN = (
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.9.8.7:1",
    "[::1]",
    "[::1]:8000",
)
FOREIGN = (
    "", "x", "gateway", "evil.example", "evil.example:8000", "localhost.evil.example:8000",
    "10.0.0.1:8000", "0.0.0.0:8000", "[::]:8000", "127.0.0.1.evil.example", "localhost:x",
    "localhost:8000@evil.example", "evil.example#localhost", "[::1", "\xff",
    "127.0.0.1, evil.example",
)  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_without_keys_this_machines_names_are_served(host):
    app = make_app(Served(Cluster()))
    named = (b"host", host.encode())
    assert status_of(app, "GET", "/live", None, named) == 200
    for scheme in ("http", "https"):
        origin = (b"origin", f"{scheme}://{host}".encode())
        assert status_of(app, "GET", "/live", None, named, origin) == 200


def test_without_keys_a_client_may_leave_out_host_and_origin():
    assert status_of(make_app(Served(Cluster())), "GET", "/live", None) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_without_keys_foreign_hosts_and_origins_are_refused(host):
    """The first is what a rebound name sends, the second what a page of another site sends."""
    app, foreign, own = make_app(Served(NoCluster())), host.encode("latin-1"), b"localhost:8000"
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/dashboard/events")):
        for headers in (
            [(b"host", foreign)],
            [(b"host", foreign), (b"host", own)],
            [(b"host", own), (b"host", foreign)],
            [(b"host", own), (b"origin", b"http://" + foreign)],
            [(b"host", own), (b"origin", foreign)],
            [(b"host", own), (b"origin", b"null")],
        ):
            assert status_of(app, method, path, None, *headers) == 403, headers


def test_with_a_key_any_host_and_origin_is_served():
    app = make_app(Served(Cluster()), [digest_of(KEYS[0])])
    headers = [(b"host", b"gateway.example"), (b"origin", b"https://ui.example")]
    assert status_of(app, "GET", "/live", b"Bearer " + KEYS[0].encode(), *headers) == 200
