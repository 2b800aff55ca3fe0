"""The decode worker's decisions: grant, take over, generate, end.

Invariants: a block is written by exactly one grant or running request; a request runs only
after its whole manifest arrived intact; its tokens are sent in order and stay available
until the router has its terminal; every request taken over ends in one terminal or an Abort.

The core uses no socket, clock or thread. It contains the handoff's receiver and the engine's
scheduler, which are pure too; the shell runs steps, writes frames into the pool and moves messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ..engine.cache.paged_cache import Allocation
from ..engine.grammar.constraint import GrammarDone, GrammarTask, grammar_task
from ..engine.models.registry import read_context
from ..engine.scheduling.events import Event as EngineEvent
from ..engine.scheduling.events import Failed, Finished, TokenEvent
from ..engine.scheduling.scheduler import Scheduler
from ..engine.scheduling.sequence import Sequence
from ..engine.scheduling.step_time import StepTime
from ..kv_transfer.receiver import Evict, Handover, Receiver, Reply, check_receiver
from ..kv_transfer.receiver import Output as Received
from ..proto.contexts.outputs import TokenLogProbs
from ..proto.contexts.text import TextContext
from ..proto.errors import BatonError, HandoffFailed, InternalError, VersionMismatch
from ..proto.hashing import cache_salt
from ..proto.ids import RequestID
from ..proto.limits import PROTOCOL_VERSION
from ..proto.requests import check_continued
from ..proto.wire.messages import (
    DEVICE,
    SHARED,
    STREAMED,
    Abort,
    Aborted,
    Busy,
    Commit,
    Fence,
    Message,
    Open,
    Opened,
    OpenRefused,
    Ping,
    Pong,
    Probe,
    ProbeReply,
    Rejected,
    Release,
    Released,
    RequestState,
    Reserve,
    Terminal,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from ..proto.wire.versions import check_version
from ..runtime.keyed_heap import Agenda
from ..worker.attempts import Attempts, Key
from ..worker.base_core import Handler, WorkerCore
from ..worker.events import AbandonStep, Fault, Note, RunStep, StepDone, Tick, ToRouter
from ..worker.membership import EngineState, Membership, left_alone, moved_to, other_owner
from ..worker.token_replay import LOGPROBS_KEPT, runs_again
from .blocks import GrantStore as GrantStore
from .events import (
    Action,
    Event,
    FrameStored,
    FromPeer,
    MapPool,
    PeerGone,
    PoolMapped,
    ToPeer,
)
from .grammars import Grammars


@dataclass(slots=True)
class _Live:
    """A request this worker owns."""

    key: Key
    router: str
    commit: Commit
    context: TextContext
    sequence: Sequence
    deadline: float
    prompt_length: int
    logprobs: deque[TokenLogProbs]  # of the newest tokens, if the client requested them
    grammar: GrammarTask | None = None  # still compiling; the engine does not have the request yet

    def known_tokens(self, position: int) -> list[int]:
        """Return the tokens from ``position`` on, without a placeholder for the next token."""
        tokens: list[int] = self.context.tokens.all[position : self.sequence.num_tokens].tolist()
        return tokens


class DecodeCore(WorkerCore):
    """State machine of one decode worker."""

    def __init__(
        self,
        member: Membership,
        scheduler: Scheduler,
        receiver: Receiver[Allocation],
        data_endpoint: str,
        max_frame_bytes: int,
        times: StepTime | None = None,
    ) -> None:
        super().__init__(member)
        self.receiver = receiver
        self._scheduler = scheduler
        self._data_endpoint = data_endpoint
        self._max_frame_bytes = max_frame_bytes
        self._card = member.identity.model
        self._live: Attempts[_Live] = Attempts()
        self._deadlines: Agenda[Key] = Agenda()
        self._by_sequence: dict[bytes, _Live] = {}
        self._grammars = Grammars()
        self._progress = 0
        self._step_s = 0.0  # predicted duration of the running step
        self._times = times or StepTime()
        self._tombstone_s = 600.0

    # ------------------------------------------------------------------ entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the actions to perform, in order."""
        actions: list[Action] = self.HANDLERS[type(event)](self, event, now)
        if self._grammars:
            actions += self._grammars.prune(self._wants_grammar)
        self._plan(actions, now)
        return actions

    def next_timer(self) -> float:
        """Latest time of the next Tick."""
        return self._member.next_timer()

    # ------------------------------------------------------------------ messages of routers

    def _peer_dead(self, endpoint: str, incarnation: int, now: float) -> list[Action]:
        return self._received(self.receiver.peer_dead(incarnation), now)

    def _abort(self, router: str, message: Abort, now: float) -> list[Action]:
        request, attempt = message.request, message.attempt
        stopped = self._live.of(request, attempt)
        owner = other_owner(stopped, router)
        if owner is not None:
            return list(left_alone(owner, router, message))
        for live in stopped:
            self._stop(live)
        outputs = self.receiver.abort(request, attempt, now, self._tombstone_s)
        self._member.forget(request, attempt, router)
        names = [live.sequence.request for live in stopped]
        running = [name for name in names if self._scheduler.is_inflight(name)]
        note = self._freed((request, attempt), now, running)
        answer = ToRouter(router, Aborted(request=request, attempt=attempt))
        return [*self._received(outputs, now), answer, *note, *self._maybe_drained()]

    def _adopt(self, router: str, request: bytes, position: int) -> list[Action]:
        """Reroute the request to this router and repeat all its tokens from ``position`` on."""
        live = self._live.newest(request)
        if live is None:
            return list(self._member.adopt(router, request, position))
        moved = moved_to(router, live.router, request)
        live.router = router
        position = max(position, live.prompt_length)
        tokens = live.known_tokens(position)  # an empty run confirms ownership
        runs = runs_again(live.key, position, tokens, live.logprobs)
        return [*moved, ToRouter(router, Tokens(runs=runs))]

    def _held(self) -> list[RequestState]:
        return [
            RequestState(*k, v.sequence.num_tokens, v.prompt_length, router=v.router)
            for k, v in self._live.items()
        ]

    # ------------------------------------------------------------------ prefill workers

    def _on_peer(self, event: FromPeer, now: float) -> list[Action]:
        peer, receiver = event.peer, self.receiver
        receiver.peer_heard(peer, now)
        match event.message:
            case Reserve() as message:
                if not self._invited(message):
                    return [ToPeer(peer, self._uninvited(message))]
                if self._member.draining and not receiver.holds(message):
                    return [ToPeer(peer, _busy(message, "draining"))]
                actions = self._received(receiver.on_reserve(peer, message, now), now)
                return actions + self._prepare(message)
            case Commit() as message:
                return self._received(receiver.on_commit(peer, message, now), now)
            case Release() as message:
                if not self._invited(message) and not self._owns(message):
                    # The sender has no grant for this attempt, and must not end another's.
                    gone = Released(request=message.request, attempt=message.attempt)
                    return [ToPeer(peer, gone)]
                return self._received(receiver.on_release(peer, message, now), now)
            case Fence() as message:
                return self._received(receiver.on_fence(message), now)
            case Open() as message:
                return self._open(peer, message)
            case Probe(nonce=nonce):
                return [ToPeer(peer, self._probe(nonce))]
            case Ping(nonce=nonce):
                return [ToPeer(peer, Pong(nonce=nonce))]
            case _:
                return []

    def _invited(self, message: Reserve | Release) -> bool:
        """True if a router assigned this attempt to the sender, for handoff to this worker."""
        key = (message.request, message.attempt)
        return self._member.invited(*key, message.incarnation, message.ticket)

    def _uninvited(self, message: Reserve) -> Message:
        """Return the answer to a Reserve without a valid ticket; nothing is reserved.

        Aborted makes an honest sender return the attempt to its router. The ticket may be for an
        earlier incarnation of this worker, which has been restarted since.
        """
        if not self._member.can_check:
            return _busy(message, "this worker is not registered with a router yet")
        self._member.dropped["peer_uninvited"] += 1
        return Aborted(request=message.request, attempt=message.attempt)

    def _owns(self, message: Release) -> bool:
        """True if the sender has a live grant for the attempt."""
        owner = self.receiver.owner_of_attempt(message.request, message.attempt)
        return owner is not None and owner == message.incarnation

    def _prepare(self, message: Reserve) -> list[Action]:
        """Compile the request's grammar while its KV is computed and transferred."""
        spec = message.grammar
        if spec is None or not self.receiver.holds(message):
            return []
        task = GrammarTask(spec.schema, frozenset(spec.eos), tuple(spec.emitted))
        return list(self._grammars.want((message.request, message.attempt), task))

    def _on_peer_gone(self, event: PeerGone, now: float) -> list[Action]:
        self.receiver.peer_gone(event.peer, now)
        return []

    def _open(self, peer: bytes, message: Open) -> list[Action]:
        refusal = self._refusal(message)
        if refusal is not None:
            return [ToPeer(peer, refusal)]
        self.receiver.peer_moved(message.incarnation, peer)
        if message.pool is not None and SHARED in message.transports:
            return [MapPool(peer, message.incarnation, message.pool, SHARED)]
        if message.device_pool is not None and DEVICE in message.transports:
            return [MapPool(peer, message.incarnation, message.device_pool, DEVICE)]
        return [ToPeer(peer, self._opened(STREAMED))]

    def _on_mapped(self, event: PoolMapped, now: float) -> list[Action]:
        if event.failure:
            note = Note("handoff.not_shared", {"reason": event.failure})
            return [note, ToPeer(event.peer, self._opened(STREAMED))]
        return [ToPeer(event.peer, self._opened(event.transport))]

    def _refusal(self, message: Open) -> Message | None:
        try:
            check_version(message.version, f"worker {message.worker}")
        except VersionMismatch as error:
            return Rejected(code=error.code, message=str(error))
        mismatch = self._card.mismatch(message.model)
        if mismatch:
            field, ours, theirs = mismatch
            return OpenRefused(field=field, ours=ours, theirs=theirs)
        if STREAMED not in message.transports:
            theirs = ",".join(message.transports)
            return OpenRefused(field="transports", ours=STREAMED, theirs=theirs)
        return None

    def _opened(self, transport: str) -> Opened:
        return Opened(
            worker=self._member.identity.worker,
            incarnation=self._member.identity.incarnation,
            transport=transport,
            data_endpoint=self._data_endpoint,
            max_frame_bytes=self._max_frame_bytes,
        )

    def _probe(self, nonce: int) -> ProbeReply:
        me = self._member.identity
        return ProbeReply(
            nonce=nonce,
            version=PROTOCOL_VERSION,
            worker=me.worker,
            role=me.role,
            incarnation=me.incarnation,
        )

    def _on_frame(self, event: FrameStored, now: float) -> list[Action]:
        outputs = self.receiver.on_frame(event.frame, intact=event.intact, now=now)
        note = [] if event.intact else [Note("handoff.frame_damaged", {"frame": event.frame.index})]
        return [*note, *self._received(outputs, now)]

    def _received(self, outputs: list[Received[Allocation]], now: float) -> list[Action]:
        actions: list[Action] = []
        for output in outputs:
            match output:
                case Reply(peer=peer, message=message):
                    actions.append(ToPeer(peer, message))
                case Handover() as handover:
                    actions += self._take_over(handover, now)
                case Evict(request=request, attempt=attempt):
                    live = self._live.get((request, attempt))
                    if live:
                        self._stop(live)
                        gone = Aborted(request=request, attempt=attempt)
                        actions.append(ToRouter(live.router, gone))
        return actions

    # ------------------------------------------------------------------ requests

    def _take_over(self, handover: Handover[Allocation], now: float) -> list[Action]:
        """Run a committed request. Its newest token is repeated: prefill's may have been lost."""
        commit = handover.commit
        key = (commit.request, commit.attempt)
        deadline = now + commit.deadline
        try:
            context = self._read_context(commit)
            sequence = self._sequence(key, context, handover, now)
            task = grammar_task(context)
            if task is None:
                self._scheduler.adopt(sequence)
        except Exception as error:  # whatever the error, the blocks must be freed
            self._scheduler.cache.free(handover.allocation)
            self.receiver.close(*key)
            return self._failed_takeover(commit, deadline, error, now)
        newest = context.newest_log_probabilities()
        live = _Live(
            key,
            commit.router,
            commit,
            context,
            sequence,
            deadline,
            context.prompt_length,
            deque(newest, maxlen=LOGPROBS_KEPT),
            grammar=task,
        )
        self._live[key] = live
        self._member.assigned(key, commit.proof, deadline)
        self._deadlines.put(key, deadline)
        self._by_sequence[sequence.request] = live
        run = TokenRun(
            key[0], key[1], len(context.tokens) - 1, [context.tokens[-1]], newest or None
        )
        said = ToRouter(live.router, Tokens(runs=[run]))
        if task is None:
            return [said]
        return [said, *self._grammars.want(key, task), *self._constrain(live, task, now)]

    def _read_context(self, commit: Commit) -> TextContext:
        """Read the context of a Commit. Raises HandoffFailed if the context is invalid."""
        try:
            request_id = RequestID(commit.request_id)
            check_continued(commit.context, self._card)
            return read_context(self._card.architecture, commit.context, request_id)
        except ValueError as error:
            raise HandoffFailed(str(error)) from error

    def _on_grammar(self, event: GrammarDone, now: float) -> list[Action]:
        """Store a compiled grammar or its error. The request may not be here yet, or have ended."""
        if not self._grammars.done(event.key, event.result):
            return []
        live = self._live.get(event.key)
        if live is None or live.grammar is None:
            return []
        return self._constrain(live, live.grammar, now)

    def _constrain(self, live: _Live, task: GrammarTask, now: float) -> list[Action]:
        """Run a request whose grammar is compiled, or end it with the compiler's error."""
        result = self._grammars.take(live.key, task)
        if result is None:
            return []
        if isinstance(result, BatonError):
            code, text, later = result.code, str(result), result.retry_after
            return self._end(live, now, code=code, message=text, retry_after=later)
        live.sequence.constrain(result)
        live.grammar = None
        self._scheduler.adopt(live.sequence)
        return []

    def _wants_grammar(self, key: Key) -> bool:
        """True if a request waits for its grammar, or its handoff is still under way."""
        live = self._live.get(key)
        return self.receiver.expects(*key) if live is None else live.grammar is not None

    def _sequence(
        self,
        key: Key,
        context: TextContext,
        handover: Handover[Allocation],
        now: float,
    ) -> Sequence:
        sequence = Sequence(
            key[0] + key[1].to_bytes(8, "little"),
            context,
            block_size=self._card.layout.block_size,
            salt=cache_salt(self._card.fingerprint, handover.commit.context.cache_salt),
            arrival=now,
        )
        sequence.allocation = handover.allocation
        sequence.cached_tokens = handover.cached_tokens
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self._scheduler.cache.publish(
            handover.allocation, sequence.extend_hashes(), sequence.num_computed_tokens
        )
        return sequence

    def _failed_takeover(
        self, commit: Commit, deadline: float, error: Exception, now: float
    ) -> list[Action]:
        """End a request that cannot run here.

        An invalid Commit is reported as a failed handoff, and the router retries: the Commit of
        another prefill worker may be valid. A bug in this code would fail on every pair of workers,
        so the request ends with an internal error and the log has the traceback.
        """
        actions: list[Action] = []
        code, message = HandoffFailed.code, str(error)
        if not isinstance(error, BatonError):
            self._member.dropped["internal_error"] += 1
            fields: dict[str, object] = {
                "request": commit.request.hex(),
                "request_id": commit.request_id,
            }
            actions.append(Fault("handoff.takeover_failed", error, fields))
            code = InternalError.code
            worker, kind = self._member.identity.worker, type(error).__name__
            message = f"worker {worker} could not take the request over: {kind}: {error}"
        self._member.assigned((commit.request, commit.attempt), commit.proof, deadline)
        terminal = Terminal(
            request=commit.request,
            attempt=commit.attempt,
            position=len(commit.context.tokens),
            code=code,
            message=message,
            request_id=commit.request_id,
        )
        return [*actions, *self._member.end(commit.router, terminal, now, deadline)]

    def _stop(self, live: _Live) -> None:
        """Remove a request and free its blocks, if needed after the running step."""
        del self._live[live.key]
        self._deadlines.drop(live.key)
        self._by_sequence.pop(live.sequence.request, None)
        allocation = live.sequence.allocation
        if live.grammar is None:
            self._scheduler.abort(live.sequence.request)
        elif allocation is not None:
            self._scheduler.cache.free(allocation)
        self.receiver.close(*live.key)

    # ------------------------------------------------------------------ engine

    def _plan(self, actions: list[Action], now: float) -> None:
        """Keep one step running and, if its rows allow, a second step queued."""
        actions += [AbandonStep(step) for step in self._scheduler.take_unwanted()]
        if not self._scheduler.steps_out:
            plan = self._scheduler.plan(now)
            if plan is None:
                actions += self._engine_events(self._scheduler.take_events(), now)
                return
            self._step_s = self._times.predict(plan.num_tokens)
            actions.append(RunStep(plan))
        ahead = self._scheduler.plan_ahead()
        if ahead is not None:
            actions.append(RunStep(ahead))

    def _on_step(self, event: StepDone, now: float) -> list[Action]:
        self._progress += 1
        if not event.result.abandoned:
            self._times.learn(event.result.num_tokens, event.result.seconds)
        actions = self._engine_events(self._scheduler.apply(event.result, now), now)
        return [*actions, *self._step_over(now, self._scheduler.is_inflight)]

    def _engine_events(self, events: list[EngineEvent], now: float) -> list[Action]:
        """Return one Tokens message per router, then the terminals."""
        runs: defaultdict[str, list[TokenRun]] = defaultdict(list)
        ends: list[Action] = []
        for event in events:
            live = self._by_sequence.get(event.request)
            if live is None:
                continue
            if type(event) is TokenEvent:
                logprobs = None if event.logprobs is None else [event.logprobs]
                live.logprobs.extend(logprobs or ())
                request, attempt = live.key
                run = TokenRun(request, attempt, event.position, [event.token], logprobs)
                runs[live.router].append(run)
            elif type(event) is Finished:
                ends += self._end(live, now, status=event.status)
            elif type(event) is Failed:
                ends += self._end(live, now, code=event.code, message=event.message)
        tokens: list[Action] = [ToRouter(r, Tokens(runs=list_)) for r, list_ in runs.items()]
        return tokens + ends

    def _end(
        self,
        live: _Live,
        now: float,
        *,
        status: str | None = None,
        code: str | None = None,
        message: str = "",
        retry_after: float | None = None,
    ) -> list[Action]:
        tokens = live.known_tokens(live.prompt_length)
        terminal = Terminal(
            request=live.key[0],
            attempt=live.key[1],
            position=live.sequence.num_tokens,
            status=status,
            code=code,
            message=message,
            retry_after=retry_after,
            request_id=live.commit.request_id,
            cached_tokens=max(live.commit.cached_tokens, live.sequence.cached_tokens),
            prefill=live.commit.prefill,
            decode=self._member.identity.worker,
        )
        self._stop(live)
        ended = self._member.end(
            live.router, terminal, now, live.deadline, live.prompt_length,
            live.prompt_length, tokens, live.logprobs,
        )  # fmt: skip
        return [*ended, *self._maybe_drained()]

    # ------------------------------------------------------------------ time and drain

    def _on_tick(self, event: Tick, now: float) -> list[Action]:
        engine = EngineState(
            self._progress + event.layers, self._scheduler.steps_out > 0, self._step_s
        )
        actions: list[Action] = list(self._member.tick(now, engine, self.load))
        actions += self._introduce_again(now)
        actions += self._deserted(now)
        actions += self._received(self.receiver.tick(now), now)
        for key in self._deadlines.due(now):
            if live := self._live.get(key):
                actions += self._end(
                    live, now, code="deadline_exceeded", message="the deadline passed"
                )
        return actions + self._maybe_drained()

    @property
    def _requests(self) -> int:
        return len(self._live)

    @property
    def is_drained(self) -> bool:
        """True if this worker is draining and nothing is left."""
        idle = not self._live and not self.receiver.granted and not self._member.unacknowledged
        return self._member.draining and idle

    @property
    def idle(self) -> bool:
        """True if there is no request and no running step, so integrity can be checked."""
        return not self._live and not self.receiver.granted and not self._scheduler.steps_out

    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""
        held = (
            (live.router, live.sequence.num_tokens + live.sequence.remaining_tokens)
            for live in self._live.values()
        )
        return msgspec.structs.replace(self._scheduler.load(), shares=self._shares(held))

    @property
    def remembered(self) -> int:
        """Number of entries kept about ended requests; each entry expires."""
        return self.receiver.remembered + self._member.unacknowledged

    def check_integrity(self) -> None:
        """Raise InternalError unless every block and byte of credit has exactly one owner."""
        compiling = [live.sequence for live in self._live.values() if live.grammar is not None]
        held = [s.allocation for s in compiling if s.allocation is not None]
        self._scheduler.check_integrity([*self.receiver.held(), *held])
        check_receiver(self.receiver, {request for request, _ in self._live})
        if not all(self._wants_grammar(key) for key in self._grammars):
            raise InternalError("a grammar is compiled for no request")
        expected = set(self._by_sequence) - {s.request for s in compiling}
        if self._scheduler.requests != expected:
            raise InternalError("the engine's sequences do not match the requests")

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        **WorkerCore.HANDLERS,
        FromPeer: _on_peer,
        PeerGone: _on_peer_gone,
        FrameStored: _on_frame,
        PoolMapped: _on_mapped,
        StepDone: _on_step,
        GrammarDone: _on_grammar,
        Tick: _on_tick,
    }


def _busy(message: Reserve, reason: str) -> Busy:
    return Busy(request=message.request, attempt=message.attempt, reason=reason, retry_after=0.2)
