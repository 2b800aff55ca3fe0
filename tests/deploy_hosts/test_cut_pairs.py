"""A prefill worker and a decode worker on separate hosts that cannot reach each other.

Both workers stay connected to the router. Ray is not used: the processes are started as by
``baton serve``, each on its host.
"""

import os
import subprocess

import pytest

from .cluster import wait_until
from .plain import DECODE, PREFILL, STREAMS, result

# Marked long: the tests take minutes, and their timing needs an otherwise idle machine.
pytestmark = [pytest.mark.deploy, pytest.mark.long, pytest.mark.timeout(420)]

CUT_S = float(os.environ.get("BATON_CUT_SECONDS", "60"))
AFTER_S = 25.0
LONGEST_WAIT_S = 5.0


@pytest.mark.parametrize("lost", ["both", "to the decode worker", "to the prefill worker"])
def test_streams_go_on_while_one_pair_of_workers_is_cut(plain_cluster, expected, lost):
    there, back = (PREFILL, DECODE), (DECODE, PREFILL)
    ways = {"both": [there, back], "to the decode worker": [there]}.get(lost, [back])
    replayed = plain_cluster.status()["router"]["requests"]["replayed"]
    running = plain_cluster.streams(CUT_S + AFTER_S)
    pairs = []
    for way in ways:
        plain_cluster.lab.lose_packets(*way)
    try:
        subprocess.run(["sleep", str(CUT_S)], check=True)
        pairs = plain_cluster.status()["failed_pairs"]
    finally:
        for way in ways:
            plain_cluster.lab.lose_packets(*way, lost=False)
    found = result(running)
    status = plain_cluster.status()
    print("longest waits:", found["waits"], "pair:", pairs)
    assert found["waits"][-1][0] <= LONGEST_WAIT_S, found["waits"]
    assert found["answers"] == expected
    assert [(pair["prefill"], pair["decode"]) for pair in pairs] == [("prefill-0", "decode-0")]
    assert all(worker["state"] == "ready" for worker in status["workers"])
    moved = status["router"]["requests"]["replayed"] - replayed
    assert 1 <= moved <= 2 * STREAMS, "after the first ones the pair is only tried now and then"
    wait_until(lambda: not plain_cluster.status()["failed_pairs"], "the pair to be forgotten")
    assert all(not worker["kv_blocks_used"] for worker in plain_cluster.status()["workers"])
