"""An exception of the router's own code harms one request, whatever raised."""

from __future__ import annotations

import pytest

from baton.proto.errors import InternalError
from baton.proto.wire.messages import (
    Abort,
    Assign,
    Cancel,
    FinalAck,
    PeerDead,
    Status,
    StatusReport,
    Submit,
    Terminal,
)
from baton.router.admission import Admission
from baton.router.events import Fault, FromClient, Tick
from baton.router.lifecycle import Lifecycle
from baton.router.own_errors import METRIC, TEXT
from baton.router.placement import Placement
from baton.router.records import Attempt, Request
from baton.router.recovery import WorkerLosses
from baton.router.registry import Registry
from baton.router.timers import Timers

from .conftest import Bench, make_config, make_context


@pytest.fixture
def bench():
    bench = Bench(make_config())
    bench.faulty = True
    bench.prefill, bench.decode = bench.join("prefill", 0), bench.join("decode", 0)
    return bench


def plant(monkeypatch, owner, name, chosen, *, before=True):
    """Raise in ``owner.name`` whenever ``chosen(arguments)``; before or after the real work."""
    original = getattr(owner, name)

    def planted(*arguments, **named):
        if before and chosen(*arguments):
            raise KeyError("planted")
        result = original(*arguments, **named)
        if not before and chosen(*arguments):
            raise KeyError("planted")
        return result

    monkeypatch.setattr(owner, name, planted)


def ends(bench, client=b"client"):
    return {m.request: m for m in bench.sent[client] if isinstance(m, Terminal)}


def of(key):
    return lambda *arguments: any(isinstance(a, Request) and a.key == key for a in arguments)


def check(bench, harmed, others):
    """The harmed request has ended with an InternalError, the others go on, the books agree."""
    terminal = ends(bench)[harmed]
    assert (terminal.code, terminal.message) == ("internal", TEXT)
    requests = bench.core.table.requests
    assert not any(requests[key].done for key in others)
    assert bench.core.dropped[METRIC] >= 1 and not bench.core.broken
    bench.core.check_integrity()


@pytest.mark.parametrize("before", [True, False])
def test_a_timer_that_raises_ends_its_request_and_no_other_timer(bench, monkeypatch, before):
    keys = [bench.submit(f"r{number}", deadline=1.0) for number in range(4)]
    plant(monkeypatch, Timers, "_request", of(keys[1]), before=before)
    for _ in range(40):
        bench.now += 0.05
        bench.beat_all()
        bench.feed(Tick())
    found = ends(bench)
    assert set(found) == set(keys)
    others = {found[key].code for key in keys if key != keys[1]}
    assert others == {"deadline_exceeded"}
    bench.core.check_integrity()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["place", "assign"])
def test_a_submit_that_raises_gets_one_internal_error(bench, monkeypatch, name, before):
    other = bench.submit("other")
    plant(monkeypatch, Lifecycle, name, lambda _self, one, *_: one.request_id == "r", before=before)
    key = bench.submit("r")
    check(bench, key, [other])
    sent = [m for m in bench.sent[b"client"] if isinstance(m, Terminal)]
    assert len(sent) == 1


def test_a_submit_that_raises_before_it_is_admitted_is_answered(bench, monkeypatch):
    plant(monkeypatch, Lifecycle, "start", lambda *_: True)
    key = bench.submit("r")
    assert ends(bench)[key].code == "internal"
    assert not bench.core.table.requests and not bench.core.unfinished
    bench.core.check_integrity()


def test_the_workers_of_a_harmed_request_are_told_to_abort_it(bench, monkeypatch):
    key = bench.submit("r")
    _, assign = bench.find(Assign)
    plant(monkeypatch, Lifecycle, "accepted", of(key))
    bench.prefill.accept(assign)
    check(bench, key, [])
    assert any(isinstance(m, Abort) for m in bench.sent[bench.prefill.identity])


def test_a_token_run_that_raises_leaves_the_other_runs_of_its_message(bench, monkeypatch):
    keys = [bench.submit(f"r{number}") for number in range(3)]
    for message in list(bench.sent[bench.prefill.identity]):
        if isinstance(message, Assign):
            bench.prefill.accept(message)
    original = Request.keep

    def keep(self, run):
        if self.key == keys[1]:
            raise KeyError("planted")
        original(self, run)

    monkeypatch.setattr(Request, "keep", keep)
    for key in keys:
        bench.prefill.tokens(key, 10, 5)
    check(bench, keys[1], [keys[0], keys[2]])
    assert [bench.core.table.requests[key].next for key in (keys[0], keys[2])] == [11, 11]


def test_a_death_moves_the_other_requests_if_moving_one_raises(bench, monkeypatch):
    bench.join("prefill", 1)
    keys = [bench.submit(f"r{number}") for number in range(6)]
    requests = bench.core.table.requests
    there = [key for key in keys if requests[key].attempt.prefill.id == bench.prefill.id]
    assert len(there) > 1
    plant(monkeypatch, Lifecycle, "lost", of(there[0]))
    plant(monkeypatch, Lifecycle, "requeue", of(there[0]))
    bench.workers.remove(bench.prefill)
    bench.prefill.gone()
    bench.advance(8.0)
    check(bench, there[0], [])
    assert all(requests[key].attempt.prefill.id != bench.prefill.id for key in there[1:])


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("owner", "name"), [
    (Registry, "_changed"), (Placement, "forget"), (Request, "start_over"),
    (WorkerLosses, "_blame"),
])  # fmt: skip
def test_a_death_is_handled_to_its_end_if_a_part_of_it_raises(
    bench, monkeypatch, owner, name, before
):
    """The worker is gone, the others hear of it, and its requests run elsewhere or have ended."""
    other = bench.join("prefill", 1)
    keys = [bench.submit(f"r{number}") for number in range(6)]
    requests = bench.core.table.requests
    for one in (bench.prefill, other):
        for message in list(bench.sent[one.identity]):
            if isinstance(message, Assign):
                one.accept(message)
    bench.workers.remove(bench.prefill)
    bench.prefill.gone()
    bench.advance(0.6)
    plant(monkeypatch, owner, name, lambda *_: True, before=before)
    bench.advance(8.0)
    monkeypatch.undo()
    bench.advance(2.0)
    dead = [m for m in bench.sent[bench.decode.identity] if isinstance(m, PeerDead)]
    assert dead
    ended = ends(bench)
    for key in keys:
        if key in ended:
            assert ended[key].code == "internal"
        else:
            assert not requests[key].doubts
            assert requests[key].attempt.prefill.id == other.id
    bench.core.check_integrity()


def test_an_end_that_raises_near_the_deadline_still_reaches_the_client(bench, monkeypatch):
    key, _ = bench.run(deadline=1.0)
    bench.advance(0.5)
    plant(monkeypatch, Attempt, "leave", lambda _self, one: one == key, before=False)
    bench.decode.end(key, 10)
    assert bench.core.errors.fresh is False and bench.core.dropped[METRIC] >= 1
    monkeypatch.undo()
    bench.advance(3.0)
    assert key in ends(bench)


def test_part_of_the_timers_that_raises_leaves_the_other_parts(bench, monkeypatch):
    key = bench.submit("r", deadline=1.0)
    plant(monkeypatch, Timers, "_workers", lambda *_: True)
    before = bench.core.errors.unowned
    for _ in range(30):
        bench.now += 0.05
        bench.feed(Tick())
    assert ends(bench)[key].code == "deadline_exceeded"
    assert bench.core.errors.unowned - before >= 20  # so the clock ends the process


def test_a_query_that_raises_harms_nothing(bench, monkeypatch):
    key = bench.submit("r")
    monkeypatch.setattr(bench.core._reporter, "_requests", lambda *_: {}["planted"])
    bench.feed(FromClient(b"client", [Status()]))
    assert not any(isinstance(m, StatusReport) for m in bench.sent[b"client"])
    assert not bench.core.table.requests[key].done and not bench.core.errors.unowned


def test_an_acknowledgement_that_raises_drops_the_record_in_the_end(bench, monkeypatch):
    key = bench.submit("r", deadline=1.0)
    bench.advance(1.5)
    plant(monkeypatch, Lifecycle, "forget", of(key))
    bench.feed(FromClient(b"client", [FinalAck(requests=[key])]))
    bench.core.check_integrity()
    bench.advance(60.0)
    assert not bench.core.table.requests
    bench.core.check_integrity()


def test_a_request_of_another_client_is_not_harmed_by_a_message_that_raises(bench, monkeypatch):
    key = bench.submit("r")
    plant(
        monkeypatch, bench.core._handlers[FromClient].__self__.__class__, "_may_end", lambda *_: 1
    )
    bench.feed(FromClient(b"stranger", [Cancel(request_id="x", request=key)]))
    assert not bench.core.table.requests[key].done
    bench.core.check_integrity()


def test_the_log_has_the_exception_and_the_client_one_sentence(bench, monkeypatch):
    plant(monkeypatch, Lifecycle, "assign", lambda *_: True)
    actions = bench.core.handle(
        FromClient(b"client", [Submit(request_id="r", context=make_context())]), bench.now
    )
    faults = [action for action in actions if isinstance(action, Fault)]
    assert isinstance(faults[0].error, KeyError) and faults[0].error.__traceback__ is not None
    assert "planted" not in TEXT and "KeyError" not in TEXT


def test_books_that_cannot_be_repaired_break_the_core(bench, monkeypatch):
    bench.submit("r")
    plant(monkeypatch, Timers, "_workers", lambda *_: True)
    monkeypatch.setattr(bench.core._repair, "_recount", lambda now: {}["planted"])
    bench.now += 0.1
    bench.feed(Tick())
    assert "could not be repaired" in bench.core.broken


@pytest.mark.parametrize(("owner", "name"), [
    (Placement, "choose"), (Admission, "admit"), (Registry, "check_pool"),
])  # fmt: skip
def test_the_text_of_an_internal_error_stays_in_the_log(bench, monkeypatch, owner, name):
    def raising(*_arguments, **_named):
        raise InternalError("worker decode-0 holds secret 7")

    monkeypatch.setattr(owner, name, raising)
    bench.submit(pool="default")
    (terminal,) = ends(bench).values()
    assert (terminal.code, terminal.message) == ("internal", TEXT)
