"""Load adds a node to a pool, its end removes the node, and no request is affected."""

import pytest

from ..cluster.conftest import wait_until
from ..cluster.streams import check, jobs, run, tokens, under_load
from .conftest import WAIT, launched

pytestmark = pytest.mark.timeout(360)

WORK = jobs(24, prompt=60, new=60)
SMALL = {"prefill": 1, "decode": 1}
SETTINGS = {
    "autoscale": "on", "prefill_max": 1, "decode_max": 2, "stabilization_window": 8.0,
    "decode_kv_blocks": 64, "slo_ttft": 5.0, "slo_itl": 5.0,
}  # fmt: skip


def test_load_takes_a_decode_node_and_its_end_gives_it_back(tmp_path):
    with launched(tmp_path, SETTINGS) as cluster:
        undisturbed = tokens(run(cluster.address, WORK))
        prefill = cluster.pid("prefill-0")

        def grown() -> None:
            wait_until(lambda: cluster.pools()["decode"] == 2, what="growth", timeout=WAIT)

        check(under_load(cluster.address, WORK, grown), undisturbed)
        cluster.wait_nodes(prefill=1, decode=2)

        wait_until(lambda: cluster.pools() == SMALL, what="shrinking", timeout=2 * WAIT)
        cluster.wait_nodes(**SMALL)
        assert tokens(run(cluster.address, WORK)) == undisturbed
        assert cluster.pid("prefill-0") == prefill
        with cluster.client() as client:
            assert client.status()["router"]["requests"]["failed"] == 0
