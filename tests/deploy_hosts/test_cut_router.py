"""The router's connections lose packets for a time: to a worker, a client, a gateway."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from .plain import DECODE, PREFILL, ROUTER, result

# Marked long: the tests take minutes, and their timing needs an otherwise idle machine.
pytestmark = [pytest.mark.deploy, pytest.mark.long, pytest.mark.timeout(420)]

CLIENT = 0
CUT_S = 15.0
BEYOND_S = 3.0
"""Longest wait for a token after the network works again."""
HTTP_PORT = 8000
# Streams over HTTP that repeat until a time, as in ``plain.STREAM``.
HTTP_STREAMS = """
import http.client, json, sys, threading, time
count, seconds, port = json.loads(sys.argv[1])
start, waits, failed = time.monotonic(), [], []
def stream(i):
    body = {"prompt": [(7 * i + j) % 200 + 5 for j in range(20 + 9 * i)], "max_tokens": 200,
            "ignore_eos": True, "temperature": 0, "stream": True}
    while time.monotonic() < start + seconds:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            heard = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body),
                               {"content-type": "application/json"})
            for line in connection.getresponse():
                now = time.monotonic()
                waits.append((round(now - heard, 3), i, 0, round(heard - start, 1)))
                heard = now
                if b'"error"' in line:
                    failed.append(line.decode())
        except Exception as error:
            failed.append(repr(error))
threads = [threading.Thread(target=stream, args=(i,)) for i in range(count)]
print("BEGUN", flush=True)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("RESULT " + json.dumps(dict(waits=sorted(waits)[-5:], asked=len(waits), failed=failed,
                                  answers=[])))
"""


def cut(cluster, ways) -> float:
    """Lose all packets of these directions for a time; return the seconds until they pass."""
    began = time.monotonic()
    for way in ways:
        cluster.lab.lose_packets(*way)
    try:
        time.sleep(CUT_S)
    finally:
        for way in ways:
            cluster.lab.lose_packets(*way, lost=False)
    return time.monotonic() - began


WAYS = {
    "to a decode worker": [(ROUTER, DECODE)],
    "from a decode worker": [(DECODE, ROUTER)],
    "to and from a decode worker": [(ROUTER, DECODE), (DECODE, ROUTER)],
    "to a prefill worker": [(ROUTER, PREFILL)],
    "to and from a prefill worker": [(ROUTER, PREFILL), (PREFILL, ROUTER)],
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS.keys())
def test_streams_leave_a_worker_that_the_router_cannot_reach(plain_cluster, expected, ways):
    """They go on elsewhere while the network is still cut."""
    running = plain_cluster.streams(CUT_S + 5.0)
    cut(plain_cluster, ways)
    found = result(running)
    print("longest waits:", found["waits"])
    assert found["answers"] == expected
    assert found["waits"][-1][0] <= BEYOND_S
    plain_cluster.wait_ready()


CLIENT_WAYS = {
    "to": [(ROUTER, CLIENT)],
    "from": [(CLIENT, ROUTER)],
    "to and from": [(ROUTER, CLIENT), (CLIENT, ROUTER)],
}


@pytest.mark.parametrize("ways", CLIENT_WAYS.values(), ids=CLIENT_WAYS.keys())
def test_streams_of_a_client_continue_soon_after_the_network_does(plain_cluster, expected, ways):
    running = plain_cluster.streams(CUT_S + 10.0)
    healed = cut(plain_cluster, ways)
    found = result(running)
    print("longest waits:", found["waits"], "healed at", healed)
    assert found["answers"] == expected
    assert max(began + wait for wait, *_, began in found["waits"] if wait > BEYOND_S) <= (
        healed + BEYOND_S
    )


@pytest.fixture
def gateway(plain_cluster):
    """A gateway on the machine outside."""
    command = [sys.executable, "-P", "-m", "baton.cli", "gateway", f"--http-port={HTTP_PORT}"]
    env = plain_cluster.lab.outside.environment(BATON_KEYS=str(plain_cluster.keys))
    process = subprocess.Popen(
        plain_cluster.lab.outside.enter(*command, f"--address={plain_cluster.address}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        assert "serving" in process.stdout.readline()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # nsenter's child, too
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("ways", CLIENT_WAYS.values(), ids=CLIENT_WAYS.keys())
def test_streams_of_a_gateway_continue_soon_after_the_network_does(plain_cluster, gateway, ways):
    running = plain_cluster.begin(HTTP_STREAMS, [8, CUT_S + 12.0, HTTP_PORT])
    assert running.stdout.readline() == "BEGUN\n"
    time.sleep(1.0)
    healed = 1.0 + cut(plain_cluster, ways)
    output, _ = running.communicate(timeout=120)
    found = json.loads(output.partition("RESULT ")[2])
    print("longest waits:", found["waits"], "healed at", healed)
    assert found["failed"] == []
    assert max(began + wait for wait, *_, began in found["waits"] if wait > BEYOND_S) <= (
        healed + BEYOND_S
    )


def test_streams_leave_a_worker_that_loses_a_third_of_its_packets(plain_cluster, expected):
    if shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("needs nftables")
    running = plain_cluster.streams(25.0)
    plain_cluster.lab.lose_share(ROUTER, DECODE, 30)
    try:
        found = result(running)
    finally:
        plain_cluster.lab.lose_share(ROUTER, DECODE, 0)
    print("longest waits:", found["waits"])
    assert found["answers"] == expected
    assert found["waits"][-1][0] <= BEYOND_S
    plain_cluster.wait_ready()
