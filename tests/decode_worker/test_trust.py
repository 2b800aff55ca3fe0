"""What a prefill worker's key allows at a decode worker: its own handoffs and nothing else."""

from __future__ import annotations

import pytest
import zmq
from msgspec.structs import replace

from baton.decode_worker.events import FromPeer
from baton.decode_worker.prefill_sockets import refusal
from baton.proto.ids import new_nonce, worker_incarnation
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.messages import (
    Aborted,
    Commit,
    Committed,
    Credit,
    Fence,
    Grant,
    Message,
    Open,
    Ping,
    Release,
    Released,
    Reserve,
    Stale,
    Terminal,
    Welcome,
)
from baton.proto.wire.proofs import Holder, Terms, reserve_ticket
from baton.runtime.keys.allowed import AllowedKeys, KeyEntry

from .bench import (
    CARD,
    KEY,
    OTHER,
    PEER,
    PROMPT,
    ROUTER,
    TERMS,
    WORKER_KEY,
    Bench,
    hashes_of,
)  # fmt: skip

MINE, THEIRS = (zmq.curve_keypair()[0] for _ in range(2))
ROGUE = b"rogue"


def opening(key: bytes, name: str = "prefill-0") -> Open:
    nonce = new_nonce()
    return Open(
        version=PROTOCOL_VERSION, worker=name, incarnation=worker_incarnation(key, nonce),
        nonce=nonce, model=CARD, transports=["zmq"],
    )  # fmt: skip


def reserving(
    key: bytes, request: bytes = KEY, attempt: int = 1, incarnation: int = 5, terms: Terms = TERMS
) -> Reserve:
    """A Reserve with the ticket of the worker that has ``key``."""
    ticket = reserve_ticket(WORKER_KEY, request, attempt, Holder(incarnation, key), terms)
    return Reserve(
        request=request, attempt=attempt, incarnation=incarnation, hashes=hashes_of(PROMPT),
        num_tokens=PROMPT, growth=4, serial=1, deadline=60.0, ticket=ticket,
    )  # fmt: skip


class Keyed(Bench):
    """A worker with one honest prefill worker and a rogue."""

    def mine(self, message: Message) -> None:
        self.feed(FromPeer(PEER, message, MINE))

    def theirs(self, message: Message) -> None:
        self.feed(FromPeer(ROGUE, message, THEIRS))


@pytest.fixture
def keyed() -> Keyed:
    return Keyed()


@pytest.fixture
def grant(keyed) -> Grant:
    keyed.mine(reserving(MINE))
    (grant,) = keyed.to_peer(Grant)
    return grant


# ------------------------------------------------------------------------------ before the core


def allowed() -> AllowedKeys:
    return AllowedKeys(
        [
            KeyEntry(public=MINE.decode(), role="prefill", names=("prefill-0",)),
            KeyEntry(public=THEIRS.decode(), role="prefill"),
        ]
    )


def test_a_link_opens_only_with_the_key_its_incarnation_was_made_with():
    keys = allowed()
    mine = opening(MINE)
    assert refusal(keys, keys.get(MINE), mine) is None
    assert refusal(keys, keys.get(THEIRS), mine).code == "access_denied"
    assert refusal(keys, keys.get(THEIRS), replace(mine, worker="prefill-9")) is not None
    assert refusal(keys, keys.get(MINE), replace(mine, nonce=new_nonce())) is not None
    assert refusal(keys, keys.get(THEIRS), opening(THEIRS, "prefill-9")) is None
    assert refusal(keys, None, opening(MINE)) is not None
    assert refusal(keys, None, Ping()) is None


# ------------------------------------------------------------------------------ tickets


@pytest.mark.parametrize("incarnation", [5, 6])
def test_a_ticket_is_good_only_over_a_connection_with_its_key(keyed, incarnation):
    """A rogue that captured a Reserve, and repeats it over its own connection."""
    keyed.theirs(replace(reserving(MINE), incarnation=incarnation))
    assert keyed.to_peer(Aborted)
    assert not keyed.to_peer(Grant)
    assert keyed.cache.pool.used == 0
    assert keyed.member.dropped["peer_uninvited"] == 1
    keyed.mine(reserving(MINE))
    assert keyed.to_peer(Grant)


def test_tickets_of_a_router_end_ten_minutes_after_its_restart(keyed):
    """A rogue may keep the tickets of its requests; the attempts of honest workers go on."""
    keyed.hear(Welcome(router=ROUTER, incarnation=4, key=b"n" * 16))
    keyed.mine(reserving(MINE))
    assert keyed.to_peer(Grant)
    keyed.later(599.0, step=1.0)
    keyed.mine(reserving(MINE, OTHER))
    assert keyed.to_peer(Grant)
    keyed.later(2.0)
    keyed.to_peer(Grant)  # again, of the running handoff
    keyed.mine(reserving(MINE, b"a hoarded ticket"))
    assert not keyed.to_peer(Grant)
    assert keyed.member.dropped["peer_uninvited"] == 1


def test_a_router_without_a_key_for_tickets_invites_nobody():
    bench = Bench(welcomed=False)
    bench.hear(Welcome(router=ROUTER, incarnation=3))
    bench.ask(replace(reserving(b""), ticket=b""))
    assert bench.to_peer(Aborted)
    assert bench.cache.pool.used == 0


# ------------------------------------------------------------------------------ ticket's terms


def test_a_reserve_for_more_than_its_ticket_gets_nothing(keyed):
    asked = reserving(MINE, terms=Terms(PROMPT + 4, 0, 60))
    for more in ({"growth": 5}, {"num_tokens": 5000, "growth": 0}, {"growth": 1 << 20}):
        keyed.mine(replace(asked, **more))
        assert keyed.to_peer(Aborted), more
    assert keyed.cache.pool.used == 0
    assert keyed.member.dropped["peer_too_much"] == 3
    keyed.mine(asked)
    assert keyed.to_peer(Grant)


def test_what_a_ticket_states_cannot_be_changed(keyed):
    asked = reserving(MINE, terms=Terms(PROMPT, 0, 60))
    larger = Terms(PROMPT + 4, 0, 60).encode() + asked.ticket[len(TERMS.encode()) :]
    for ticket in (larger, asked.ticket[:-1], asked.ticket + b"x", b"", b"t" * 16):
        keyed.mine(replace(asked, ticket=ticket))
        assert keyed.to_peer(Aborted), ticket
    assert keyed.member.dropped["peer_uninvited"] == 5


def test_a_grant_ends_with_its_ticket_whatever_deadline_its_sender_states(keyed):
    keyed.mine(replace(reserving(MINE, terms=Terms(PROMPT + 4, 7, 20)), deadline=1e6))
    assert keyed.to_peer(Grant)
    for second in range(1, 20):
        keyed.later(1.0, step=0.5)
        keyed.mine(Ping(nonce=second))
        assert keyed.cache.pool.used
    keyed.later(1.0, step=0.5)
    assert keyed.cache.pool.used == 0


def test_a_ticket_is_over_once_a_later_one_shows_its_time(keyed):
    old, late = Terms(200, 1000, 60), Terms(200, 1061, 60)
    keyed.mine(reserving(MINE, OTHER, terms=late))
    assert keyed.to_peer(Grant)
    keyed.mine(reserving(MINE, terms=old))
    assert keyed.to_peer(Aborted)
    # of the seconds that it had, the time that others show is gone
    keyed.mine(reserving(MINE, b"another request ", terms=Terms(200, 1051, 60)))
    assert keyed.to_peer(Grant)
    slot = keyed.receiver._grants.table.live[b"another request "]
    assert slot.expires == keyed.now + 50


def test_a_request_may_not_grow_beyond_its_ticket_nor_live_longer(bench):
    terms = Terms(PROMPT + 8, 0, 60)
    for request, new, ended in ((KEY, 8, False), (OTHER, 9, True)):
        ticket = reserve_ticket(WORKER_KEY, request, 1, Holder(5), terms)
        reserve = replace(reserving(b"", request), ticket=ticket, growth=1)
        bench.ask(reserve)
        (grant,) = bench.to_peer(Grant)
        manifest = bench.send(grant)
        bench.commit(grant, manifest, new=new, deadline=1e6)
        ends = bench.take(Terminal)
        assert bool(ends) == ended
        if not ended:
            assert bench.core._jobs.get((request, 1)).deadline <= bench.now + 60
        else:
            assert ends[0].code == "handoff_failed"
            assert "ticket" in ends[0].message


# ------------------------------------------------------------------------------ captured grants


def test_a_captured_grant_obeys_only_its_key(keyed, grant):
    manifest = keyed.send(grant)
    commit = keyed.commit(grant, manifest)  # without a key
    assert [(one.request, one.attempt) for one in keyed.to_peer(Stale)] == [(KEY, 1)]
    keyed.theirs(commit)
    assert keyed.to_peer(Stale)
    keyed.theirs(Fence(grant=grant.grant))
    keyed.theirs(Release(request=KEY, attempt=1, grant=grant.grant, incarnation=5))
    assert keyed.to_peer(Released)  # the rogue has nothing there
    assert keyed.member.dropped["peer_anothers_grant"] == 3
    keyed.to_peer(Committed), keyed.to_peer(Credit)
    keyed.mine(commit)
    assert keyed.to_peer(Committed)


def test_a_committed_attempt_is_confirmed_only_to_the_key_that_committed(keyed, grant):
    commit = keyed.commit(grant, keyed.send(grant))
    keyed.mine(commit)
    assert keyed.to_peer(Committed)
    keyed.theirs(replace(commit, grant=replace(commit.grant, slot=7)))
    assert not keyed.to_peer(Committed)
    assert keyed.to_peer(Stale)
    keyed.mine(commit)
    assert keyed.to_peer(Committed)


def test_cached_blocks_of_one_key_serve_no_other_key(keyed, grant):
    """Their KV may be false, and so may the hashes under which they were sent."""
    keyed.mine(keyed.commit(grant, keyed.send(grant)))
    keyed.theirs(reserving(THEIRS, OTHER, incarnation=6))
    (foreign,) = (one for one in keyed.to_peer(Grant) if one.request == OTHER)
    assert foreign.cached_tokens == 0
    keyed.mine(reserving(MINE, b"another request!"))
    (own,) = (one for one in keyed.to_peer(Grant) if one.request == b"another request!")
    assert own.cached_tokens > 0


def test_answers_do_not_follow_a_rogue_that_opens_with_the_same_incarnation(keyed, grant):
    """By accident only: the socket has compared the incarnation with the key before."""
    link = replace(opening(THEIRS), incarnation=5)
    keyed.theirs(link)
    (slot,) = keyed.receiver.ungiven()
    assert slot.peer == PEER
    keyed.feed(FromPeer(b"new", link, MINE))
    assert slot.peer == b"new"


def test_opens_leave_nothing_behind(keyed, grant):
    """The flood of finding T1: the honest worker's link and grants stay as they are."""
    for _ in range(3000):
        keyed.theirs(opening(THEIRS, "prefill-9"))
        keyed.peers.clear()
    keyed.mine(opening(MINE))
    keyed.mine(reserving(MINE, OTHER))
    assert [one.request for one in keyed.to_peer(Grant)] == [OTHER]
    assert keyed.receiver.remembered == 0
    keyed.mine(keyed.commit(grant, keyed.send(grant)))
    assert [one for one in keyed.to_peer(Committed) if one.request == KEY]


def test_commit_is_the_only_message_that_runs_a_request(keyed, grant):
    keyed.theirs(Commit(**{name: getattr(one, name) for one in [keyed.commit(grant, (0, 0, 0))]
                           for name in one.__struct_fields__}))  # fmt: skip
    assert not keyed.plans
