"""The decode worker's decisions: grant, take over, generate, end.

A request arrives in a handoff, or a router assigns it here without a prefill worker. Such a *local*
request waits in the scheduler, which computes its prompt in chunks between the tokens of others
(docs/decisions/0047-a-decode-worker-computes-prompts.md).

Invariants: a block is written by exactly one grant or running request; a request of a handoff runs
only after its whole manifest arrived intact; an attempt is either local or granted, and the newest
attempt of a request ends the others; its tokens are sent in order and stay available
until the router has its terminal; every request taken over ends in one terminal or an Abort.

The core uses no socket, clock or thread. It contains the handoff's receiver and the engine's
scheduler, which are pure too; the shell runs steps, writes frames into the pool and moves messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Unpack

import msgspec

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.engine.grammar.constraint import GrammarDone, grammar_task
from baton.engine.scheduling.events import Event as EngineEvent
from baton.engine.scheduling.events import Failed, Finished, TokenEvent
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer.receiver import Receiver, check_receiver
from baton.kv_transfer.receiver_grants import Evict, Handover, Reply
from baton.proto.errors import BatonError, HandoffFailed, InternalError
from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Assign,
    Commit,
    PeerDead,
    Reserve,
    Terminal,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from baton.proto.wire.token_runs import messages_of
from baton.worker.assign_core import AssignCore
from baton.worker.assigned import ended_status
from baton.worker.attempts import Key
from baton.worker.base_core import FORGOTTEN, TOMBSTONE_S, Handler, WorkerCore
from baton.worker.events import CheckImages, Fault, ImagesChecked, StepDone, Tick, ToRouter
from baton.worker.jobs import Ending, Jobs
from baton.worker.membership import EngineState, Membership
from baton.worker.own_errors import failure_text
from baton.worker.steps import EngineSteps

from .events import (
    Action,
    ChunkDecoded,
    DecodeChunk,
    FrameFailed,
    FrameStored,
    FromPeer,
    HandoffEvent,
    PeerGone,
    PoolMapped,
    ToPeer,
)
from .grammars import Grammars
from .handoffs import Handoffs, Output
from .job import Job, make_job, make_local_job
from .local_prompts import LocalPrompts
from .voice import Codec

MAX_QUEUE = 1024
"""Local requests without a first token at which an Assign is answered Busy."""


class DecodeCore(AssignCore[Job]):
    """State machine of one decode worker."""

    def __init__(
        self,
        member: Membership,
        scheduler: Scheduler,
        receiver: Receiver[Allocation],
        data: tuple[str, int],
        times: StepTime | None = None,
        codec: Codec | None = None,
        slo_ttft: float = 0.0,
    ) -> None:
        """``data``: the address for KV frames, and the most bytes of one.

        ``codec``: of a speech model. ``slo_ttft``: see :class:`.local_prompts.LocalPrompts`.
        """
        self._jobs: Jobs[Job] = Jobs()
        self._codec = codec
        self._voices: dict[Key, Job] = {}  # speech that this event may have advanced
        self._prompts: set[Key] = set()  # local requests without a first token
        self._local = LocalPrompts(slo_ttft, scheduler.cache)  # those that wait for their turn
        super().__init__(member, self._jobs, MAX_QUEUE)
        self.receiver = receiver
        self._scheduler = scheduler
        self._card = member.identity.model
        self._grammars = Grammars()
        self._handoffs = Handoffs(member, receiver, self._grammars, *data)
        self._steps = EngineSteps(scheduler, times)

    @property
    def cache(self) -> PagedCache:
        """The books of the KV blocks."""
        return self._scheduler.cache

    # ------------------------------------------------------------------ after any event

    def _go_on(self, actions: list[Action], now: float) -> None:
        if self._grammars or self._voices:  # the next event tries again, if the books agree
            self.errors.apart(
                actions,
                grammars=lambda: self._grammars.prune(self._wants_grammar),
                speech=lambda: self._speak(now),
            )
        self._plan(actions, now)

    def _failed(self, event: object, error: Exception, now: float) -> list[Action]:
        if isinstance(event, FrameStored | FrameFailed):
            self.receiver.data.not_recorded(event.frame)
        return super()._failed(event, error, now)

    def _abandon(self, key: Key, now: float) -> list[Action]:
        return self._received(self.receiver.abort(*key, now, TOMBSTONE_S), now)

    def _key_of(self, event: object) -> Key | None:
        if isinstance(event, FrameStored | FrameFailed):
            return self.receiver.attempt_of(event.frame.grant)
        return super()._key_of(event)

    # ------------------------------------------------------------------ messages of routers

    def _peer_dead(self, message: PeerDead, now: float) -> list[Action]:
        return self._received(self.receiver.peer_dead(message.incarnation), now)

    @property
    def _waiting(self) -> int:
        return len(self._prompts)

    def _is_over(self, key: Key, now: float) -> bool:
        return self.receiver.is_over(*key, now)

    def _make_job(self, router: str, message: Assign, now: float) -> Job:
        return make_local_job(router, message, self._member.identity, now, self._codec)

    def _begin_job(self, job: Job, now: float) -> list[Action]:
        """End what the request holds here of other attempts, and prepare the job for the engine."""
        keep = max(TOMBSTONE_S, job.deadline - now)
        actions = self._received(self.receiver.abort(*job.key, now, keep), now)
        if (status := ended_status(job.sequence)) is not None:
            return [*actions, *self._end(job, now, status=status)]  # the client has the last token
        self._prompts.add(job.key)
        job.grammar = grammar_task(job.context)
        if job.grammar is not None:
            actions += self._grammars.want(job.key, job.grammar)
        if job.unchecked is not None:
            actions.append(CheckImages(job.key, job.unchecked))
        self._run(job, now)
        return actions

    def _abort_jobs(self, jobs: list[Job], router: str, message: Abort, now: float) -> list[Action]:
        request, attempt = message.request, message.attempt
        for job in jobs:
            self._stop(job, now)
        outputs = self.receiver.abort(request, attempt, now, TOMBSTONE_S)
        self._member.forget(request, attempt, router)
        note = self._freed((request, attempt), now, self._running(jobs))
        answer = ToRouter(router, Aborted(request=request, attempt=attempt))
        return [*self._received(outputs, now), answer, *note, *self._maybe_drained()]

    def _is_running(self, name: bytes) -> bool:
        return self._scheduler.is_inflight(name)

    # ------------------------------------------------------------------ prefill workers

    def _on_handoff(self, event: HandoffEvent, now: float) -> list[Action]:
        actions = self._received(self._handoffs.handle(event, now), now)
        if isinstance(event, FromPeer) and isinstance(event.message, Reserve):
            return [*actions, *self._superseded(event.message, now)]
        return actions

    def _superseded(self, reserve: Reserve, now: float) -> list[Action]:
        """End the local attempts before one that got a grant here."""
        lower = self._jobs.of(reserve.request, reserve.attempt - 1)
        if not lower or not self.receiver.holds(reserve):
            return []
        return [action for job in lower for action in self._evict(job, now)]

    def _evict(self, job: Job, now: float) -> list[Action]:
        self._stop(job, now)
        return [ToRouter(job.router, Aborted(request=job.key[0], attempt=job.key[1]))]

    def _on_frame_failed(self, event: FrameFailed, now: float) -> list[Action]:
        return self._failed(event, event.error, now)

    def _received(self, outputs: Iterable[Output], now: float) -> list[Action]:
        """Perform the receiver's outputs; pass on actions."""

        def handle(output: Output) -> list[Action]:
            match output:
                case Reply(peer=peer, message=message):
                    return [ToPeer(peer, message)]
                case Handover() as handover:
                    return self._take_over(handover, now)
                case Evict(request=request, attempt=attempt):
                    job = self._jobs.get((request, attempt))
                    return [] if job is None else self._evict(job, now)
                case action:
                    return [action]

        return self._outputs(outputs, handle, now)

    # ------------------------------------------------------------------ requests

    def _take_over(self, handover: Handover[Allocation], now: float) -> list[Action]:
        """Run a committed request. Its newest token is repeated: prefill's may have been lost."""
        commit, cache = handover.commit, self._scheduler.cache
        try:
            job = make_job(handover, self._card, now, self._codec)
            sequence = job.sequence
            cache.publish(
                handover.allocation, sequence.extend_hashes(), sequence.num_computed_tokens,
                sequence.tokens_between,
            )  # fmt: skip
            job.grammar = grammar_task(job.context)
            self._run(job, now)
        except Exception as error:  # whatever the error, the blocks must be freed
            cache.free(handover.allocation)
            self.receiver.close(commit.request, commit.attempt)
            return self._failed_takeover(commit, handover.until, error, now)
        self._jobs.add(job)
        newest = job.newest_token()
        if job.voice is not None:  # with its chunk, or only a sign that the request is here
            newest = TokenRun(*job.key, job.voice.sent, [])
            self._voices[job.key] = job
        said = ToRouter(job.router, Tokens(runs=[newest]))
        if job.grammar is None:
            return [said]
        return [said, *self._grammars.want(job.key, job.grammar), *self._constrain(job, now)]

    def _run(self, job: Job, now: float) -> None:
        """Pass a prepared request to the engine, or let it wait for its turn."""
        if job.grammar is not None or job.unchecked is not None:
            return
        if job.local is not None:
            self._local.put(job)
        elif job.sequence.allocation is None:
            self._scheduler.add(job.sequence, now)
        else:
            self._scheduler.adopt(job.sequence)

    def _start_prompts(self, now: float) -> None:
        """Give the engine the local prompts for its next step, so that the others can change turns.

        The scheduler never changes the order of those that it has.
        """
        while self._local and self._scheduler.wants_prompts:
            job = self._local.pop(now)
            if job is None:
                return
            job.local = None
            self._scheduler.add(job.sequence, now)

    def _on_images(self, event: ImagesChecked, now: float) -> list[Action]:
        """Note that a local request's images are checked, or end the request."""
        job = self._jobs.get(event.key)
        if job is None or job.unchecked is None:
            return []
        noted, failure = self._checked(job.key, event.result)
        if failure is not None:
            return [*noted, *self._end(job, now, code=failure.code, message=str(failure))]
        job.unchecked = None
        self._run(job, now)
        return []

    def _on_grammar(self, event: GrammarDone, now: float) -> list[Action]:
        """Store a compiled grammar or its error. The request may not be here yet, or have ended."""
        if not self._grammars.done(event.key, event.result):
            return []
        job = self._jobs.get(event.key)
        return [] if job is None else self._constrain(job, now)

    def _constrain(self, job: Job, now: float) -> list[Action]:
        """Run a request whose grammar is compiled, or end it with the compiler's error."""
        if job.grammar is None:
            return []
        result = self._grammars.take(job.key, job.grammar)
        if result is None:
            return []
        if isinstance(result, BatonError):
            code, text, later = result.code, str(result), result.retry_after
            return self._end(job, now, code=code, message=text, retry_after=later)
        job.sequence.constrain(result)
        job.grammar = None
        self._run(job, now)
        return []

    def _wants_grammar(self, key: Key) -> bool:
        """True if a request waits for its grammar, or its handoff is still under way."""
        job = self._jobs.get(key)
        return self.receiver.expects(*key) if job is None else job.grammar is not None

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
            message = failure_text(self._member.identity.worker)
        terminal = Terminal(
            request=commit.request,
            attempt=commit.attempt,
            position=len(commit.context.tokens),
            code=code,
            message=message,
            request_id=commit.request_id,
        )
        ended = self._member.end(commit.router, terminal, now, deadline, proof=commit.proof)
        return [*actions, *ended]

    # ------------------------------------------------------------------ speech

    def _adopt(self, router: str, request: bytes, position: int) -> list[Action]:
        actions: list[Action] = super()._adopt(router, request, position)
        job = self._jobs.newest(request)
        if job is not None and job.voice is not None:
            self._voices[job.key] = job
        return actions

    def _speak(self, now: float) -> list[Action]:
        """Send tokens with their decoded chunks, and end the requests that are over."""
        voices, self._voices = self._voices, {}

        def advance(job: Job) -> list[Action]:
            voice = job.voice
            if voice is None or self._jobs.get(job.key) is not job:
                return []
            runs, window = voice.advance(job.key, job.logprobs)
            actions: list[Action] = [ToRouter(job.router, tokens) for tokens in messages_of(runs)]
            if window is not None:
                actions.append(DecodeChunk(job.key, window, voice.entries(window)))
            if voice.is_over:
                actions += self._end(job, now, status=voice.status)
            return actions

        return self._each(voices.values(), advance, "speech", now)

    def _on_chunk(self, event: ChunkDecoded, now: float) -> list[Action]:
        """Store a chunk, whose request may have ended meanwhile."""
        job = self._jobs.get(event.key)
        if job is None or job.voice is None:
            return []
        if isinstance(event.samples, Exception):
            text = f"the audio codec failed: {type(event.samples).__name__}"
            fault = Fault("codec.failed", event.samples, {"request": job.key[0].hex()})
            return [fault, *self._end(job, now, code=InternalError.code, message=text)]
        job.voice.made(event.frame, event.samples)
        self._voices[job.key] = job
        return []

    # ------------------------------------------------------------------ ends

    def _stop(self, job: Job, now: float) -> list[Action]:
        """Remove a request and free its blocks, if needed after the running step."""
        self._jobs.remove(job)
        self._prompts.discard(job.key)
        self._local.drop(job)
        allocation = job.sequence.allocation
        if not job.is_preparing:
            self._scheduler.abort(job.sequence.request)
        elif allocation is not None:
            self._scheduler.cache.free(allocation)
        self.receiver.close(*job.key)
        return []

    # ------------------------------------------------------------------ engine

    def _plan(self, actions: list[Action], now: float) -> None:
        """Keep one step running and, if its rows allow, a second step queued."""
        if self._local:
            self._start_prompts(now)
        actions += self._steps.plan(now)
        actions += self._engine_events(self._steps.idle_events(), now)

    def _on_step(self, event: StepDone, now: float) -> list[Action]:
        before = self._scheduler.prompt_tokens
        events = self._steps.finish(event.result, now)
        self._local.learn(self._scheduler.prompt_tokens - before, event.result.seconds)
        actions = self._engine_events(events, now)
        return [*actions, *self._step_over(now, self._scheduler.is_inflight)]

    def _engine_events(self, events: list[EngineEvent], now: float) -> list[Action]:
        """Return one Tokens message per router, then the terminals."""
        runs: defaultdict[str, list[TokenRun]] = defaultdict(list)
        ends = self._each_event(
            events, lambda job, event: self._engine_event(job, event, runs, now), now
        )
        tokens: list[Action] = [
            ToRouter(router, message) for router in runs for message in messages_of(runs[router])
        ]
        return tokens + ends

    def _engine_event(
        self, job: Job, event: EngineEvent, runs: dict[str, list[TokenRun]], now: float
    ) -> list[Action]:
        """Add a new token to its router's runs, or return the end of the request."""
        if type(event) is Failed:
            if event.cause is not None:
                return self._harm(job, event.cause, "step result", now)
            return self._end(job, now, code=event.code, message=event.message)
        if self._prompts and type(event) is TokenEvent:
            self._prompts.discard(job.key)
        voice = job.voice
        if voice is not None:
            self._voices[job.key] = job
            if type(event) is TokenEvent:
                voice.add(event.token)
                job.logprobs.extend(() if event.logprobs is None else (event.logprobs,))
            elif type(event) is Finished:
                voice.status = event.status
        elif type(event) is TokenEvent:
            logprobs = None if event.logprobs is None else [event.logprobs]
            job.logprobs.extend(logprobs or ())
            request, attempt = job.key
            position, media = event.position - job.shift, event.preview or event.prompt_log_probs
            if media is not None:
                job.media[position] = media
            run = TokenRun(request, attempt, position, [event.token], logprobs, media)
            runs[job.router].append(run)
        elif type(event) is Finished:
            return self._end(job, now, status=event.status, media=event.result)
        return []

    def _end(self, job: Job, now: float, **ending: Unpack[Ending]) -> list[Action]:
        first, media = job.base, job.media
        if job.voice is None:
            tokens = job.known_tokens(first)
        else:
            first = job.voice.oldest
            tokens, media = job.voice.kept()
        terminal = job.terminal(self._member.identity.worker, now, **ending)
        self._stop(job, now)
        ended = self._member.end(
            job.router, terminal, now, job.deadline, job.base, first, tokens, job.logprobs, media,
            job.proof,
        )  # fmt: skip
        return [*ended, *self._maybe_drained()]

    # ------------------------------------------------------------------ time and drain

    def _engine_state(self, layers: int) -> EngineState:
        return self._steps.state(layers)

    def _timed_parts(self, now: float, event: Tick) -> dict[str, Callable[[], list[Action]]]:
        return {
            "handoffs": lambda: self._check_handoffs(now),
            "deadlines": lambda: self._end_overdue(now),
        }

    def _check_handoffs(self, now: float) -> list[Action]:
        outputs = self.receiver.tick(now)
        if self.receiver.forgotten:
            self.dropped[FORGOTTEN] = self.receiver.forgotten
        return self._received(outputs, now)

    @property
    def is_drained(self) -> bool:
        """True if this worker is draining and nothing is left."""
        if not self._member.draining:  # asked at each end of a request: no look at the grants
            return False
        return not (len(self._jobs) or self._member.unacknowledged or self.receiver.granted)

    @property
    def idle(self) -> bool:
        """True without requests and a running step, so integrity can be checked."""
        return not len(self._jobs) and not self.receiver.granted and not self._steps.running

    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""
        held = ((job.router, job.work) for job in self._jobs)
        load, local = self._scheduler.load(), self._local
        return msgspec.structs.replace(
            load,
            shares=self._shares(held),
            requests_waiting=load.requests_waiting + len(local),
            tokens_waiting=load.tokens_waiting + local.tokens,
        )

    @property
    def remembered(self) -> int:
        """Number of entries kept about ended requests; each entry expires."""
        return self.receiver.remembered + self._member.unacknowledged

    def check_integrity(self) -> None:
        """Raise InternalError unless every block and byte of credit has exactly one owner."""
        preparing = [job.sequence for job in self._jobs if job.is_preparing]
        held = [s.allocation for s in preparing if s.allocation is not None]
        self._jobs.check_integrity()
        self._scheduler.check_integrity([*self.receiver.held(), *held])
        check_receiver(self.receiver, {job.key[0] for job in self._jobs})
        if not all(self._wants_grammar(key) for key in self._grammars):
            raise InternalError("a grammar is compiled for no request")
        spoken = {job.name for job in self._jobs if job.voice is not None and job.voice.status}
        expected = self._jobs.names - {s.request for s in preparing} - spoken
        if self._scheduler.requests != expected:
            raise InternalError("the engine's sequences do not match the requests")
        if not all(self._jobs.get(key) for key in self._prompts):
            raise InternalError("a prompt is counted for no request")
        self._local.check_integrity(self._jobs)

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        **WorkerCore.HANDLERS,
        FromPeer: _on_handoff,
        PeerGone: _on_handoff,
        FrameStored: _on_handoff,
        FrameFailed: _on_frame_failed,
        PoolMapped: _on_handoff,
        StepDone: _on_step,
        GrammarDone: _on_grammar,
        ImagesChecked: _on_images,
        ChunkDecoded: _on_chunk,
    }
    ENGINE_EVENTS: ClassVar[frozenset[type]] = frozenset({StepDone})
