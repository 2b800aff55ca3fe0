"""KV events of real workers, followed from the published schema alone."""

import pytest

from ..kv_subscriber import Follower, Subscriber
from ..processes import wait_until
from .streams import jobs, run

pytestmark = pytest.mark.cluster


def test_a_subscriber_ends_with_the_blocks_of_each_worker(cluster):
    served = cluster(
        prefill=1, decode=1, kv_events="tcp://127.0.0.1:0", kv_events_topic="kv@{worker}@{model}",
        kv_blocks=96, kv_memory="",
    )  # fmt: skip
    workers = served.workers()
    addresses = {name: worker["kv_events"] for name, worker in workers.items()}
    assert len({one for pair in addresses.values() for one in pair}) == 4
    subscribers = {name: Subscriber(pair, "kv@") for name, pair in addresses.items()}
    try:
        for first in range(4):
            done = run(served.address, jobs(8, prompt=200, new=60, seed=first))
            assert [one for one in done if one.error] == []
        served.wait_idle()

        def same(name):
            follower = Follower()
            for _, payload in subscribers[name].replay(0):
                follower.take(payload)
            cached = served.workers()[name]["kv_blocks_cached"]
            return follower if len(follower.blocks) == cached else None

        for name in workers:
            follower = wait_until(lambda name=name: same(name), what=f"the blocks of {name}")
            assert follower.removed > 0
            assert follower.stored > 96
        run(served.address, jobs(1, prompt=300, new=2, seed=9))
        topic, _, payload = subscribers["decode-0"].receive()
        assert topic.startswith(b"kv@decode-0@")
        assert payload
    finally:
        for subscriber in subscribers.values():
            subscriber.close()
