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
    Welcome,
)
from baton.proto.wire.proofs import Holder, reserve_ticket
from baton.runtime.keys.allowed import AllowedKeys, KeyEntry

from .bench import CARD, KEY, OTHER, PEER, PROMPT, ROUTER, WORKER_KEY, Bench, hashes_of

MINE, THEIRS = (zmq.curve_keypair()[0] for _ in range(2))
ROGUE = b"rogue"


def opening(key: bytes, name: str = "prefill-0") -> Open:
    nonce = new_nonce()
    return Open(
        version=PROTOCOL_VERSION, worker=name, incarnation=worker_incarnation(key, nonce),
        nonce=nonce, model=CARD, transports=["zmq"],
    )  # fmt: skip


def reserving(key: bytes, request: bytes = KEY, attempt: int = 1, incarnation: int = 5) -> Reserve:
    """A Reserve with the ticket of the worker that has ``key``."""
    ticket = reserve_ticket(WORKER_KEY, request, attempt, Holder(incarnation, key))
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
