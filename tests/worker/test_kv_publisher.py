"""The publisher of KV events: numbers, topics, replays, and subscribers that are slow or absent."""

import time

import pytest

from baton.engine.cache.kv_events import KvEventLog
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


def test_a_subscriber_that_reads_nothing_costs_a_bounded_buffer(publisher, monkeypatch):
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 100)
    slow = Subscriber(publisher.addresses)
    fast = Subscriber(publisher.addresses)
    try:
        for number in range(5_000):
            store(publisher, number)
            if number % 50 == 0:
                wait_until(lambda: not publisher._new, what="the thread to publish")
        wait_until(lambda: not publisher._new, what="the thread to publish")
        assert len(publisher._kept) == 100
        kept = fast.replay(0)
        assert [number for number, _ in kept] == list(range(4_900, 5_000))
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
