"""The prefill side of a handoff."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import (
    TRANSITIONS,
    Done,
    Failed,
    Gone,
    Granted,
    HandoffState,
    Refusal,
    Send,
    SenderConfig,
    SendFrame,
)
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import (
    Busy,
    Commit,
    Committed,
    Credit,
    Fence,
    Grant,
    GrantRef,
    Refused,
    Release,
    Reserve,
    Revoke,
    Stale,
)

sys.path.insert(0, str(Path(__file__).parent))
from helpers import LAYOUT, REQUEST, commit, make_sender, reserve

KEY = (REQUEST, 1)
REF = GrantRef(77, 0, 0)
ENDPOINT = "ipc://d"
BIG = 1 << 30
T = 1000.0
"""When the handoffs start: a clock at 0 would hide a time taken for a duration."""


def started(credit: int = BIG, cached: int = 0, tokens: int = 10, frame_bytes: int = 128):
    sender = make_sender(frame_bytes)
    (first,) = sender.start(ENDPOINT, 0, reserve(tokens), T)
    assert isinstance(first.message, Reserve)
    grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=cached, credit=credit)
    assert sender.on_grant(ENDPOINT, grant, T) == [Granted(KEY, cached)]
    return sender


def frames(outputs) -> list:
    return [o.frame for o in outputs if isinstance(o, SendFrame)]


def pack(sender, outputs, now: float = T) -> list:
    """Do what the shell does until nothing is left to pack."""
    done = []
    for output in outputs:
        done.append(output)
        if isinstance(output, SendFrame):
            done += pack(sender, sender.on_packed(KEY, output.frame.index, 7, now), now)
    return done


def maker(grant, count, nbytes, digest):
    return commit(grant, count, nbytes, digest)


def cells(found) -> np.ndarray:
    covered = np.zeros((LAYOUT.num_layers, 3), int)
    for frame in found:
        covered[
            frame.layer_start : frame.layer_start + frame.layer_count,
            frame.block_start : frame.block_start + frame.block_count,
        ] += 1
    return covered


@pytest.mark.parametrize("frame_bytes", [1, 64, 100, 128, 192, 4096])
@pytest.mark.parametrize("cached", [0, 4, 8])
def test_frames_cover_every_uncached_cell_once(frame_bytes, cached):
    sender = started(cached=cached, frame_bytes=frame_bytes)
    found = frames(sender.ready(KEY, layer_end=1, token_end=6, last=False, now=T))
    found += frames(sender.ready(KEY, layer_end=2, token_end=6, last=False, now=T))
    found += frames(sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    covered = cells(found)
    assert (covered[:, cached // 4 :] == 1).all()
    assert (covered[:, : cached // 4] == 0).all()
    assert all(f.nbytes <= max(frame_bytes, LAYOUT.block_bytes) for f in found)
    assert [f.index for f in found] == list(range(len(found)))


@pytest.mark.parametrize(
    ("tokens", "shared", "sizes"),
    [
        (64, False, [1024, 512]),
        (64, True, [1536]),
        (128, False, [1024] * 3),
        (256, False, [512] * 12),
        (256, True, [2048] * 3),
        (1024, False, [2048] * 12),
    ],
)
def test_only_what_travels_is_cut_for_overlap(tokens, shared, sizes):
    """1.5 to 24 MiB in KiB a frame: small layers travel together."""
    layout = KVLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=16)
    sender = Sender(2, layout, SenderConfig())
    sender.start(ENDPOINT, 0, reserve(tokens), T, shared=shared)
    grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=BIG)
    sender.on_grant(ENDPOINT, grant, T)
    found = frames(sender.ready(KEY, layer_end=12, token_end=tokens, last=True, now=T))
    assert [frame.nbytes >> 10 for frame in found] == sizes


def test_a_partial_block_waits_for_the_prompts_end():
    sender = started()
    assert cells(frames(sender.ready(KEY, layer_end=2, token_end=7, last=False, now=T))).sum() == 2


def test_nothing_is_sent_beyond_credit_and_commit_waits_for_all_frames():
    sender = started(credit=LAYOUT.block_bytes * 2, frame_bytes=LAYOUT.block_bytes)
    out = pack(sender, sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    assert len(frames(out)) == 2
    assert sender.finish(KEY, maker, T) == []
    out = pack(sender, sender.on_credit(ENDPOINT, Credit(grant=REF, credit=BIG), T))
    assert len(frames(out)) == 4
    assert isinstance(out[-1], Send)
    assert isinstance(out[-1].message, Commit)
    assert out[-1].message.frames == 6
    assert out[-1].message.bytes == 6 * LAYOUT.block_bytes


def committed_sender():
    sender = started()
    pack(sender, sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    (send,) = sender.finish(KEY, maker, T)
    return sender, send.message


def test_done_reports_what_was_sent_and_received():
    sender, message = committed_sender()
    answer = Committed(request=REQUEST, attempt=1, grant=REF, bytes=message.bytes, frames=3)
    (done,) = sender.on_committed(answer, T + 0.5)
    assert isinstance(done, Done)
    assert done.bytes_sent == done.bytes_received == message.bytes
    assert done.seconds == 0.5
    assert len(sender) == 0
    assert sender.on_committed(answer, T + 0.6) == []


def test_unanswered_messages_are_repeated_with_growing_pauses():
    sender = make_sender()
    (first,) = sender.start(ENDPOINT, 0, reserve(), T)
    assert sender.tick(T + 0.1) == []
    (again,) = sender.tick(T + 0.25)
    assert again.message.serial == first.message.serial
    assert again.message.deadline == 60.0 - 0.25
    assert sender.tick(T + 0.4) == []
    assert len(sender.tick(T + 0.7)) == 1
    sender, message = committed_sender()
    (again,) = sender.tick(T + 0.3)
    assert again.message.digest == message.digest


def test_refused_frames_are_sent_again_and_committed_again():
    sender, message = committed_sender()
    refused = Refused(
        request=REQUEST,
        attempt=1,
        grant=REF,
        code="frames_missing",
        frames=[1],
        credit=BIG,
        round=1,
    )
    out = pack(sender, sender.on_refused(refused, T + 0.1))
    assert [f.index for f in frames(out)] == [1]
    assert isinstance(out[-1].message, Commit)
    assert out[-1].message.bytes == message.bytes
    answer = Committed(request=REQUEST, attempt=1, grant=REF, bytes=message.bytes, frames=3)
    (done,) = sender.on_committed(answer, T + 0.5)
    assert done.resent == 1
    assert done.bytes_sent == message.bytes


def test_refused_frames_wait_for_credit_the_other_side_has_written_off():
    sender, _ = committed_sender()
    refused = Refused(
        request=REQUEST, attempt=1, grant=REF, code="frames_missing", frames=[1], credit=BIG,
        counted=BIG, round=1,
    )  # fmt: skip
    assert frames(pack(sender, sender.on_refused(refused, T + 0.1))) == []
    sender.check_integrity()
    out = pack(sender, sender.on_credit(ENDPOINT, Credit(grant=REF, credit=BIG + 128), T + 0.2))
    assert [f.index for f in frames(out)] == [1]


def test_a_wrong_count_cannot_exceed_the_credit():
    sender = make_sender()
    sender.start(ENDPOINT, 0, reserve(), T)
    grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=256, counted=BIG)
    sender.on_grant(ENDPOINT, grant, T)
    assert frames(sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T)) == []
    sender.check_integrity()


def test_a_refusal_said_again_asks_for_nothing():
    sender, _ = committed_sender()
    refused = Refused(
        request=REQUEST,
        attempt=1,
        grant=REF,
        code="frames_missing",
        frames=[1],
        credit=BIG,
        round=1,
    )
    pack(sender, sender.on_refused(refused, T + 0.1))
    assert sender.on_refused(refused, T + 0.2) == []


def test_repeated_frames_keep_to_the_credit():
    sender, message = committed_sender()
    refused = Refused(
        request=REQUEST, attempt=1, grant=REF, code="frames_missing", frames=[0, 1], round=1
    )
    first = message.bytes // message.frames
    sender._of(ENDPOINT, REF).credit = message.bytes
    out = pack(sender, sender.on_refused(refused, T + 0.1))
    assert not frames(out)
    out = pack(
        sender,
        sender.on_credit(ENDPOINT, Credit(grant=REF, credit=message.bytes + 2 * first), T + 0.2),
    )
    assert len(frames(out)) == 2


def test_a_lost_credit_is_asked_for_by_repeating_the_reserve():
    sender = started(credit=LAYOUT.block_bytes, frame_bytes=LAYOUT.block_bytes)
    pack(sender, sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    (again,) = sender.tick(T + 0.3)
    assert isinstance(again.message, Reserve)
    grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=BIG)
    assert len(frames(pack(sender, sender.on_grant(ENDPOINT, grant, T + 0.4)))) == 5
    assert sender.tick(T + 9.0) == []


def test_a_peer_without_credit_is_waited_for_as_long_as_it_answers():
    sender = started(credit=LAYOUT.block_bytes, frame_bytes=LAYOUT.block_bytes)
    pack(sender, sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    size = LAYOUT.block_bytes
    grant = Grant(
        request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=size, counted=size
    )  # all that was sent has arrived
    for second in range(1, 20):
        assert isinstance(sender.tick(T + second)[0], Send)
        assert sender.on_grant(ENDPOINT, grant, T + second + 0.1) == []
    assert [isinstance(o, Failed) for o in sender.tick(T + 30.0)] == [False, True]


def test_a_peer_that_answers_while_no_frame_arrives_is_given_up():
    size = LAYOUT.block_bytes
    sender = started(credit=size, frame_bytes=size)
    pack(sender, sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    for tenth in range(1, 30):
        counted = tenth // 6 * size  # frames written off as lost get new credit
        grant = Grant(
            request=REQUEST, attempt=1, grant=REF, cached_tokens=0,
            credit=counted + size, counted=counted, arrived=0,
        )  # fmt: skip
        assert not any(isinstance(o, Failed) for o in sender.tick(T + tenth / 10))
        sender.on_grant(ENDPOINT, grant, T + tenth / 10)
    (failed,) = [o for o in sender.tick(T + 3.3) if isinstance(o, Failed)]
    assert failed.lost_peer


def test_frames_of_another_handoff_that_arrive_keep_one_waiting():
    """They share a connection: its own frames may follow those."""
    size = LAYOUT.block_bytes
    sender = started(credit=size, frame_bytes=size)
    pack(sender, sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    other = msgspec.structs.replace(reserve(10), request=b"o" * 16)
    sender.start(ENDPOINT, 0, other, T)
    ref = GrantRef(77, 1, 0)
    grant = Grant(request=b"o" * 16, attempt=1, grant=ref, cached_tokens=0, credit=size)
    sender.on_grant(ENDPOINT, grant, T)
    sender.ready((b"o" * 16, 1), layer_end=2, token_end=10, last=True, now=T)
    for second in range(1, 6):
        sender.on_credit(ENDPOINT, Credit(grant=ref, credit=(second + 1) * size), T + second)
        assert not any(isinstance(o, Failed) for o in sender.tick(T + second + 0.5))


def test_time_spent_computing_is_no_silence():
    sender = started(credit=0, frame_bytes=LAYOUT.block_bytes)
    sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T + 100.0)
    assert sender.tick(T + 100.1) == []


def test_a_replaced_grant_fails_the_handoff():
    sender = started()
    other = GrantRef(REF.incarnation, REF.slot, REF.generation + 1)
    grant = Grant(request=REQUEST, attempt=1, grant=other, cached_tokens=0, credit=BIG)
    outputs = sender.on_grant(ENDPOINT, grant, T + 0.1)
    assert isinstance(outputs[-1], Failed)
    assert isinstance(outputs[0].message, Release)


def test_a_grant_nobody_waits_for_is_given_back():
    sender = make_sender()
    grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=BIG)
    (send,) = sender.on_grant(ENDPOINT, grant, T)
    assert (send.endpoint, send.message.grant) == (ENDPOINT, REF)
    assert isinstance(send.message, Release)
    started = make_sender()
    started.start(ENDPOINT, 0, reserve(), T)
    (send,) = started.on_grant("ipc://elsewhere", grant, T)
    assert send.endpoint == "ipc://elsewhere"


def test_a_revoked_grant_nobody_knows_is_fenced():
    (send,) = make_sender().on_revoke(ENDPOINT, Revoke(grant=REF))
    assert send.message == Fence(grant=REF)


def test_final_refusal_fails_the_handoff():
    sender, _ = committed_sender()
    refused = Refused(request=REQUEST, attempt=1, grant=REF, code="handoff_failed", message="no")
    outputs = sender.on_refused(refused, T + 0.1)
    assert outputs[-1] == Failed(KEY, "handoff_failed", "no", lost_peer=False)
    assert len(sender) == 0


def test_busy_ends_the_handoff():
    sender = make_sender()
    sender.start(ENDPOINT, 0, reserve(), T)
    assert sender.on_busy(Busy(request=REQUEST, attempt=1, retry_after=0.3)) == [Refusal(KEY, 0.3)]
    assert len(sender) == 0


def test_release_is_repeated_until_confirmed():
    sender = started()
    (send,) = sender.release(KEY, T)
    assert isinstance(send.message, Release)
    assert sender.release(KEY, T) == []
    assert sender.tick(T + 0.2) == [send]
    assert sender.on_gone(*KEY) == [Gone(KEY)]
    assert sender.release(KEY, T + 1.0) == [Gone(KEY)]


def test_release_that_crosses_committed_is_gone_too():
    sender, message = committed_sender()
    sender.release(KEY, T)
    answer = Committed(request=REQUEST, attempt=1, grant=REF, bytes=message.bytes, frames=3)
    assert sender.on_committed(answer, T + 0.1) == [Gone(KEY)]


def test_stale_grant_fails_the_handoff():
    sender, _ = committed_sender()
    outputs = sender.on_stale(Stale(grant=REF, request=REQUEST, attempt=1))
    assert isinstance(outputs[-1], Failed)


def test_dead_peer_fails_its_handoffs_only():
    sender = started()
    assert sender.peer_lost("ipc://other", "died") == []
    assert sender.peer_lost(ENDPOINT, "died", incarnation=99) == []
    assert sender.peer_lost(ENDPOINT, "died", incarnation=77) == [
        Failed(KEY, "worker_lost", "died", lost_peer=True)
    ]


def test_a_transfer_without_credit_is_given_up():
    sender = started(credit=0)
    sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T)
    assert isinstance(sender.tick(T + 1.0)[0], Send)
    assert any(isinstance(o, Failed) for o in sender.tick(T + 10.0))


def test_a_transfer_that_waits_for_compute_needs_no_timer():
    sender = started()
    assert sender.next_timer() is None
    assert sender.tick(T + 1e6) == []


def test_an_unanswered_reserve_ends_with_its_deadline():
    sender = make_sender()
    sender.start(ENDPOINT, 0, reserve(deadline=1.0), T)
    sender.tick(T + 0.9)
    (failed,) = sender.tick(T + 3.0)
    assert isinstance(failed, Failed)
    assert failed.code == "worker_lost"


def test_revoke_is_answered_by_a_fence():
    sender = started()
    outputs = sender.on_revoke(ENDPOINT, Revoke(grant=REF))
    assert isinstance(outputs[0].message, Fence)
    assert isinstance(outputs[-1], Failed)


def test_a_frame_names_all_blocks_of_a_gpu_that_became_final():
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
    group = 8 * layout.blocks_for(8192) * layout.block_bytes
    for limit, count in ((1 << 40, 1), (16 << 20, group // (16 << 20))):
        sender = Sender(5, layout, SenderConfig())
        sender.start(ENDPOINT, 0, reserve(8192), T, limit, shared=True, fenced=True)
        grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=1 << 40)
        sender.on_grant(ENDPOINT, grant, T)
        for layer_end in (8, 16, 24, 32):
            outputs = sender.ready(KEY, layer_end=layer_end, token_end=8192, last=True, now=T)
            assert len(frames(outputs)) == count
            assert sum(frame.nbytes for frame in frames(outputs)) == group


def being_read() -> Sender:
    """A handoff whose blocks the decode worker reads where they are."""
    sender = make_sender()
    sender.start(ENDPOINT, 0, reserve(10), T, shared=True, fenced=True)
    grant = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=BIG)
    sender.on_grant(ENDPOINT, grant, T)
    assert not sender.may_be_read(KEY)
    assert frames(sender.ready(KEY, layer_end=2, token_end=10, last=True, now=T))
    assert sender.may_be_read(KEY)
    return sender


@pytest.mark.parametrize(
    "fail",
    [
        lambda s: s.on_stale(Stale(request=REQUEST, attempt=1, grant=REF)),
        lambda s: s.on_gone(*KEY),
        lambda s: s.on_revoke(ENDPOINT, Revoke(grant=REF)),
        lambda s: s.unreachable(ENDPOINT, "no connection"),
        lambda s: s.tick(T + 1000.0),
    ],
)
def test_blocks_that_are_read_stay_until_the_reader_has_said_that_it_does_not(fail):
    sender = being_read()
    credit = Grant(request=REQUEST, attempt=1, grant=REF, cached_tokens=0, credit=0)
    sender.on_grant(ENDPOINT, credit, T)
    sender._live[KEY].queue.append(sender._live[KEY].frames[0])  # waits for credit
    outputs = fail(sender)
    assert [type(o) for o in outputs if not isinstance(o, Send)] == [Failed]
    assert sender.may_be_read(KEY)
    for now in (1000.0, 2000.0, 1e6):  # long past the deadline
        (again,) = sender.tick(T + now)
        assert isinstance(again.message, Release)
    assert sender.may_be_read(KEY)
    assert sender.on_gone(*KEY) == [Gone(KEY)]
    assert not sender.may_be_read(KEY)


def test_blocks_of_a_dead_reader_are_free():
    sender = being_read()
    sender.release(KEY, T)
    assert sender.may_be_read(KEY)
    assert sender.peer_lost(ENDPOINT, "died", 999) == []
    assert sender.may_be_read(KEY)
    assert sender.peer_lost(ENDPOINT, "died", 77) == [Gone(KEY)]
    sender = being_read()
    (failed,) = sender.peer_lost(ENDPOINT, "died", 77)
    assert isinstance(failed, Failed)
    assert not sender.may_be_read(KEY)


def test_states_without_an_entry_refuse():
    sender = started()
    handoff = sender._live[KEY]
    for state in HandoffState:
        for event in {event for _, event in TRANSITIONS}:
            handoff.state = state
            if (state, event) not in TRANSITIONS:
                with pytest.raises(ValueError, match="in state"):
                    handoff.step(event)
