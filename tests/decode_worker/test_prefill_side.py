"""The decode worker's messages to prefill workers."""

from __future__ import annotations

import msgspec
import pytest

from baton.decode_worker.events import MapPool, PeerGone, PoolMapped
from baton.proto.limits import MAX_NAMED_BYTES, PROTOCOL_VERSION
from baton.proto.wire.messages import (
    DeviceTicket,
    Open,
    Opened,
    OpenRefused,
    PeerDead,
    Ping,
    Pong,
    PoolTicket,
    Probe,
    ProbeReply,
    Rejected,
    Release,
    Released,
    Tokens,
)

from .bench import CARD, KEY, OTHER, PEER, Bench, ticket


def test_opening_compares_models(bench):
    opening = Open(
        version=PROTOCOL_VERSION, worker="p", incarnation=5, model=CARD, transports=["zmq"]
    )
    bench.ask(opening)
    assert bench.to_peer(Opened)[0].data_endpoint == "ipc:///data"
    for change in ({"fingerprint": "x"}, {"numerics": "x"}, {"vocab_size": 7}):
        other = msgspec.structs.replace(CARD, **change)
        bench.ask(msgspec.structs.replace(opening, model=other))
        (refused,) = bench.to_peer(OpenRefused)
        assert refused.field == next(iter(change))
    bench.ask(msgspec.structs.replace(opening, transports=["pigeon"]))
    assert bench.to_peer(OpenRefused)[0].field == "transports"
    bench.ask(msgspec.structs.replace(opening, version=99))
    assert bench.to_peer(Rejected)[0].code == "version_mismatch"


@pytest.mark.parametrize("failure", ["", "no such process"])
@pytest.mark.parametrize(
    ("transport", "where"),
    [
        ("shm", {"pool": PoolTicket(1, 2, 4096, b"m" * 16)}),
        ("cuda_ipc", {"device_pool": DeviceTicket("host", b"h" * 64, 512, 4096)}),
    ],
)
def test_a_pool_is_mapped_before_the_link_is_open(bench, failure, transport, where):
    opening = Open(
        version=PROTOCOL_VERSION, worker="p", incarnation=5, model=CARD,
        transports=[transport, "zmq"], **where,
    )  # fmt: skip
    bench.ask(opening)
    assert not bench.to_peer(Opened)
    (wanted,) = [each for each in bench.other if isinstance(each, MapPool)]
    assert (wanted.incarnation, wanted.ticket) == (5, *where.values())
    bench.feed(PoolMapped(wanted.peer, failure, wanted.transport))
    (opened,) = bench.to_peer(Opened)
    assert opened.transport == ("zmq" if failure else transport)
    assert (opened.max_frame_bytes == MAX_NAMED_BYTES) == (opened.transport == "cuda_ipc")
    bench.ask(msgspec.structs.replace(opening, transports=["zmq"]))
    assert bench.to_peer(Opened)[0].transport == "zmq"
    bench.ask(msgspec.structs.replace(opening, model=msgspec.structs.replace(CARD, vocab_size=7)))
    assert bench.to_peer(OpenRefused)


def test_anyone_may_ask_who_listens(bench):
    bench.ask(Probe(nonce=7), b"anyone")
    (reply,) = bench.to_peer(ProbeReply)
    assert (reply.nonce, reply.worker, reply.incarnation) == (7, "decode-0", 9)
    bench.ask(Ping(nonce=8), b"anyone")
    assert bench.to_peer(Pong)[0].nonce == 8


def test_a_released_grant_is_free(bench):
    bench.reserve()
    bench.ask(Release(request=KEY, attempt=1, incarnation=5, ticket=ticket()))
    assert bench.to_peer(Released)
    assert bench.cache.pool.used == 0


def test_a_prefill_worker_that_stays_away_holds_no_blocks():
    bench = Bench(timeout=1.0, lease=100.0)
    bench.reserve()
    bench.later(0.1)
    bench.feed(PeerGone(PEER))
    bench.later(0.5)
    assert bench.to_peer(Ping)
    for _ in range(4):
        bench.ask(Pong())
        bench.later(0.5)
    assert bench.cache.pool.used  # it was there all the time
    bench.feed(PeerGone(PEER))
    bench.later(1.1)
    assert bench.cache.pool.used == 0


def test_a_dead_prefill_worker_holds_no_blocks_and_what_it_committed_runs_on(bench):
    bench.run()
    bench.reserve(OTHER)
    bench.hear(PeerDead(incarnation=5))
    assert bench.receiver.granted == 0
    bench.take(Tokens)
    bench.step()
    assert bench.streamed() == [(11, 43)]
