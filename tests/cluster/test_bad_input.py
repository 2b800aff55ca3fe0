"""Whatever comes in at any socket: a clear typed error or nothing, and everybody serves on."""

import json
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.proto.codec import encode_kv_header
from baton.proto.contexts import TextContext
from baton.proto.errors import BatonError, DeadlineExceeded, DuplicateRequest, InputError
from baton.proto.limits import (
    MAX_ARRAY_FRAMES,
    MAX_CONTROL_BYTES,
    MAX_KV_FRAME_BYTES,
    PROTOCOL_VERSION,
)
from baton.proto.messages import GrantRef, KVFrame, Submit
from baton.proto.sampling import SamplingParams
from baton.proto.wire import WireContext, WireSampling

from .conftest import command_environment, wait_until
from .driver import Job, ask, greedy
from .raw import PREFIX, RawPeer, RawWorker, envelope, send_bytes
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"
CASES = cases_of(MODEL)
VOCABULARY, CONTEXT = 256, 2048
GOLDEN = Path(__file__).resolve().parents[1] / "proto" / "golden" / "envelopes.json"


@pytest.fixture(scope="module")
def running(shared_cluster):
    """A cluster that must be the same processes to the end."""
    running = shared_cluster(model=DATA / MODEL, prefill=1, decode=2, log_level="error")
    before = running.pids()
    yield running
    assert running.pids() == before
    assert "callback_failed" not in running.text()


@pytest.fixture
def client(running):
    with running.client() as client:
        yield client


@pytest.fixture(autouse=True)
def serves_on(request):
    """After each test that used the cluster it answers correctly."""
    yield
    if "running" in request.fixturenames:
        running = request.getfixturevalue("running")
        with running.client() as client:
            assert ask(client, Job(CASES[4].prompt, greedy(64))).tokens == CASES[4].greedy


# ------------------------------------------------------------------------------ requests


def wire(tokens=(5, 6, 7), **fields) -> WireContext:
    fields = {"max_length": 64, **fields}
    return WireContext(tokens=np.array(tokens, fields.pop("dtype", np.int32)), **fields)


BAD_CONTEXTS = {
    "empty": (wire([]), "prompt is empty"),
    "negative id": (wire([5, -1]), "token id -1 at position 1 is outside"),
    "large id": (wire([VOCABULARY]), "token id 256 at position 0 is outside"),
    "too long": (wire([5] * CONTEXT, max_length=CONTEXT), "prompt has 2048 tokens"),
    "much too long": (wire([5] * 100_000, max_length=CONTEXT), "prompt has 100000 tokens"),
    "no room": (wire(max_length=3), "leaves no room"),
    "longer than the model": (wire(max_length=CONTEXT + 1), "more than the model's"),
    "wrong dtype": (wire([5.0], dtype=np.float32), "one-dimensional int32"),
    "wrong shape": (wire([[5, 6]]), "one-dimensional int32"),
    "other model": (wire(model_name="another"), "is not served here"),
    "endpoint": (wire(target_endpoint="nowhere"), "must start with tcp:// or ipc://"),
    "log-probs": (wire(log_probabilities=21), "must be 0 to 20"),
    "stop id": (wire(eos_sequences=[[VOCABULARY]]), "outside the vocabulary"),
    "min tokens": (wire(sampling=WireSampling(min_new_tokens=62)), "min_new_tokens 62"),
}
BAD_SAMPLING = {
    "temperature": [-0.1, math.nan, math.inf],
    "top_p": [-0.1, 1.1, math.nan],
    "top_k": [-2, 256],
    "min_p": [-0.1, 1.5, math.nan],
    "repetition_penalty": [0.0, -1.0, math.inf, math.nan],
    "frequency_penalty": [math.nan, math.inf],
    "presence_penalty": [math.nan, -math.inf],
    "max_new_tokens": [0, -1],
    "min_new_tokens": [-1],
    "seed": [-1],
    "stop": [[""], ["x" * 129]],
}
for _field, _values in BAD_SAMPLING.items():
    for _value in _values:
        _sampling = WireSampling(**{_field: _value})
        _shown = "stop string" if _field == "stop" else _field
        BAD_CONTEXTS[f"{_field}={_value!r:.12}"] = (wire(sampling=_sampling), _shown)


def refusal(peer: RawPeer, submit: Submit) -> dict:
    """The terminal a request gets; it must be the only answer."""
    peer.say(submit)
    (answer,) = peer.answers()
    assert answer["type"] == "Terminal"
    assert answer.get("request_id", "") == submit.request_id
    assert "status" not in answer
    return answer


@pytest.mark.parametrize("name", BAD_CONTEXTS)
def test_the_router_refuses_a_wrong_request(running, name):
    context, message = BAD_CONTEXTS[name]
    with RawPeer(running.address) as peer:
        answer = refusal(peer, Submit(request_id="r", context=context))
    assert answer["code"] == "input"
    assert message in answer["message"]
    assert len(answer["message"]) < 300


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"deadline": -3.0}, "deadline_exceeded", "was over 3 s before"),
        ({"deadline": 0.0}, "deadline_exceeded", "was over"),
        ({"deadline": math.nan}, "input", "not a number"),
        ({"pin": "hard"}, "input", "known are prefer and strict"),
        ({"request_id": ""}, "input", "1 to 256 characters"),
        ({"request_id": "x" * 257}, "input", "1 to 256 characters"),
    ],
)
def test_the_router_refuses_a_wrong_submit(running, fields, code, message):
    with RawPeer(running.address) as peer:
        submit = Submit(**{"request_id": "r", "context": wire(), **fields})
        answer = refusal(peer, submit)
    assert answer["code"] == code
    assert message in answer["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([5, VOCABULARY], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1 << 40], "does not fit 32 bits"),
        ([0.5], "must be integers"),
        ([[5]], "one-dimensional"),
        ([5] * CONTEXT, "prompt has 2048 tokens"),
    ],
)
def test_the_client_refuses_a_wrong_prompt(client, prompt, message):
    with pytest.raises(InputError, match=message):
        ask(client, Job(prompt, greedy(4)))


def test_the_client_refuses_what_cannot_be_asked(client):
    job = Job([5, 6], greedy(4))
    for deadline in (0, -1.0):
        with pytest.raises(DeadlineExceeded):
            ask(client, Job(job.prompt, job.params, {"deadline": deadline}))
    with pytest.raises(InputError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=0)
    with pytest.raises(InputError, match="cannot be sent"):
        ask(client, Job(job.prompt, SamplingParams(logits_processors=[lambda row: None])))
    with pytest.raises(BatonError, match="give prompts as token ids"):
        client.generate("text for a model without a tokenizer")


def test_a_deadline_that_passes_ends_the_request(running, client):
    long = Job(CASES[7].prompt, greedy(500), {"deadline": 0.05})
    with pytest.raises(DeadlineExceeded):
        ask(client, long)


def test_one_id_with_two_contents(running, client):
    params = greedy(1500)
    with client.generate([5, 6, 7], params, request_id="same") as first:
        tokens = list(next(first).tokens)
        with pytest.raises(InputError):
            ask(client, Job([5, 6, 8], params, {"request_id": "same"}))
        tokens += [t for output in first for t in output.tokens]
    assert len(tokens) == 1500
    with RawPeer(running.address) as peer:
        peer.say(Submit(request_id="same", context=wire(max_length=CONTEXT)))
        peer.hear_until(lambda m: m["type"] == "Tokens")
        peer.say(Submit(request_id="same", context=wire([9], max_length=CONTEXT)))
        refused = peer.hear_until(lambda m: m.get("code") is not None)[-1]
        assert refused["code"] == DuplicateRequest.code
        assert not refused.get("request")  # the key would end the stream that runs
        end = peer.hear_until(lambda m: m["type"] == "Terminal")[-1]
        assert end["status"] == "maximum_length"


# ------------------------------------------------------------------------------ sockets


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


def golden(*without: str) -> dict[str, list[list[bytes]]]:
    """Envelopes of every kind of message by its name."""
    samples = json.loads(GOLDEN.read_text())
    return {
        kind: [[bytes.fromhex(frame) for frame in entry[form]] for form in ("full", "least")]
        for kind, entry in samples.items()
        if kind not in ("KVFrame", *without)
    }


def peer_of(running, name: str) -> RawPeer:
    address = sockets(running)[name]
    if name != "router":
        return RawPeer(address)
    return RawWorker(address, hello())


def hello() -> dict:
    """A worker's first message, as a map."""
    frame = golden()["Hello"][0][0]
    right = {"version": PROTOCOL_VERSION, "endpoint": "ipc:///nowhere/worker"}
    return msgspec.msgpack.decode(frame[3:])[0] | right


NONSENSE = [
    [b""],
    [b"", b"", b""],
    [b"BT"],
    [b"BT\x01"],
    [b"hello"],
    [b"BK\x01\x90"],
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
    [envelope({"type": "Hello", "version": 1, "worker": []})],
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
        peer.send(b"BT\x02" + envelope({"type": "Ping"})[3:])
        (answer,) = peer.answers()
    assert (answer["type"], answer["code"]) == ("Rejected", "version_mismatch")
    assert re.search("version 2, this is 1", answer["message"])


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
    assert {w["state"] for w in running.workers().values()} == {"ready"}


# ------------------------------------------------------------------------------ workers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": str(DATA / "qwen2")}, "architecture is Qwen2ForCausalLM"),
        ({"block_size": 32}, "layout.block_size is 32, the cluster has 16"),
        ({"backend": "numpy"}, "numerics is numpy"),
    ],
    ids=["model", "layout", "numerics"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_another_kind_is_refused(running, tmp_path, role, changes, message):
    (path,) = running.folder.glob(f"baton-run-*/{role}-0.json")
    config = json.loads(path.read_text())
    config |= {"worker_id": "stranger", "endpoint": f"ipc://{tmp_path}/s", "data_endpoint": ""}
    if role == "prefill":
        del config["data_endpoint"]
    config["runner"] |= changes
    (tmp_path / "stranger.json").write_text(json.dumps(config))
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            f"baton.{role}_worker",
            "--config",
            tmp_path / "stranger.json",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        env=command_environment(tmp_path),
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    refused = running.workers()["stranger"]
    assert refused["state"] == "refused"
    assert message in refused["reason"]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"version": 2}, "version_mismatch", "speaks protocol 2, not 1"),
        ({"role": "judge"}, "protocol", "known are prefill and decode"),
        ({"endpoint": "nowhere"}, "input", "must start with"),
    ],
)
def test_a_wrong_hello_is_refused(running, changes, code, message):
    wrong = hello() | changes
    with RawPeer(sockets(running)["router"]) as peer:
        peer.send(envelope(wrong))
        answer = peer.hear()
    assert (answer["type"], answer["code"]) == ("Rejected", code)
    assert message in answer["message"]
    assert wrong["worker"] not in running.workers()


def test_what_is_no_context_object(client):
    with pytest.raises(InputError):
        client.generate(TextContext(max_length=64, tokens=[5]), greedy(4))
