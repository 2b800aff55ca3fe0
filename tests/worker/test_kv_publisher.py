"""The publisher of KV events: numbers, topics, replays, and subscribers that are slow or absent."""

import os
import time
from pathlib import Path

import pytest
import zmq

from baton.engine.cache.kv_events import BATCH_BYTES, KvEventLog
from baton.proto.errors import ConfigError
from baton.worker import kv_publisher
from baton.worker.kv_publisher import KvPublisher, check_address, next_port

from ..kv_subscriber import Follower, Subscriber
from ..processes import wait_until


@pytest.fixture
def publisher():
    one = KvPublisher(KvEventLog(4, "CPU"), "tcp://127.0.0.1:0", "kv@decode-0")
    one.start()
    yield one
    one.close()


@pytest.fixture
def subscriber(publisher):
    one = Subscriber(publisher.addresses, "kv@")
    yield one
    one.close()


def store(publisher, number):
    publisher.log.stored([number.to_bytes(16, "little")], None, [1, 2, 3, 4])
    publisher.flush()


def test_a_subscriber_follows_from_a_replay_on(publisher, subscriber):
    for number in range(50):
        store(publisher, number)
    late = Follower()
    wait_until(lambda: len(subscriber.replay(0)) == 50, what="all batches to be kept")
    for place, (number, payload) in enumerate(subscriber.replay(0)):
        assert number == place
        late.take(payload)
    assert len(late.blocks) == 50
    assert [number for number, _ in subscriber.replay(45)] == [45, 46, 47, 48, 49]
    assert subscriber.replay(1000) == []
    until = time.monotonic() + 20.0
    while not subscriber.events.poll(50):  # the subscription arrives when it may
        assert time.monotonic() < until
        store(publisher, int(1e9) + publisher._number)
    topic, number, payload = subscriber.receive()
    assert topic == b"kv@decode-0"
    assert (number, payload) in subscriber.replay(0)


def resident() -> int:
    """Bytes of memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def store_megabyte(publisher, number):
    """Store 800 blocks whose 256,000 tokens are encoded in 5 bytes each."""
    keys = [(number * 1000 + i).to_bytes(16, "little") for i in range(1, 801)]
    publisher.log.stored(keys, None, [1 << 20] * 320 * len(keys))
    publisher.flush()
    wait_until(lambda: not publisher._new, what="the thread to publish")


@pytest.fixture
def large():
    """A publisher of blocks of 320 tokens."""
    one = KvPublisher(KvEventLog(320, "CPU"), "tcp://127.0.0.1:0", "kv@decode-0")
    one.start()
    yield one
    one.close()


def test_replays_that_nobody_reads_cost_bounded_memory(large):
    for number in range(30):
        store_megabyte(large, number)
    before = resident()
    greedy = [unread(large.addresses, 10) for _ in range(20)]
    fair = Subscriber(large.addresses, "no topic")
    try:
        wait_until(lambda: len(large._wanted) == 20, what="the requests")
        for number in range(30, 60):
            store_megabyte(large, number)  # other batches than those in the queues are kept now
        assert large._replays.queued <= kv_publisher.QUEUED_BYTES
        assert resident() - before < 128 << 20
        assert len(large._wanted) == 20
        for one in greedy:
            one.close()
        assert fair.replay(0)[-1][0] == large._number - 1
    finally:
        for one in greedy:
            one.close()
        fair.close()


def unread(addresses: list[str], requests: int) -> Subscriber:
    """Request replays and read none."""
    one = Subscriber(addresses, "no topic")
    one.replays.close()
    one.replays = one.context.socket(zmq.DEALER)
    one.replays.setsockopt(zmq.RCVHWM, 1)
    one.replays.connect(addresses[1])
    for _ in range(requests):
        one.replays.send_multipart((b"", bytes(8)))
    return one


def test_a_replay_that_is_not_read_ends(large, monkeypatch):
    monkeypatch.setattr(kv_publisher, "REPLAY_TIMEOUT", 1.0)
    for number in range(30):
        store_megabyte(large, number)
    one = unread(large.addresses, 1)
    try:
        wait_until(lambda: large._wanted, what="the replay to start")
        wait_until(lambda: not large._wanted, what="the replay to end")
    finally:
        one.close()


def test_a_subscriber_that_reads_nothing_costs_bounded_bytes(large):
    slow = Subscriber(large.addresses)
    slow.events.setsockopt(zmq.RCVHWM, 1)
    fast = Subscriber(large.addresses)
    try:
        before = resident()
        for number in range(120):
            store_megabyte(large, number)
        assert large._events.queued <= kv_publisher.QUEUED_BYTES
        assert resident() - before < 160 << 20
        kept = fast.replay(0)
        assert sum(len(payload) for _, payload in kept) <= kv_publisher.KEPT_BYTES
        assert kept[-1][0] == large._number - 1
        assert max(len(payload) for _, payload in kept) <= BATCH_BYTES
    finally:
        slow.close()
        fast.close()


def test_kept_batches_are_bounded_in_bytes(publisher, subscriber, monkeypatch):
    monkeypatch.setattr(kv_publisher, "KEPT_BYTES", 10_000)
    for number in range(500):
        store(publisher, number)
    wait_until(lambda: not publisher._new, what="the thread to publish")
    kept = subscriber.replay(0)
    assert sum(len(payload) for _, payload in kept) <= 10_000
    assert kept[-1][0] == 499


def test_dropped_events_are_a_gap_in_the_numbers(publisher, subscriber):
    store(publisher, 1)
    publisher.log.dropped = 7
    store(publisher, 2)
    wait_until(lambda: len(subscriber.replay(0)) == 2, what="both batches")
    assert [number for number, _ in subscriber.replay(0)] == [0, 2]


@pytest.mark.parametrize(
    "frames", [(b"",), (b"", b"abc"), (b"", b"x" * 8, b"more"), (b"x" * 2000,)]
)
def test_what_is_no_request_is_ignored(frames, publisher, subscriber):
    subscriber.replays.send_multipart(frames)
    store(publisher, 1)
    other = Subscriber(publisher.addresses)
    try:
        wait_until(lambda: other.replay(0), what="a replay for another subscriber")
    finally:
        other.close()


def test_a_port_in_use_is_an_error(publisher):
    with pytest.raises(ConfigError, match="cannot listen at tcp://127"):
        KvPublisher(KvEventLog(4, "CPU"), publisher.addresses[0], "")


@pytest.mark.parametrize(
    "address",
    ["ipc:///x", "tcp://host", "tcp://:5", "tcp://h:99999", "h:5", "tcp://h:1/x", "tcp://"],
)
def test_a_wrong_address(address):
    with pytest.raises(ConfigError, match="kv_events is"):
        check_address(address)


def test_ports():
    check_address("tcp://[::1]:5557")
    assert next_port("tcp://127.0.0.1:5557", 3) == "tcp://127.0.0.1:5560"
    assert next_port("tcp://127.0.0.1:0", 3) == "tcp://127.0.0.1:0"
