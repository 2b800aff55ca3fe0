"""Gateways as members of a cluster: deaths under streams, one port, restarts, drains, the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from baton.deploy.controller.admin_client import AdminClient

from ..suite.short import some_long
from .conftest import READY_TIMEOUT, command_environment, wait_until
from .http import Http
from .test_gateway import CHAT, MESSAGES, STORY, text_of

pytestmark = pytest.mark.cluster
HEALTH_CHECK = Path(__file__).parents[2] / "deploy/docker/ready.py"


def asked(tokens: int) -> dict:
    """A request whose answer has this many tokens, the same each time."""
    return {
        "messages": MESSAGES,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 1,
        "seed": 3,
    }


def door(cluster) -> Http:
    """HTTP to a cluster's own gateways."""
    return Http(int(re.search(r"^  http +http://127.0.0.1:(\d+)/v1 ", cluster.text(), re.M)[1]))


def members(cluster) -> dict:
    with AdminClient(f"{cluster.address}.admin", timeout=READY_TIMEOUT) as client:
        return {member.name: member for member in client.overview().members}


@pytest.fixture(scope="module")
def two(shared_cluster):
    """A cluster with two gateways at one port."""
    settings = {"gateways": 2, "http_port": 0, "worker_timeout": 5.0, "kv_memory": "64MiB"}
    return shared_cluster(prefill=1, decode=2, **settings)


@pytest.fixture(autouse=True)
def idle(request):
    """Afterwards no worker holds a block or a request."""
    yield
    if "two" in request.fixturenames:
        two = request.getfixturevalue("two")
        wait_until(lambda: _is_idle(two), what="all blocks to be free")


def _is_idle(cluster) -> bool:
    workers = cluster.workers().values()
    return len(workers) == 3 and all(
        w["state"] == "ready" and w["kv_blocks_used"] == w["requests_running"] == 0 for w in workers
    )


# --------------------------------------------------------------------------- deaths under streams


@pytest.mark.parametrize("load", some_long((8, 1000), (64, 500)), ids=str)
def test_streams_go_on_when_workers_and_router_die(two, load):
    """A prefill worker dies under prompts, then the router and a decode worker under answers."""
    streams, tokens = load
    http, body = door(two), asked(tokens)
    wanted = http.post(CHAT, **body)["choices"][0]["message"]["content"]
    begun = threading.Semaphore(0)

    def read() -> str:
        events, marks = [], [2, 40]
        try:
            for event in http.events(CHAT, **body):
                events.append(event)
                if marks and len(events) == marks[0]:
                    begun.release()
                    del marks[0]
        finally:  # an event holds many tokens after a pause
            for _ in marks:
                begun.release()
        assert "error" not in events[-1], events[-1]
        return text_of(events)

    pids = two.pids()
    with ThreadPoolExecutor(streams) as threads:
        answers = [threads.submit(read) for _ in range(streams)]
        os.kill(pids["prefill-0"], signal.SIGKILL)
        for victim in ("router", "decode-0"):
            for _ in range(streams):
                assert begun.acquire(timeout=120)
            os.kill(pids[victim], signal.SIGKILL)
        assert [answer.result(200) for answer in answers] == [wanted] * streams
    for name in ("prefill-0", "decode-0"):
        two.wait_replaced(name, pids[name])
    assert two.pids()["gateway-0"] == pids["gateway-0"]


def owner(port: int, client_port: int, pids: dict[str, int]) -> str | None:
    """Name of the gateway that has accepted this connection; None while none has."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        if local.endswith(f":{port:04X}") and remote.endswith(f":{client_port:04X}"):
            link = f"socket:[{rest[6]}]"
            for name, pid in pids.items():
                if any(_target(fd) == link for fd in Path(f"/proc/{pid}/fd").iterdir()):
                    return name
    return None


def _target(path: Path) -> str:
    with contextlib.suppress(OSError):
        return str(path.readlink())
    return ""


def connections_of_both(http: Http, pids: dict[str, int], count: int):
    """Open connections until each gateway has ``count``; returns those, by gateway."""
    found: dict[str, list[http.client.HTTPConnection]] = {name: [] for name in pids}
    while min(map(len, found.values())) < count:
        connection = http.connection()
        connection.connect()
        own = connection.sock.getsockname()[1]
        name = wait_until(lambda own=own: owner(http.port, own, pids), what="an accept")
        if len(found[name]) < count:
            found[name].append(connection)
        else:
            connection.close()
    return found


def read_stream(connection: http.client.HTTPConnection, body: dict, begun) -> str | None:
    """The text of a streamed answer; None if its connection broke."""
    events = []
    try:
        connection.request("POST", CHAT, json.dumps({**body, "stream": True}).encode())
        for line in connection.getresponse():
            if line == b"data: [DONE]\n":
                return text_of(events)
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 3:
                    begun.release()
    except (http.client.HTTPException, OSError):
        pass
    finally:
        connection.close()
    return None


@pytest.mark.parametrize("streams", some_long(4, 32))
def test_a_dead_gateway_breaks_its_own_connections_alone(two, streams):
    http, body = door(two), asked(2000 // streams)
    wanted = http.post(CHAT, **body)["choices"][0]["message"]["content"]
    pids = {name: pid for name, pid in two.pids().items() if name.startswith("gateway-")}
    found = connections_of_both(http, pids, streams)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(2 * streams) as threads:
        answers = {
            name: [threads.submit(read_stream, one, body, begun) for one in connections]
            for name, connections in found.items()
        }
        for _ in range(2 * streams):
            assert begun.acquire(timeout=60)
        os.kill(pids["gateway-0"], signal.SIGKILL)
        # A stream may have ended before the kill if this process had to wait for a processor.
        assert {answer.result(120) for answer in answers["gateway-0"]} <= {None, wanted}
        assert [answer.result(120) for answer in answers["gateway-1"]] == [wanted] * streams

    def successor() -> int:
        found = members(two)["gateway-0"]
        return found.stage == "ready" and found.pid != pids["gateway-0"] and found.pid

    pids["gateway-0"] = wait_until(successor, what="its successor")
    for connections in connections_of_both(http, pids, 1).values():
        connections[0].request("GET", "/ready")
        assert connections[0].getresponse().status == 200
        connections[0].close()


# --------------------------------------------------------------------------- status, drain, rollout


def test_status_names_the_gateways_and_one_of_two_can_be_drained(two):
    http = door(two)
    shown = two.command("status").stdout
    assert "gateway      2 of 2 ready\n" in shown
    assert f"HTTP         http://127.0.0.1:{http.port}/v1\n" in shown
    assert f"dashboard    http://127.0.0.1:{http.port}/dashboard\n" in shown
    drained = two.command("drain", "gateway-1", "--wait")
    assert drained.returncode == 0, drained.stderr
    assert set(two.pids()) & {"gateway-0", "gateway-1"} == {"gateway-0"}
    assert http.ask("GET", "/ready")[0] == 200
    last = two.command("drain", "gateway-0")
    assert last.returncode == 1
    assert "gateway-0 is the last gateway: HTTP would end" in last.stderr


@pytest.mark.long
def test_gateways_are_added_and_removed_without_a_refused_connection(two):
    http, over, statuses = door(two), threading.Event(), set()

    def ask() -> None:
        while not over.is_set():
            statuses.add(http.ask("GET", "/live")[0])

    def gateways() -> set[str]:
        return {name for name in members(two) if name.startswith("gateway")}

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        try:
            done = two.command("scale", "gateway=3", "--wait", "--timeout=60")
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-1] == "reached prefill=1 decode=2 gateway=3"
            assert gateways() == {"gateway-0", "gateway-1", "gateway-2"}
            done = two.command("scale", "gateway=2", "--wait", "--timeout=60")
            assert done.returncode == 0, done.stderr
            assert gateways() == {"gateway-0", "gateway-1"}
        finally:
            over.set()
        asking.result(60)
    assert statuses == {200}
    refused = two.command("scale", "gateway=0")
    assert (refused.returncode, "at least 1" in refused.stderr) == (1, True)


def test_a_rollout_replaces_the_gateways_without_a_refused_connection(two, tmp_path):
    http, over = door(two), threading.Event()
    keys = tmp_path / "keys"
    keys.write_text("new-key\n")
    statuses = set()

    def ask() -> None:
        while not over.is_set():
            status, _, _ = http.ask("GET", "/version", headers={"Authorization": "Bearer new-key"})
            statuses.add(status)

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        done = two.command("rollout", f"api-key-file={keys}", "--wait", "--timeout=60")
        over.set()
        asking.result(60)
    assert done.returncode == 0, done.stderr
    assert statuses == {200}
    assert http.ask("GET", "/version")[0] == 401


# --------------------------------------------------------------------------- the end, the port


def test_a_cluster_with_a_key_ends_after_its_requests_and_shows_the_key_nowhere(cluster, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-file\n")
    running = cluster(
        prefill=1, decode=1, gateways=1, http_port=0, api_key_file=keys, log_format="json",
        log_level="info",
    )  # fmt: skip
    (ready,) = (line for line in json_lines(running) if line["event"].startswith("ready: "))
    port = int(re.search(r":(\d+)/v1$", ready["http"])[1])
    check_the_health_check(port)
    http = Http(port, {"Authorization": "Bearer a-key-of-a-file"})
    foreign = {"Authorization": "Bearer a-key-of-nobody"}
    assert http.ask("GET", "/version", headers=foreign)[0] == 401
    check_that_the_port_is_taken(running, port)
    body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "seed": 1}
    wanted = http.post("/v1/completions", **body)["choices"][0]["text"]
    seen = [path.read_text() for path in running.folder.rglob("*.json")]
    for pid in running.pids().values():
        seen += [Path(f"/proc/{pid}/{name}").read_text() for name in ("environ", "cmdline")]
    assert len(seen) == 12
    begun = threading.Event()

    def read() -> str:
        events = []
        for event in http.events("/v1/completions", **body):
            events.append(event)
            begun.set()
        assert "error" not in events[-1], events[-1]
        return text_of(events)

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(read)
        assert begun.wait(60)
        running.interrupt()
        assert answer.result(60) == wanted
    assert running.process.wait(60) == 0
    with pytest.raises(OSError, match="refused"):
        http.ask("GET", "/live")
    assert {"supervisor", "router", "gateway-0"} <= {li["process"] for li in json_lines(running)}
    assert not any("-key-of-" in text for text in (*seen, running.text()))


def json_lines(cluster) -> list[dict]:
    """Its log, every line of which is an object with a time and its zone."""
    lines = [json.loads(line) for line in cluster.text().splitlines()]
    for line in lines:
        assert {"timestamp", "level", "process", "event"} <= set(line)
        assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None
    return lines


def check_the_health_check(port: int) -> None:
    """The container's health check needs no key."""
    for asked, code in ((port, 0), (1, 1)):
        given = {"BATON_HTTP_PORT": str(asked)}
        done = subprocess.run(
            [sys.executable, "-P", str(HEALTH_CHECK)], env=given, capture_output=True, check=False
        )
        assert done.returncode == code, done.stdout


def check_that_the_port_is_taken(running, port: int) -> None:
    """Another cluster at this port is refused with one line."""
    folder = running.folder.parent
    second = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "baton.cli", "serve", "--gateways=1"),
            *(f"--http-port={port}", f"--address=ipc://{folder}/second.sock"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env=command_environment(folder),
        check=False,
    )
    assert second.returncode == 2
    assert f"http_port {port} of 127.0.0.1 is in use" in second.stderr
    assert second.stderr.count("\n") == 1
