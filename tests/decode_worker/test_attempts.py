"""One attempt on the decode worker: from Reserve to its end, and Abort in every state."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.scheduling.plan import StepResult, abandoned_step
from baton.proto.errors import InternalError
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Busy,
    Committed,
    Grant,
    Hello,
    KVFrame,
    Release,
    Released,
    Reserve,
    Stale,
    Terminal,
    TerminalAck,
    Tokens,
)
from baton.worker.events import AbandonStep, Log, RouterDown, RouterUp, StepDone

from .bench import KEY, LAYOUT, OTHER, ROUTER, Bench, ticket

# ------------------------------------------------------------------ from Reserve to the end


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": b""},
        {"ticket": ticket(OTHER)},
        {"ticket": ticket(attempt=2)},
        {"incarnation": 6},
        {"attempt": 7},
    ],
    ids=str,
)
def test_a_reserve_takes_the_ticket_of_its_sender_and_attempt(bench, wrong):
    """Without it nothing is taken, nothing of others is touched and nothing is remembered."""
    bench.run()
    used = bench.cache.pool.used
    good = Reserve(
        request=KEY, attempt=2, incarnation=5, hashes=[], num_tokens=4, growth=4, serial=99,
        deadline=60.0, ticket=ticket(attempt=2),
    )  # fmt: skip
    change = {"ticket": ticket()} if wrong == {"ticket": ticket(attempt=2)} else wrong
    bench.ask(msgspec.structs.replace(good, **change))
    assert len(bench.to_peer(Aborted)) == 1 and not bench.to_peer(Grant)
    assert bench.cache.pool.used == used
    bench.step()
    assert bench.streamed() == [(10, 42), (11, 43)]
    bench.ask(good)
    assert bench.to_peer(Grant), "the right one is let in afterwards"


def test_a_release_of_another_sender_changes_nothing(bench):
    bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.ask(Release(request=KEY, attempt=9, incarnation=6, ticket=ticket(incarnation=5)))
    bench.ask(Release(request=KEY, attempt=1, grant=grant.grant, incarnation=6))
    assert len(bench.to_peer(Released)) == 2
    bench.commit(grant, bench.send(grant))
    assert bench.to_peer(Committed), "the grant stands"
    bench.reserve(attempt=2)
    assert bench.to_peer(Grant), "no later attempt was buried"


def test_a_grant_takes_no_commit_of_another_request(bench):
    bench.reserve()
    (grant,) = bench.to_peer(Grant)
    bench.commit(grant, bench.send(grant), request=OTHER)
    assert bench.to_peer(Stale) and not bench.take(Tokens)


def test_blocks_are_granted_once_a_router_has_welcomed_the_worker(bench):
    fresh = Bench(welcomed=False)
    fresh.reserve()
    assert fresh.to_peer(Busy) and not fresh.to_peer(Grant)
    fresh.later(2.0)
    assert fresh.take(Hello), "the missing Welcome is asked for"


def test_a_whole_life(bench):
    bench.run()
    assert bench.streamed() == [(10, 42)]  # sent again, in case prefill's message was lost
    for _ in range(7):
        bench.step()
    assert bench.streamed() == [(position, 43) for position in range(11, 18)]
    terminal = bench.one(Terminal)
    assert (terminal.status, terminal.position) == ("maximum_length", 18)
    assert (terminal.prefill, terminal.decode) == ("prefill-0", "decode-0")
    times = terminal.times
    assert 0.0 <= times.computing <= times.computed <= times.ended
    assert times.preemptions == 0
    assert bench.cache.pool.used == 0
    bench.hear(TerminalAck(requests=[(KEY, 1)]))
    bench.later(2.0)
    assert not bench.take(Terminal)
    assert bench.core.idle


def test_the_tokens_of_a_step_leave_in_one_message_per_router(bench):
    bench.run(KEY)
    bench.step()
    bench.run(OTHER, tokens=7)
    bench.run(b"t" * 16, tokens=5, router="router-2")
    bench.step()
    bench.take(Tokens)
    bench.step()  # planned before the newcomers were here
    bench.take(Tokens)
    bench.routers.clear()
    bench.step()
    sizes = {r: len(m.runs) for r, m in bench.routers if isinstance(m, Tokens)}
    assert sizes == {ROUTER: 2, "router-2": 1}


def test_the_end_of_sequence_ends_it(bench):
    bench.run()
    bench.step(token=0)
    assert bench.one(Terminal).status == "end_of_sequence"


def test_a_prefix_is_found_and_need_not_be_sent_again(bench):
    bench.run()
    bench.reserve(OTHER, tokens=12)
    (grant,) = bench.to_peer(Grant)
    assert grant.cached_tokens == 8
    assert bench.send(grant, 12)[1] == 2 * LAYOUT.block_bytes


@pytest.mark.parametrize("found", [0, 4, 12])
def test_cached_tokens_are_those_that_no_worker_computed(bench, found):
    """This worker has 8 tokens in its cache; the prefill worker found ``found`` in its own."""
    bench.run()
    bench.reserve(OTHER, tokens=12)
    (grant,) = bench.to_peer(Grant)
    assert grant.cached_tokens == 8
    manifest = bench.send(grant, 12)
    bench.commit(grant, manifest, tokens=12, cached_tokens=found, new=2)
    while bench.plans:
        bench.step()
    (terminal,) = [t for t in bench.take(Terminal) if t.request == OTHER]
    assert terminal.cached_tokens == found


def test_a_repeated_reserve_and_commit_get_the_same_answers(bench):
    message = bench.reserve()
    bench.ask(message)
    first, second = bench.to_peer(Grant)
    assert first == second
    commit = bench.commit(first, bench.send(first))
    bench.ask(commit)
    one, two = bench.to_peer(Committed)
    assert one == two
    assert len(bench.streamed()) == 1


def test_what_belongs_to_a_router_that_is_gone_for_good_is_freed_at_last(bench):
    bench.feed(RouterUp("router-2"))
    bench.run(new=100, deadline=600.0)
    bench.run(OTHER, new=100, router="router-2", deadline=600.0)
    bench.finish()
    bench.feed(RouterDown("router-2"))
    bench.later(59.0, step=0.5)
    assert len(bench.core._held()) == 2
    bench.take(Aborted)
    bench.later(2.0, step=0.5)
    assert [held.router for held in bench.core._held()] == [ROUTER]
    assert not bench.take(Aborted), "nobody is there to hear it"


def test_no_room_is_busy():
    bench = Bench(blocks=3)
    bench.reserve(tokens=40)
    assert bench.to_peer(Busy)


def test_requests_that_were_preempted_come_before_new_grants():
    bench = Bench(blocks=8)
    bench.run(KEY, new=30)
    bench.run(OTHER, tokens=9, new=30)
    while not bench.core.load().preemptions:
        bench.step()
    bench.reserve(b"t" * 16, tokens=16)
    assert bench.to_peer(Busy)
    bench.hear(Abort(request=KEY, attempt=1))
    bench.hear(Abort(request=OTHER, attempt=1))
    while bench.plans:
        bench.step()
    assert bench.cache.pool.used == 0


def test_a_request_that_outgrows_the_whole_pool_fails_alone():
    bench = Bench(blocks=5)
    bench.run(new=100)
    while bench.plans:
        bench.step()
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("overloaded", 21)
    assert bench.cache.pool.used == 0


def test_the_deadline_ends_a_request(bench):
    bench.run(deadline=1.0)
    bench.later(1.1)
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.position) == ("deadline_exceeded", 11)
    bench.finish()
    assert bench.cache.pool.used == 0


def test_a_failed_step_fails_its_requests_only(bench):
    bench.run()
    bench.run(OTHER)
    plan = bench.plans.pop(0)
    failed = {chunk.request: InternalError("boom") for chunk in plan.chunks}
    bench.feed(StepDone(StepResult(plan.step, (), 0.01, plan.num_tokens, failed)))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.request, "boom" in terminal.message) == ("internal", KEY, True)
    bench.finish()
    bench.step()
    assert bench.streamed()[-1] == (11, 43)


# ------------------------------------------------------------------ Abort in every state


def test_abort_of_a_grant_frees_at_once(bench):
    bench.reserve()
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used == 0
    (grant,) = bench.to_peer(Grant)
    frame = KVFrame(grant.grant, 0, 0, 2, 0, 3, 6 * LAYOUT.block_bytes, 77)
    assert bench.receiver.data.locate(frame) is None  # late bytes go nowhere


def test_abort_of_a_running_request_frees_after_its_step(bench):
    bench.run()
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    assert bench.cache.pool.used
    bench.take(Tokens)
    assert not [each for each in bench.other if isinstance(each, Log)]
    heard, bench.now = bench.now, bench.now + 0.03
    assert len(bench.plans) == 2  # the running step and the next step
    bench.step()
    assert bench.cache.pool.used
    assert not [each for each in bench.other if isinstance(each, Log)]
    bench.now += 0.02
    bench.step()
    assert bench.cache.pool.used == 0
    assert not bench.take(Tokens) + bench.take(Terminal)
    (line,) = [each for each in bench.other if isinstance(each, Log)]
    assert line.event == "request.freed"
    assert (line.fields["heard"], line.fields["at"]) == (heard, bench.now)


def test_steps_that_nobody_waits_for_are_abandoned_and_teach_nothing(bench):
    bench.run(KEY, new=100)
    bench.finish()
    bench.run(OTHER, new=100)
    bench.finish()
    two = [plan.step for plan in bench.plans if len(plan.chunks) == 2]
    assert len(two) == len(bench.plans) == 2
    bench.hear(Abort(request=KEY, attempt=1))
    assert not [each for each in bench.other if isinstance(each, AbandonStep)]
    bench.hear(Abort(request=OTHER, attempt=1))
    abandoned = [each.step for each in bench.other if isinstance(each, AbandonStep)]
    assert abandoned == two
    known = bench.core._steps._times.predict(2)
    for plan in bench.plans:
        bench.feed(StepDone(abandoned_step(plan, 1e-6)))
    assert bench.cache.pool.used == 0
    assert bench.core._steps._times.predict(2) == known


def test_abort_of_an_unknown_request_is_answered_and_remembered(bench):
    bench.hear(Abort(request=KEY, attempt=2))
    assert bench.one(Aborted).attempt == 2
    bench.reserve(attempt=2)
    assert bench.to_peer(Aborted)
    bench.reserve(attempt=3)
    assert bench.to_peer(Grant)


def test_abort_of_an_ended_request_ends_its_terminal(bench):
    bench.run(new=2)
    bench.step()
    bench.take(Terminal)
    bench.hear(Abort(request=KEY, attempt=1))
    bench.later(2.0)
    assert not bench.take(Terminal)
    assert bench.member.unacknowledged == 0


def test_a_higher_attempt_takes_the_place_of_the_lower(bench):
    bench.run()
    bench.reserve(attempt=2)
    assert bench.to_peer(Grant)
    bench.take(Tokens)
    bench.step()
    assert not bench.take(Tokens)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.receiver.granted == 1
