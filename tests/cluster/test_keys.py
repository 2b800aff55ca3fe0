"""A cluster with keys on TCP: it serves as any other, and strangers get nowhere.

The sockets are those the kernel lists for the cluster's processes; no setting says which to try.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from baton.cli.command import main
from baton.client import Client
from baton.deploy.plan.addresses import free_ports
from baton.kv_transfer.checksums import envelope_digest
from baton.proto.errors import AccessDenied
from baton.proto.sampling import SamplingParams
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder, encode_kv_header
from baton.proto.wire.messages import (
    GrantRef,
    KVFrame,
    Message,
    PrefillToDecode,
    Probe,
    Release,
    Submit,
)
from baton.proto.wire.proofs import Holder, Terms, reserve_ticket, worker_key
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.runtime.keys.keyring import KeyRing, add_key, make_folder, read_pair

from ..processes import wait_until
from .driver import Job, ask, ask_all, collect, greedy
from .listening import descendants, listening_ports
from .raw import RawPeer, envelope, golden, hello_map, identity_of, life_of
from .reference import DATA, cases_of
from .scan import (
    check_garbage,
    check_roles,
    check_stolen_identity,
    check_strangers,
    heard_kinds,
    keys_of,
)

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys of a cluster whose decode workers and first prefill worker have separate keys."""
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_folder(folder)
    for name in ("decode-0", "decode-1", "prefill-0"):
        add_key(folder, name.partition("-")[0], [name])
    add_key(folder, "prefill", ["prefill-9"])
    add_key(folder, "decode", ["decode-9"])
    add_key(folder, "client", ["thief"])
    return folder


@pytest.fixture(scope="module")
def running(shared_cluster, folder):
    """A cluster that must be the same processes to the end, and serve as before."""
    port = free_port()
    running = shared_cluster(
        model=DATA / MODEL, prefill=1, decode=2,
        transport="tcp", address=f"tcp://127.0.0.1:{port}", keys=str(folder),
    )  # fmt: skip
    before = running.pids()
    yield running
    assert running.pids() == before
    case = cases_of(MODEL)[4]
    with running.client() as client:
        assert ask(client, Job(case.prompt, greedy(64))).tokens == case.greedy


def free_port() -> int:
    return free_ports(1)[0]


def ports_of(running) -> dict[str, list[int]]:
    """Listening TCP ports of every process, by name."""
    names = {pid: name for name, pid in running.pids().items()}
    found = {}
    for pid in descendants(running.process.pid):
        for port in listening_ports(pid):
            found.setdefault(names.get(pid, str(pid)), []).append(port)
    return found


def cluster_key(running) -> bytes:
    """What only its routers know."""
    (config,) = running.folder.rglob("router.json")
    return bytes.fromhex(json.loads(config.read_text())["cluster_key"])


def dropped(running) -> dict[str, int]:
    """All processes' counters of messages that they could not use."""
    with running.client() as client:
        status = client.status()
    counters = {f"router {k}": v for k, v in status["router"]["dropped"].items()}
    for worker in status["workers"]:
        counters |= {f"{worker['id']} {k}": v for k, v in worker["dropped"].items()}
    return counters


# ------------------------------------------------------------------------------ it serves


def test_tokens_are_those_of_a_cluster_without_keys(running, lasting_cluster):
    cases = cases_of(MODEL)
    jobs = [
        Job(case.prompt, params)
        for case in cases
        for params in (greedy(32), _sampled(len(case.prompt)))
    ]
    plain = lasting_cluster(model=DATA / MODEL, prefill=1, decode=2)
    with running.client() as keyed, plain.client() as without:
        expected = [answer.tokens for answer in ask_all(without, jobs)]
        assert [answer.tokens for answer in ask_all(keyed, jobs)] == expected
        assert keyed.status()["handoffs"]["count"] >= len(jobs)
    for case, tokens in zip(cases, expected[::2], strict=True):
        assert tokens == case.greedy[:32]


def _sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_new_tokens=32, ignore_eos=True)


def test_verbs_take_the_folder(running, folder, capsys):
    address = ["--address", running.address, "--keys", str(folder)]
    assert main(["status", *address]) == 0
    assert "decode-1" in capsys.readouterr().out
    assert main(["wait-ready", "--decode", "2", *address]) == 0


# ------------------------------------------------------------------------------ the scan


def test_strangers_get_past_no_socket(running, folder):
    """Garbage, no mechanism, an unknown key, a wrong server key: at every listening socket."""
    ports = ports_of(running)
    assert {name: len(found) for name, found in ports.items()} == {
        "router": 2, "prefill-0": 1, "decode-0": 2, "decode-1": 2,
    }  # fmt: skip
    before = dropped(running)
    for name, found in ports.items():
        for port in found:
            check_garbage(port)
            server = read_pair(folder / f"{name}.key").public.encode()
            check_strangers(port, server, KeyRing(folder, "operator").pair)
    expected = {
        "router client_refused", "router worker_refused", "prefill-0 endpoint_refused",
        "decode-0 endpoint_refused", "decode-0 data_refused",
        "decode-1 endpoint_refused", "decode-1 data_refused",
    }  # fmt: skip
    wait_until(lambda: grown(running, before) >= expected, what="the workers' heartbeats")
    assert grown(running, before) == expected


def grown(running, before: dict[str, int]) -> set[str]:
    """Counters of refused handshakes that have grown since :func:`dropped` gave ``before``."""
    return {
        name
        for name, count in dropped(running).items()
        if name.endswith("_refused") and count != before.get(name, 0)
    }


def test_a_listed_key_gets_past_only_where_its_role_belongs(running, folder):
    """Each role at each socket: it is admitted by the table, and refused elsewhere."""
    ports = ports_of(running)
    decode = running.workers()["decode-0"]["endpoint"]
    control = int(decode.rpartition(":")[2])
    (data,) = (port for port in ports["decode-0"] if port != control)
    client = int(running.address.rpartition(":")[2])
    (worker,) = (port for port in ports["router"] if port != client)
    table = {
        (client, "router"): {"client", "operator"},
        (worker, "router"): {"prefill-9", "decode-9"},
        (ports["prefill-0"][0], "prefill-0"): {"prefill-9", "router", "operator"},
        (control, "decode-0"): {"prefill-9", "router", "operator"},
        (data, "decode-0"): {"prefill-9"},
    }
    files = ("router", "prefill-9", "decode-9", "client", "operator")
    for (port, server), roles in table.items():
        check_roles(port, server, folder, files, roles)


# ------------------------------------------------------------------------------ roles


def test_a_client_may_ask_and_not_drain(running, folder, tmp_path):
    keys = keys_of(folder, "client", "router")
    with Client(running.address, keys=keys) as client:
        assert client.status()["workers"]
        with pytest.raises(AccessDenied, match="requires an operator key"):
            client.drain("decode-1")
    assert running.workers()["decode-1"]["state"] == "ready"


def test_a_worker_at_the_clients_socket_is_told_so(running, folder):
    with (
        Client(running.address, keys=keys_of(folder, "decode-9", "router")) as client,
        pytest.raises(AccessDenied, match="refused this key"),
    ):
        client.status()


def test_a_client_without_keys_hears_what_is_wrong(running):
    with Client(running.address, connect_timeout=1.0) as client, pytest.raises(Exception) as caught:
        client.status()
    assert "--keys FOLDER" in str(caught.value)


def worker_address(running) -> str:
    client = int(running.address.rpartition(":")[2])
    (port,) = (port for port in ports_of(running)["router"] if port != client)
    return f"tcp://127.0.0.1:{port}"


def rejected(peer: RawPeer) -> dict:
    """The next refusal."""
    return peer.hear_until(lambda message: message["type"] in ("Rejected", "Welcome"))[-1]


@pytest.mark.parametrize(
    ("file", "changes", "code"),
    [
        ("prefill-9", {"role": "decode", "worker": "decode-7"}, "access_denied"),
        ("prefill-9", {"role": "prefill", "worker": "prefill-7"}, "access_denied"),
        ("decode-9", {"role": "decode", "worker": "decode-0"}, "access_denied"),
        ("decode", {"role": "decode", "worker": "decode-0"}, "access_denied"),
        ("decode-9", {"role": "decode", "worker": "decode-9", "life": "decode-0"}, "endpoint_dead"),
    ],
    ids=["role", "name", "another key's name", "the pool's key", "incarnation"],
)
def test_a_stolen_worker_id_gets_nothing(running, folder, file, changes, code):
    """While requests run, a thief sends another's Hello; all tokens go where they should."""
    case = cases_of(MODEL)[5]
    victims = running.workers()
    hello = {**hello_map(), "incarnation": random.getrandbits(63), **changes}
    life = hello.pop("life", None)
    if life:
        hello["incarnation"] = victims[life]["incarnation"]
    with running.client() as client:
        jobs = [Job(case.prompt, greedy(64)).start(client) for _ in range(6)]
        keys = keys_of(folder, file, "router")
        with RawPeer(worker_address(running), keys=keys) as thief:
            for _ in range(3):
                thief.send(envelope(hello))
                answer = rejected(thief)
                assert (answer["type"], answer["code"]) == ("Rejected", code), answer
            assert [collect(job).tokens for job in jobs] == [case.greedy] * 6
            assert heard_kinds(thief) <= {"Ping"}
    assert {w["id"] for w in running.workers().values()} == set(victims)


def test_only_prefill_workers_deal_with_a_decode_worker(running, folder):
    decode = running.workers()["decode-0"]
    for file, allowed in (("operator", False), ("router", False), ("prefill-9", True)):
        keys = keys_of(folder, file, "decode-0")
        with RawPeer(decode["endpoint"], keys=keys) as peer:
            peer.say(Probe(nonce=7))
            assert peer.hear()["worker"] == "decode-0"
            if allowed:
                continue
            for kind in ("Open", "Reserve", "Commit", "Release", "Fence"):
                peer.send(*_sealed(_sample(kind)))
                answer = rejected(peer)
                assert answer["code"] == "access_denied", (kind, answer)
                assert "prefill" in answer["message"]


def test_a_prefill_worker_cannot_speak_for_another(running, folder):
    """With the name, then with the incarnation of prefill-0, which the thief knows."""
    workers = running.workers()
    victim = workers["prefill-0"]
    case = cases_of(MODEL)[3]
    with running.client() as client:  # its link stands, so its incarnation is known there
        ask(
            client,
            Job(case.prompt, greedy(8), {"target_endpoint": workers["decode-0"]["endpoint"]}),
        )
    keys = keys_of(folder, "prefill-9", "decode-0")
    opened, reserve = _sample("Open"), _sample("Reserve")
    with RawPeer(workers["decode-0"]["endpoint"], keys=keys) as thief:
        for message in (
            msgspec.structs.replace(opened, worker="prefill-0"),
            msgspec.structs.replace(opened, worker="prefill-9", incarnation=victim["incarnation"]),
        ):
            thief.send(*_sealed(message))
            answer = rejected(thief)
            assert answer["code"] == "access_denied", answer
        for message in (
            msgspec.structs.replace(reserve, incarnation=victim["incarnation"]),
            msgspec.structs.replace(reserve, incarnation=4711),  # of no worker
        ):
            thief.send(*_sealed(message))
            assert thief.hear()["type"] == "Aborted"


def router_incarnation(running, folder) -> int:
    """As the router states it in the Welcome of a worker that takes no requests."""
    keys = keys_of(folder, "prefill-9", "router")
    with running.client() as client:
        card = msgspec.to_builtins(client.describe().card)
    hello = {
        **hello_map(), "worker": "prefill-9", "role": "prefill", "draining": True, "requests": [],
        "model": card, "endpoint": "tcp://127.0.0.1:9", **life_of(keys),
    }  # fmt: skip
    with RawPeer(worker_address(running), keys=keys) as peer:
        peer.send(envelope(hello))
        said = peer.hear_until(lambda message: message["type"] in ("Welcome", "Rejected"))[-1]
    return said["incarnation"]


def test_blocks_for_another_workers_grant_are_refused(running, folder):
    """Whoever guesses a grant cannot write into it: a frame counts with its owner's key alone."""
    ports = ports_of(running)["decode-0"]
    decode = running.workers()["decode-0"]["endpoint"]
    (data,) = (port for port in ports if port != int(decode.rpartition(":")[2]))
    keys = keys_of(folder, "prefill-9", "decode-0")
    life = life_of(keys)
    ours = life["incarnation"]
    opened = msgspec.structs.replace(_sample("Open"), worker="prefill-9", **life)
    reserve = msgspec.structs.replace(
        _sample("Reserve"), request=os.urandom(16), incarnation=ours, hashes=[], num_tokens=8
    )
    there = Holder(running.workers()["decode-0"]["incarnation"], keys.servers[0])
    theirs = worker_key(cluster_key(running), there, router_incarnation(running, folder))
    us, terms = Holder(ours, keys.public), Terms(4096, int(time.monotonic()), 600)
    ticket = reserve_ticket(theirs, reserve.request, reserve.attempt, us, terms)
    reserve = msgspec.structs.replace(reserve, ticket=ticket)
    with RawPeer(decode, keys=keys) as owner:
        owner.send(*_sealed(opened))
        owner.send(*_sealed(reserve))
        grant = owner.hear_until(lambda message: message["type"] == "Grant")[-1]["grant"]
        header = KVFrame(
            grant=GrantRef(*grant), index=0, layer_start=0, layer_count=1, block_start=0,
            block_count=1, nbytes=64, checksum=0,
        )  # fmt: skip
        for file, counter in (
            ("prefill-0", "data_access_denied"),
            ("prefill", "data_access_denied"),
            ("prefill-9", "data_protocol"),  # its own grant, but no block of 64 bytes
        ):
            before = dropped(running)
            keys = keys_of(folder, file, "decode-0")
            with RawPeer(f"tcp://127.0.0.1:{data}", keys=keys) as sender:
                for _ in range(3):
                    sender.send(encode_kv_header(header), bytes(64))

                # A worker reports its counters with its heartbeats, so those of earlier
                # tests may still come in: only the frames' own count here.
                def frames(before=before) -> Counter[str]:
                    more = Counter(dropped(running)) - Counter(before)
                    return Counter({name: n for name, n in more.items() if " data_" in name})

                wait_until(lambda: frames().total() >= 3, what="the worker's heartbeat")
                assert frames() == {f"decode-0 {counter}": 3}, file
        release = Release(
            request=reserve.request, attempt=reserve.attempt, incarnation=ours, ticket=ticket
        )
        owner.send(*_sealed(release))
        owner.hear_until(lambda message: message["type"] == "Released")


def _sample(kind: str) -> Message:
    """A message of a kind, as the golden file has it."""
    return EnvelopeDecoder[Message](PrefillToDecode).decode(golden()[kind][0])[0]


def _sealed(message: Message) -> list:
    return EnvelopeEncoder(digest=envelope_digest).encode([message])


# ------------------------------------------------------------------------------ names of clients


def test_a_stolen_identity_gets_no_tokens_of_its_owner(running, folder):
    """The thief has a key and the victim's identity, and asks for it again and again."""
    keys = keys_of(folder, "client", "router")
    identity = identity_of(keys)
    context = WireContext(
        tokens=WireTokens(np.array(cases_of(MODEL)[3].prompt, np.int32)), max_length=2048
    )
    thief_keys = keys_of(folder, "thief", "router")
    with RawPeer(running.address, keys=keys, identity=identity) as victim:
        victim.say(Submit(request_id="mine", context=context))
        victim.hear_until(lambda message: message["type"] == "Tokens")
    check_stolen_identity(running.address, thief_keys, identity)  # the victim left in mid-stream
    assert dropped(running).get("router client_intruders", 0) > 0
