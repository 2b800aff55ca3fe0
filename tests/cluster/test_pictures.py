"""Pictures through whole clusters: the pixels of the engine in one process, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from ..processes import wait_until
from .picture_driver import FOLDER, Drawing, Reference

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=2, decode=2, model=FOLDER, worker_timeout=1.0, block_size=16)


@pytest.fixture(autouse=True)
def clean(pools):
    """All workers are there, and afterwards none holds a block."""
    pools.wait_ready()
    yield
    wait_until(
        lambda: all(w["kv_blocks_used"] == 0 for w in pools.workers().values()),
        what="all blocks to be free",
    )


@pytest.fixture(scope="module")
def client(pools):
    with pools.client() as client:
        yield client


@pytest.fixture(scope="module")
def reference():
    return Reference()


def test_pixels_are_those_of_one_process(client, reference):
    request = reference.request()
    drawing = Drawing(client, request)
    assert np.array_equal(drawing.pixels(), reference.draw(request))
    assert drawing.steps == [0, 1, 2, 3, 4]
    assert drawing.positions[0] == len(request.tokens)
    assert drawing.ended.status == "maximum_length"
