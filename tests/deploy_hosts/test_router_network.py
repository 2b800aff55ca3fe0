"""The router's network fails for a time or has a high latency."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from .hosts import missing
from .plain import PLACES, ROUTER, PlainCluster, answers_undisturbed, result

# Marked long: the tests take minutes, and their timing needs an otherwise idle machine.
pytestmark = [pytest.mark.deploy, pytest.mark.long, pytest.mark.timeout(300)]

RELAY = Path(__file__).with_name("relay.py")
RELAY_PORT = 7999
ONE_WAY_S = 0.1


def lives(cluster) -> dict[str, tuple[int, int]]:
    return {w["id"]: (w["pid"], w["incarnation"]) for w in cluster.status()["workers"]}


@pytest.mark.parametrize("seconds", [0.25, 1.0, 2.0, 4.0])
def test_a_router_without_a_network_loses_no_worker(plain_cluster, expected, seconds):
    before = lives(plain_cluster)
    running = plain_cluster.streams(seconds + 6.0)
    time.sleep(1.0)
    plain_cluster.lab.unplug(ROUTER)
    try:
        time.sleep(seconds)
    finally:
        plain_cluster.lab.unplug(ROUTER, plugged=True)
    found = result(running)
    print(f"without a network for {seconds} s, longest waits:", found["waits"])
    assert found["answers"] == expected
    plain_cluster.wait_ready()
    assert lives(plain_cluster) == before


@pytest.fixture
def far_away(tmp_path_factory):
    """The round trip between the decode workers' host and the router takes 200 ms."""
    address = f"tcp://127.0.0.1:{RELAY_PORT}"
    relayed = {name: address for name in PLACES if name.startswith("decode")}
    if why := missing():
        pytest.skip(why)
    cluster = PlainCluster(tmp_path_factory.mktemp("net"), relayed)
    try:
        router = cluster.lab.hosts[PLACES["router"] - 1].address
        for name in relayed:
            host = cluster.lab.hosts[PLACES[name] - 1]
            arguments = [str(RELAY_PORT), router, "7170", str(ONE_WAY_S)]
            command = host.enter(sys.executable, str(RELAY), *arguments)
            cluster.running.append(subprocess.Popen(command, env=host.environment()))
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()


def test_workers_far_away_are_neither_suspect_nor_replayed(far_away):
    expected = answers_undisturbed(far_away)
    before = lives(far_away)
    running = far_away.streams(15.0)
    seen = set()
    while running.poll() is None and len(seen) < 2:
        seen |= {worker["state"] for worker in far_away.status()["workers"]}
        time.sleep(0.5)
    assert result(running)["answers"] == expected
    assert seen == {"ready"}
    assert lives(far_away) == before
    assert far_away.status()["router"]["requests"]["replayed"] == 0
