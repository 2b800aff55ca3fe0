"""The decode side of a handoff, race by race."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.kv_transfer.grants import TRANSITIONS, GrantState, IllegalTransition
from baton.kv_transfer.receiver import Receiver, check_receiver
from baton.kv_transfer.receiver_grants import Evict, Handover, Reply
from baton.kv_transfer.sender_handoff import SendFrame
from baton.proto.errors import InternalError, ProtocolError
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.messages import (
    Aborted,
    Busy,
    Committed,
    Fence,
    Grant,
    GrantRef,
    KVFrame,
    Ping,
    Refused,
    Release,
    Released,
    Revoke,
    Stale,
)
from baton.proto.wire.proofs import Holder
from baton.simulator.own_errors import Plant, Planted

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import (
    LAYOUT,
    PEER,
    REQUEST,
    commit,
    context,
    make_receiver,
    make_sender,
    reserve,
)

from work_counter import opcodes


def grant_of(receiver: Receiver, message=None, now: float = 0.0) -> Grant:
    (reply,) = receiver.on_reserve(PEER, message or reserve(), now)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Grant)
    return reply.message


def frames_for(grant: Grant, tokens: int = 10) -> list[KVFrame]:
    """Frames a real sender cuts for this grant."""
    sender = make_sender()
    sender.start("ipc://d", 0, reserve(tokens), 0.0)
    sender.on_grant("ipc://d", msgspec.structs.replace(grant, credit=1 << 30), 0.0)
    outputs = sender.ready((REQUEST, 1), layer_end=2, token_end=tokens, last=True, now=0.0)
    frames = [o.frame for o in outputs if isinstance(o, SendFrame)]
    return [msgspec.structs.replace(f, checksum=1000 + f.index) for f in frames]


def deliver(receiver: Receiver, frames: list[KVFrame], *, intact: bool = True) -> list:
    outputs = []
    for frame in frames:
        assert receiver.data.locate(frame) is not None
        outputs += receiver.data.on_frame(frame, intact=intact, now=0.0)
    return outputs


def manifest(grant: Grant, frames: list[KVFrame], attempt: int = 1):
    digest = 0
    for frame in frames:
        digest ^= frame.checksum
    total = sum(f.nbytes for f in frames)
    return commit(grant.grant, len(frames), total, digest, attempt)


def test_a_complete_handoff_passes_ownership_once():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    outputs = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    reply, handover = outputs
    assert isinstance(reply.message, Committed)
    assert isinstance(handover, Handover)
    assert handover.bytes_received == 3 * 2 * LAYOUT.block_bytes
    assert reply.message.bytes == handover.bytes_received
    check_receiver(receiver, [REQUEST])
    store.free(handover.allocation)
    receiver.close(REQUEST, 1)
    assert store.used == 0


def test_commit_overtakes_its_data():
    receiver, _ = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    assert receiver.on_commit(PEER, manifest(grant, frames), 0.0) == []
    outputs = deliver(receiver, frames)
    assert [type(o) for o in outputs if isinstance(o, Handover)] == [Handover]


def test_lost_frames_are_asked_for_again_after_patience():
    receiver, _ = make_receiver(patience=0.5)
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames[:-1])
    assert receiver.on_commit(PEER, manifest(grant, frames), 0.0) == []
    assert receiver.tick(0.4) == []
    (reply,) = receiver.tick(0.6)
    assert isinstance(reply.message, Refused)
    assert reply.message.frames == [frames[-1].index]
    outputs = deliver(receiver, frames[-1:]) + receiver.on_commit(
        PEER, manifest(grant, frames), 0.7
    )
    assert any(isinstance(o, Handover) for o in outputs)


def test_credit_of_a_lost_grant_is_written_off_on_both_sides():
    """The Grant never came and its credit counts as used: the sender must not use it after all."""
    receiver, _ = make_receiver(patience=0.5, window=128)
    lost = grant_of(receiver)
    assert (lost.credit, lost.counted) == (128, 0)
    grant = grant_of(receiver, now=1.0)
    assert (grant.credit, grant.counted) == (256, 128)
    sender = make_sender()
    sender.start("ipc://d", 0, reserve(), 1.0)
    sender.on_grant("ipc://d", grant, 1.0)
    outputs = sender.ready((REQUEST, 1), layer_end=2, token_end=10, last=True, now=1.0)
    sent = [o.frame for o in outputs if isinstance(o, SendFrame)]
    raised = [o.message for o in deliver(receiver, sent)]  # each within its grant
    assert [f.nbytes for f in sent] == [128]
    assert [c.credit for c in raised] == [384]
    outputs = sender.on_credit("ipc://d", raised[0], 1.0)
    sent += [o.frame for o in outputs if isinstance(o, SendFrame)]
    assert deliver(receiver, sent[1:])
    sender.check_integrity()
    check_receiver(receiver, [])


def test_a_refusal_says_what_counts_as_used():
    receiver, _ = make_receiver(window=128, budget=128)
    grant = grant_of(receiver)
    frames = frames_for(grant)
    credit = grant.credit
    for frame in frames:
        (news,) = deliver(receiver, [frame], intact=frame.index != 1) or [None]
        credit = news.message.credit if news else credit
    (reply,) = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    assert reply.message.frames == [1]
    assert reply.message.counted == credit <= reply.message.credit


def test_damaged_frame_is_refused_and_taken_when_repeated():
    receiver, _ = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames[1:])
    deliver(receiver, frames[:1], intact=False)
    (reply,) = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    assert reply.message.frames == [0]
    assert receiver.data.damaged == 1
    deliver(receiver, frames[:1])
    outputs = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    assert any(isinstance(o, Handover) for o in outputs)


def test_wrong_digest_fails_the_handoff_and_frees_the_blocks():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    wrong = msgspec.structs.replace(manifest(grant, frames), digest=1)
    (reply,) = receiver.on_commit(PEER, wrong, 0.0)
    assert reply.message.code == "handoff_failed"
    assert store.used == 0


def test_a_manifest_that_leaves_cells_out_is_refused():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)[:-1]
    deliver(receiver, frames)
    (reply,) = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    assert reply.message.code == "handoff_failed"
    assert store.used == 0


def test_duplicate_reserve_repeats_the_grant():
    receiver, store = make_receiver()
    first = grant_of(receiver)
    used = store.used
    assert grant_of(receiver) == first
    assert store.used == used


def test_new_serial_gets_a_fresh_grant():
    receiver, store = make_receiver()
    first = grant_of(receiver)
    used = store.used
    second = grant_of(receiver, reserve(serial=2))
    assert second.grant != first.grant
    assert store.used == used
    assert receiver.data.locate(frames_for(first)[0]) is None


def test_duplicate_commit_repeats_committed():
    receiver, _ = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    message = manifest(grant, frames)
    first = receiver.on_commit(PEER, message, 0.0)[0]
    assert receiver.on_commit(PEER, message, 0.1) == [first]


def test_forgotten_attempts_are_counted():
    receiver, _ = make_receiver(attempts=3)
    for number in range(5):
        receiver.abort(number.to_bytes(16, "big"), 1, now=1.0, keep=600.0)
    receiver.tick(2.0)
    assert receiver.forgotten == 2
    receiver.tick(602.0)
    receiver.abort(REQUEST, 1, now=602.0, keep=600.0)
    assert (receiver.forgotten, receiver.remembered) == (2, 1)


def test_late_reserve_after_abort_meets_the_tombstone():
    receiver, store = make_receiver()
    assert receiver.abort(REQUEST, 1, 0.0, keep=60.0) == []
    (reply,) = receiver.on_reserve(PEER, reserve(), 1.0)
    assert isinstance(reply.message, Aborted)
    assert store.used == 0


def test_abort_crosses_commit():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    receiver.abort(REQUEST, 1, 0.0, keep=60.0)
    (reply,) = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    assert isinstance(reply.message, Stale)
    assert store.used == 0


def test_abort_of_an_owned_request_evicts_it():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    handover = receiver.on_commit(PEER, manifest(grant, frames), 0.0)[1]
    assert receiver.abort(REQUEST, 1, 0.0, keep=60.0) == [Evict(REQUEST, 1)]
    store.free(handover.allocation)
    assert store.used == 0


def test_higher_attempt_revokes_the_lower_and_lower_is_refused():
    receiver, store = make_receiver()
    first = grant_of(receiver)
    second = grant_of(receiver, reserve(attempt=2))
    assert second.grant != first.grant
    assert store.used == 4
    (reply,) = receiver.on_reserve(PEER, reserve(attempt=1), 0.0)
    assert isinstance(reply.message, Aborted)
    assert receiver.data.locate(frames_for(first)[0]) is None


def test_release_frees_and_a_late_frame_is_stale():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames[:1])
    (reply,) = receiver.on_release(PEER, Release(request=REQUEST, attempt=1), 0.0)
    assert isinstance(reply.message, Released)
    assert store.used == 0
    assert receiver.data.locate(frames[1]) is None
    assert receiver._grants.stale == 1
    (again,) = receiver.on_release(PEER, Release(request=REQUEST, attempt=1), 0.0)
    assert again == reply


def test_release_does_not_take_an_owned_request_away():
    receiver, _ = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    receiver.on_release(PEER, Release(request=REQUEST, attempt=1), 0.0)
    check_receiver(receiver, [REQUEST])
    assert receiver.granted == 0


def test_dead_prefill_frees_its_grants_only():
    receiver, store = make_receiver()
    grant_of(receiver)
    receiver.peer_dead(999)
    assert store.used > 0
    receiver.peer_dead(5)
    assert store.used == 0


def test_a_prefill_worker_that_one_router_declared_dead_serves_the_others():
    """Whether it lives is for routers to decide: the ticket of its Reserve says that one has."""
    receiver, store = make_receiver()
    grant_of(receiver)
    receiver.peer_dead(5)
    receiver.abort(REQUEST, 1, 0.0, 600.0)
    (late,) = receiver.on_reserve(PEER, reserve(attempt=1), 0.0)
    assert isinstance(late.message, Aborted), "the attempt that was moved takes no blocks"
    assert store.used == 0
    (reply,) = receiver.on_reserve(PEER, reserve(attempt=2), 0.0)
    assert isinstance(reply.message, Grant)


def test_no_blocks_is_busy_and_takes_none():
    receiver, store = make_receiver(blocks=2)
    (reply,) = receiver.on_reserve(PEER, reserve(), 0.0)
    assert isinstance(reply.message, Busy)
    assert store.used == 0


def test_deadline_frees_a_silent_grant():
    receiver, store = make_receiver()
    grant_of(receiver, reserve(deadline=1.0))
    receiver.tick(0.9)
    assert store.used > 0
    receiver.tick(1.1)
    assert store.used == 0


def test_cached_prefix_is_pinned_between_grant_and_commit():
    receiver, store = make_receiver(blocks=6)
    hashes = [b"a" * 16, b"b" * 16]
    seed = store.cache.reserve(hashes, 9, 0)
    store.cache.publish(seed, hashes, 8)
    cached = seed.block_table[:2].tolist()
    store.cache.free(seed)
    grant = grant_of(receiver, reserve(hashes=hashes))
    assert grant.cached_tokens == 8
    assert store.cache.reserve([], 12, 0) is None or store.used <= 6
    assert all(store.cache.pool.is_owned(block) for block in cached)
    frames = frames_for(grant)
    assert min(f.block_start for f in frames) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"layer_start": 2},
        {"layer_count": 3},
        {"block_start": 3},
        {"block_count": 9},
        {"nbytes": 1},
        {"layer_count": 0},
        {"block_start": -1},
        {"layer_start": -1},
    ],
)
def test_frames_outside_their_grant_are_errors_before_anything_is_written(change):
    receiver, _ = make_receiver()
    frame = frames_for(grant_of(receiver))[0]
    with pytest.raises(ProtocolError):
        receiver.data.locate(msgspec.structs.replace(frame, **change))


def test_overlapping_frames_are_refused():
    receiver, _ = make_receiver()
    frames = frames_for(grant_of(receiver))
    deliver(receiver, frames[:1])
    with pytest.raises(ProtocolError, match="already filled"):
        receiver.data.locate(msgspec.structs.replace(frames[0], index=9))


def test_what_is_read_in_place_gets_all_its_credit_and_carries_nothing():
    receiver, _ = make_receiver(window=64)
    (reply,) = receiver.on_reserve(PEER, reserve(), 0.0, in_place=True)
    assert reply.message.credit == 2 * 3 * LAYOUT.block_bytes
    first, *_ = frames_for(reply.message)
    with pytest.raises(ProtocolError, match="read in place"):
        receiver.data.locate(first)
    assert receiver.data.locate(msgspec.structs.replace(first, shared=True)) is not None


def test_a_link_that_shares_memory_after_the_reserve_gets_all_its_credit():
    """A frame that is read in place is larger than the window, so it would never be sent."""
    receiver, _ = make_receiver(window=64)
    asked = reserve()
    (first,) = receiver.on_reserve(PEER, asked, 0.0)
    assert first.message.credit == 64
    again = [receiver.on_reserve(PEER, asked, 0.1, in_place=True)[0].message for _ in range(2)]
    assert again[0] == again[1]
    assert again[0].credit - again[0].counted == 2 * 3 * LAYOUT.block_bytes
    (frame, *_) = frames_for(again[0])
    assert receiver.data.locate(msgspec.structs.replace(frame, shared=True)) is not None
    check_receiver(receiver, [])


def test_a_frame_beyond_its_credit_is_refused():
    receiver, _ = make_receiver(window=64)
    grant = grant_of(receiver)
    assert grant.credit == 64
    with pytest.raises(ProtocolError, match="credit"):
        receiver.data.locate(frames_for(grant)[0])


def test_foreign_incarnation_slot_or_generation_is_stale():
    receiver, _ = make_receiver()
    frame = frames_for(grant_of(receiver))[0]
    ref = frame.grant
    for foreign in (
        GrantRef(ref.incarnation + 1, ref.slot, ref.generation),
        GrantRef(ref.incarnation, ref.slot + 1, ref.generation),
        GrantRef(ref.incarnation, ref.slot, ref.generation + 1),
        GrantRef(ref.incarnation, -1, ref.generation),
    ):
        assert receiver.data.locate(msgspec.structs.replace(frame, grant=foreign)) is None
    assert receiver._grants.stale == 4


def test_device_path_frees_only_after_the_fence():
    receiver, store = make_receiver(device=True)
    grant = grant_of(receiver)
    (reply,) = receiver.abort(REQUEST, 1, 0.0, keep=60.0)
    assert isinstance(reply.message, Revoke)
    assert store.used > 0
    receiver.on_fence(Fence(grant=grant.grant))
    assert store.used == 0


def being_written(receiver, blocks=16):
    """A grant with its first frame located and not yet stored."""
    grant = grant_of(receiver)
    frames = frames_for(grant)
    assert receiver.data.locate(frames[0]) is not None
    return grant, frames


def test_a_grant_that_ends_while_a_frame_is_written_keeps_its_blocks_until_that_is_over():
    ends = {
        "abort": lambda r: r.abort(REQUEST, 1, 0.0, keep=60.0),
        "death": lambda r: r.peer_dead(5),
        "deadline": lambda r: r.tick(1000.0),
        "a higher attempt": lambda r: r.on_reserve(PEER, reserve(attempt=2), 0.0),
    }
    for end in ends.values():
        receiver, store = make_receiver()
        _, frames = being_written(receiver)
        held = store.used
        end(receiver)
        assert store.used >= held
        assert receiver.data.locate(frames[1]) is None, "nothing new is written"
        receiver.tick(2000.0)
        receiver.tick(4000.0)
        assert store.used >= held, "freed on a timeout"
        after = store.used - held
        receiver.data.on_frame(frames[0], intact=True, now=4000.0)
        assert store.used == after
        assert (
            receiver.data.on_frame(frames[0], intact=True, now=4000.0) == []
        )  # of a grant that is gone


def test_the_sender_hears_that_its_grant_is_gone_when_nobody_reads_its_memory_any_more():
    receiver, store = make_receiver()
    _, frames = being_written(receiver)
    release = Release(request=REQUEST, attempt=1)
    assert receiver.on_release(PEER, release, 0.0) == []
    assert receiver.on_release(PEER, release, 0.2) == []  # asked again
    (reply,) = receiver.data.on_frame(frames[0], intact=True, now=0.3)
    assert isinstance(reply.message, Released)
    assert store.used == 0
    (again,) = receiver.on_release(PEER, release, 0.4)
    assert again == reply


def test_after_an_abort_the_sender_s_words_are_answered_when_the_frame_is_written():
    for ask, answer in (
        (lambda r, g, f: r.on_release(PEER, Release(request=REQUEST, attempt=1), 0.0), Released),
        (lambda r, g, f: r.on_commit(PEER, manifest(g, f), 0.0), Stale),
    ):
        receiver, store = make_receiver()
        grant, frames = being_written(receiver)
        assert receiver.abort(REQUEST, 1, 0.0, keep=60.0) == []
        assert ask(receiver, grant, frames) == []
        (reply,) = receiver.data.on_frame(frames[0], intact=False, now=0.0)
        assert isinstance(reply.message, answer)
        assert store.used == 0


def test_a_manifest_that_fails_is_refused_when_nothing_is_written_any_more():
    receiver, store = make_receiver()
    grant, frames = being_written(receiver)
    wrong = msgspec.structs.replace(manifest(grant, frames), frames=1000)
    assert receiver.on_commit(PEER, wrong, 0.0) == []
    assert store.used > 0
    (reply,) = receiver.data.on_frame(frames[0], intact=True, now=0.0)
    assert isinstance(reply.message, Refused)
    assert store.used == 0


def test_frames_being_written_are_neither_asked_for_again_nor_taken_twice():
    receiver, _ = make_receiver()
    grant, frames = being_written(receiver)
    assert receiver.data.locate(frames[0]) is None  # a duplicate
    other = msgspec.structs.replace(frames[0], index=999)
    with pytest.raises(ProtocolError, match="being written"):
        receiver.data.locate(other)
    deliver(receiver, frames[1:])
    receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    assert receiver.tick(50.0) == []
    replies = receiver.data.on_frame(frames[0], intact=True, now=50.0)
    assert isinstance(replies[0].message, Committed)


def test_a_fence_does_not_free_what_is_still_written_here():
    receiver, store = make_receiver(device=True)
    grant, frames = being_written(receiver)
    receiver.abort(REQUEST, 1, 0.0, keep=60.0)
    receiver.on_fence(Fence(grant=grant.grant))
    assert store.used > 0
    receiver.data.on_frame(frames[0], intact=True, now=0.0)
    assert store.used == 0


def test_every_transition_of_the_table_is_legal_and_others_raise():
    receiver, _ = make_receiver()
    grant_of(receiver)
    slot = next(iter(receiver._grants.table.live.values()))
    for state in GrantState:
        for event in {event for _, event in TRANSITIONS}:
            slot.state = state
            if (state, event) in TRANSITIONS:
                slot.step(event)
                assert slot.state is TRANSITIONS[(state, event)]
            else:
                with pytest.raises(IllegalTransition):
                    slot.step(event)


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": -17, "growth": 600},
        {"num_tokens": 0},
        {"growth": -1},
        {"num_tokens": 1 << 50},
        {"growth": 1 << 50},
        {"hashes": [b"h" * 16] * 3},
    ],
    ids=str,
)
def test_an_implausible_reserve_takes_nothing(change):
    receiver, store = make_receiver()
    message = msgspec.structs.replace(reserve(), **change)
    (reply,) = receiver.on_reserve(PEER, message, 0.0)
    assert isinstance(reply.message, Aborted)
    assert store.used == receiver.granted == 0


@pytest.mark.parametrize(
    "change",
    [
        {"frames": 1 << 40},
        {"frames": 7},
        {"context": context()},
        {"context": grown_map(context(), [3, 4])},
    ],
    ids=["many frames", "other frames", "nothing generated", "a token more"],
)
def test_a_commit_that_cannot_fit_its_grant_fails_and_frees(change):
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    message = msgspec.structs.replace(commit(grant.grant, 1, 64, 0), **change)
    (reply,) = receiver.on_commit(PEER, message, 1.0)
    assert isinstance(reply.message, Refused)
    assert (reply.message.code, reply.message.frames) == ("handoff_failed", [])
    assert store.used == receiver.granted == 0


# ------------------------------------------------------------------ nothing is held without a peer


def test_a_reserve_behind_its_release_gets_nothing():
    receiver, store = make_receiver()
    message = reserve()
    receiver.on_release(PEER, Release(request=REQUEST, attempt=1), 0.0)
    (reply,) = receiver.on_reserve(PEER, message, 0.1)
    assert isinstance(reply.message, Aborted)
    assert store.used == 0
    grant_of(receiver, reserve(attempt=2), 0.2)


def test_a_reserve_of_a_committed_attempt_is_aborted():
    """A router that lost its memory counts attempts from the start."""
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    _, handover = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    store.free(handover.allocation)
    receiver.close(REQUEST, 1)
    (reply,) = receiver.on_reserve(PEER, reserve(serial=9), 1.0)
    assert isinstance(reply.message, Aborted)
    assert store.used == 0


def test_a_quiet_grant_is_named_again_so_that_one_given_up_unheard_is_released():
    receiver, store = make_receiver(lease=2.0)
    grant = grant_of(receiver)
    assert receiver.tick(1.9) == []
    (reply,) = receiver.tick(2.0)
    assert reply.message.grant == grant.grant
    assert receiver.tick(2.1) == []
    receiver.on_release(PEER, Release(request=REQUEST, attempt=1, grant=grant.grant), 2.2)
    assert store.used == 0
    assert receiver.tick(10.0) == []


def pass_time(receiver: Receiver, now: float, until: float) -> float:
    """Ticks as often as a shell's."""
    while now < until:
        now += 0.05
        receiver.tick(now)
    return now


def test_a_peer_whose_connection_broke_is_called_and_keeps_its_grant_when_it_answers():
    receiver, store = make_receiver(timeout=5.0, lease=100.0)
    grant_of(receiver)
    assert receiver.tick(0.9) == []
    receiver.contacts.gone(PEER, 1.0)
    assert [type(o.message) for o in receiver.tick(1.1)] == [Ping]
    assert receiver.tick(1.2) == []
    now = pass_time(receiver, 1.2, 5.9)
    receiver.contacts.heard(PEER, now)
    now = pass_time(receiver, now, 6.5)
    assert store.used
    receiver.contacts.gone(PEER, now)
    now = pass_time(receiver, now, 11.4)
    assert store.used
    pass_time(receiver, now, 11.7)
    assert store.used == 0


def test_the_time_this_worker_was_stopped_does_not_end_a_grant():
    """The sender's words arrived meanwhile, and timers are looked at before they are read."""
    receiver, store = make_receiver(timeout=3.0, lease=100.0)
    grant_of(receiver)
    now = pass_time(receiver, 0.0, 1.5)  # it has been asked by now
    receiver.tick(now + 10.0)
    assert store.used
    receiver.contacts.heard(PEER, now + 10.0)
    pass_time(receiver, now + 10.0, now + 12.0)
    assert store.used


@pytest.mark.parametrize("filling", [False, True])
def test_a_silent_sender_is_asked_and_given_up(filling):
    """Nothing it sends arrives, and its connection seems to stand."""
    receiver, store = make_receiver(timeout=3.0, lease=100.0)
    grant = grant_of(receiver)
    if filling:
        deliver(receiver, frames_for(grant)[:1])
    now, asked = 0.0, 0
    while now < 3.9:
        now += 0.05
        asked += len(receiver.tick(now))
        assert store.used
    assert asked > 3
    for _ in range(10):
        now += 0.05
        receiver.tick(now)
    assert store.used == 0
    assert receiver.data.locate(frames_for(grant)[0]) is None, "a late frame is stale"


def test_a_revoked_grant_of_a_silent_sender_that_writes_itself_stays_until_its_fence():
    receiver, store = make_receiver(timeout=3.0, device=True)
    grant = grant_of(receiver)
    pass_time(receiver, 0.0, 10.0)
    assert store.used, "nobody knows whether it still writes"
    receiver.on_fence(Fence(grant=grant.grant))
    assert store.used == 0


def test_grants_follow_their_sender_to_its_new_connection():
    receiver, store = make_receiver(timeout=3.0, lease=100.0)
    grant_of(receiver)
    receiver.contacts.gone(PEER, 1.0)
    receiver.peer_moved(Holder(5), b"prefill-0:2")
    for tenth in range(10, 80):
        receiver.contacts.heard(b"prefill-0:2", tenth / 10)
        receiver.tick(tenth / 10)
    assert store.used


def test_a_sender_that_asks_gets_new_credit_for_what_was_lost():
    receiver, _ = make_receiver(patience=0.5, window=LAYOUT.block_bytes, budget=1 << 20)
    message = reserve()
    grant = grant_of(receiver, message)
    assert grant.credit == LAYOUT.block_bytes
    assert grant_of(receiver, message, 0.4).credit == LAYOUT.block_bytes
    assert grant_of(receiver, message, 0.6).credit == 2 * LAYOUT.block_bytes


def test_damaged_frames_are_asked_for_together():
    receiver, _ = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    deliver(receiver, frames[:1], intact=False)
    outputs = deliver(receiver, frames[1:-1])
    assert not [o for o in outputs if isinstance(o, Reply) and isinstance(o.message, Refused)]
    (reply,) = deliver(receiver, frames[-1:], intact=False)
    assert reply.message.frames == [frames[0].index, frames[-1].index]
    assert reply.message.round == 1


def test_a_revoked_grant_takes_no_commit_and_is_revoked_until_the_fence():
    receiver, store = make_receiver(device=True, lease=2.0)
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    (reply,) = receiver.abort(REQUEST, 1, 0.0, 60.0)
    assert isinstance(reply.message, Revoke)
    (reply,) = receiver.on_commit(PEER, manifest(grant, frames), 0.1)
    assert isinstance(reply.message, Stale)
    (reply,) = receiver.tick(2.0)
    assert isinstance(reply.message, Revoke)
    assert receiver.tick(100.0)
    assert store.used  # never freed by a timeout
    receiver.on_fence(Fence(grant=grant.grant))
    assert store.used == 0


def test_tables_forget():
    receiver, store = make_receiver()
    grant = grant_of(receiver)
    frames = frames_for(grant)
    deliver(receiver, frames)
    _, handover = receiver.on_commit(PEER, manifest(grant, frames), 0.0)
    store.free(handover.allocation)
    receiver.close(REQUEST, 1)
    receiver.abort(b"x" * 16, 1, 0.0, 60.0)
    receiver.contacts.gone(b"other", 0.0)
    assert receiver.remembered
    receiver.tick(1000.0)
    assert receiver.remembered == 0


def test_a_grant_that_is_revoked_for_a_higher_attempt_stays_in_the_books():
    receiver, store = make_receiver(device=True, lease=2.0)
    grant = grant_of(receiver)
    before = store.used
    revoke, reply = receiver.on_reserve(PEER, reserve(attempt=2), 0.0)
    assert isinstance(revoke.message, Revoke)
    assert len(receiver.held()) == 2
    assert receiver.granted == 2
    assert Revoke in {type(o.message) for o in receiver.tick(2.0)}
    receiver.on_fence(Fence(grant=grant.grant))
    assert store.used == before
    assert reply.message.grant != grant.grant


def costs_among(grants: int) -> dict[str, int]:
    """Work of each message of one handoff and of its end, beside ``grants`` other grants."""
    receiver, store = make_receiver(16 * grants + 64, budget=1 << 30, window=256)
    for number in range(grants):
        other = msgspec.structs.replace(reserve(), request=number.to_bytes(16, "big"))
        receiver.on_reserve(PEER, other, 0.0)
    costs: dict[str, int] = {}
    kept: list[Any] = []

    def cost(name: str, call: Callable[[], object]) -> Any:
        costs[name] = opcodes(lambda: kept.append(call()))
        return kept.pop()

    message = reserve()
    grant = cost("Reserve", lambda: receiver.on_reserve(PEER, message, 0.0))[0].message
    for frame in frames_for(grant):
        cost(f"frame {frame.index}", lambda frame=frame: deliver(receiver, [frame]))
    made = manifest(grant, frames_for(grant))
    _, handover, *_ = cost("Commit", lambda: receiver.on_commit(PEER, made, 0.0))
    cost("end", lambda: receiver.close(REQUEST, 1))
    store.free(handover.allocation)
    given_up = msgspec.structs.replace(reserve(), request=b"s" * 16)
    receiver.on_reserve(PEER, given_up, 0.0)
    release = Release(request=given_up.request, attempt=1, incarnation=5)
    cost("Release", lambda: receiver.on_release(PEER, release, 0.0))
    cost("repeated Release", lambda: receiver.on_release(PEER, release, 0.0))
    cost("late Reserve", lambda: receiver.on_reserve(PEER, given_up, 0.0))
    return costs


def test_no_message_costs_more_among_1024_grants():
    few, many = costs_among(16), costs_among(1024)
    assert len(few) == len(many) > 8
    assert {name: many[name] for name in few if many[name] > few[name] + 10} == {}


def test_an_exception_at_any_line_of_an_end_is_seen_by_the_books_or_made_good():
    """Otherwise blocks of a grant that ended in part would be held for ever."""
    release = Release(request=REQUEST, attempt=1)
    seen = 0
    for line in itertools.count(1):
        receiver, store = make_receiver()
        _, frames = being_written(receiver)
        receiver.on_release(PEER, release, 0.0)
        plant = Plant(line)
        try:
            plant.run(lambda: receiver.data.on_frame(frames[0], intact=True, now=0.3))  # noqa: B023
            assert line > 15 and seen > 3
            return
        except Planted:
            pass
        receiver.data.not_recorded(frames[0])
        try:
            check_receiver(receiver, [])
            books = sum(len(one.block_table) for one in receiver.held()) == store.used
        except (IllegalTransition, InternalError):
            books = False
        if not books:
            seen += 1
            continue  # the process is replaced
        receiver.on_release(PEER, release, 0.5)
        receiver.tick(0.6)
        assert not receiver.ungiven() and store.used == 0, plant.where
