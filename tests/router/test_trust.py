"""What a worker's key allows at a router: nothing of another key's worker, whoever comes first."""

from __future__ import annotations

import sys

import pytest
import zmq
from msgspec.structs import replace

from baton.proto.ids import new_nonce, worker_incarnation
from baton.proto.wire.messages import (
    Abort,
    Assign,
    Drain,
    Hello,
    Rejected,
    RequestState,
    Tokens,
    Welcome,
)  # fmt: skip
from baton.proto.wire.proofs import (
    Holder,
    Terms,
    assignment_proof,
    reserve_ticket,
    terms_of,
    worker_key,
)  # fmt: skip
from baton.router.authorization import hello_refusal
from baton.router.records import NO_KEY, Authentication, WorkerCaller
from baton.runtime.keys.allowed import AllowedKeys, KeyEntry

from .conftest import KEY, Bench, make_config

VICTIM, ROGUE = (zmq.curve_keypair()[0] for _ in range(2))
PLACE = "tcp://10.0.0.7:5000"


class Keyed:
    """A router whose workers have keys: by routing identity, as on a socket with CURVE."""

    def __init__(self) -> None:
        self.callers: dict[bytes, WorkerCaller] = {}
        self.bench = Bench(
            make_config(),
            authentication=Authentication(worker=lambda who, _name: self.callers.get(who, NO_KEY)),
        )

    def join(self, role: str, key: bytes, name: str, *, vouched: bool = False, **fields):
        identity = f"{name} {len(self.callers)}".encode()
        self.callers[identity] = WorkerCaller(key, vouched)
        fields.setdefault("endpoint", f"tcp://10.0.0.9:{5000 + len(self.callers)}")
        return self.bench.join(role, worker=name, identity=identity, **fields)


@pytest.fixture
def keyed() -> Keyed:
    return Keyed()


def welcomed(keyed: Keyed, worker) -> bool:
    return bool(keyed.bench.take(worker, Welcome))


def hello_of(key: bytes, name: str, role: str = "decode") -> Hello:
    nonce = new_nonce()
    bench = Bench(make_config())
    hello = bench.join(role, worker=name).hello
    return replace(hello, nonce=nonce, incarnation=worker_incarnation(key, nonce))


# ------------------------------------------------------------------------------ the Hello alone


def listed(**names: tuple[str, ...]) -> AllowedKeys:
    keys = {"victim": VICTIM, "rogue": ROGUE}
    return AllowedKeys(
        [
            KeyEntry(public=keys[who].decode(), role="decode", names=wanted)
            for who, wanted in names.items()
        ]
    )


def test_an_incarnation_is_good_only_with_the_key_it_was_made_with():
    allowed = listed(victim=("*",), rogue=("*",))
    hello = hello_of(VICTIM, "decode-0")
    assert hello_refusal(allowed, allowed.get(VICTIM), hello) is None
    stolen = hello_refusal(allowed, allowed.get(ROGUE), hello)
    assert stolen is not None
    assert stolen.code == "endpoint_dead"  # an honest worker takes a new incarnation at once
    changed = hello_refusal(allowed, allowed.get(VICTIM), replace(hello, nonce=b"\0" * 16))
    assert changed is not None


def test_a_name_that_the_list_spells_out_is_its_keys_alone():
    allowed = listed(victim=("decode-0",), rogue=("*",))
    assert hello_refusal(allowed, allowed.get(ROGUE), hello_of(ROGUE, "decode-0")).code == (
        "access_denied"
    )
    assert hello_refusal(allowed, allowed.get(ROGUE), hello_of(ROGUE, "decode-1")) is None


def test_refused_hellos_leave_nothing_behind(keyed):
    """A flood of Hellos that the router's core refuses, as the victim's claims once did."""
    victim = keyed.join("decode", VICTIM, "decode-0", endpoint=PLACE)
    rogue = keyed.join("decode", ROGUE, "rogue", draining=True)
    for number in range(2000):
        rogue.say(replace(rogue.hello, incarnation=10_000 + number, version=99))
        rogue.say(replace(rogue.hello, incarnation=90_000 + number, endpoint="nonsense"))
    registry = keyed.bench.core.registry
    assert {one.id for one in registry.live()} == {"decode-0", "rogue"}
    assert len(registry._by_identity) == 2
    assert not registry._gone
    assert not any(registry._dead_incarnations.values())
    assert sum(log.event == "worker.refused" for log in keyed.bench.logs) == 1
    victim.gone()
    victim.identity = b"again"
    keyed.callers[b"again"] = WorkerCaller(VICTIM)
    victim.say(victim.hello)
    assert welcomed(keyed, victim)


def test_a_connection_registers_one_worker(keyed):
    rogue = keyed.join("decode", ROGUE, "rogue-0", draining=True)
    for number in range(100):
        rogue.say(replace(rogue.hello, incarnation=5_000 + number, worker=f"rogue-{number}"))
    assert [one.id for one in keyed.bench.core.registry.live()] == ["rogue-0"]
    assert {one.code for one in keyed.bench.take(rogue, Rejected)} == {"access_denied"}


def test_a_key_pushes_out_only_its_own_dead_workers(keyed):
    """Thousands of workers that register and die, after a worker of another key died."""
    victim = keyed.join("decode", VICTIM, "decode-0")
    registry, now = keyed.bench.core.registry, keyed.bench.now
    registry.declare_dead(registry.known(victim.hello.incarnation), "its connection closed")
    for number in range(5_000):
        hello = replace(victim.hello, incarnation=10_000 + number, worker=f"rogue-{number}")
        rogue = registry.join(b"%d" % number, hello, now, WorkerCaller(ROGUE))
        registry.declare_dead(rogue, "its connection closed")
    assert registry.is_dead(victim.hello.incarnation, VICTIM)
    assert "decode-0" in {one.id for one in registry.listed()}
    assert len(registry.listed()) == 64
    assert len(registry._dead_of(ROGUE)) == 4096


# ------------------------------------------------------------------------------ names and places


@pytest.mark.parametrize("first", ["victim", "rogue"])
def test_a_rogue_with_the_victims_name_and_endpoint_displaces_nobody(keyed, first):
    def join(who: str):
        key = {"victim": VICTIM, "rogue": ROGUE}[who]
        return keyed.join("decode", key, "decode-0", endpoint=PLACE, draining=who == "rogue")

    workers = {who: join(who) for who in sorted(("victim", "rogue"), key=lambda who: who != first)}
    assert all(welcomed(keyed, worker) for worker in workers.values())
    keyed.join("prefill", VICTIM, "prefill-0")
    keyed.bench.submit()
    _, assign = keyed.bench.find(Assign)
    victim = workers["victim"].hello
    assert (assign.decode_incarnation, assign.decode_key) == (victim.incarnation, VICTIM)
    workers["rogue"].gone()
    keyed.bench.advance(30.0)
    assert keyed.bench.core.registry.known(victim.incarnation) is not None


def test_the_same_key_still_replaces_only_a_lost_worker(keyed):
    first = keyed.join("decode", VICTIM, "decode-0", endpoint=PLACE)
    second = keyed.join("decode", VICTIM, "decode-0", endpoint=PLACE)
    assert keyed.bench.one(second, Rejected).code == "name_taken"
    first.gone()
    second.say(second.hello)
    assert welcomed(keyed, second)
    assert keyed.bench.core.registry.known(first.hello.incarnation) is None


def test_a_name_means_the_worker_that_the_list_names(keyed):
    keyed.join("decode", ROGUE, "decode-0", endpoint=PLACE)
    victim = keyed.join("decode", VICTIM, "decode-0", endpoint=PLACE, vouched=True)
    keyed.join("decode", ROGUE, "decode-1")
    assert keyed.bench.core.registry.resolve(PLACE).incarnation == victim.hello.incarnation
    keyed.bench.client(Drain(worker="decode-0"))
    assert keyed.bench.take(victim, Drain)


def test_another_key_with_a_known_incarnation_is_told_to_take_another(keyed):
    """By accident only: the socket has compared the incarnation with the key before."""
    victim = keyed.join("decode", VICTIM, "decode-0", endpoint=PLACE)
    incarnation = victim.hello.incarnation
    rogue = keyed.join("decode", ROGUE, "decode-0", endpoint=PLACE, incarnation=incarnation)
    assert keyed.bench.one(rogue, Rejected).code == "endpoint_dead"
    assert keyed.bench.core.registry.known(incarnation).identity == victim.identity


# ------------------------------------------------------------------------------ proofs


def test_what_a_key_may_show_is_made_for_that_key():
    cluster, decode = b"c" * 32, worker_key(b"c" * 32, Holder(9, VICTIM), 1)
    assert decode != worker_key(cluster, Holder(9, ROGUE), 1)
    assert decode != worker_key(cluster, Holder(9, VICTIM), 2)  # after the router's restart
    mine, theirs = Holder(5, ROGUE), Holder(5, VICTIM)
    assert assignment_proof(cluster, KEY, 1, mine) != assignment_proof(cluster, KEY, 1, theirs)
    terms = Terms(10, 1, 60)
    ticket = reserve_ticket(decode, KEY, 1, mine, terms)
    assert ticket != reserve_ticket(decode, KEY, 1, theirs, terms)
    assert ticket[-16:] != reserve_ticket(decode, KEY, 1, mine, Terms(11, 1, 60))[-16:]


def test_terms_above_32_bits_are_cut_to_the_largest_number():
    most = (1 << 32) - 1
    ticket = reserve_ticket(b"k" * 16, KEY, 1, Holder(5, ROGUE), Terms(1 << 40, most, most + 1))
    assert terms_of(ticket) == Terms(most, most, most)


def test_a_ticket_states_what_its_request_needs(keyed):
    bench = keyed.bench
    bench.pair()
    bench.submit(prompt=10, new=20, deadline=30.5)
    _, assign = bench.find(Assign)
    terms = terms_of(assign.ticket)
    assert terms == Terms(30, int(bench.now), 32)
    holder = Holder(bench.workers[1].hello.incarnation)
    key = worker_key(bench.config.key, holder, 77)
    mine = Holder(bench.workers[0].hello.incarnation)
    assert assign.ticket == reserve_ticket(key, assign.request, 1, mine, terms)


@pytest.mark.parametrize("ending", [{}, {"code": "internal", "message": "no"}])
def test_an_end_before_the_handoff_is_an_end_at_the_decode_worker_too(keyed, ending):
    bench = keyed.bench
    prefill, decode = bench.pair()
    key, _ = bench.run()
    prefill.end(key, 10, **ending)
    assert [(a.request, a.attempt) for a in bench.take(decode, Abort)] == [(key, 1)]


def test_a_proof_shown_with_another_key_counts_for_nothing(keyed):
    """A captured proof in a Hello after the router's restart."""
    held = RequestState(KEY, 1, 12, 10, router="router")
    proof = assignment_proof(keyed.bench.config.key, KEY, 1, Holder(77, VICTIM))
    rogue = keyed.join("decode", ROGUE, "decode-0", incarnation=77)
    keyed.bench.hear(rogue.identity, replace(rogue.hello, requests=[replace(held, proof=proof)]))
    assert not keyed.bench.core.registry.known(77).reported
    assert keyed.bench.core.dropped["unproven"] == 1


def test_a_welcome_gives_a_key_that_only_this_key_can_use(keyed):
    rogue = keyed.join("decode", ROGUE, "decode-0", incarnation=77)
    welcome = keyed.bench.one(rogue, Welcome)
    assert welcome.key == worker_key(keyed.bench.config.key, Holder(77, ROGUE), welcome.incarnation)


def test_reports_about_unknown_requests_leave_little_behind(keyed):
    """Each is answered with Abort, which is repeated until the worker confirms it."""
    rogue = keyed.join("decode", ROGUE, "decode-0", draining=True)
    keyed.bench.advance(120.0)  # no client may resume what began before
    keyed.callers[rogue.identity] = WorkerCaller(ROGUE)
    for number in range(5_000):
        rogue.tokens(number.to_bytes(16, "little"), 10, 7)
    worker = keyed.bench.core.registry.known(rogue.hello.incarnation)
    assert worker is not None
    assert len(worker.aborts) == 1024


def test_tokens_for_a_request_of_another_key_change_nothing(keyed):
    keyed.join("prefill", VICTIM, "prefill-0")
    keyed.join("decode", VICTIM, "decode-0")
    rogue = keyed.join("decode", ROGUE, "decode-0", draining=True)
    key, _ = keyed.bench.run()
    rogue.tokens(key, 10, 7, 7)
    assert not keyed.bench.take(b"client", Tokens)
    assert sys.getsizeof(keyed.bench.core.dropped) < 10_000
    assert keyed.bench.core.dropped["unproven"] == 1
