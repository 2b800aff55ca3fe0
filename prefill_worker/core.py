"""The prefill worker's decisions: queue, reserve, compute, hand over, free.

Invariants: a job holds an execution slot before it reserves blocks on a decode worker, and holds
that grant before it computes; its own blocks stay until the decode worker owns the
request; every Assign is answered; every job ends by handoff, terminal, Busy or Abort.

The core uses no socket, clock or thread. It contains the engine's scheduler and the handoff's
sender, which are pure too; the shell runs steps, packs frames and moves messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ..engine.cache.paged_cache import Allocation
from ..engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone, grammar_task
from ..engine.scheduling.events import ChunkDone, Failed, Finished, Prefilled, TokenEvent
from ..engine.scheduling.events import Event as EngineEvent
from ..engine.scheduling.scheduler import Scheduler
from ..engine.scheduling.step_time import StepTime
from ..kv_transfer import sender as handoff
from ..kv_transfer.sender import Key, Sender
from ..kv_transfer.timeout import HANDOFF_TIMEOUT_S
from ..proto.errors import BatonError, InternalError, LimitExceeded
from ..proto.wire.messages import (
    DEVICE,
    READ_IN_PLACE,
    Abort,
    Aborted,
    Accepted,
    Assign,
    Busy,
    Commit,
    Committed,
    Credit,
    DeviceTicket,
    Grant,
    Message,
    Opened,
    OpenRefused,
    PeerLost,
    Ping,
    Pong,
    PoolTicket,
    Refused,
    Rejected,
    Released,
    RequestState,
    Reserve,
    Revoke,
    Stale,
    Terminal,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from ..runtime.tables import ExpiringMap
from ..worker.base_core import Handler, WorkerCore
from ..worker.events import AbandonStep, Note, RunStep, StepDone, Tick, ToRouter
from ..worker.membership import EngineState, Membership, left_alone, moved_to, other_owner
from ..worker.token_replay import runs_again
from .decode_links import DecodeLink, DecodeLinks, LinkState
from .events import (
    Action,
    DataDown,
    DataUp,
    Disconnect,
    Event,
    FromPeer,
    LayersDone,
    NotSent,
    OpenData,
    Packed,
    PackFrame,
    PeerDown,
    PeerUp,
    ToPeer,
)
from .job import Job, JobState, make_job, report
from .queue import Queue, Urgency

TOMBSTONE_S = 600.0
"""Seconds for which an Abort also rejects a late Assign of the same attempt."""


@dataclass(slots=True, frozen=True)
class PrefillLimits:
    """The settings the core needs; see PrefillWorkerConfig."""

    max_active: int = 16
    max_queue: int = 1024
    max_reserve_tries: int = 3
    stream_tokens: int = 512
    growth: int = 64
    slo_ttft: float = 0.0


class PrefillCore(WorkerCore):
    """State machine of one prefill worker."""

    def __init__(
        self,
        member: Membership,
        scheduler: Scheduler,
        sender: Sender,
        limits: PrefillLimits,
        times: StepTime | None = None,
        ticket: PoolTicket | DeviceTicket | None = None,
        timeout: float = HANDOFF_TIMEOUT_S,
    ) -> None:
        """``ticket``: lets decode workers of this host map the pool; None if sharing is off.

        ``timeout``: seconds without an answer after which a decode worker is unreachable.
        """
        super().__init__(member)
        self._scheduler = scheduler
        self._sender = sender
        self._limits = limits
        self._card = member.identity.model
        urgency = Urgency(limits.slo_ttft, scheduler.cache) if limits.slo_ttft else None
        self._queue = Queue(limits.max_active, urgency)
        self._links = DecodeLinks(member.identity, ticket, timeout)
        self._answered: ExpiringMap[Key, bool] = ExpiringMap()  # attempts that ended here
        self._aborted: ExpiringMap[bytes, int] = ExpiringMap()  # aborted up to this attempt
        self._readers: dict[Key, Allocation] = {}  # blocks that a decode worker may still read
        self._serial = 0
        self._progress = 0
        self._step_s = 0.0  # predicted duration of the running step
        self._times = times or StepTime()
        self._step_running = False

    # ------------------------------------------------------------------ entry

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the actions to perform, in order."""
        actions: list[Action] = self.HANDLERS[type(event)](self, event, now)
        self._dispatch(actions, now)
        self._plan(actions, now)
        return actions

    def next_timer(self) -> float:
        """Latest time of the next Tick."""
        sender = self._sender.next_timer()
        beat = self._member.next_timer()
        return min(beat, sender) if sender is not None else beat

    # ------------------------------------------------------------------ messages of routers

    def _assigned(self, router: str, message: Message, now: float) -> list[Action]:
        return self._assign(router, message, now) if isinstance(message, Assign) else []

    def _assign(self, router: str, message: Assign, now: float) -> list[Action]:
        key = (message.request, message.attempt)
        accepted = ToRouter(router, Accepted(request=key[0], attempt=key[1]))
        job = self._queue.get(key)
        if job:
            moved = moved_to(router, job.router, key[0])
            self._queue.hand_to(router, job)
            return [*moved, accepted]
        if self._member.has_ended(*key):
            return [accepted]
        if self._answered.get(key, now):
            # Handed over or ended. A router that lost its state would otherwise wait for it.
            return [ToRouter(router, Aborted(request=key[0], attempt=key[1]))]
        if key[1] <= (self._aborted.get(key[0], now) or 0):
            return [ToRouter(router, Aborted(request=key[0], attempt=key[1]))]
        actions = self._drop_lower(router, key, now)
        if self._member.draining or self._queue.waiting >= self._limits.max_queue:
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
        self._queue.add(job)
        if job.ended is not None:  # a replay: the client already has the last token
            return [accepted, *self._finished(job, job.ended, now)]
        self._queue.queue(job)
        task = job.grammar = grammar_task(job.context)
        job.compiling = task is not None
        return [accepted] if task is None else [accepted, CompileGrammar(key, task)]

    def _drop_lower(self, router: str, key: Key, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self._queue.of(key[0], key[1] - 1):
            actions += [*moved_to(router, job.router, key[0]), *self._stop(job, now)]
        self._member.forget(key[0], key[1] - 1)
        return actions

    def _abort(self, router: str, message: Abort, now: float) -> list[Action]:
        request, attempt = message.request, message.attempt
        actions: list[Action] = []
        stopped = self._queue.of(request, attempt)
        owner = other_owner(stopped, router)
        if owner is not None:
            return list(left_alone(owner, router, message))
        for job in stopped:
            actions += self._stop(job, now)
        self._member.forget(request, attempt, router)
        if attempt >= (self._aborted.get(request, now) or 0):
            self._aborted.put(request, attempt, now + TOMBSTONE_S)
        names = [job.sequence.request for job in stopped]
        running = [name for name in names if self._scheduler.is_inflight(name)]
        actions += self._freed((request, attempt), now, running)
        answer = Aborted(request=request, attempt=attempt)
        return [*actions, ToRouter(router, answer), *self._maybe_drained()]

    def _stop(self, job: Job, now: float) -> list[Action]:
        """End a job without a message to the router; release its grant."""
        self._queue.remove(job)
        self._free(job)
        if job.compiling:
            return [DropGrammar(job.key)]
        if job.key in self._sender:
            return self._sender_actions(self._sender.release(job.key, now), now)
        return []

    def _adopt(self, router: str, request: bytes, position: int) -> list[Action]:
        """Reroute the job's tokens to this router. An empty token run confirms ownership."""
        job = self._queue.newest(request)
        if job is None:
            return list(self._member.adopt(router, request, position))
        moved = moved_to(router, job.router, request)
        self._queue.hand_to(router, job)
        position = max(position, len(job.assign.context.tokens))
        tokens = job.context.tokens.all[position:].tolist()
        runs = runs_again(job.key, position, tokens, job.logprobs)
        return [*moved, ToRouter(router, Tokens(runs=runs))]

    def _held(self) -> list[RequestState]:
        return [job.held() for job in self._queue]

    # ------------------------------------------------------------------ queue and slots

    def _dispatch(self, actions: list[Action], now: float) -> None:
        """Give free execution slots to queued jobs, in order."""
        while (job := self._queue.next(now)) is not None:
            if now >= job.deadline:
                actions += self._end(
                    job, now, "deadline_exceeded", "the deadline passed in the queue"
                )
            else:
                actions += self._begin(job, now)

    def _begin(self, job: Job, now: float) -> list[Action]:
        """Reserve blocks if the link to the decode worker is open and the grammar is compiled."""
        if job.compiling:
            self._queue.park(job, _grammar_place(job))
            return []
        endpoint = job.assign.decode
        link = self._links.get(endpoint)
        if link is not None and (hopeless := link.hopeless(now)):
            return self._give_back(job, now, hopeless, lost=True, refused=link.refuses)
        if link is not None and link.is_ready:
            self._queue.start(job, now)
            return self._reserve(job, link, now)
        self._queue.park(job, endpoint)
        return self._links.connect(endpoint, now)

    def _on_grammar(self, event: GrammarDone, now: float) -> list[Action]:
        """Store the compiled grammar in its job, or end the job with the compiler's error."""
        job = self._queue.get(event.key)
        if job is None or not job.compiling:
            return []
        job.compiling = False
        if isinstance(event.result, BatonError):
            error = event.result
            return self._end(job, now, error.code, str(error), error.retry_after)
        job.sequence.constrain(event.result)
        self._queue.wake(_grammar_place(job))
        return []

    def _reserve(self, job: Job, link: DecodeLink, now: float) -> list[Action]:
        self._serial += 1
        incarnation = self._member.identity.incarnation
        reserve = job.reserve(incarnation, self._serial, self._limits.growth, now)
        outputs = self._sender.start(
            link.endpoint,
            link.incarnation,
            reserve,
            now,
            link.frame_limit,
            shared=link.transport in READ_IN_PLACE,
            fenced=link.transport == DEVICE,
        )
        return self._sender_actions(outputs, now)

    # ------------------------------------------------------------------ decode workers

    def _on_peer_up(self, event: PeerUp, now: float) -> list[Action]:
        return self._links.up(event.endpoint, now)

    def _on_peer_down(self, event: PeerDown, now: float) -> list[Action]:
        self._links.down(event.endpoint, now)
        return []

    def _on_data_up(self, event: DataUp, now: float) -> list[Action]:
        self._links.data(event.endpoint, stands=True, now=now)
        self._queue.wake(event.endpoint)
        return []

    def _on_data_down(self, event: DataDown, now: float) -> list[Action]:
        self._links.data(event.endpoint, stands=False, now=now)
        return []

    def _on_peer(self, event: FromPeer, now: float) -> list[Action]:
        sender = self._sender
        if self._is_anothers(event):
            self._member.dropped["peer_anothers_handoff"] += 1
            return []
        match event.message:
            case Grant() as message:
                outputs = sender.on_grant(event.endpoint, message, now)
            case Busy() as message:
                outputs = sender.on_busy(message)
            case Credit() as message:
                outputs = sender.on_credit(event.endpoint, message, now)
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
                return self._open_refused(event.endpoint, message)
            case Ping(nonce=nonce):
                return [ToPeer(event.endpoint, Pong(nonce=nonce))]
            case Rejected(code="version_mismatch", message=text):
                self._queue.wake(event.endpoint)
                return self._links.of_another_version(event.endpoint, text)
            case Rejected(code="endpoint_dead", message=text):
                # Only routers declare workers dead. This affects only the link to that worker.
                outputs = sender.unreachable(event.endpoint, text)
            case Rejected(code=code, message=text):
                return [
                    Note(
                        "peer.rejected", {"endpoint": event.endpoint, "code": code, "reason": text}
                    )
                ]
            case Pong(nonce=nonce):
                self._links.pong(event.endpoint, nonce)
                return []
            case _:  # ProbeReply: this worker sends no Probe
                return []
        return self._sender_actions(outputs, now)

    def _is_anothers(self, event: FromPeer) -> bool:
        """True if a decode worker sends a message about a handoff with another worker."""
        match event.message:
            case Busy() | Committed() | Refused() | Stale() | Released() | Aborted() as message:
                return not self._sender.is_with(event.endpoint, message.request, message.attempt)
            case _:
                return False

    def _on_not_sent(self, event: NotSent, now: float) -> list[Action]:
        """End a request whose Reserve or Commit is too large to send; a retry cannot help."""
        message = event.message
        job = None
        if isinstance(message, Reserve | Commit):
            job = self._queue.get((message.request, message.attempt))
        return [] if job is None else self._end(job, now, LimitExceeded.code, event.reason)

    def _opened(self, endpoint: str, message: Opened, now: float) -> list[Action]:
        link = self._links.get(endpoint)
        if link is None or link.state is LinkState.OPEN:
            return []
        actions: list[Action] = []
        if link.incarnation not in (0, message.incarnation):
            reason = f"{endpoint} was restarted"
            lost = self._sender.peer_lost(endpoint, reason, link.incarnation)
            actions += self._sender_actions(lost, now)
        elif link.incarnation:
            actions += self._sender_actions(self._sender.reconnected(endpoint, now), now)
        if message.max_frame_bytes < self._card.layout.block_bytes:
            limit = f"{message.max_frame_bytes} bytes, a block has {self._card.layout.block_bytes}"
            refusal = OpenRefused(field="max_frame_bytes", ours=limit, theirs="whole blocks")
            return actions + self._open_refused(endpoint, refusal)
        self._links.opened(link, message, now)
        self._queue.wake(endpoint)
        return [*actions, OpenData(endpoint, message.data_endpoint)]

    def _open_refused(self, endpoint: str, message: OpenRefused) -> list[Action]:
        self._queue.wake(endpoint)
        return self._links.refused(endpoint, message)

    def _peer_dead(self, endpoint: str, incarnation: int, now: float) -> list[Action]:
        link = self._links.of_worker(endpoint, incarnation)
        if link is None:
            return []
        outputs = self._sender.peer_lost(link.endpoint, "the worker died", incarnation)
        self._links.drop(link)
        self._queue.wake(link.endpoint)
        return [*self._sender_actions(outputs, now), Disconnect(link.endpoint)]

    # ------------------------------------------------------------------ handoff outputs

    def _sender_actions(self, outputs: list[handoff.Output], now: float) -> list[Action]:
        actions: list[Action] = []
        for output in outputs:
            match output:
                case handoff.Send(endpoint=endpoint, message=message):
                    actions.append(ToPeer(endpoint, message))
                case handoff.SendFrame(key=key):
                    job = self._queue.get(key)
                    allocation = job.sequence.allocation if job else None
                    if allocation is not None:
                        link = self._links.get(output.endpoint)
                        shared = link is not None and link.transport in READ_IN_PLACE
                        if self._sender.may_be_read(key) and key not in self._readers:
                            self._readers[key] = self._scheduler.cache.hold(allocation)
                        actions.append(PackFrame(output, allocation.block_table, shared))
                case handoff.Granted():
                    self._granted(output, now)
                case handoff.Refusal():
                    actions += self._refused(output, now)
                case handoff.Done():
                    actions += self._done(output, now)
                case handoff.Failed():
                    actions += self._handoff_failed(output, now)
                case handoff.Gone(key=key):
                    self._not_read(key)  # the job was removed when its handoff was released
        return actions

    def _not_read(self, key: Key) -> None:
        """Free the blocks held for a decode worker's reads, unless it may still read them."""
        if self._sender.may_be_read(key):
            return
        held = self._readers.pop(key, None)
        if held is not None:
            self._scheduler.cache.free(held)

    def _granted(self, output: handoff.Granted, now: float) -> None:
        job = self._queue.get(output.key)
        if job is None:
            return
        job.state = JobState.COMPUTING
        job.cached_tokens = output.cached_tokens
        uncached = job.sequence.num_tokens - output.cached_tokens
        if uncached >= self._limits.stream_tokens:
            job.sequence.stream_from = output.cached_tokens
        self._scheduler.add(job.sequence, now)

    def _refused(self, output: handoff.Refusal, now: float) -> list[Action]:
        job = self._queue.get(output.key)
        if job is None:
            return []
        job.tries += 1
        if job.tries >= self._limits.max_reserve_tries:
            return self._give_back(job, now, "the decode worker has no free blocks")
        self._queue.queue(job, now + output.retry_after * job.tries)
        return []

    def _give_back(
        self, job: Job, now: float, reason: str, *, lost: bool = False, refused: bool = False
    ) -> list[Action]:
        """Return the request to the router, which must choose another decode worker."""
        self._queue.remove(job)
        self._free(job)
        request, attempt = job.key
        messages: list[Message] = []
        if lost:
            endpoint = job.assign.decode
            messages.append(
                PeerLost(
                    endpoint=endpoint,
                    request=request,
                    attempt=attempt,
                    reason=reason,
                    refused=refused,
                )
            )
        messages.append(Busy(request=request, attempt=attempt, reason=reason, decode_full=True))
        return list(self._member.give_back(job.router, job.key, messages, now, job.deadline))

    def _done(self, output: handoff.Done, now: float) -> list[Action]:
        self._not_read(output.key)
        job = self._queue.get(output.key)
        if job is None:
            return []
        self._remember(job)
        self._queue.remove(job)
        self._free(job)
        link = self._links.get(output.endpoint)
        worker, transport = (link.worker, link.transport) if link else ("", "")
        message = report(output, self._member.identity.worker, worker, transport)
        return [ToRouter(job.router, message), *self._maybe_drained()]

    def _handoff_failed(self, output: handoff.Failed, now: float) -> list[Action]:
        self._not_read(output.key)
        job = self._queue.get(output.key)
        if job is None:
            return []
        link = self._links.get(job.assign.decode)
        refused = link is not None and link.refuses
        return self._give_back(job, now, output.message, lost=output.lost_peer, refused=refused)

    # ------------------------------------------------------------------ engine

    def _plan(self, actions: list[Action], now: float) -> None:
        if self._step_running:
            actions += [AbandonStep(step) for step in self._scheduler.take_unwanted()]
            return
        plan = self._scheduler.plan(now)
        if plan is None:
            self._engine_events(self._scheduler.take_events(), actions, now)
            return
        for chunk in plan.chunks:
            job = self._queue.of_sequence(chunk.request)
            if job:
                job.token_end = chunk.start + len(chunk.tokens)
                job.last_chunk = chunk.sample is not None
        self._step_running = True
        self._step_s = self._times.predict(plan.num_tokens)
        actions.append(RunStep(plan))

    def _on_layers(self, event: LayersDone, now: float) -> list[Action]:
        job = self._queue.of_sequence(event.sequence)
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
        if not event.result.abandoned:
            self._times.learn(event.result.num_tokens, event.result.seconds)
            self._queue.learn(event.result.num_tokens, event.result.seconds)
        actions: list[Action] = []
        self._engine_events(self._scheduler.apply(event.result, now), actions, now)
        return [*actions, *self._step_over(now, self._scheduler.is_inflight)]

    def _engine_events(self, events: list[EngineEvent], actions: list[Action], now: float) -> None:
        for event in events:
            job = self._queue.of_sequence(event.request)
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
        """End the request with its first token: no decode worker is needed."""
        return self._close(job, job.terminal(self._member.identity.worker, status=status), now)

    def _end(
        self, job: Job, now: float, code: str, message: str, retry_after: float | None = None
    ) -> list[Action]:
        worker = self._member.identity.worker
        terminal = job.terminal(worker, code=code, message=message, retry_after=retry_after)
        return self._close(job, terminal, now)

    def _close(self, job: Job, terminal: Terminal, now: float) -> list[Action]:
        """Send the terminal, release the grant, keep the tokens until they are acknowledged."""
        prompt = len(job.assign.context.tokens)
        tokens, logprobs = job.generated, job.logprobs
        self._remember(job)
        actions = self._stop(job, now)
        return actions + list(
            self._member.end(
                job.router, terminal, now, job.deadline, prompt, prompt, tokens, logprobs
            )
        )

    # ------------------------------------------------------------------ ends

    def _free(self, job: Job) -> None:
        """Remove the sequence from the scheduler and return its blocks to the pool."""
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
        actions += self._introduce_again(now)
        actions += self._deserted(now)
        actions += self._sender_actions(self._sender.tick(now), now)
        busy = self._sender.endpoints()
        actions += self._links.tick(now, lambda name: name in busy or self._queue.wants(name))
        for job in self._queue.overdue(now):
            actions += self._end(job, now, "deadline_exceeded", "the deadline passed")
        self._forget(now)
        return [*actions, *self._drop_lost_links(now), *self._maybe_drained()]

    def _forget(self, now: float) -> None:
        self._answered.expire(now)
        self._aborted.expire(now)

    def _drop_lost_links(self, now: float) -> list[Action]:
        """Fail jobs that wait for an unreachable decode worker; drop links unused for long."""
        actions: list[Action] = []
        for link in self._links:
            reason = link.hopeless(now)
            if not reason:
                continue
            lost = self._sender.unreachable(link.endpoint, reason)
            actions += self._sender_actions(lost, now)
            if self._queue.wants(link.endpoint):
                self._queue.wake(link.endpoint)
            elif link.is_stale(now) and link.endpoint not in self._sender.endpoints():
                self._links.drop(link)
                actions.append(Disconnect(link.endpoint))
        return actions

    @property
    def _requests(self) -> int:
        return len(self._queue)

    @property
    def is_drained(self) -> bool:
        """True if this worker is draining and nothing is left."""
        idle = not len(self._queue) and not len(self._sender) and not self._member.unacknowledged
        return self._member.draining and idle

    @property
    def idle(self) -> bool:
        """True if there is no request and no running step, so integrity can be checked."""
        return not len(self._queue) and not len(self._sender) and not self._step_running

    @property
    def remembered(self) -> int:
        """Number of entries kept about ended requests; each entry expires."""
        return len(self._answered) + len(self._aborted) + self._member.unacknowledged

    def knows(self, endpoint: str, incarnation: int) -> bool:
        """True if the last known incarnation at ``endpoint`` is ``incarnation``."""
        link = self._links.get(endpoint)
        return link is not None and link.incarnation == incarnation

    def check_integrity(self) -> None:
        """Raise InternalError if blocks, slots and handoffs do not match the jobs."""
        self._scheduler.check_integrity(held=self._readers.values())
        self._sender.check_integrity()
        if not all(self._sender.may_be_read(key) for key in self._readers):
            raise InternalError("blocks are held for a decode worker that no longer reads them")
        self._queue.check_integrity()
        if not self._scheduler.requests <= self._queue.sequences:
            raise InternalError("the engine runs a sequence without a job")

    def load(self) -> WorkerLoad:
        """Return the load that heartbeats report."""
        load = self._scheduler.load()
        return msgspec.structs.replace(
            load,
            requests_waiting=load.requests_waiting + self._queue.waiting,
            tokens_waiting=load.tokens_waiting + self._queue.waiting_tokens,
            shares=self._queue.shares.report() if len(self._member.routers) > 1 else {},
        )

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        **WorkerCore.HANDLERS,
        FromPeer: _on_peer,
        NotSent: _on_not_sent,
        PeerUp: _on_peer_up,
        PeerDown: _on_peer_down,
        DataUp: _on_data_up,
        DataDown: _on_data_down,
        LayersDone: _on_layers,
        StepDone: _on_step,
        Packed: _on_packed,
        GrammarDone: _on_grammar,
        Tick: _on_tick,
    }


def _grammar_place(job: Job) -> str:
    """Key under which a job is parked until its grammar is compiled."""
    return f"grammar of {job.sequence.request.hex()}"
