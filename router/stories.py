"""What happened to each request: a bounded record of the last requests, for operators.

While an ended request has a record, its :class:`Story` is made of the record. After that the story
is kept as msgpack bytes, without prompt, tokens and embedding, and decoded when it is asked for.
As objects it would take three times the memory, and it takes 2 µs to free so many small objects
that are in no cache any more. For the same reason each story is built once, when its record is
dropped, and its log line is made soon after that.

Workers report durations, because the clocks of processes differ. The times of this router are
monotonic seconds.

Invariant: at most ``keep`` ended, ``keep`` failed and ``keep`` refused requests are kept, with at
most :data:`STORY_BYTES` bytes each. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TypeVar

import msgspec

from baton.proto.errors import BatonError
from baton.proto.limits import MAX_REQUEST_ID_CHARS
from baton.proto.wire.messages import HandoffReport, Resume, Submit, Terminal, WorkerTimes

from .records import ANYBODY, NEVER, Attempt, Caller, Request, Route, Worker

MAX_PAST = 8
"""Earlier attempts kept per request; the oldest is dropped first."""
STORY_BYTES = (12 + MAX_PAST * 5) << 10
"""Upper bound of the memory of one kept request, whatever its workers report: 52 KB.

A request without replays takes 0.4 KB, one with eight replays 1 KB. The rest is room for the
longest names and texts that the decoder admits, of characters with 4 bytes each."""
MAX_FRESH = 16_384
"""Stories that wait to be taken, of each kind; above this the oldest is dropped."""
MAX_LATE = 4096
"""Latest ended requests among which the request of a late report is searched."""
MAX_MESSAGE_CHARS = 512
MAX_CAUSE_CHARS = 256
"""Longest kept cause of a replay, and longest kept name of another router."""
MAX_ORIGIN_CHARS = 64
"""Longest kept name of a gateway, and longest kept traceparent."""
MIN_PART_CHARS = 8
"""Shortest part of a request id, or of a key in hexadecimal, that finds a request."""


class StoryHandoff(msgspec.Struct, array_like=True, gc=False):
    """The report of a handoff; the fields of :class:`HandoffReport`."""

    transport: str
    bytes_sent: int
    bytes_received: int
    blocks: int
    cached_tokens: int
    frames: int
    resent_frames: int
    seconds: float
    times: WorkerTimes | None


class StoryAttempt(msgspec.Struct, array_like=True, gc=False):
    """One attempt: its workers' names (empty: none), why they were chosen, and its handoff.

    ``incarnation``: of the prefill worker, 0 without one. ``assigned_at``: when the first Assign
    was sent; ``reported_at``: when the handoff's report arrived; ``ended_at`` and ``cause``: of an
    attempt that was replaced. NEVER for a time that was not reached.
    """

    number: int
    prefill: str
    incarnation: int
    decode: str
    assigned_at: float
    route: Route | None
    report: StoryHandoff | None
    reported_at: float
    ended_at: float
    cause: str


class Story(msgspec.Struct, array_like=True, gc=False):
    """What happened to one request; times are monotonic seconds, NEVER if not reached.

    ``state``: finished, failed, cancelled, refused or moved (to another router), or the state of
    an unfinished request. ``attempts``: the earlier attempts and the last one. ``times``: of the
    last attempt, from the terminal of its worker; ``decoded``: that is a decode worker.
    ``resumed``: it began at another router, or before this router's start. ``slo_ttft``,
    ``slo_itl``: the request's own limits in seconds, 0 without.
    """

    key: bytes
    request_id: str
    identity: bytes
    owner: bytes
    gateway: str
    traceparent: str
    state: str
    began: float
    first_token: float
    last_token: float
    ended: float
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    task: str  # "generate", "embed" or "draw"
    resumed: bool
    attempts: list[StoryAttempt]
    status: str | None = None
    code: str | None = None
    message: str = ""
    times: WorkerTimes | None = None
    decoded: bool = False
    slo_ttft: float = 0.0
    slo_itl: float = 0.0

    def latencies(self) -> tuple[float | None, float | None, float | None]:
        """Return queue time, TTFT and ITL in seconds.

        Queue time: from arrival until the first attempt with known times was computed. TTFT: None
        for a resumed request or without a token. ITL: the mean; None also with fewer than two.
        """
        began, first, new = self.began, self.first_token, self.new_tokens
        queued = ttft = itl = None
        for attempt in self.attempts:
            report = attempt.report
            times = self._unreported_times(attempt) if report is None else report.times
            if times is not None and times.computing is not None and attempt.assigned_at != NEVER:
                waited = attempt.assigned_at - began
                queued = times.computing if waited < 0 else waited + times.computing
                break
        if first != NEVER and not self.resumed:
            ttft = first - began
            if new > 1:
                itl = (self.last_token - first) / (new - 1)
        return queued, ttft, itl

    def prefill_times(self, attempt: StoryAttempt) -> WorkerTimes | None:
        """Return the times of one of the attempts at its prefill worker, or None."""
        if attempt.report is not None:
            return attempt.report.times
        return self.times if attempt is self.attempts[-1] and not self.decoded else None

    def _unreported_times(self, attempt: StoryAttempt) -> WorkerTimes | None:
        """Return the times of the last attempt at the worker that computed its prompt, or None."""
        local = attempt.route is not None and not attempt.prefill
        last = attempt is self.attempts[-1]
        return self.times if last and (local or not self.decoded) else None

    @property
    def decode_times(self) -> WorkerTimes | None:
        """Times of the last attempt at its decode worker, or None."""
        return self.times if self.decoded else None


T = TypeVar("T", Request, Story)
_HEXADECIMAL = frozenset("0123456789abcdef")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Story).decode


class Stories:
    """The stories of the last ended and the last refused requests of one router.

    ``keep``: number of requests of each kind; 0 keeps none. ``fresh``: whether
    :meth:`take_fresh` is called, for logs and spans.
    """

    def __init__(self, keep: int, *, fresh: bool = False) -> None:
        self._ended: dict[bytes, Request] = {}  # since the last take_fresh, and have a record
        self._recorded: dict[bytes, Request] = {}  # ended earlier, and still have a record
        self._kept: deque[bytes] = deque(maxlen=keep)
        self._failed: deque[bytes] = deque(maxlen=keep)  # apart: successes do not push them out
        self._refused: deque[Story] = deque(maxlen=keep)
        self._complete: deque[Story] = deque(maxlen=MAX_FRESH)
        self._waiting: deque[Story] = deque(maxlen=MAX_FRESH)  # a report may still join them
        self._fresh = fresh
        self._keeps = keep > 0
        self._on = bool(keep or fresh)

    # ------------------------------------------------------------------ what happens

    def ended(self, request: Request, terminal: Terminal, now: float) -> None:
        """Record the end of a request."""
        if not self._on:
            return
        request.ended_at = now
        request.times, request.decoded = terminal.times, terminal.decode != ""
        self._ended[request.key] = request

    def moved(self, request: Request, router: str, now: float) -> None:
        """Record that another router serves the request."""
        request.moved_to = router[:MAX_CAUSE_CHARS]
        self.ended(request, Terminal(request=request.key), now)

    def forgotten(self, request: Request) -> None:
        """Make the story of an ended request whose record is dropped."""
        if self._ended.pop(request.key, None) is not None:
            story = story_of(request)
            self._keep(story)
            if self._fresh:
                reported = request.past is None and request.attempt.report is not None
                (self._complete if reported else self._waiting).append(story)
        elif self._recorded.pop(request.key, None) is not None:
            self._keep(story_of(request))

    def _keep(self, story: Story) -> None:
        if self._keeps:
            (self._failed if story.state == _FAILED else self._kept).append(_encode(story))

    def refused(
        self, key: bytes, asked: Submit | Resume, identity: bytes, owner: bytes,
        error: BatonError, now: float,
    ) -> None:  # fmt: skip
        """Record a request that was not admitted."""
        if not self._on:
            return
        context = asked.context
        story = Story(
            key, asked.request_id[:MAX_REQUEST_ID_CHARS], identity, owner,
            asked.gateway[:MAX_ORIGIN_CHARS], asked.traceparent[:MAX_ORIGIN_CHARS], "refused",
            now, NEVER, NEVER, now, len(context.tokens.array), 0, 0,
            context.task if context.task in _OTHER_TASKS else _GENERATE,
            type(asked) is Resume, [], None, error.code, str(error)[:MAX_MESSAGE_CHARS],
        )  # fmt: skip
        self._refused.append(story)
        if self._fresh:
            self._complete.append(story)

    def handed_over(self, report: HandoffReport, worker: Worker, now: float) -> None:
        """Add the report of a handoff that arrived after its request's end.

        ``worker``: its sender. A report of a worker that did not run the attempt is ignored.
        """
        recorded = self._ended.get(report.request) or self._recorded.get(report.request)
        if recorded is not None:
            for past in recorded.past or ():
                runs = past.number == report.attempt and past.prefill is worker
                if runs and past.report is None:
                    past.report, past.reported_at = report, now
        for story in islice(reversed(self._waiting), MAX_LATE):
            if story.key == report.request:
                _add_report(story, report, worker, now)
                break
        for kept in (self._kept, self._failed):
            for index, encoded in enumerate(islice(reversed(kept), MAX_LATE)):
                if report.request in encoded and (story := _decode(encoded)).key == report.request:
                    _add_report(story, report, worker, now)
                    kept[-1 - index] = _encode(story)
                    return

    # ------------------------------------------------------------------ look up

    def take_fresh(self) -> list[Story]:
        """Return the requests that ended or were refused since the last call.

        Call it now and then, and not at once: a handoff's report may arrive after the request's
        end.
        """
        found = [*self.take_complete(), *self._waiting]
        self._waiting.clear()
        if self._fresh:
            found += map(story_of, self._ended.values())
            self._recorded |= self._ended
            self._ended.clear()
        return found

    def take_complete(self, at_least: int = 0) -> list[Story]:
        """Return those stories of :meth:`take_fresh` to which no report can be added.

        Returns none if there are fewer than ``at_least``.
        """
        complete = self._complete
        if len(complete) < at_least or not complete:
            return []
        found = list(complete)
        complete.clear()
        return found

    def last(self, most: int, caller: Caller = ANYBODY) -> list[Story]:
        """Return up to ``most`` stories of the latest ended and refused requests, latest last.

        They are the latest stories that the caller may see.
        """
        return self._latest(most, caller, (b"",), lambda _: True)

    def failed(self, most: int, caller: Caller = ANYBODY) -> list[Story]:
        """Return up to ``most`` failed and ``most`` refused stories that the caller may see.

        They are the latest ones of each kind, latest last.
        """

        def seen(story: Story) -> bool:
            return caller.operator or story.owner == caller.key

        with_record = map(story_of, filter(_has_error, self._with_record()))
        kept = _decoded(self._failed, caller, (b"",))
        failed = (one for one in chain(with_record, kept) if one.state == _FAILED and seen(one))
        found = [*islice(failed, most), *islice(filter(seen, reversed(self._refused)), most)]
        found.sort(key=_ended_at)
        return found

    def find(self, name: str, most: int, caller: Caller = ANYBODY) -> list[Story]:
        """Return the latest ``most`` stories that ``name`` names (:func:`names`), latest last."""
        parts = [name.encode("utf-8", "surrogatepass")]
        if len(name) >= MIN_PART_CHARS and set(name) <= _HEXADECIMAL:
            parts.append(bytes.fromhex(name[: len(name) // 2 * 2]))
        return self._latest(most, caller, parts, lambda one: names(name, one.key, one.request_id))

    def _latest(
        self,
        most: int,
        caller: Caller,
        parts: Iterable[bytes],
        wanted: Callable[[Request | Story], bool],
    ) -> list[Story]:
        """Return the latest stories that are wanted; ``parts``: their bytes have one of these."""

        def chosen(some: Iterable[T]) -> Iterator[T]:
            seen = (one for one in some if caller.operator or one.owner == caller.key)
            return filter(wanted, seen)

        most = max(0, most)
        found = [*islice(chosen(reversed(self._refused)), most)]
        for kept in (self._kept, self._failed):
            found += islice(chosen(_decoded(kept, caller, parts)), most)
        found += map(story_of, islice(chosen(self._with_record()), most))
        found.sort(key=_ended_at)
        return found[len(found) - most :] if len(found) > most else found

    def _with_record(self) -> Iterator[Request]:
        """Yield the ended requests that have a record, the latest first."""
        if not self._keeps:
            return iter(())
        return chain(reversed(self._ended.values()), reversed(self._recorded.values()))

    def __len__(self) -> int:
        records = len(self._ended) + len(self._recorded)
        return len(self._kept) + len(self._failed) + records + len(self._refused)


def _decoded(kept: deque[bytes], caller: Caller, parts: Iterable[bytes]) -> Iterator[Story]:
    """Yield the stories, latest first, whose bytes have the caller's key and one of the parts.

    So few of the others are decoded.
    """
    for story in reversed(kept):
        mine = caller.operator or caller.key in story
        if mine and any(part in story for part in parts):
            yield _decode(story)


def _has_error(request: Request) -> bool:
    return request.terminal is not None and request.terminal.code is not None


def _add_report(story: Story, report: HandoffReport, worker: Worker, now: float) -> None:
    """Add a report to the attempt that it is about, if ``worker`` ran that attempt."""
    for attempt in story.attempts:
        runs = (attempt.number, attempt.prefill, attempt.incarnation)
        if runs == (report.attempt, worker.id, worker.incarnation) and attempt.report is None:
            attempt.report, attempt.reported_at = _handoff(report), now


def names(name: str, key: bytes, request_id: str) -> bool:
    """True if ``name`` names the request: its id, a part of its id, or the start of its key.

    A gateway puts the HTTP client's X-Request-Id between dashes into the request id. Other parts
    have at least :data:`MIN_PART_CHARS` characters.
    """
    if name == request_id or (name and f"-{name}-" in request_id):
        return True
    return len(name) >= MIN_PART_CHARS and (name in request_id or key.hex().startswith(name))


def story_of(request: Request, now: float = NEVER) -> Story:
    """Return the story of an ended request, or until ``now`` of an unfinished one."""
    terminal, past = request.terminal, request.past
    status = code = None
    message, cached = "", 0
    if request.moved_to:
        state, message = "moved", f"served by {request.moved_to} since"
    elif terminal is None:
        state = request.state.value
    else:
        status, code, cached = terminal.status, terminal.code, terminal.cached_tokens
        message = terminal.message and terminal.message[:MAX_MESSAGE_CHARS]
        if status == "cancelled" or code == "cancelled":
            state = "cancelled"
        else:
            state = _FAILED if code else "finished"
    ended = request.ended_at
    attempts = [_attempt(request.attempt)]
    if past is not None:
        attempts[:0] = map(_attempt, past)
    task = _GENERATE
    if request.embeds or request.work.file:
        task = "embed" if request.embeds else "draw"
    return Story(
        request.key, request.request_id, request.identity, request.owner, request.gateway,
        request.traceparent, state, request.began, request.first_at, request.token_at,
        now if ended == NEVER else ended, request.base, request.next - request.base, cached,
        task, request.submitted_at == NEVER, attempts, status, code, message,
        request.times, request.decoded, request.slo_ttft, request.slo_itl,
    )  # fmt: skip


_FAILED = "failed"
_GENERATE, _OTHER_TASKS = "generate", ("embed", "draw")


def _attempt(attempt: Attempt) -> StoryAttempt:
    prefill, decode, report = attempt.prefill, attempt.decode, attempt.report
    name, incarnation = ("", 0) if prefill is None else (prefill.id, prefill.incarnation)
    return StoryAttempt(
        attempt.number, name, incarnation, "" if decode is None else decode.id,
        attempt.assigned_at, attempt.route,
        None if report is None else _handoff(report), attempt.reported_at,
        attempt.ended_at, attempt.cause,
    )  # fmt: skip


def _handoff(report: HandoffReport) -> StoryHandoff:
    return StoryHandoff(
        report.transport, report.bytes_sent, report.bytes_received, report.blocks,
        report.cached_tokens, report.frames, report.resent_frames, report.seconds, report.times,
    )  # fmt: skip


def _ended_at(story: Story) -> float:
    return story.ended
