"""Speech over two routers, one of which dies, alone or together with a decode worker."""

from __future__ import annotations

import os
import signal

import pytest

from ..processes import wait_until
from .speaker import assert_same, make_speaker, samples_here, speak_all

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_speaker(tmp_path_factory.mktemp("speech") / "speaker")


@pytest.fixture(scope="module")
def pools(shared_cluster, folder, tmp_path_factory):
    at = tmp_path_factory.mktemp("r")
    address = f"ipc://{at}/a.sock,ipc://{at}/b.sock"
    return shared_cluster(
        model=folder, prefill=2, decode=2, routers=2, address=address, worker_timeout=1.0
    )


@pytest.fixture(scope="module")
def undisturbed(pools, folder):
    with pools.client() as client:
        return samples_here(folder, client.model())


@pytest.mark.parametrize(
    ("also", "begun"), [((), 7), (("decode-0",), 1), (("decode-0", "decode-1"), 14)]
)
def test_killed_routers_and_workers_change_no_sample(pools, undisturbed, also, begun):
    pools.wait_ready()
    names, before = ["router-0", *also], pools.text().count("serves again")
    wait_until(lambda: set(names) <= pools.pids().keys(), what="all processes")
    pids, killed = pools.pids(), []

    def strike(chunks):
        if not killed and sum(map(len, chunks)) >= begun:
            killed.append(True)
            for name in names:
                os.kill(pids[name], signal.SIGKILL)

    assert_same(speak_all(pools.address.split(","), strike), undisturbed)
    assert killed
    wait_until(lambda: pools.text().count("serves again") >= before + len(names))
