"""Ray ends all processes a fixed time after the head's loss; until then requests are served."""

import time

import pytest

from ..cluster.conftest import wait_until
from ..cluster.streams import jobs, run, tokens
from .bed import kill, processes
from .conftest import WAIT, launched, note

pytestmark = pytest.mark.timeout(120)

WORK = jobs(100, prompt=100, new=40)
WINDOW = "10"  # seconds; Ray's default is 60


def test_requests_are_served_until_the_window_is_over(tmp_path):
    with launched(tmp_path, {}, RAY_gcs_rpc_server_reconnect_timeout_s=WINDOW) as cluster:
        undisturbed = tokens(run(cluster.address, WORK))
        killed = kill(cluster.bed.gcs())
        assert tokens(run(cluster.address, WORK)) == undisturbed
        note("head lost, requests served after", time.monotonic() - killed)
        wait_until(lambda: cluster.members() == [], what="the end of all members", timeout=WAIT)
        note(f"head lost, all ended with a window of {WINDOW} s", time.monotonic() - killed)
        assert time.monotonic() - killed > 5  # they end by the timeout, not at once
        assert not any(line.startswith("ray::Pool") for line in processes().values())
