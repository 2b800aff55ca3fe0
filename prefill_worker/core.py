"""The prefill worker's decisions: queue, reserve, compute, hand over, let go.

Invariants: a job holds an execution slot before it asks a decode worker for blocks, and
blocks there before it computes; its own blocks stay until the decode worker owns the
request; every Assign is answered, and every job ends by handover, terminal, Busy or Abort.

Knows no socket, clock or thread. The engine's scheduler and the handoff's sender are pure
parts of it; the shell runs steps, packs frames and moves messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ..engine.events import ChunkDone, Failed, Finished, Prefilled, TokenEvent
from ..engine.events import Event as EngineEvent
from ..engine.scheduler import Scheduler
from ..engine.step_time import StepTime
from ..kv_transfer import sender as handoff
from ..kv_transfer.sender import Key, Sender
from ..proto.errors import BatonError, InternalError
from ..proto.limits import PROTOCOL_VERSION
from ..proto.messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Busy,
    Committed,
    Credit,
    Drain,
    Drained,
    Grant,
    Message,
    Open,
    Opened,
    OpenRefused,
    PeerDead,
    PeerLost,
    Ping,
    Pong,
    Refused,
    Rejected,
    Released,
    RequestState,
    Revoke,
    Stale,
    Terminal,
    TerminalAck,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from ..runtime.actions import (
    DrainRequested,
    FromRouter,
    Note,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
    blocks_freed,
)
from ..runtime.expiry import Expiring
from ..runtime.membership import EngineState, Membership, moved_to
from .events import (
    Action,
    Connect,
    Disconnect,
    Event,
    FromPeer,
    LayersDone,
    OpenData,
    Packed,
    PackFrame,
    PeerDown,
    PeerUp,
    RunStep,
    StepDone,
    ToPeer,
)
from .job import Job, JobState, make_job, report
from .link import OPEN_REPEAT_S, Link, LinkState

TOMBSTONE_S = 600.0
"""How long an Abort holds against an Assign that comes late."""


@dataclass(slots=True, frozen=True)
class PrefillLimits:
    """The settings the core needs; see PrefillWorkerConfig."""

    max_active: int = 16
    max_queue: int = 1024
    max_reserve_tries: int = 3
    stream_tokens: int = 512
    growth: int = 64


class PrefillCore:
    """State machine of one prefill worker."""

    def __init__(
        self,
        member: Membership,
        scheduler: Scheduler,
        sender: Sender,
        limits: PrefillLimits,
        times: StepTime | None = None,
    ) -> None:
        self._member = member
        self._scheduler = scheduler
        self._sender = sender
        self._limits = limits
        self._card = member.identity.model
        self._jobs: dict[Key, Job] = {}
        self._by_sequence: dict[bytes, Job] = {}
        self._queue: deque[Key] = deque()
        self._active = 0
        self._links: dict[str, Link] = {}
        self._answered: Expiring[Key, bool] = Expiring()  # ended: repeat the answer
        self._aborted: Expiring[bytes, int] = Expiring()  # attempts up to this one are over
        self._serial = 0
        self._progress = 0
        self._step_s = 0.0  # predicted, of the step that runs
        self._times = times or StepTime()
        self._step_running = False
        self._drained_said = False
        self._freed_later: list[Key] = []  # aborted, but part of the running step

    # ------------------------------------------------------------------ entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; the returned actions are to be performed in order."""
        actions = self._handlers[type(event)](self, event, now)
        self._dispatch(actions, now)
        self._plan(actions, now)
        return actions

    def next_timer(self) -> float:
        """Latest moment of the next Tick."""
        sender = self._sender.next_timer()
        beat = self._member.next_timer()
        return min(beat, sender) if sender is not None else beat

    # ------------------------------------------------------------------ routers

    def _on_router_up(self, event: RouterUp, now: float) -> list[Action]:
        return list(self._member.up(event.router, self.load(), self._held(), now))

    def _unknown_there(self, router: str, now: float) -> list[Action]:
        """A router has no memory of us; many words of ours may have met it."""
        if not self._member.may_introduce(now):
            return []
        return self._on_router_up(RouterUp(router), now)

    def _on_router_down(self, event: RouterDown, now: float) -> list[Action]:
        self._member.down(event.router)
        return []

    def _on_router(self, event: FromRouter, now: float) -> list[Action]:
        match event.message:
            case Assign() as message:
                return self._assign(event.router, message, now)
            case Abort() as message:
                return self._abort(event.router, message, now)
            case TerminalAck(requests=ended):
                self._member.acknowledged(ended)
                return self._maybe_drained()
            case Adopt(request=request, position=position):
                return self._adopt(event.router, request, position)
            case PeerDead(incarnation=incarnation, endpoint=endpoint):
                return self._peer_dead(endpoint, incarnation, now)
            case Drain():
                return self._drain(now)
            case Ping(nonce=nonce):
                return [ToRouter(event.router, Pong(nonce=nonce))]
            case Rejected(code="endpoint_unknown"):
                return self._unknown_there(event.router, now)
            case Rejected() as message:
                return [self._member.rejected(event.router, message)]
            case _:
                return []

    def _assign(self, router: str, message: Assign, now: float) -> list[Action]:
        key = (message.request, message.attempt)
        accepted = ToRouter(router, Accepted(request=key[0], attempt=key[1]))
        job = self._jobs.get(key)
        if job:
            job.router = router
            return [accepted]
        if self._member.has_ended(*key):
            return [accepted]
        if self._answered.get(key, now):
            # Handed over or ended. A router that lost its memory would wait for it for ever.
            return [ToRouter(router, Aborted(request=key[0], attempt=key[1]))]
        if key[1] <= (self._aborted.get(key[0], now) or 0):
            return [ToRouter(router, Aborted(request=key[0], attempt=key[1]))]
        actions = self._drop_lower(key, now)
        if self._member.draining or len(self._queue) >= self._limits.max_queue:
            reason = "draining" if self._member.draining else "queue full"
            busy = Busy(request=key[0], attempt=key[1], reason=reason, retry_after=0.2)
            return [*actions, ToRouter(router, busy)]
        return actions + self._take(router, message, accepted, now)

    def _take(self, router: str, message: Assign, accepted: ToRouter, now: float) -> list[Action]:
        key = (message.request, message.attempt)
        try:
            job = make_job(key, router, message, self._card, now)
        except (BatonError, ValueError) as error:
            code = error.code if isinstance(error, BatonError) else "input"
            terminal = Terminal(
                request=key[0],
                attempt=key[1],
                code=code,
                message=str(error),
                request_id=message.request_id,
            )
            ended = self._member.end(router, terminal, now, now + message.deadline)
            return [accepted, *ended]
        self._jobs[key] = job
        self._by_sequence[job.sequence.request] = job
        if job.ended is not None:  # a replay whose last token the client has already
            return [accepted, *self._finished(job, job.ended, now)]
        self._queue.append(key)
        return [accepted]

    def _drop_lower(self, key: Key, now: float) -> list[Action]:
        actions: list[Action] = []
        for other in [k for k in self._jobs if k[0] == key[0] and k[1] < key[1]]:
            actions += self._stop(self._jobs[other], now)
        self._member.forget(key[0], key[1] - 1)
        return actions

    def _abort(self, router: str, message: Abort, now: float) -> list[Action]:
        request, attempt = message.request, message.attempt
        actions: list[Action] = []
        stopped = [j for k, j in self._jobs.items() if k[0] == request and k[1] <= attempt]
        for job in stopped:
            actions += self._stop(job, now)
        self._member.forget(request, attempt)
        if attempt >= (self._aborted.get(request, now) or 0):
            self._aborted.put(request, attempt, now + TOMBSTONE_S)
        if any(self._scheduler.is_inflight(job.sequence.request) for job in stopped):
            self._freed_later.append((request, attempt))
        else:
            actions.append(blocks_freed(request, attempt, now))
        answer = Aborted(request=request, attempt=attempt)
        return [*actions, ToRouter(router, answer), *self._maybe_drained()]

    def _stop(self, job: Job, now: float) -> list[Action]:
        """End a job without a word to the router; its grant goes back."""
        self._remove(job)
        self._free(job)
        if job.key in self._sender:
            return self._sender_actions(self._sender.release(job.key, now), now)
        return []

    def _adopt(self, router: str, request: bytes, position: int) -> list[Action]:
        """Say its tokens again, to this router from now on; an empty run says: it is here."""
        held = [job for job in self._jobs.values() if job.key[0] == request]
        if not held:
            return list(self._member.adopt(router, request, position))
        job = max(held, key=lambda one: one.key[1])
        moved = moved_to(router, job.router, request)
        job.router = router
        position = max(position, len(job.assign.context.tokens))
        tokens = job.context.tokens.all[position:].tolist()
        run = TokenRun(request, job.key[1], position, tokens)
        return [*moved, ToRouter(router, Tokens(runs=[run]))]

    def _held(self) -> list[RequestState]:
        return [job.held() for job in self._jobs.values()]

    # ------------------------------------------------------------------ queue and slots

    def _dispatch(self, actions: list[Action], now: float) -> None:
        """Give free execution slots to queued jobs, in order."""
        waiting: list[Key] = []
        while self._queue and self._active < self._limits.max_active:
            key = self._queue.popleft()
            job = self._jobs.get(key)
            if job is None or job.state is not JobState.QUEUED:
                continue
            if now >= job.deadline:
                actions += self._end(
                    job, now, "deadline_exceeded", "the deadline passed in the queue"
                )
            elif now < job.not_before or not self._link_open(job, actions, now):
                waiting.append(key)
            else:
                actions += self._reserve(job, now)
        self._queue.extendleft(reversed(waiting))

    def _link_open(self, job: Job, actions: list[Action], now: float) -> bool:
        endpoint = job.assign.decode
        link = self._links.get(endpoint)
        if link is None:
            self._links[endpoint] = Link(endpoint, now)
            actions.append(Connect(endpoint))
            return False
        if link.state is LinkState.REFUSED:
            # The router has workers of one model only: this one came without its knowledge.
            actions += self._give_back(job, now, link.refusal, lost=True)
            return False
        if link.is_lost(now):
            actions += self._give_back(job, now, f"no answer from {endpoint}", lost=True)
            return False
        return link.state is LinkState.OPEN

    def _reserve(self, job: Job, now: float) -> list[Action]:
        job.state = JobState.RESERVING
        self._active += 1
        self._serial += 1
        link = self._links[job.assign.decode]
        incarnation = self._member.identity.incarnation
        reserve = job.reserve(incarnation, self._serial, self._limits.growth, now)
        outputs = self._sender.start(job.assign.decode, link.incarnation, reserve, now)
        return self._sender_actions(outputs, now)

    # ------------------------------------------------------------------ decode workers

    def _on_peer_up(self, event: PeerUp, now: float) -> list[Action]:
        link = self._links.get(event.endpoint)
        if link is None:
            return []
        # Also after a refusal: another process may listen there now.
        link.state, link.since = LinkState.OPENING, now
        return [self._open(link, now)]

    def _open(self, link: Link, now: float) -> Action:
        link.repeat_at = now + OPEN_REPEAT_S
        me = self._member.identity
        message = Open(
            version=PROTOCOL_VERSION,
            worker=me.worker,
            incarnation=me.incarnation,
            model=me.model,
            transports=["zmq"],
        )
        return ToPeer(link.endpoint, message)

    def _on_peer_down(self, event: PeerDown, now: float) -> list[Action]:
        link = self._links.get(event.endpoint)
        if link:
            link.state, link.since = LinkState.CONNECTING, now
        return []

    def _on_peer(self, event: FromPeer, now: float) -> list[Action]:
        sender = self._sender
        match event.message:
            case Grant() as message:
                outputs = sender.on_grant(event.endpoint, message, now)
            case Busy() as message:
                outputs = sender.on_busy(message)
            case Credit() as message:
                outputs = sender.on_credit(message, now)
            case Committed() as message:
                outputs = sender.on_committed(message, now)
            case Refused() as message:
                outputs = sender.on_refused(message, now)
            case Stale() as message:
                outputs = sender.on_stale(message)
            case Released() | Aborted() as message:
                outputs = sender.on_gone(message.request, message.attempt)
            case Revoke() as message:
                outputs = sender.on_revoke(event.endpoint, message)
            case Opened() as message:
                return self._opened(event.endpoint, message, now)
            case OpenRefused() as message:
                return self._open_refused(event.endpoint, message, now)
            case Ping(nonce=nonce):
                return [ToPeer(event.endpoint, Pong(nonce=nonce))]
            case _:
                return []
        return self._sender_actions(outputs, now)

    def _opened(self, endpoint: str, message: Opened, now: float) -> list[Action]:
        link = self._links.get(endpoint)
        if link is None or link.state is LinkState.OPEN:
            return []
        actions: list[Action] = []
        if link.incarnation not in (0, message.incarnation):
            reason = f"{endpoint} was restarted"
            lost = self._sender.peer_lost(endpoint, reason, link.incarnation)
            actions += self._sender_actions(lost, now)
        link.state, link.since = LinkState.OPEN, now
        link.worker, link.incarnation = message.worker, message.incarnation
        link.transport = message.transport
        return [*actions, OpenData(endpoint, message.data_endpoint)]

    def _open_refused(self, endpoint: str, message: OpenRefused, now: float) -> list[Action]:
        link = self._links.get(endpoint)
        if link is None:
            return []
        link.state, link.since = LinkState.REFUSED, now
        link.refusal = (
            f"workers differ in {message.field}: {message.theirs} here,"
            f" {message.ours} at {endpoint}"
        )
        return [Note("handoff.refused", {"endpoint": endpoint, "field": message.field})]

    def _peer_dead(self, endpoint: str, incarnation: int, now: float) -> list[Action]:
        outputs: list[handoff.Output] = []
        for link in list(self._links.values()):
            if link.incarnation == incarnation or (link.endpoint == endpoint and not link.worker):
                outputs += self._sender.peer_lost(link.endpoint, "the worker died", incarnation)
                del self._links[link.endpoint]
                return [*self._sender_actions(outputs, now), Disconnect(link.endpoint)]
        return []

    # ------------------------------------------------------------------ handoff outputs

    def _sender_actions(self, outputs: list[handoff.Output], now: float) -> list[Action]:
        actions: list[Action] = []
        for output in outputs:
            match output:
                case handoff.Send(endpoint=endpoint, message=message):
                    actions.append(ToPeer(endpoint, message))
                case handoff.SendFrame(key=key):
                    allocation = self._jobs[key].sequence.allocation
                    if allocation is not None:
                        actions.append(PackFrame(output, allocation.block_table))
                case handoff.Granted():
                    self._granted(output, now)
                case handoff.Refusal():
                    actions += self._refused(output, now)
                case handoff.Done():
                    actions += self._done(output, now)
                case handoff.Failed():
                    actions += self._handoff_failed(output, now)
                case handoff.Gone():
                    pass  # the job has left when it was released
        return actions

    def _granted(self, output: handoff.Granted, now: float) -> None:
        job = self._jobs.get(output.key)
        if job is None:
            return
        job.state = JobState.COMPUTING
        job.cached_tokens = output.cached_tokens
        uncached = job.sequence.num_tokens - output.cached_tokens
        if uncached >= self._limits.stream_tokens:
            job.sequence.stream_from = output.cached_tokens
        self._scheduler.add(job.sequence, now)

    def _refused(self, output: handoff.Refusal, now: float) -> list[Action]:
        job = self._jobs.get(output.key)
        if job is None:
            return []
        self._active -= 1
        job.tries += 1
        if job.tries >= self._limits.max_reserve_tries:
            job.state = JobState.QUEUED
            return self._give_back(job, now, "the decode worker has no free blocks")
        job.state = JobState.QUEUED
        job.not_before = now + output.retry_after * job.tries
        self._queue.appendleft(job.key)
        return []

    def _give_back(self, job: Job, now: float, reason: str, *, lost: bool = False) -> list[Action]:
        """The router shall choose another decode worker."""
        self._remove(job)
        self._free(job)
        request, attempt = job.key
        messages: list[Message] = []
        if lost:
            endpoint = job.assign.decode
            messages.append(
                PeerLost(endpoint=endpoint, request=request, attempt=attempt, reason=reason)
            )
        messages.append(Busy(request=request, attempt=attempt, reason=reason, decode_full=True))
        return list(self._member.give_back(job.router, job.key, messages, now, job.deadline))

    def _done(self, output: handoff.Done, now: float) -> list[Action]:
        job = self._jobs.get(output.key)
        if job is None:
            return []
        self._remember(job)
        self._remove(job)
        self._free(job)
        link = self._links.get(output.endpoint)
        worker, transport = (link.worker, link.transport) if link else ("", "")
        message = report(output, self._member.identity.worker, worker, transport)
        return [ToRouter(job.router, message), *self._maybe_drained()]

    def _handoff_failed(self, output: handoff.Failed, now: float) -> list[Action]:
        job = self._jobs.get(output.key)
        if job is None:
            return []
        return self._give_back(job, now, output.message, lost=output.lost_peer)

    # ------------------------------------------------------------------ engine

    def _plan(self, actions: list[Action], now: float) -> None:
        if self._step_running:
            return
        plan = self._scheduler.plan(now)
        if plan is None:
            self._engine_events(self._scheduler.take_events(), actions, now)
            return
        for chunk in plan.chunks:
            job = self._by_sequence.get(chunk.request)
            if job:
                job.token_end = chunk.start + len(chunk.tokens)
                job.last_chunk = chunk.sample is not None
        self._step_running = True
        self._step_s = self._times.predict(plan.num_tokens)
        actions.append(RunStep(plan))

    def _on_layers(self, event: LayersDone, now: float) -> list[Action]:
        job = self._by_sequence.get(event.sequence)
        if job is None:
            return []
        outputs = self._sender.ready(
            job.key,
            layer_end=event.layer_end,
            token_end=job.token_end,
            last=job.last_chunk,
            now=now,
        )
        return self._sender_actions(outputs, now)

    def _on_step(self, event: StepDone, now: float) -> list[Action]:
        self._step_running = False
        self._progress += 1
        self._times.learn(event.result.num_tokens, event.result.seconds)
        actions: list[Action] = []
        self._engine_events(self._scheduler.apply(event.result, now), actions, now)
        freed, self._freed_later = self._freed_later, []
        return [*actions, *(blocks_freed(*key, now) for key in freed)]

    def _engine_events(self, events: list[EngineEvent], actions: list[Action], now: float) -> None:
        for event in events:
            job = self._by_sequence.get(event.request)
            if job is not None:
                actions += self._engine_event(job, event, now)

    def _engine_event(self, job: Job, event: EngineEvent, now: float) -> list[Action]:
        match event:
            case ChunkDone(num_computed_tokens=tokens):
                return self._ready(job, tokens, last=False, now=now)
            case TokenEvent(position=position, token=token, logprobs=logprobs):
                job.last_logprobs = logprobs
                extra = None if logprobs is None else [logprobs]
                run = TokenRun(job.key[0], job.key[1], position, [token], extra)
                return [ToRouter(job.router, Tokens(runs=[run]))]
            case Prefilled():
                job.state = JobState.HANDING_OVER
                actions = self._ready(job, job.sequence.num_tokens - 1, last=True, now=now)
                maker = job.commit_maker(self._member.identity.worker, now)
                outputs = self._sender.finish(job.key, maker, now)
                return actions + self._sender_actions(outputs, now)
            case Finished(status=status):
                return self._finished(job, status, now)
            case Failed(code=code, message=message):
                return self._end(job, now, code, message)
            case _:
                return []

    def _ready(self, job: Job, tokens: int, *, last: bool, now: float) -> list[Action]:
        layers = self._card.layout.num_layers
        outputs = self._sender.ready(
            job.key, layer_end=layers, token_end=tokens, last=last, now=now
        )
        return self._sender_actions(outputs, now)

    def _finished(self, job: Job, status: str, now: float) -> list[Action]:
        """The first token ended the request: no decode worker is needed."""
        return self._close(job, job.terminal(self._member.identity.worker, status=status), now)

    def _end(self, job: Job, now: float, code: str, message: str) -> list[Action]:
        worker = self._member.identity.worker
        return self._close(job, job.terminal(worker, code=code, message=message), now)

    def _close(self, job: Job, terminal: Terminal, now: float) -> list[Action]:
        """Send the terminal, give the grant back, keep the tokens until acknowledged."""
        prompt = len(job.assign.context.tokens)
        tokens = job.generated
        self._remember(job)
        actions = self._stop(job, now)
        return actions + list(
            self._member.end(job.router, terminal, now, job.deadline, prompt, prompt, tokens)
        )

    # ------------------------------------------------------------------ ends

    def _remove(self, job: Job) -> None:
        if self._jobs.pop(job.key, None) is None:
            return
        if job.state is not JobState.QUEUED:
            self._active -= 1

    def _free(self, job: Job) -> None:
        """Let go of the sequence: out of the scheduler, its blocks back to the pool."""
        self._by_sequence.pop(job.sequence.request, None)
        waiting = self._scheduler.abort(job.sequence.request)
        if not waiting and job.sequence.allocation is not None:
            self._scheduler.release(job.sequence)

    def _remember(self, job: Job) -> None:
        self._answered.put(job.key, True, job.deadline)  # noqa: FBT003

    # ------------------------------------------------------------------ time and drain

    def _on_packed(self, event: Packed, now: float) -> list[Action]:
        outputs = self._sender.on_packed(event.key, event.index, event.checksum, now)
        return self._sender_actions(outputs, now)

    def _on_tick(self, event: Tick, now: float) -> list[Action]:
        engine = EngineState(self._progress + event.layers, self._step_running, self._step_s)
        actions: list[Action] = list(self._member.tick(now, engine, self.load))
        actions += self._sender_actions(self._sender.tick(now), now)
        for link in self._links.values():
            if link.state is LinkState.OPENING and now >= link.repeat_at:
                actions.append(self._open(link, now))
        for job in [j for j in self._jobs.values() if now >= j.deadline]:
            actions += self._end(job, now, "deadline_exceeded", "the deadline passed")
        self._forget(now)
        return [*actions, *self._drop_lost_links(now), *self._maybe_drained()]

    def _forget(self, now: float) -> None:
        self._answered.expire(now)
        self._aborted.expire(now)

    def _drop_lost_links(self, now: float) -> list[Action]:
        """Close the sockets of workers nobody waits for and that do not answer."""
        lost = [k for k in self._links.values() if k.is_lost(now) and not self._wanted(k)]
        for link in lost:
            del self._links[link.endpoint]
        return [Disconnect(link.endpoint) for link in lost]

    def _wanted(self, link: Link) -> bool:
        return any(job.assign.decode == link.endpoint for job in self._jobs.values())

    def _on_drain(self, event: DrainRequested, now: float) -> list[Action]:
        return self._drain(now)

    def _drain(self, now: float) -> list[Action]:
        self._member.draining = True
        return [Note("worker.draining", {"jobs": len(self._jobs)}), *self._maybe_drained()]

    def _maybe_drained(self) -> list[Action]:
        if not self.is_drained or self._drained_said:
            return []
        self._drained_said = True
        message = Drained(worker=self._member.identity.worker)
        return [ToRouter(router, message) for router in self._member.routers]

    @property
    def is_drained(self) -> bool:
        """Draining and nothing left."""
        idle = not self._jobs and not len(self._sender) and not self._member.unacknowledged
        return self._member.draining and idle

    @property
    def idle(self) -> bool:
        """No request is here and no step runs: integrity can be checked."""
        return not self._jobs and not len(self._sender) and not self._step_running

    @property
    def remembered(self) -> int:
        """Entries kept about requests that are over; each ends at its time."""
        return len(self._answered) + len(self._aborted) + self._member.unacknowledged

    def check_integrity(self) -> None:
        """Raise InternalError unless blocks, slots and handoffs fit the jobs."""
        self._scheduler.check_integrity()
        self._sender.check_integrity()
        active = sum(job.state is not JobState.QUEUED for job in self._jobs.values())
        if active != self._active:
            raise InternalError(f"{self._active} slots are taken, {active} jobs hold one")
        if {job.sequence.request for job in self._jobs.values()} != set(self._by_sequence):
            raise InternalError("a sequence has no job or a job no sequence")
        if not self._scheduler.requests <= set(self._by_sequence):
            raise InternalError("the engine runs for nobody")

    def load(self) -> WorkerLoad:
        """Figures for heartbeats."""
        load = self._scheduler.load()
        queued = [self._jobs[k] for k in self._queue if k in self._jobs]
        return msgspec.structs.replace(
            load,
            requests_waiting=load.requests_waiting + len(queued),
            tokens_waiting=load.tokens_waiting + sum(j.sequence.num_tokens for j in queued),
        )

    _handlers: ClassVar[dict[type, Callable[..., list[Action]]]] = {
        FromRouter: _on_router,
        RouterUp: _on_router_up,
        RouterDown: _on_router_down,
        FromPeer: _on_peer,
        PeerUp: _on_peer_up,
        PeerDown: _on_peer_down,
        LayersDone: _on_layers,
        StepDone: _on_step,
        Packed: _on_packed,
        Tick: _on_tick,
        DrainRequested: _on_drain,
    }
