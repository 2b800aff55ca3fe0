"""The simulator finds bugs: each of these, planted, is seen within the stated number of seeds."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from baton.client.routers import Routers
from baton.decode_worker.core import DecodeCore
from baton.decode_worker.grammars import Grammars
from baton.decode_worker.handoffs import GrantStore
from baton.decode_worker.handoffs import Handoffs as DecodeHandoffs
from baton.engine.scheduling.admission import Admission
from baton.engine.scheduling.scheduler import Scheduler
from baton.kv_transfer import receiver
from baton.kv_transfer.frames import FrameWriter
from baton.kv_transfer.grants import CreditPool
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_data import ReceiverData
from baton.kv_transfer.receiver_grants import ReceiverGrants, Reply
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import Handoff, HandoffState
from baton.prefill_worker.embed_core import BatchDone, EmbedCore, TextQueue
from baton.prefill_worker.handoffs import Handoffs as PrefillHandoffs
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import Committed, Drain, TokenRun, Tokens
from baton.router.client_messages import ClientMessages
from baton.router.lifecycle import Lifecycle
from baton.router.queries import Queries
from baton.router.records import NEVER
from baton.router.recovery import WorkerLosses
from baton.router.registry import Registry
from baton.router.repair import Repair as RouterRepair
from baton.router.states import State
from baton.router.takeover import UnclaimedRequests
from baton.router.worker_messages import WorkerMessages
from baton.router.worker_registration import WorkerRegistration
from baton.simulator import keys, rogues
from baton.simulator.network import Faults
from baton.simulator.run import run
from baton.simulator.scenarios import NARROW, SCENARIOS, Scenario
from baton.simulator.shape import Shape
from baton.simulator.violation import Violation
from baton.worker.base_core import WorkerCore
from baton.worker.jobs import Jobs
from baton.worker.membership import Allowance, Membership
from baton.worker.own_errors import OwnErrors as WorkerErrors

from ..suite.short import in_short


def around(monkeypatch, owner, name, make):
    """Replace ``owner.name`` by ``make(original)``."""
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def generation_not_raised_and_digest_not_compared(monkeypatch):
    monkeypatch.setattr(ReceiverData, "_manifest_agrees", lambda self, slot, commit: True)
    monkeypatch.setattr(receiver, "_another", lambda held, commit: False)

    def make(original):
        def free(self, slot):
            original(self, slot)
            self.table.at(slot.index).generation -= 1

        return free

    around(monkeypatch, ReceiverGrants, "free", make)


def checksum_not_checked(monkeypatch):
    def write(self, frame, blocks, payload):
        return intact(self, frame, blocks, payload) or True

    intact = FrameWriter.write
    monkeypatch.setattr(FrameWriter, "write", write)


def digest_not_verified(monkeypatch):
    monkeypatch.setattr(EnvelopeDecoder, "_verify", lambda self, digest, parts: None)


def credit_beyond_the_window(monkeypatch):
    def give(self, key, account):
        room = account.expected - account.credit
        account.credit += room
        self._outstanding += room
        self._news[key] = account.credit

    monkeypatch.setattr(CreditPool, "_raise", give)


def credit_not_heeded(monkeypatch):
    def make(original):
        def push(self, now):
            self.credit = 1 << 40
            return original(self, now)

        return push

    around(monkeypatch, Handoff, "push", make)


def position_off_by_one_after_adopt(monkeypatch):
    def make(original):
        def adopt(self, router, request, position):
            actions = original(self, router, request, position)
            for action in actions:
                if isinstance(action.message, Tokens):
                    runs = [
                        TokenRun(r.request, r.attempt, r.position + 1, r.tokens)
                        for r in action.message.runs
                    ]
                    msgspec.structs.force_setattr(action.message, "runs", runs)
            return actions

        return adopt

    around(monkeypatch, DecodeCore, "_adopt", make)


def commit_with_cells_missing(monkeypatch):
    def make(original):
        def own(self, slot, now):
            if slot.commit is not None and slot.arrived is not None:
                slot.arrived[:] = True
                slot.damaged.clear()
                digest = 0
                for checksum in slot.frames.values():
                    digest ^= checksum
                slot.commit = msgspec.structs.replace(
                    slot.commit, frames=len(slot.frames), bytes=slot.sizes, digest=digest
                )
            return original(self, slot, now)

        return own

    around(monkeypatch, ReceiverData, "_try_own", make)


def abort_frees_twice(monkeypatch):
    def make(original):
        def drop(self, slot):
            allocation = slot.allocation
            outputs = original(self, slot)
            if allocation is not None:
                self._store.free(allocation)
            return outputs

        return drop

    around(monkeypatch, ReceiverGrants, "drop", make)


def abort_frees_nothing(monkeypatch):
    def stop(self, job):
        self._jobs.remove(job)
        self.receiver.close(*job.key)

    monkeypatch.setattr(DecodeCore, "_stop", stop)


def any_position_passes_the_router(monkeypatch):
    def make(original):
        def irregular(self, worker, request, run, now):
            checked = original(self, worker, request, run, now)
            if checked is None and run.position > request.next:
                return run
            return checked

        return irregular

    around(monkeypatch, WorkerMessages, "_irregular", make)


def terminal_not_repeated(monkeypatch):
    monkeypatch.setattr(Membership, "_repeat", lambda self, now, due: [])


def what_is_given_back_is_said_once(monkeypatch):
    monkeypatch.setattr(Membership, "_repeat_notices", lambda self, now: [])


def duplicate_reserve_allocates_again(monkeypatch):
    def make(original):
        def reserve(self, peer, message, now):
            self._grants.table.live.pop(message.request, None)
            return original(self, peer, message, now)

        return reserve

    around(monkeypatch, Receiver, "on_reserve", make)


def prefix_published_before_it_arrived(monkeypatch):
    def make(original):
        def reserve(self, hashes, num_tokens, growth, key):
            allocation = original(self, hashes, num_tokens, growth, key)
            if allocation is not None:
                self._cache.publish(allocation, hashes, num_tokens)
            return allocation

        return reserve

    around(monkeypatch, GrantStore, "reserve", make)


def blocks_sent_before_they_are_computed(monkeypatch):
    def make(original):
        def ready(self, key, *, layer_end, token_end, last, now):
            return original(self, key, layer_end=layer_end, token_end=token_end, last=True, now=now)

        return ready

    around(monkeypatch, Sender, "ready", make)


def preempted_blocks_still_count_as_computed(monkeypatch):
    def make(original):
        def preempt(self, sequence):
            computed = sequence.num_computed_tokens
            original(self, sequence)
            sequence.num_computed_tokens = computed

        return preempt

    around(monkeypatch, Admission, "_preempt", make)


def lost_assign_not_repeated(monkeypatch):
    def make(original):
        def assign(self, request, now):
            original(self, request, now)
            request.retry_at = float("inf")

        return assign

    around(monkeypatch, Lifecycle, "assign", make)


def ends_are_kept_for_clients_that_never_come(monkeypatch):
    monkeypatch.setattr(UnclaimedRequests, "expected", lambda self, worker, key, attempt, now: True)


def orphans_have_no_time_of_grace(monkeypatch):
    def over(self, key, attempt, now):
        ended = attempt <= self._table.last_attempt(key)
        return ended or self._table.cancelled.holds(key, now)

    monkeypatch.setattr(UnclaimedRequests, "_is_over", over)


def what_is_given_back_while_its_request_waits_is_not_let_go(monkeypatch):
    def make(original):
        def current(self, worker, request, attempt, now, proof=b""):
            if request.state in (State.QUEUED, State.RECOVERING):
                return False
            return original(self, worker, request, attempt, now, proof)

        return current

    around(monkeypatch, WorkerMessages, "_current", make)


def acknowledged_before_it_is_owned(monkeypatch):
    def make(original):
        def on_commit(self, peer, message, now, **sender):
            done = Committed(
                request=message.request,
                attempt=message.attempt,
                grant=message.grant,
                bytes=message.bytes,
                frames=message.frames,
            )
            return original(self, peer, message, now, **sender) or [Reply(peer, done)]

        return on_commit

    around(monkeypatch, Receiver, "on_commit", make)


def last_token_dropped_when_an_end_is_adopted(monkeypatch):
    def make(original):
        def adopt(self, router, request, position):
            actions = original(self, router, request, position)
            for action in actions:
                if isinstance(action.message, Tokens):
                    action.message.runs[0].tokens.pop()
            return actions

        return adopt

    around(monkeypatch, Membership, "adopt", make)


def deaths_not_counted(monkeypatch):
    def make(original):
        return lambda self, there: None

    around(monkeypatch, WorkerLosses, "_blame", make)


def newcomers_take_any_name(monkeypatch):
    """Two lives of one name then bury each other in turn."""

    def make(original):
        def check_join(self, hello, now, *, idle):
            for worker in self.live():
                worker.finished = True
            return original(self, hello, now, idle=idle)

        return check_join

    around(monkeypatch, Registry, "check_join", make)


def suspects_are_dead(monkeypatch):
    def make(original):
        def judged(self, lost, doubtful, now):
            original(self, [*lost, *doubtful], [], now)

        return judged

    around(monkeypatch, WorkerLosses, "judged", make)


def lost_connections_are_deaths(monkeypatch):
    def make(original):
        def disconnected(self, workers, now):
            self.lose_all([(worker, "the connection closed") for worker in workers], now)

        return disconnected

    around(monkeypatch, WorkerLosses, "disconnected", make)


def certificates_need_no_secret(monkeypatch):
    monkeypatch.setattr("baton.router.worker_registration.seal_of", lambda secret: secret)


def drain_asked_once(monkeypatch):
    def make(original):
        def drain(self, identity, message, now):
            original(self, identity, message, now)
            for worker in self._registry.live():
                worker.drain_at = NEVER

        return drain

    monkeypatch.setitem(Queries._handlers, Drain, make(Queries._handlers[Drain]))


def matcher_not_shown_prefills_token(monkeypatch):
    monkeypatch.setattr("baton.decode_worker.grammars.follow", lambda matcher, tokens: None)


def grammar_of_an_ended_handoff_compiles_on(monkeypatch):
    monkeypatch.setattr(Grammars, "prune", lambda self, wanted: [])


def vectors_of_the_batch_mixed_up(monkeypatch):
    def make(original):
        def done(self, event, now):
            names, vectors = list(event.vectors), list(event.vectors.values())
            event = replace(event, vectors=dict(zip(names, vectors[::-1], strict=True)))
            return original(self, event, now)

        return done

    monkeypatch.setitem(EmbedCore.HANDLERS, BatchDone, make(EmbedCore.HANDLERS[BatchDone]))


def blocks_freed_while_a_frame_is_written(monkeypatch):
    def make(original):
        def locate(self, frame):
            blocks = original(self, frame)
            slot = self._grants.table.find(frame.grant)
            if slot is not None:
                slot.moving.clear()
            return blocks

        return locate

    around(monkeypatch, ReceiverData, "locate", make)


def blocks_freed_while_a_decode_worker_reads_them(monkeypatch):
    monkeypatch.setattr(Handoff, "may_be_read", property(lambda self: False))


def the_sender_is_told_while_its_blocks_are_read(monkeypatch):
    def at_once(self, peer, key, answer):
        return [Reply(peer, answer)]

    def make(original):
        def part(self, slot, last_word):
            said = [] if last_word is None else [Reply(slot.peer, last_word)]
            return [*said, *original(self, slot, None)]

        return part

    around(monkeypatch, ReceiverGrants, "part", make)
    monkeypatch.setattr(ReceiverGrants, "when_drained", at_once)


def text_without_a_vector_is_forgotten(monkeypatch):
    def make(original):
        def finish(self, job, vector, failure, now):
            return [] if vector is None else original(self, job, vector, failure, now)

        return finish

    around(monkeypatch, EmbedCore, "_finish", make)


def aborted_text_stays_in_the_queue(monkeypatch):
    monkeypatch.setattr(TextQueue, "remove", Jobs.remove)


def a_step_is_abandoned_while_somebody_waits_for_it(monkeypatch):
    def take_unwanted(self):
        found = [
            step
            for step, rows in enumerate(self._out, self.steps)
            if step not in self._unwanted and any(s.aborted for s, _ in rows.values())
        ]
        self._unwanted.update(found)
        return found

    monkeypatch.setattr(Scheduler, "take_unwanted", take_unwanted)


def the_timeout_runs_while_frames_are_sent_alone(monkeypatch):
    def make(original):
        def unreachable(self, endpoint, reason):
            others = {
                key: handoff
                for key, handoff in self._live.items()
                if handoff.state is not HandoffState.SENDING
            }
            for key in others:
                del self._live[key]
            try:
                return original(self, endpoint, reason)
            finally:
                self._live.update(others)

        return unreachable

    around(monkeypatch, Sender, "unreachable", make)


def frames_that_never_arrive_are_sent_again_and_again(monkeypatch):
    monkeypatch.setattr(Handoff, "nothing_arrives", lambda self, peer_arrival, now: False)


def a_client_stays_with_its_router(monkeypatch):
    monkeypatch.setattr(Routers, "move", lambda self, now: self.current)


def tokens_of_a_taken_over_request_begin_anew(monkeypatch):
    def make(original):
        def take_emitted(self, request, message):
            original(self, request, message)
            request.emitted = request.emitted[:-1]

        return take_emitted

    around(monkeypatch, ClientMessages, "_take_emitted", make)


def a_harmed_request_gets_no_end(monkeypatch):
    monkeypatch.setattr(RouterRepair, "_end", lambda self, request, lifecycle, now: None)


def sums_are_not_made_again_after_an_error(monkeypatch):
    monkeypatch.setattr(RouterRepair, "_recount", lambda self, now: None)


def a_harmed_job_gets_no_end(monkeypatch):
    monkeypatch.setattr(
        WorkerCore,
        "_harm",
        lambda self, job, error, where, now: [self.errors.of(job.key, error, where)],
    )


def the_books_of_a_worker_are_not_compared_after_an_error(monkeypatch):
    monkeypatch.setattr(WorkerErrors, "compare", lambda self, check: [])


def a_link_whose_event_raised_stays_half_open(monkeypatch):
    monkeypatch.setattr(PrefillHandoffs, "agree_again", lambda *_: None)


def an_exception_ends_a_turn_of_the_core(monkeypatch):
    def handle(self, event, now):
        actions = self.HANDLERS[type(event)](self, event, now)
        self._go_on(actions, now)
        return actions

    monkeypatch.setattr(WorkerCore, "handle", handle)


def tickets_are_good_for_any_key(monkeypatch):
    allowed = Allowance(1 << 30, 600)
    monkeypatch.setattr(Membership, "allowance", lambda *_: allowed)


def a_committed_attempt_is_confirmed_to_anybody(monkeypatch):
    def make(original):
        def on_commit(self, peer, message, now, *, key=b""):
            done = self._past.committed.get((message.request, message.attempt), now)
            return original(self, peer, message, now, key=done[1] if done else key)

        return on_commit

    around(monkeypatch, Receiver, "on_commit", make)


def a_grant_obeys_any_key(monkeypatch):
    monkeypatch.setattr(DecodeHandoffs, "_is_anothers", lambda *_: False)


def cached_blocks_are_shared_by_all_keys(monkeypatch):
    def make(original):
        def reserve(self, hashes, num_tokens, growth, key):
            return original(self, hashes, num_tokens, growth, b"")

        return reserve

    around(monkeypatch, GrantStore, "reserve", make)


def tickets_state_no_size(monkeypatch):
    def make(original):
        def allowance(self, *args):
            allowed = original(self, *args)
            return allowed and allowed._replace(tokens=1 << 30)

        return allowance

    around(monkeypatch, Membership, "allowance", make)


def any_key_may_state_any_incarnation(monkeypatch):
    monkeypatch.setattr(keys, "refusal", lambda *_: None)
    monkeypatch.setattr(rogues, "refusal", lambda *_: None)
    monkeypatch.setattr(WorkerRegistration, "_check_known", staticmethod(lambda *_: None))


LATE = Scenario(
    shape=Shape(decode=1, sizes=NARROW),
    prompt=150,
    cancels=0.9,
    faults=Faults(reordering=0.4, duplication=0.4, max_delay=0.004),
)
DEAF = replace(SCENARIOS["scarce-crash"], faults=Faults(loss=0.15))
LONELY = replace(SCENARIOS["failover"], shape=replace(SCENARIOS["failover"].shape, restart_s=9.0))
CROWDED = replace(SCENARIOS["embed"], load_s=0.1, cancels=0.7, requests=200)


RAISES_OFTEN = replace(SCENARIOS["raises-decode"], raises=20)
ROUTER_RAISES_OFTEN = replace(SCENARIOS["raises-router"], raises=24)


def cut_by(*kinds: str) -> Scenario:
    """One pair of workers is cut in one of these ways, for longer than a stream may wait."""
    return replace(SCENARIOS["cut-narrow"], cut_kinds=kinds, load_s=14.0)


BEFORE_DOUBT_S = 9.0
"""A stuck request goes on after its client doubts, after 10 s: so no request may wait so long."""
PLANTS = [
    (generation_not_raised_and_digest_not_compared, LATE, 60),
    (checksum_not_checked, "noise", 5),
    (digest_not_verified, "damage", 10),
    (credit_beyond_the_window, "narrow", 5),
    (credit_not_heeded, "narrow", 5),
    (position_off_by_one_after_adopt, "noise", 5),
    (commit_with_cells_missing, "noise", 5),
    (abort_frees_twice, "narrow-noise", 10),
    (abort_frees_nothing, "noise", 5),
    (any_position_passes_the_router, "noise", 5),
    (terminal_not_repeated, "noise", 12),
    (what_is_given_back_is_said_once, DEAF, 30),
    (duplicate_reserve_allocates_again, "noise", 5),
    (prefix_published_before_it_arrived, "plain", 20),
    (blocks_sent_before_they_are_computed, "narrow", 5),
    (preempted_blocks_still_count_as_computed, "scarce", 5),
    (lost_assign_not_repeated, "noise", 5),
    (acknowledged_before_it_is_owned, "noise", 5),
    (last_token_dropped_when_an_end_is_adopted, "noise", 5),
    (deaths_not_counted, "poison", 3),
    (newcomers_take_any_name, "twins", 3),
    (suspects_are_dead, "pauses", 3),
    (lost_connections_are_deaths, "cut-off", 3),
    (certificates_need_no_secret, "certificates-forged", 3),
    (drain_asked_once, "rolling-noise", 10),
    (ends_are_kept_for_clients_that_never_come, "noise", 20),
    (orphans_have_no_time_of_grace, "orphans", 5),
    (what_is_given_back_while_its_request_waits_is_not_let_go, "drains", 10),
    (vectors_of_the_batch_mixed_up, CROWDED, 5),
    (text_without_a_vector_is_forgotten, "embed", 3),
    (blocks_freed_while_a_frame_is_written, "moves", 20),
    (blocks_freed_while_a_decode_worker_reads_them, "in-place", 20),
    (the_sender_is_told_while_its_blocks_are_read, "in-place", 20),
    (a_step_is_abandoned_while_somebody_waits_for_it, "noise", 10),
    (aborted_text_stays_in_the_queue, CROWDED, 5),
    (matcher_not_shown_prefills_token, "structured", 3),
    (grammar_of_an_ended_handoff_compiles_on, "structured", 5),
    (a_client_stays_with_its_router, LONELY, 5),
    (the_timeout_runs_while_frames_are_sent_alone, cut_by("both", "there"), 12),
    (frames_that_never_arrive_are_sent_again_and_again, cut_by("data"), 12),
    (tokens_of_a_taken_over_request_begin_anew, "failover", 10),
    (a_harmed_request_gets_no_end, "raises-router", 10),
    (sums_are_not_made_again_after_an_error, ROUTER_RAISES_OFTEN, 10),
    (a_harmed_job_gets_no_end, "raises-prefill", 30),
    (the_books_of_a_worker_are_not_compared_after_an_error, RAISES_OFTEN, 20),
    (an_exception_ends_a_turn_of_the_core, "raises-prefill", 3),
    (a_link_whose_event_raised_stays_half_open, "raises-links", range(6, 14)),
    (tickets_are_good_for_any_key, "rogue", 10),
    (a_committed_attempt_is_confirmed_to_anybody, "rogue", 10),
    (a_grant_obeys_any_key, "rogue-moves", 60),
    (cached_blocks_are_shared_by_all_keys, "rogue-greedy", 10),
    (any_key_may_state_any_incarnation, "rogue", 10),
    (tickets_state_no_size, "rogue-greedy", 80),
]


LATE = (
    "what_is_given_back_is_said_once", "prefix_published_before_it_arrived",
    "last_token_dropped_when_an_end_is_adopted", "digest_not_verified",
    "generation_not_raised_and_digest_not_compared", "suspects_are_dead",
    "frames_that_never_arrive_are_sent_again_and_again", "drain_asked_once",
    "the_timeout_runs_while_frames_are_sent_alone", "a_grant_obeys_any_key",
    "tickets_state_no_size",
)  # fmt: skip
"""Found after seconds only."""
BY_NAME = {plant.__name__: (plant, *rest) for plant, *rest in PLANTS}


@pytest.mark.parametrize("planted", in_short(BY_NAME, *(BY_NAME.keys() - LATE)))
def test_a_planted_bug_is_found(monkeypatch, planted):
    plant, scenario, seeds = planted
    plant(monkeypatch)
    played = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    played = replace(played, wait_s=min(played.wait_s, BEFORE_DOUBT_S))
    for seed in seeds if isinstance(seeds, range) else range(seeds):
        try:
            run(seed, played)
        except Violation:
            return
    pytest.fail(f"{plant.__name__} was not seen in the runs of {seeds}")


SELDOM = ("a_harmed_job_gets_no_end", "sums_are_not_made_again_after_an_error")


@pytest.mark.parametrize("planted", SELDOM)
def test_a_planted_bug_is_found_if_the_books_are_compared_seldom(monkeypatch, planted):
    plant, scenario, seeds = BY_NAME[planted]
    plant(monkeypatch)
    played = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    with pytest.raises(Violation):
        for seed in range(seeds):
            run(seed, played, check_every=16)
