"""Noise at every socket of every process: a typed error or nothing, and everybody serves on."""

import random
import re
import time

import msgspec
import pytest

from baton.proto.limits import (
    MAX_ARRAY_FRAMES,
    MAX_CONTROL_BYTES,
    MAX_KV_FRAME_BYTES,
)
from baton.proto.wire.envelope import encode_kv_header
from baton.proto.wire.messages import GrantRef, KVFrame

from ..processes import wait_until
from .driver import Job, ask, greedy
from .raw import PREFIX, RawPeer, RawWorker, envelope, golden, hello_map, send_bytes
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
CASE = cases_of(MODEL)[4]


@pytest.fixture(scope="module")
def running(lasting_cluster):
    """A cluster that must be the same processes to the end."""
    running = lasting_cluster(model=DATA / MODEL, prefill=1, decode=2)
    before = running.pids()
    yield running
    assert running.pids() == before
    assert "callback_failed" not in running.text()


@pytest.fixture(autouse=True)
def serves_on(running):
    """After each test the cluster answers correctly."""
    yield
    with running.client() as client:
        assert ask(client, Job(CASE.prompt, greedy(64))).tokens == CASE.greedy


def sockets(running) -> dict[str, str]:
    """Every listening socket of every process of the cluster."""
    found = {"clients": running.address}
    for path in running.folder.glob("baton-run-*/*.sock"):
        found[path.name.removesuffix(".sock")] = f"ipc://{path}"
    return found


NAMES = ("clients", "router", "prefill-0", "decode-0", "decode-1")
DATA_NAMES = ("decode-0.data", "decode-1.data")


def test_these_are_all_sockets(running):
    assert set(sockets(running)) == {*NAMES, *DATA_NAMES}


def peer_of(running, name: str) -> RawPeer:
    address = sockets(running)[name]
    if name != "router":
        return RawPeer(address)
    return RawWorker(address, hello_map())


NONSENSE = [
    [b""],
    [b"", b"", b""],
    [b"BT"],
    [b"BT\x03"],
    [b"hello"],
    [b"BK\x02\x90"],
    [PREFIX + b"\xc1"],
    [PREFIX + b"\xc0"],
    [PREFIX + b"\x91"],
    [PREFIX + b"\xdd\xff\xff\xff\xff"],
    [PREFIX + b"\x91\xdf\xff\xff\xff\xff"],
    [PREFIX + b"\x91\x81\xdb\xff\xff\xff\xff"],
    [PREFIX + b"\x91" * 100_000],
    [PREFIX + b"\x81" * 1000],
    [envelope("Ping")],
    [envelope({})],
    [envelope({"type": None})],
    [envelope({"type": "Nothing"})],
    [envelope({"type": "Ping", "nonce": "one"})],
    [envelope({"type": "Submit", "request_id": 5})],
    [envelope({"type": "Reserve", "request": "text", "hashes": 3})],
    [envelope({"type": "Hello", "version": 2, "worker": []})],
    [envelope({"type": "Ping"}), b"an array nobody refers to"],
    [envelope({"type": "Ping"}) + b"\x00"],
]


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_answered_once_by_a_typed_error(running, name):
    with peer_of(running, name) as peer:
        for frames in NONSENSE:
            peer.send(*frames)
            (answer,) = peer.answers()
            assert answer["type"] == "Rejected", frames[0][:40]
            assert answer["code"] in ("decode_failed", "limit_exceeded"), answer
            assert 0 < len(answer["message"]) < 300


@pytest.mark.parametrize("name", NAMES)
def test_another_protocol_version_is_named(running, name):
    with peer_of(running, name) as peer:
        peer.send(b"BT\x01" + envelope({"type": "Ping"})[3:])
        (answer,) = peer.answers()
    assert (answer["type"], answer["code"]) == ("Rejected", "version_mismatch")
    assert re.search("version 1; this process has version 3 and accepts 3 to 4", answer["message"])


@pytest.mark.parametrize("name", NAMES)
def test_messages_of_other_directions(running, name):
    """Right in form, wrong in place: an error or silence, and no harm."""
    # Hello would enlist a worker that does not exist, Drain is an order this cluster obeys.
    with peer_of(running, name) as peer:
        for kind, samples in golden("Hello", "Drain").items():
            for frames in samples:
                peer.send(*frames)
                for answer in peer.answers():
                    assert answer["type"] != "Tokens", kind


@pytest.mark.parametrize("name", [*NAMES, *DATA_NAMES])
def test_random_and_mutated_bytes(running, name):
    rng = random.Random(name)
    samples = [frames for kind in golden("Hello", "Drain").values() for frames in kind]
    with peer_of(running, name) as peer:
        for number in range(150):
            frames = list(rng.choice(samples))
            if number % 3 == 0:
                frames = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randint(1, 4))]
            else:
                frames[0] = mutated(frames[0], rng)
            peer.send(*frames)
        if name in NAMES:
            answers = peer.answers()
            assert any(answer["type"] == "Rejected" for answer in answers)


def mutated(data: bytes, rng: random.Random) -> bytes:
    body = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(3):
            case 0:
                body[rng.randrange(len(body))] = rng.randrange(256)
            case 1:
                del body[rng.randrange(len(body)) :][: rng.randrange(8)]
            case _:
                at = rng.randrange(len(body))
                body[at:at] = rng.randbytes(rng.randrange(8))
        body = body or bytearray(1)
    return bytes(body)


@pytest.mark.parametrize("name", [*NAMES, *DATA_NAMES])
def test_too_many_and_too_large_frames(running, name):
    """Too many are dropped, too large ones end their connection, not the socket."""
    with peer_of(running, name) as peer:
        peer.send(*[b"x"] * (MAX_ARRAY_FRAMES + 2))
        peer.send(*[b"x"] * 20_000)
        if name in NAMES:
            assert all(answer["type"] == "Rejected" for answer in peer.answers())
    limit = MAX_CONTROL_BYTES if name in NAMES else MAX_KV_FRAME_BYTES
    with peer_of(running, name) as peer:
        peer.send(bytes(limit + 1))
        peer.send(envelope({"type": "Ping"}), bytes(limit + 1))
    with peer_of(running, name) as peer:
        if name in NAMES:
            assert peer.answers() == []


@pytest.mark.parametrize("name", [*NAMES, *DATA_NAMES])
def test_peers_that_are_no_zeromq(running, name):
    rng = random.Random(name)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    address = sockets(running)[name]
    for chunks in (
        [],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [rng.randbytes(5000)],
        [greeting[:20]],
        [greeting, rng.randbytes(500)],
        [greeting, b"\x06" + (1 << 62).to_bytes(8, "big"), rng.randbytes(100)],
        [greeting, b"\x04\x05READY", b"\x02" + bytes(8)],
    ):
        send_bytes(address, chunks)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_kv_frames_without_a_grant(running, name):
    worker = running.workers()[name.removesuffix(".data")]
    frame = KVFrame(
        grant=GrantRef(worker["incarnation"], 0, 0),
        index=0,
        layer_start=0,
        layer_count=1,
        block_start=0,
        block_count=1,
        nbytes=1024,
        checksum=0,
    )
    replace = msgspec.structs.replace
    frames = [
        frame,
        replace(frame, grant=GrantRef(1, 2, 3)),
        replace(frame, grant=GrantRef(worker["incarnation"], 1 << 30, 0)),
        replace(frame, grant=GrantRef(worker["incarnation"], -1, -1)),
        replace(frame, layer_start=-1, block_start=-5),
        replace(frame, layer_count=1 << 40, block_count=1 << 40),
        replace(frame, nbytes=1 << 60),
        replace(frame, nbytes=-1),
    ]
    with peer_of(running, name) as peer:
        for each in frames:
            header = encode_kv_header(each)
            for payload in ([bytes(1024)], [b""], [], [bytes(1024)] * 2):
                peer.send(header, *payload)
            for cut in range(1, len(header), 7):
                peer.send(header[:cut], bytes(1024))
        time.sleep(0.1)  # nothing answers on this socket


def test_no_block_is_left_to_strangers(running):
    """What some of them reserved is free once they have been gone for a while."""
    wait_until(
        lambda: all(w["kv_blocks_used"] == 0 for w in running.workers().values()),
        what="all blocks to be free",
    )
    workers = running.workers()
    assert {workers[name]["state"] for name in running.pids() if name != "router"} == {"ready"}


# ------------------------------------------------------------------------------ workers
