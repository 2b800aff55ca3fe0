"""Gateways on Ray: two at one port beside the router, and kills of a gateway and of its actor."""

import http.client
import json
import os
import signal

import pytest

from ..cluster.conftest import wait_until
from .bed import parent, processes
from .conftest import WAIT, launched

pytestmark = pytest.mark.timeout(180)
PORT = 8000  # the default: the hosts of these tests have a separate network


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with launched(tmp_path_factory.mktemp("bed"), {"gateways": 2}) as cluster:
        yield cluster


def ask(method: str = "GET", path: str = "/ready", body: object = None):
    """Status and content of an answer; None while nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=WAIT)
    try:
        connection.request(method, path, json.dumps(body).encode() if body else None)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except OSError:
        return None
    finally:
        connection.close()


def test_gateways_return_after_kills_of_process_and_actor(cluster):
    wait_until(lambda: "2 of 2 ready" in gateways(cluster), what="both gateways", timeout=WAIT)
    question = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
    status, answer = ask("POST", "/v1/chat/completions", question)
    assert status == 200
    assert answer["choices"][0]["message"]["content"].startswith("I am the demo model")
    for victim in (lambda pid: pid, parent):
        wait_until(lambda: "2 of 2 ready" in gateways(cluster), what="both again", timeout=WAIT)
        pid = cluster.pid("gateway-0")
        os.kill(victim(pid), signal.SIGKILL)
        wait_until(lambda pid=pid: pid not in processes(), what="its end", timeout=WAIT)
        wait_until(lambda: (ask() or (0,))[0] == 200, what="an answer", timeout=WAIT)
        wait_until(lambda pid=pid: another(pid), what="another gateway-0", timeout=WAIT)
        wait_until(lambda: "2 of 2 ready" in gateways(cluster), what="both again", timeout=WAIT)
    assert ask("POST", "/v1/chat/completions", question)[1]["choices"] == answer["choices"]


def test_gateways_are_scaled(cluster):
    assert "gateway=3" in cluster.baton("scale", "gateway=3", "--wait")
    assert "3 of 3 ready" in gateways(cluster)
    cluster.baton("scale", "gateway=2", "--wait")
    wait_until(lambda: "2 of 2 ready" in gateways(cluster), what="two gateways", timeout=WAIT)
    assert ask()[0] == 200


def another(pid: int) -> bool:
    found = [p for p, line in processes().items() if "/gateway-0.json --parent" in line]
    return bool(found) and pid not in found


def gateways(cluster) -> str:
    """The line of ``baton status`` about gateways."""
    lines = cluster.baton("status").splitlines()
    return next((line for line in lines if line.startswith("gateway ")), "")
