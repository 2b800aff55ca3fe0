"""An exception in an event of a link to a decode worker leaves no link half open."""

from __future__ import annotations

import pytest

from baton.engine.scheduling.scheduler import Scheduler
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import Handoff
from baton.prefill_worker.decode_links import DecodeLinks
from baton.prefill_worker.events import DataDown, DataUp, Disconnect, OpenData, PeerUp
from baton.prefill_worker.handoffs import Handoffs
from baton.prefill_worker.queue import Queue
from baton.proto.errors import InternalError
from baton.proto.wire.messages import (
    Busy,
    Credit,
    Open,
    Opened,
    PeerLost,
    Pong,
    Release,
    Released,
    Reserve,
    Terminal,
)
from baton.worker.events import Exit
from baton.worker.own_errors import METRIC

from .test_core import DECODE, KEY, SECOND, Bench


@pytest.fixture
def bench():
    bench = Bench()
    bench.faulty = True
    return bench


@pytest.fixture
def plant(monkeypatch):
    """Raise in ``owner.name`` the first ``times`` calls, before or after the real work."""

    def planted(owner, name, times=1, *, after=False):
        original = getattr(owner, name)
        left = [times]

        def raising(*arguments, **named):
            if not left[0]:
                return original(*arguments, **named)
            left[0] -= 1
            if after:
                original(*arguments, **named)
            raise KeyError("planted")

        monkeypatch.setattr(owner, name, raising)

    return planted


def agreed(bench):
    """Answer the Open that the worker sends again after its error."""
    bench.to_peer(Open)
    bench.later(1.0)
    assert bench.to_peer(Open)
    bench.answer(Opened(worker="decode-0", incarnation=9, transport="zmq", data_endpoint="d"))


def check(bench):
    """The job goes on over the link, and nothing else has ended."""
    assert bench.did(OpenData)
    reserves = bench.to_peer(Reserve)
    assert KEY in [reserve.request for reserve in reserves]
    assert bench.core.dropped[METRIC] == 1
    assert not bench.take(Terminal) and not bench.take(Busy) and not bench.did(Exit)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), [
    (DecodeLinks, "up"), (DecodeLinks, "opened"), (Handoffs, "_opened"), (Queue, "wake"),
])  # fmt: skip
def test_a_link_whose_opening_raised_is_agreed_again(bench, plant, owner, name, after):
    bench.assign()
    plant(owner, name, after=after)
    bench.open()
    if not bench.did(OpenData):
        agreed(bench)
        check(bench)


def test_a_pong_that_raises_repeats_the_handoffs_messages(bench, plant):
    bench.assign()
    bench.open()
    plant(DecodeLinks, "pong")
    bench.to_peer(Reserve)
    bench.did(OpenData)
    bench.answer(Pong(nonce=1))
    agreed(bench)
    check(bench)


def test_a_data_connection_whose_event_raised_is_used(bench, plant):
    bench.open()
    bench.feed(DataDown(DECODE))
    bench.assign()
    plant(DecodeLinks, "data")
    bench.feed(DataUp(DECODE))
    agreed(bench)
    check(bench)


def test_a_link_that_raises_forever_is_lost_and_its_jobs_are_given_back(bench, plant):
    bench.assign()
    plant(DecodeLinks, "opened", 10**6)
    for _ in range(20):
        bench.open()
        bench.later(0.5)
    assert {message.request for message in bench.take(PeerLost)} == {KEY}  # repeated
    assert all(message.decode_full for message in bench.take(Busy))
    bench.assert_empty()


def test_an_outcome_that_raises_leaves_those_after_it(bench, plant):
    """Both jobs of a lost worker are given back although the blocks of the first raise."""
    bench.computing()
    bench.assign(key=SECOND)
    bench.to_peer(Reserve)
    plant(Handoffs, "_not_read")
    bench.open(incarnation=10)
    assert {m.request for m in bench.take(Busy)} == {KEY, SECOND}
    assert not bench.did(Exit) and not bench.did(Disconnect)


def test_frames_that_raise_end_their_own_request(bench, plant):
    bench.computing()
    bench.assign(key=SECOND)
    (reserve,) = bench.to_peer(Reserve)
    plant(Sender, "may_be_read")
    bench.step()
    bench.grant(reserve)
    (terminal,) = bench.take(Terminal)
    assert (terminal.request, terminal.code) == (KEY, "internal")


def test_an_event_of_an_unknown_link_changes_nothing(bench, plant):
    plant(DecodeLinks, "up")
    bench.feed(PeerUp("ipc:///nobody"))
    bench.later(1.0)
    assert not bench.to_peer(Open)


def test_choosing_the_next_job_that_raises_is_tried_again(bench, plant):
    bench.assign()
    bench.open()
    bench.to_peer(Reserve)
    plant(Queue, "next")
    bench.assign(key=SECOND)
    assert bench.core.errors.unowned == 1 and not bench.did(Exit)
    bench.later(0.1)
    assert [reserve.request for reserve in bench.to_peer(Reserve)] == [SECOND]
    assert not bench.take(Terminal)


@pytest.mark.parametrize(("owner", "name"), [
    (Scheduler, "release"), (Scheduler, "abort"), (Queue, "remove"),
])  # fmt: skip
@pytest.mark.parametrize("after", [False, True])
def test_an_end_that_raises_leaves_no_blocks(bench, plant, owner, name, after):
    """Either the job ends all the same, or the incarnation does, and its blocks with it."""
    commit = bench.handing_over()
    plant(owner, name, after=after)
    bench.committed(commit)
    if not bench.did(Exit):
        bench.later(1.0)
        bench.assert_empty()


def test_a_handoff_that_is_kept_after_its_end_ends_the_incarnation(bench, plant):
    commit = bench.handing_over()
    plant(Handoff, "step", after=True)
    with pytest.raises(InternalError, match="kept after its end"):
        bench.committed(commit)  # the bench compares the books once more
    assert bench.did(Exit)


def test_a_credit_that_raises_ends_its_own_request(bench, plant):
    """The frame that it lets pass may be lost with it, and no message asks for that one again."""
    grant = bench.computing()
    plant(Handoff, "push")
    bench.answer(Credit(grant=grant, credit=1 << 20))
    (terminal,) = bench.take(Terminal)
    assert (terminal.request, terminal.code) == (KEY, "internal")


@pytest.mark.parametrize("after", [False, True])
def test_an_end_that_raises_while_it_releases_the_grant_leaves_no_handoff(bench, plant, after):
    bench.computing(shape={"new": 1})
    plant(Sender, "release", after=after)
    bench.step()
    (terminal,) = bench.take(Terminal)
    assert terminal.code == InternalError.code
    bench.later(1.0)
    assert bench.to_peer(Release)
    bench.answer(Released(request=KEY, attempt=1))
    bench.assert_empty()
