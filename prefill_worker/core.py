"""The prefill worker's decisions: queue, reserve, compute, hand over, free.

Invariants: a job holds an execution slot before it reserves blocks on a decode worker, and holds
that grant before it computes; its own blocks stay until the decode worker owns the
request; every Assign is answered; every job ends by handoff, terminal, Busy or Abort.

The core uses no socket, clock or thread. It contains the engine's scheduler and the handoff's
sender, which are pure too; the shell runs steps, packs frames and moves messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import msgspec

from baton.engine.cache.paged_cache import PagedCache
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone, grammar_task
from baton.engine.scheduling.events import ChunkDone, Failed, Finished, Prefilled, TokenEvent
from baton.engine.scheduling.events import Event as EngineEvent
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_time import StepTime
from baton.kv_transfer import sender_handoff as handoff
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.timeout import HANDOFF_TIMEOUT_S
from baton.proto.errors import BatonError, DeadlineExceeded, InternalError, LimitExceeded
from baton.proto.wire.messages import (
    Assign,
    Busy,
    Commit,
    Credit,
    DeviceTicket,
    Message,
    PeerDead,
    PeerLost,
    PoolTicket,
    Reserve,
    Revoke,
    TokenRun,
    Tokens,
    WorkerLoad,
)
from baton.worker.assigned import ended_status
from baton.worker.attempts import Key
from baton.worker.base_core import Handler, WorkerCore
from baton.worker.events import CheckImages, ImagesChecked, RunStep, StepDone, Tick, ToRouter
from baton.worker.jobs import Ending
from baton.worker.membership import EngineState, Membership
from baton.worker.steps import EngineSteps

from .assign_core import PromptCore
from .custom_order import CustomOrder
from .decode_links import DecodeLinks
from .events import (
    Action,
    DataDown,
    DataUp,
    FromPeer,
    HandoffEvent,
    LayersDone,
    NotPacked,
    NotSent,
    Packed,
    PeerDown,
    PeerUp,
    Raised,
)
from .handoffs import Handoffs, Output
from .job import Job, JobState, make_job, report
from .link_names import link_name
from .queue import Queue, Urgency


@dataclass(slots=True, frozen=True)
class PrefillLimits:
    """The settings the core needs; see PrefillWorkerConfig."""

    max_active: int = 16
    max_queue: int = 1024
    max_reserve_tries: int = 3
    stream_tokens: int = 512
    growth: int = 64
    slo_ttft: float = 0.0
    handoff_timeout_s: float = HANDOFF_TIMEOUT_S


class PrefillCore(PromptCore[Job]):
    """State machine of one prefill worker."""

    def __init__(
        self,
        member: Membership,
        scheduler: Scheduler,
        sender: Sender,
        limits: PrefillLimits,
        times: StepTime | None = None,
        ticket: PoolTicket | DeviceTicket | None = None,
        order: CustomOrder | None = None,
    ) -> None:
        """``ticket``: lets decode workers of this host map the pool; None if sharing is off.

        ``order``: orders waiting prompts in place of ``limits``; it needs a TTFT target.
        """
        urgency = Urgency(limits.slo_ttft, scheduler.cache) if limits.slo_ttft else None
        ranked = None if order is None or urgency is None else order.bound(urgency)
        self._queue = Queue(limits.max_active, urgency, ranked)
        super().__init__(member, self._queue, limits.max_queue)
        if order is not None:
            member.extensions.append(order.guard)
        self._scheduler = scheduler
        self._sender = sender
        self._limits = limits
        self._links = DecodeLinks(member.identity, ticket, limits.handoff_timeout_s)
        self._handoffs = Handoffs(
            member, sender, self._links, self._queue, scheduler.cache, limits.growth
        )
        self._steps = EngineSteps(scheduler, times)

    @property
    def cache(self) -> PagedCache:
        """The books of the KV blocks."""
        return self._scheduler.cache

    # ------------------------------------------------------------------ after any event

    def _go_on(self, actions: list[Action], now: float) -> None:
        try:
            self._dispatch(actions, now)
        except Exception as error:  # the next event tries again, if the books agree
            actions.append(self.errors.of(None, error, "dispatch"))
        self._plan(actions, now)

    def _key_of(self, event: object) -> Key | None:
        if isinstance(event, LayersDone):
            job = self._queue.named(event.sequence)
            return None if job is None else job.key
        if isinstance(event, FromPeer) and isinstance(event.message, Credit | Revoke):
            return self._handoffs.key_of(event.endpoint, event.message.grant)
        return super()._key_of(event)

    def _failed(self, event: Any, error: Exception, now: float) -> list[Action]:
        actions: list[Action] = super()._failed(event, error, now)
        if isinstance(event, FromPeer | PeerUp | PeerDown | DataUp | DataDown):
            try:
                if self._key_of(event) is None:
                    self._handoffs.agree_again(event, now)
            except Exception as again:
                actions += self.errors.fatal(again, f"after {type(event).__name__}")
        return actions

    # ------------------------------------------------------------------ messages of routers

    def _make_job(self, router: str, message: Assign, now: float) -> Job:
        key = (message.request, message.attempt)
        return make_job(key, router, message, self._member.identity.model, now)

    def _begin_job(self, job: Job, now: float) -> list[Action]:
        if (status := ended_status(job.sequence)) is not None:
            return self._end(job, now, status=status)  # a replay: the client has the last token
        self._queue.queue(job)
        task = job.grammar = grammar_task(job.context)
        job.compiling = task is not None
        actions: list[Action] = [] if task is None else [CompileGrammar(job.key, task)]
        return [*actions, CheckImages(job.key, job.assign.context)] if job.checking else actions

    def _stop(self, job: Job, now: float) -> list[Action]:
        """End a job without a message to the router; release its grant."""
        if job.compiling:
            self._remove(job)
            return [DropGrammar(job.key)]
        # First: after an error the job must still be found, which releases the grant again.
        actions = self._advance(self._handoffs.release(job, now), now)
        self._remove(job)
        return actions

    def _is_running(self, name: bytes) -> bool:
        return self._scheduler.is_inflight(name)

    def _peer_dead(self, message: PeerDead, now: float) -> list[Action]:
        link = link_name(message.endpoint, message.key)
        return self._advance(self._handoffs.worker_died(link, message.incarnation), now)

    # ------------------------------------------------------------------ queue and slots

    def _dispatch(self, actions: list[Action], now: float) -> None:
        """Give free execution slots to queued jobs, in order, each at most once."""
        for _ in range(self._queue.waiting):
            job = self._queue.next(now)
            if job is None:
                return
            try:
                if now >= job.deadline:
                    late = "the deadline passed in the queue"
                    actions += self._end(job, now, code=DeadlineExceeded.code, message=late)
                else:
                    actions += self._start(job, now)
            except Exception as error:
                actions += self._harm(job, error, "start", now)

    def _start(self, job: Job, now: float) -> list[Action]:
        """Reserve blocks if the link to the decode worker is open and the request is prepared.

        Blocks are found by the hashes of images, so these must be checked before.
        """
        if job.compiling or job.checking:
            self._queue.park(job, _preparing_place(job))
            return []
        endpoint = job.link
        link = self._links.get(endpoint)
        if link is not None and (hopeless := link.hopeless(now)):
            return self._give_back(job, now, hopeless, lost=True, refused=link.refuses)
        if link is not None and link.is_ready:
            self._queue.start(job, now)
            return self._advance(self._handoffs.reserve(job, link, now), now)
        self._queue.park(job, endpoint)
        return self._links.connect(endpoint, now)

    def _on_prepared(self, event: GrammarDone | ImagesChecked, now: float) -> list[Action]:
        """Note that the grammar is compiled or the images are checked, or end the job."""
        job, result = self._queue.get(event.key), event.result
        grammar = isinstance(event, GrammarDone)
        if job is None or not (job.compiling if grammar else job.checking):
            return []
        noted, failure = self._checked(job.key, result)
        if grammar:
            job.compiling = False
        else:
            job.checking = False
        if failure is not None:
            code, later = failure.code, failure.retry_after
            end = self._end(job, now, code=code, message=str(failure), retry_after=later)
            return [*noted, *end]
        if isinstance(event, GrammarDone) and not isinstance(event.result, BatonError):
            job.sequence.constrain(event.result)
        self._queue.wake(_preparing_place(job))
        return []

    # ------------------------------------------------------------------ handoffs

    def _on_handoff(self, event: HandoffEvent, now: float) -> list[Action]:
        return self._advance(self._handoffs.handle(event, now), now, about=event)

    def _on_not_sent(self, event: NotSent, now: float) -> list[Action]:
        """End a request whose Reserve or Commit is too large to send; a retry cannot help."""
        message = event.message
        job = None
        if isinstance(message, Reserve | Commit):
            job = self._queue.get((message.request, message.attempt))
        if job is None:
            return []
        return self._end(job, now, code=LimitExceeded.code, message=event.reason)

    def _advance(self, outputs: Iterable[Output], now: float, about: object = None) -> list[Action]:
        """Handle the outcomes of handoffs; pass on actions. ``about``: the event, if it is one."""

        def handle(output: Output) -> list[Action]:
            match output:
                case handoff.Granted():
                    return self._granted(output, now)
                case handoff.Refusal():
                    return self._refused(output, now)
                case handoff.Done():
                    return self._done(output, now)
                case handoff.Failed():
                    return self._handoff_failed(output, now)
                case Raised(output=raised, error=error):
                    return self._failed(raised, error, now)
                case action:
                    return [action]

        return self._outputs(outputs, handle, now, about)

    def _granted(self, output: handoff.Granted, now: float) -> list[Action]:
        job = self._queue.get(output.key)
        if job is None:
            return []
        job.state = JobState.COMPUTING
        job.granted = now
        job.cached_tokens = output.cached_tokens
        uncached = job.sequence.num_tokens - output.cached_tokens
        if uncached >= self._limits.stream_tokens:
            job.sequence.stream_from = output.cached_tokens
        self._scheduler.add(job.sequence, now)
        return []

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
        self._remove(job)
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
        messages.append(
            Busy(request=request, attempt=attempt, reason=reason, decode_full=True, proof=job.proof)
        )
        return list(self._member.give_back(job.router, job.key, messages, now, job.deadline))

    def _done(self, output: handoff.Done, now: float) -> list[Action]:
        job = self._queue.get(output.key)
        if job is None:
            return []
        self._ended.end(job.key, job.deadline)
        self._remove(job)
        link = self._links.get(output.endpoint)
        worker, transport = (link.worker, link.transport) if link else ("", "")
        times = job.times(now, output.sent_at)
        message = report(output, times, self._member.identity.worker, worker, transport)
        return [ToRouter(job.router, message), *self._maybe_drained()]

    def _handoff_failed(self, output: handoff.Failed, now: float) -> list[Action]:
        job = self._queue.get(output.key)
        if job is None:
            return []
        link = self._links.get(job.link)
        refused = link is not None and link.refuses
        return self._give_back(job, now, output.message, lost=output.lost_peer, refused=refused)

    # ------------------------------------------------------------------ engine

    def _plan(self, actions: list[Action], now: float) -> None:
        for action in self._steps.plan(now):
            if isinstance(action, RunStep):
                self._handoffs.step_begins(action.plan)
            actions.append(action)
        actions += self._engine_events(self._steps.idle_events(), now)

    def _on_step(self, event: StepDone, now: float) -> list[Action]:
        result = event.result
        if not result.abandoned:
            self._queue.learn(result.num_tokens, result.seconds)
        actions = self._engine_events(self._steps.finish(result, now), now)
        return [*actions, *self._step_over(now, self._scheduler.is_inflight)]

    def _engine_events(self, events: list[EngineEvent], now: float) -> list[Action]:
        return self._each_event(events, lambda job, event: self._engine_event(job, event, now), now)

    def _engine_event(self, job: Job, event: EngineEvent, now: float) -> list[Action]:
        match event:
            case ChunkDone(num_computed_tokens=tokens):
                return self._advance(self._handoffs.ready(job, tokens, last=False, now=now), now)
            case TokenEvent() if job.chunked:
                return []  # the router has it
            case TokenEvent(position=position, token=token, logprobs=logprobs):
                job.last_logprobs, job.prompt_log_probs = logprobs, event.prompt_log_probs
                extra = None if logprobs is None else [logprobs]
                run = TokenRun(
                    *job.key, position - job.shift, [token], extra, event.prompt_log_probs
                )
                return [ToRouter(job.router, Tokens(runs=[run]))]
            case Prefilled():
                job.state = JobState.HANDING_OVER
                tokens = job.sequence.num_tokens - 1
                sent = self._advance(self._handoffs.ready(job, tokens, last=True, now=now), now)
                return sent + self._advance(self._handoffs.commit(job, now), now)
            case Finished(status=status):
                return self._end(job, now, status=status)  # no decode worker is needed
            case Failed(cause=Exception() as cause):
                return self._harm(job, cause, "step result", now)
            case Failed(code=code, message=message):
                return self._end(job, now, code=code, message=message)
            case _:
                return []

    def _end(self, job: Job, now: float, **ending: Unpack[Ending]) -> list[Action]:
        """Send the terminal, release the grant, keep the tokens until they are acknowledged."""
        terminal = job.terminal(self._member.identity.worker, now, **ending)
        prompt = first = len(job.assign.context.tokens)
        tokens, logprobs = job.generated, job.logprobs
        if job.chunked:
            first, tokens = terminal.position, []
        self._ended.end(job.key, job.deadline)
        actions = self._stop(job, now)
        ended = self._member.end(
            job.router, terminal, now, job.deadline, prompt, first, tokens, logprobs, job.media,
            job.proof,
        )  # fmt: skip
        return [*actions, *ended]

    def _remove(self, job: Job) -> None:
        """Remove the job and its sequence; return its blocks to the pool."""
        waiting = self._scheduler.abort(job.sequence.request)
        if not waiting and job.sequence.allocation is not None:
            self._scheduler.release(job.sequence)
        self._queue.remove(job)  # last: after an error the job must still be found

    # ------------------------------------------------------------------ time and drain

    def _engine_state(self, layers: int) -> EngineState:
        return self._steps.state(layers)

    def _timed_parts(self, now: float, event: Tick) -> dict[str, Callable[[], list[Action]]]:
        handoffs = self._handoffs
        return {
            "handoffs": lambda: self._advance(handoffs.tick(now), now, about=event),
            "deadlines": lambda: self._end_overdue(now),
            "ended": lambda: self._expire_ended(now),
            "links": lambda: self._advance(handoffs.drop_lost_links(now), now, about=event),
        }

    @property
    def is_drained(self) -> bool:
        """True if this worker is draining and nothing is left."""
        idle = not len(self._queue) and not len(self._handoffs) and not self._member.unacknowledged
        return self._member.draining and idle

    @property
    def idle(self) -> bool:
        """True without requests and a running step, so integrity can be checked."""
        return not len(self._queue) and not len(self._handoffs) and not self._steps.running

    def knows(self, endpoint: str, incarnation: int) -> bool:
        """True if the last known incarnation at ``endpoint`` is ``incarnation``."""
        link = self._links.get(endpoint)
        return link is not None and link.incarnation == incarnation

    def check_integrity(self) -> None:
        """Raise InternalError if blocks, slots and handoffs do not match the jobs."""
        self._scheduler.check_integrity(held=self._handoffs.check_integrity())
        self._queue.check_integrity()
        if not self._scheduler.requests | self._scheduler.prefilled <= self._queue.names:
            raise InternalError("the engine holds a sequence without a job")

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
        **dict.fromkeys(
            (FromPeer, PeerUp, PeerDown, DataUp, DataDown, LayersDone, Packed, NotPacked),
            _on_handoff,
        ),
        NotSent: _on_not_sent,
        StepDone: _on_step,
        GrammarDone: _on_prepared,
        ImagesChecked: _on_prepared,
    }
    ENGINE_EVENTS: ClassVar[frozenset[type]] = frozenset({StepDone})


def _preparing_place(job: Job) -> str:
    """Key under which a job is parked until its grammar is compiled and its images are checked."""
    return f"preparing {job.sequence.request.hex()}"
