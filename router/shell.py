"""Sockets and clock around :class:`.core.RouterCore`.

The shell decodes envelopes, passes the messages to the core, performs its actions, and sends each
peer one envelope per turn of the loop. It has no state of requests.

Invariant: the unsent messages of one client are bounded. The core learns which clients read too
slowly, and messages above the bound are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from baton.extend.watch import CallWatch
from baton.proto.errors import DecodeFailed, ProtocolError
from baton.proto.limits import MAX_DESCRIBED_BYTES
from baton.proto.wire.envelope import EnvelopeDecoder, SalvagingDecoder
from baton.proto.wire.messages import (
    ClientToRouter,
    Described,
    Hello,
    Message,
    StatusReport,
    Submitted,
    TerminalAck,
    WorkerToRouter,
)
from baton.runtime.keys.allowed import CLIENT, DECODE, OPERATOR, PREFILL
from baton.runtime.keys.identity_owners import Callers
from baton.runtime.keys.zap import Doorkeeper, door
from baton.runtime.liveness import connection_timeout
from baton.runtime.metrics.families import Family
from baton.runtime.net.channel import ChannelOptions, Frames, SendResult
from baton.runtime.net.loop import Loop, Timer
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import Context, RouterChannel
from baton.runtime.process.clock import Clock
from baton.runtime.process.log import get_logger
from baton.runtime.process.log_limit import LogLimit
from baton.runtime.process.main import EXIT_RESTART
from baton.runtime.process.otlp import OtlpSender, Span, SpanExporter

from .authorization import client_refusals, hello_refusal, without_drains
from .config import RouterConfig
from .core import RouterCore
from .custom import Extensions, exposed_name
from .events import (
    Action,
    ClientFull,
    ClientGone,
    ClientInputRejected,
    ClientWritable,
    Event,
    Fault,
    FromClient,
    FromWorker,
    Log,
    NotSent,
    StopRequested,
    Tick,
    ToClient,
    ToWorker,
    WorkerInputRejected,
    WorkersGone,
)
from .own_errors import INTERNAL
from .records import ANYBODY, NO_KEY, Authentication, Caller, WorkerCaller
from .stories import Story
from .story_report import request_line, story_record
from .story_slices import spans_of

CLIENT_QUEUE = 64
"""Maximum envelopes in ZeroMQ's queue for one client; low, since an envelope may be large."""
HELD_MESSAGES = 1024
"""Maximum messages held for a client with a full queue; dropped messages are repeated later."""
CLIENT_SILENCE_S = 5.0
"""Seconds without an answer to ZeroMQ's heartbeats before a client is disconnected.

A client that reads nothing does not answer."""
RETRY_S = 0.02
"""Seconds between retries to send to a client with a full queue."""
LINGER_S = 1.0
"""Seconds for which a closing router waits for acknowledgements of terminals."""
PATIENCE_S = 0.001
"""Longest delay in seconds of TerminalAck, which is batched with the next message.

It is not urgent. An extra envelope for it would wake two more threads, which compete with urgent
messages for the processors."""
CLIENT_PATIENCE_S = 0.02
"""The same of Submitted. A short answer that the client takes as a whole is over by then."""
TOLD_AT_ONCE = 64
"""Ended requests that are logged before the next tick: their objects are still in the cache."""
WORKER_LINES = 500
"""Log lines of one event about workers within 10 s; further ones are counted."""
_LATEST_COUNTS = frozenset((Described, StatusReport))

_log = get_logger()


def _hangs(event: str, fields: dict[str, object]) -> None:
    """Log that a user's class does not return; called on another thread."""
    _log.error(event, **fields)


class RouterShell:
    """One router process."""

    def __init__(
        self,
        config: RouterConfig,
        files: dict[str, bytes],
        incarnation: int,
        loop: Loop,
        context: Context,
        doors: Doorkeeper | None = None,
    ) -> None:
        self._extensions = Extensions(config, loop.now)
        self._watch: CallWatch | None = None  # from the start on
        self._own_metrics = self._extensions.metrics(self._report_as)
        self.core = RouterCore(
            config,
            incarnation=incarnation,
            files=files,
            now=loop.now(),
            authentication=Authentication(self._caller_of, self._worker_of),
            fresh_stories=bool(config.otlp_endpoint or config.metrics)
            or config.log_level in ("debug", "info"),
            extensions=self._extensions,
        )
        self._spans = self._make_exporter(config)
        self._loop = loop
        options = ChannelOptions(
            send_hwm=CLIENT_QUEUE, heartbeat_s=1.0, heartbeat_timeout_s=CLIENT_SILENCE_S
        )
        client_door = door(doors, "clients", CLIENT, OPERATOR)
        worker_door = door(doors, "workers", PREFILL, DECODE)
        self.clients = RouterChannel(
            context, config.client_address, keys=client_door, options=options
        )
        try:
            timeout = connection_timeout(config.worker_timeout_s)
            self.workers = RouterChannel(
                context,
                config.worker_address,
                keys=worker_door,
                options=ChannelOptions(heartbeat_timeout_s=timeout),
            )
        except BaseException:
            self.clients.close()
            raise
        self._from_clients = SalvagingDecoder[Message](ClientToRouter)
        self._from_workers = EnvelopeDecoder[Message](WorkerToRouter)
        self._to_clients: Outbox[bytes] = Outbox(
            self.clients.send, self._client_unsent, MAX_DESCRIBED_BYTES
        )
        self._to_workers: Outbox[bytes] = Outbox(
            self.workers.send, self._worker_unsent, on_refused=self._worker_refused
        )
        self._held: dict[bytes, list[Message]] = {}  # messages of full clients, oldest first
        self._log_limit = LogLimit()
        self._worker_lines = LogLimit(burst=WORKER_LINES)
        self._leave_at = float("inf")
        self._closing = False
        self._heard_worker = False
        self._gone: list[bytes] = []  # workers whose lost connection is not reported yet
        self._patience: Timer | None = None  # runs while messages wait to be batched
        self._client_patience: Timer | None = None  # the same, for those to clients
        self._clock = Clock(loop, self._turn, lambda: self.core.errors.unowned, self._break)
        self.exit_code = 0

    def start(self) -> None:
        """Attach the sockets to the loop and start the timer."""
        self.clients.attach(self._loop, self._hear_client, self._client_gone)
        self.workers.attach(self._loop, self._hear_worker, self._worker_gone)
        self._loop.on_turn_end(self._flush)
        self._watch = CallWatch(self._extensions.guards, _hangs)
        self._clock.start()

    def close(self) -> None:
        """Close the sockets."""
        self._tell_requests(self.core.stories.take_fresh())
        if self._watch is not None:
            self._watch.stop()
        self.clients.close()
        self.workers.close()
        if self._spans is not None:
            self._spans.close()

    def stop(self, times: int) -> None:
        """Reject new requests, and end after the last request; a second signal ends at once."""
        if times > 1:
            self._loop.stop()
            return
        _log.info("router.closing", unfinished=self.core.unfinished)
        self._closing = True
        self._feed(StopRequested())

    def own_families(self, others: Sequence[Family]) -> list[Family]:
        """Return the metrics of extensions, and the counts of their failures.

        ``others``: metrics of the same scrape, whose names an extension cannot use.
        """
        found: list[Family] = []
        taken = {exposed_name(family): "Baton" for family in others}
        for metric in self._own_metrics:
            found += metric.families(taken)
        return [*self._extensions.families(), *found]

    # ------------------------------------------------------------------ in

    def _hear_client(self, identity: bytes, frames: Frames) -> None:
        try:
            messages = self._from_clients.decode(frames)
        except ProtocolError as error:
            self._warn("client.malformed", error=str(error))
            messages = self._readable(identity, frames, error)
        if self.clients.callers is not None:
            messages = self._allowed_client(self.clients.callers, identity, messages)
        self._perform(self.core.handle(FromClient(identity, messages), self._loop.now()))

    def _readable(self, identity: bytes, frames: Frames, error: ProtocolError) -> list[Message]:
        """Return the valid messages of a damaged envelope, and send Rejected for the others."""
        salvaged = self._from_clients.salvage(frames) if type(error) is DecodeFailed else None
        if salvaged is None:
            self._feed(ClientInputRejected(identity, error))
            return []
        for request_id, wrong in salvaged.refused.items():
            self._feed(ClientInputRejected(identity, wrong, request_id))
        return salvaged.messages

    def _warn(self, event: str, **keys: object) -> None:
        """Log a warning that a peer can cause at will: a line every few seconds, with a count."""
        if self._log_limit.passes(event, self._loop.now(), **keys):
            _log.warning(event, **keys)

    def _hear_worker(self, identity: bytes, frames: Frames) -> None:
        if identity in self._gone:  # it has reconnected
            self._workers_gone()
        try:
            messages = self._from_workers.decode(frames)
        except ProtocolError as error:
            self._warn("worker.malformed", error=str(error))
            self._feed(WorkerInputRejected(identity, error))
            return
        if self.workers.callers is not None:
            messages = self._allowed_worker(self.workers.callers, identity, messages)
        self._heard_worker = True
        self._perform(self.core.handle(FromWorker(identity, messages), self._loop.now()))

    def _allowed_client(
        self, callers: Callers, identity: bytes, messages: list[Message]
    ) -> list[Message]:
        """Return the messages that the client's key allows, and answer the others."""
        refusals = client_refusals(callers.entry_of(identity), messages)
        if not refusals:
            return messages
        for refusal in refusals:
            self.core.dropped[f"client_{refusal.code}"] += 1
            self._perform([ToClient(identity, refusal)])
        return without_drains(messages)

    def _allowed_worker(
        self, callers: Callers, identity: bytes, messages: list[Message]
    ) -> list[Message]:
        """Return the messages without a Hello that the worker's key does not allow."""
        passed = []
        for message in messages:
            if type(message) is Hello:
                entry = callers.entry_of(identity)
                error = hello_refusal(callers.allowed(), entry, message)
                if error is not None:
                    self._warn("worker.denied", worker=message.worker, error=str(error))
                    self._feed(WorkerInputRejected(identity, error))
                    continue
            passed.append(message)
        return passed

    def _caller_of(self, identity: bytes) -> Caller:
        callers = self.clients.callers
        if callers is None:
            return ANYBODY
        entry = callers.entry_of(identity)
        operator = entry is not None and entry.role == OPERATOR
        return Caller(callers.key_of(identity), operator)

    def _worker_of(self, identity: bytes, name: str) -> WorkerCaller:
        callers = self.workers.callers
        entry = None if callers is None else callers.entry_of(identity)
        return (
            NO_KEY if entry is None else WorkerCaller(entry.public.encode(), entry.spells_out(name))
        )

    def _client_gone(self, identity: bytes) -> None:
        self._held.pop(identity, None)
        self._to_clients.drop(identity)
        self._feed(ClientGone(identity))

    def _worker_gone(self, identity: bytes) -> None:
        self._to_workers.drop(identity)
        if identity not in self._gone:
            self._gone.append(identity)
            self._loop.post(self._workers_gone)

    def _workers_gone(self) -> None:
        """Report lost workers together: a request of one must not move to another of them."""
        gone, self._gone = self._gone, []
        if gone:
            self._feed(WorkersGone(gone))

    def _turn(self) -> float:
        """Handle all timers; return the time of the next one.

        The core's timers first: an error in counting or logging must not delay a deadline.
        """
        now = self._loop.now()
        self._perform(self.core.handle(Tick(), now))
        if self._closing:
            self._maybe_leave(now)
        for event, keys in self._log_limit.due(now):
            _log.warning(event, **keys)
        for event, keys in self._worker_lines.due(now):
            _log.info(event, **keys)
        self._count_refused()
        self._tell_requests(self.core.stories.take_fresh())
        return self.core.next_timer()

    def _break(self, reason: str) -> None:
        """End the process, so that the supervisor starts another; the workers keep the requests."""
        _log.error("router.exit", reason=reason)
        self.exit_code = EXIT_RESTART
        self._loop.stop()

    def _count_refused(self) -> None:
        """Add the channels' counts of refused input, which never reaches the core."""
        for side, channel in (("client", self.clients), ("worker", self.workers)):
            channel.stats.count_into(self.core.dropped, side)

    def _feed(self, event: Event) -> None:
        self._perform(self.core.handle(event, self._loop.now()))

    # ------------------------------------------------------------------ out

    def _perform(self, actions: list[Action]) -> None:
        rest = iter(actions)
        while self._carry_out(rest):
            pass
        if self.core.broken and not self.exit_code:
            self._break(self.core.broken)

    def _carry_out(self, actions: Iterator[Action]) -> bool:
        """Perform the actions up to one that raises; return whether there was such an action.

        One loop for all: a call and an exception guard per action take as long as the action.
        """
        held, to_clients, to_workers = self._held, self._to_clients, self._to_workers
        action: Action | None = None
        try:
            for action in actions:
                if type(action) is ToClient:
                    identity, message = action.identity, action.message
                    kind = type(message)
                    if held and identity in held:
                        self._hold(identity, [message])
                    elif kind is Submitted:
                        to_clients.put_patient(identity, message)
                    elif kind in _LATEST_COUNTS:
                        to_clients.put_latest(identity, message, _merged)
                    else:
                        to_clients.put(identity, message)
                elif type(action) is ToWorker:
                    if type(action.message) is TerminalAck:
                        to_workers.put_patient(action.identity, action.message)
                    else:
                        to_workers.put(action.identity, action.message)
                elif type(action) is Log:
                    self._note(action)
                elif type(action) is Fault:
                    self._report_as(action.event, action.error, action.fields)
        except Exception as error:
            self._report(error, {"action": type(action).__name__})
            return True
        return False

    def _report(self, error: Exception, fields: dict[str, object]) -> None:
        """Log an exception of our own code."""
        self._report_as(INTERNAL, error, fields)

    def _report_as(self, event: str, error: Exception, fields: dict[str, object]) -> None:
        """Log an exception with its traceback: at most one of an event every few seconds.

        Those of each extension are counted apart.
        """
        text, own = f"{type(error).__name__}: {error}", str(fields.get("extension", ""))
        if self._log_limit.passes(event, self._loop.now(), own, error=text, **fields):
            _log.error(event, exc_info=error, error=text, **fields)

    def _note(self, action: Log) -> None:
        """Log for the core. A worker that registers again and again cannot fill the log."""
        name, fields, now = action.event, action.fields, self._loop.now()
        if not name.startswith("worker.") or self._worker_lines.passes(name, now, **fields):
            _log.info(name, **fields)

    def _flush(self) -> None:
        """Send this turn's messages: to clients first if workers sent any, else to workers."""
        if self._heard_worker:
            self._heard_worker = False
            if self._to_clients.pressing:
                self._to_clients.flush()
        for box in (self._to_workers, self._to_clients):
            if box.pressing:
                box.flush()
        if self._to_workers.waiting and self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S, self._out_of_patience)
        if self._to_clients.waiting and self._client_patience is None:
            end = self._out_of_client_patience
            self._client_patience = self._loop.call_later(CLIENT_PATIENCE_S, end)
        if many := self.core.stories.take_complete(at_least=TOLD_AT_ONCE):
            self._tell_requests(many)  # after the messages, which are urgent

    def _make_exporter(self, config: RouterConfig) -> SpanExporter[tuple[Story, int]] | None:
        """Start to export the spans of requests; None without a collector. Raises ConfigError."""
        if not config.otlp_endpoint:
            return None
        name, policy, registry = config.name, config.policy.name, self.core.registry

        def spans(item: tuple[Story, int]) -> list[Span]:
            story, arrived_ns = item
            model = "" if registry.card is None else registry.card.name
            return spans_of(story_record(story, policy, story.ended), name, model, arrived_ns)

        exporter = SpanExporter(spans, OtlpSender(config.otlp_endpoint))
        exporter.start()
        return exporter

    def _tell_requests(self, stories: list[Story]) -> None:
        """Log and export requests that ended or were refused."""
        if stories and self._spans is not None:
            clocks = time.time() - self._loop.now()
            for story in stories:
                self._spans.put((story, int((clocks + story.began) * 1e9)))
            if self._spans.dropped:
                self.core.dropped["spans"] = self._spans.dropped
        ended = []
        for story in stories:
            if story.state != "refused":
                line = request_line(story)
                ended.append(line)
                for metric in self._own_metrics:
                    metric.ended(line)
            elif self._log_limit.passes("request.refused", self._loop.now(), code=story.code):
                _log.info("request.refused", **msgspec.to_builtins(request_line(story)))
        if ended:
            _log.info_all("request.ended", ended)

    def _out_of_patience(self) -> None:
        self._patience = None
        self._to_workers.pressing = True  # sent at the end of this turn

    def _out_of_client_patience(self) -> None:
        self._client_patience = None
        self._to_clients.pressing = True

    def _worker_unsent(self, identity: bytes, messages: list[Message], result: SendResult) -> None:
        """Drop messages to a full worker, since the core repeats them; disconnect a lost worker."""
        if result is SendResult.UNREACHABLE:
            self._worker_gone(identity)
        else:
            self.core.dropped["to_full_worker"] += len(messages)

    def _worker_refused(self, _identity: bytes, message: Message, reason: str) -> None:
        """Report an oversized message to the core, so that its request fails without delay."""
        self.core.dropped["not_encodable"] += 1
        self._feed(NotSent(message, reason))

    def _client_unsent(self, identity: bytes, messages: list[Message], result: SendResult) -> None:
        if result is SendResult.UNREACHABLE:
            self._client_gone(identity)
            return
        if identity in self._held:
            self._hold(identity, messages)
            return
        self._held[identity] = messages
        self._feed(ClientFull(identity))
        self._loop.call_later(RETRY_S, lambda: self._retry(identity))

    def _hold(self, identity: bytes, messages: list[Message]) -> None:
        """Append messages to those held for a full client, up to the limit."""
        held = self._held[identity]
        room = HELD_MESSAGES - len(held)
        self.core.dropped["to_slow_client"] += max(0, len(messages) - max(0, room))
        if 0 < room < len(messages):
            self._warn("client.does_not_read", held=HELD_MESSAGES)
        held += messages[: max(0, room)]

    def _retry(self, identity: bytes) -> None:
        """Send a full client the messages held for it, in order and before newer ones."""
        held = self._held.pop(identity, None)
        if held is None:
            return
        try:
            for message in held:
                self._to_clients.put(identity, message)
            self._to_clients.flush()
        finally:  # also after an error: the core sends again what was lost
            if identity not in self._held:  # else still full: _client_unsent retries
                self._feed(ClientWritable(identity))

    # ------------------------------------------------------------------ end

    def _maybe_leave(self, now: float) -> None:
        """Stop the loop if all requests have ended and no acknowledgement is worth waiting for."""
        if self.core.unfinished:
            return
        self._leave_at = min(self._leave_at, now + LINGER_S)
        if not self.core.kept or now >= self._leave_at:
            self._loop.stop()


def _merged(earlier: Message, later: Message) -> Message:
    """Merge two answers to one client in one turn: the later one, with the files of both."""
    if isinstance(earlier, Described) and isinstance(later, Described):
        return msgspec.structs.replace(later, files={**earlier.files, **later.files})
    return later
