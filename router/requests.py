"""The router's record of one request, its attempts, and their state machine.

A :class:`Request` is what a client asked. An :class:`Attempt` is one try at it: the workers, and
the messages that still need an answer. A retry replaces the attempt, so nothing of the failed try
is left. A request keeps what must outlive an attempt: its tokens, its limits, and its losses.

Invariants: a request ends once. :data:`TRANSITIONS` lists all legal steps; any other step raises.
An attempt holds what :data:`HOLDINGS` lists for the request's state, see
:meth:`Request.check_integrity`.

::

          submit                   resume, unknown here
            v                              v
          QUEUED <------ requeue ----- RECOVERING
           |                               |
    assign |                               | adopt
           v                               v       follow
         ASSIGNED ---- accept -------> PREFILLING ---------> FOLLOWED
           |                               | ^                  |
           |                     hand over | | reassign         | hand over
           |                               v |                  |
           +-- hand over (local) ------> DECODING <-------------+

    ASSIGNED, PREFILLING, FOLLOWED, DECODING -- requeue --> QUEUED, as a new attempt
    any of these -- end --> ENDED -- acknowledged, expired --> FORGOTTEN
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import InternalError
from baton.proto.prompt_log_probs import records_bytes
from baton.proto.wire.messages import HandoffReport, Terminal, TokenRun, WorkerTimes
from baton.proto.wire.wire_context import WireContext
from baton.proto.work import Work, kv_positions, work_of

from .workers import roles_for

if TYPE_CHECKING:
    from .clients import Client
    from .placement import Route
    from .takeover import OpenSearch
    from .workers import Worker


class State(Enum):
    """State of a request and of its current attempt; :data:`HOLDINGS` lists its resources."""

    RECOVERING = "recovering"  # resumed without a record here: a worker may hold it
    QUEUED = "queued"  # waits for workers
    ASSIGNED = "assigned"  # Assign sent to a worker, not answered yet
    PREFILLING = "prefilling"  # a prefill worker has accepted it
    FOLLOWED = "followed"  # as PREFILLING, but the handoff names another router: Adopt is repeated
    DECODING = "decoding"  # a decode worker has it: handed over, or local, also with its prompt
    ENDED = "ended"  # its terminal is known and kept until acknowledged
    FORGOTTEN = "forgotten"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow


class Step(Enum):
    """Step from one state to the next."""

    ASSIGN = "assign"
    ACCEPT = "accept"
    ADOPT = "adopt"
    FOLLOW = "follow"
    HAND_OVER = "hand over"
    REASSIGN = "reassign"
    REQUEUE = "requeue"
    END = "end"
    FORGET = "forget"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.RECOVERING, Step.ADOPT): State.PREFILLING,
    (State.RECOVERING, Step.REQUEUE): State.QUEUED,
    (State.RECOVERING, Step.END): State.ENDED,
    (State.QUEUED, Step.ASSIGN): State.ASSIGNED,
    (State.QUEUED, Step.END): State.ENDED,
    (State.ASSIGNED, Step.ACCEPT): State.PREFILLING,
    (State.ASSIGNED, Step.HAND_OVER): State.DECODING,  # local: a decode worker has accepted it
    (State.ASSIGNED, Step.REQUEUE): State.QUEUED,
    (State.ASSIGNED, Step.END): State.ENDED,
    (State.PREFILLING, Step.FOLLOW): State.FOLLOWED,
    (State.PREFILLING, Step.HAND_OVER): State.DECODING,
    (State.PREFILLING, Step.REQUEUE): State.QUEUED,
    (State.PREFILLING, Step.END): State.ENDED,
    (State.FOLLOWED, Step.HAND_OVER): State.DECODING,
    (State.FOLLOWED, Step.REQUEUE): State.QUEUED,
    (State.FOLLOWED, Step.END): State.ENDED,
    (State.DECODING, Step.HAND_OVER): State.DECODING,  # another worker proves to have it
    (State.DECODING, Step.REASSIGN): State.PREFILLING,  # by another router, as a higher attempt
    (State.DECODING, Step.REQUEUE): State.QUEUED,
    (State.DECODING, Step.END): State.ENDED,
    (State.ENDED, Step.FORGET): State.FORGOTTEN,
}
"""Every legal step."""

RUNNING = frozenset({State.PREFILLING, State.FOLLOWED, State.DECODING})
"""A worker has accepted the attempt."""
PLACED = RUNNING | {State.ASSIGNED}
"""The attempt has workers."""
BEFORE_DECODE = PLACED - {State.DECODING}
"""Its prefill worker may hold a grant of its decode worker."""


YES, NO, MAYBE = True, False, None


class Holding(NamedTuple):
    """What an attempt holds in one state: always, never, or perhaps (MAYBE, not checked).

    ``server``: role of the worker that runs it, empty without one. ``load``: its tokens count as
    load of its workers. ``search``: workers are asked for it.
    """

    prefill: bool | None
    decode: bool | None
    server: str
    load: bool | None
    search: bool | None

    @lru_cache  # noqa: B019, few holdings exist
    def wrong(self, held: Holding) -> list[str]:
        """Return the names of the parts of ``held`` that this holding forbids."""
        return [
            name
            for name, expected, found in zip(self._fields, self, held, strict=True)
            if expected is not None and expected != found
        ]


HOLDINGS: dict[State, Holding] = {
    State.RECOVERING: Holding(NO, NO, "", NO, MAYBE),
    State.QUEUED: Holding(NO, NO, "", NO, NO),
    State.ASSIGNED: Holding(MAYBE, MAYBE, "", YES, NO),  # embeddings: no decode, local: no prefill
    State.PREFILLING: Holding(YES, MAYBE, "prefill", MAYBE, NO),
    State.FOLLOWED: Holding(YES, NO, "prefill", NO, NO),
    State.DECODING: Holding(MAYBE, YES, "decode", MAYBE, NO),
    State.ENDED: Holding(MAYBE, MAYBE, "", NO, MAYBE),  # for its terminal and report
    State.FORGOTTEN: Holding(MAYBE, MAYBE, "", NO, MAYBE),
}
"""What an attempt holds in each state of its request. An adopted attempt has no load here."""

RECORD_BYTES = 2048
"""Memory of a record without its arrays, rounded up."""
_BIAS_BYTES = 160  # an entry of a dict, a number and an id
_FIELDS_FACTOR = 16
"""Memory of a map's fields by its encoded bytes: a number of one byte becomes an object."""
NEVER = float("inf")
ENDED_KEEP_S = 5.0
"""Minimum seconds for which a terminal is kept, also after the deadline."""
SUSPECT_DEATHS = 2
HARMLESS_TOKENS = 8
"""More tokens than can be in transit when their worker dies."""
TAKEOVER = 1024
"""Added to the attempt number when this router replays a request of another router.

The other router may still raise its own attempt numbers, and the two ranges must not overlap."""
_ENDED, _FORGOTTEN = State.ENDED, State.FORGOTTEN


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a request: where it runs, and what its worker has still to answer.

    ``number``: higher attempts replace lower ones. ``foreign``: another router counts the
    attempts, or did. ``search``: the running search for its worker. ``grace_until``: end of the
    wait for a ready worker, in seconds. ``prefill``, ``decode``: its workers, ``server``: the one
    that runs it, as far as known. ``prefill_cost``, ``decode_cost``: its tokens in their load.
    ``uncached``: tokens of its prompt in the work of its assignee, in mode adaptive before its
    first token; -1: not counted. ``late``: they are computed after those of other prompts.
    ``answered``: the server has answered the last Adopt; ``adopts``: how many it has not.
    ``pending``: a terminal that waits for missing tokens.

    The last fields are only for its story: the time of the first Assign, why these workers were
    chosen, the handoff's report and its arrival, the end of a replaced attempt and its cause.
    """

    number: int
    foreign: bool = False
    search: OpenSearch | None = None
    grace_until: float = NEVER
    prefill: Worker | None = None
    decode: Worker | None = None
    server: Worker | None = None
    prefill_cost: int = 0
    decode_cost: int = 0
    uncached: int = -1
    late: bool = False
    answered: bool = True
    adopts: int = 0
    pending: Terminal | None = None

    assigned_at: float = NEVER
    route: Route | None = None
    report: HandoffReport | None = None
    reported_at: float = NEVER
    ended_at: float = NEVER
    cause: str = ""

    def next(self) -> Attempt:
        """Return the attempt that replaces this one."""
        return Attempt(self.number + (TAKEOVER if self.foreign else 1))

    @property
    def local(self) -> bool:
        """Whether this router assigned it to a decode worker alone."""
        return self.prefill is None and self.route is not None and self.decode is not None

    @property
    def assignee(self) -> Worker | None:
        """The worker that gets the Assign."""
        return self.decode if self.prefill is None else self.prefill

    def runs_on(self, worker: Worker) -> bool:
        """True if ``worker`` is one of the attempt's workers."""
        return worker is self.prefill or worker is self.decode

    def cost_on(self, worker: Worker) -> int:
        """Return the tokens of the attempt in the load of ``worker``."""
        on_prefill = self.prefill_cost if worker is self.prefill else 0
        return on_prefill + (self.decode_cost if worker is self.decode else 0)

    @property
    def waits(self) -> bool:
        """True if the server has still to answer an Adopt, or to send missing tokens."""
        return not self.answered or self.pending is not None

    def count_prompt(self, uncached: int, now: float, *, late: bool = False) -> None:
        """Add the prompt to the work of its assignee until its first token."""
        worker = self.assignee
        if worker is None or self.uncached >= 0:
            return
        if not worker.prompts:
            worker.turned = now
        self.uncached, self.late = uncached, late
        if late:
            worker.late += uncached
        else:
            worker.uncached += uncached
        worker.prompts += 1

    def leave_prompt(self) -> None:
        """Remove the prompt from the work of its assignee."""
        worker = self.assignee
        if worker is not None and self.uncached >= 0:
            if self.late:
                worker.late -= self.uncached
            else:
                worker.uncached -= self.uncached
            worker.prompts -= 1
        self.uncached = -1

    def leave(self, key: bytes) -> None:
        """Remove the attempt from the load of its workers, none of which runs it any more."""
        self.leave_prompt()
        prefill, decode = self.prefill, self.decode
        if prefill is not None:
            prefill.requests.pop(key, None)
            prefill.outstanding -= self.prefill_cost
        if decode is not None:
            decode.requests.pop(key, None)
            decode.outstanding -= self.decode_cost
        self.prefill_cost = self.decode_cost = 0
        self.server = None

    def leave_prefill(self, key: bytes) -> None:
        """Remove the attempt from the load of its prefill worker."""
        if self.prefill is not None:
            self.leave_prompt()
            self.prefill.requests.pop(key, None)
            self.prefill.outstanding -= self.prefill_cost
            self.prefill_cost = 0

    def leave_decode(self, key: bytes) -> None:
        """Remove the attempt from the load of its decode worker."""
        if self.decode is not None:
            if self.prefill is None:
                self.leave_prompt()
            self.decode.requests.pop(key, None)
            self.decode.outstanding -= self.decode_cost
            self.decode_cost = 0


@dataclass(slots=True, eq=False)
class Request:
    """One request from its admission until its terminal is acknowledged.

    ``attempt``: the current try, and the last one after the end. ``base``: position of the first
    generated token. ``next``: position of the next token to relay; ``emitted`` has all tokens from
    ``base`` up to it.
    """

    key: bytes
    request_id: str
    context: WireContext
    deadline: float
    attempt: Attempt
    limit: float = field(init=False)  # the deadline, or earlier while its client is disconnected
    own: float = NEVER  # first attempt since this router's start; lower ones are older
    state: State = State.QUEUED
    client: Client | None = None
    identity: bytes = b""  # routing id of its last client connection
    owner: bytes = b""  # CURVE key of that connection, or empty
    base: int = field(init=False)
    next: int = field(init=False)
    max_new: int = field(init=False)
    work: Work = field(init=False)
    embeds: bool = field(init=False)  # its result is a vector, without tokens
    emitted: array[int] = field(init=False)
    logprobs: list[TokenLogProbs | None] | None = field(init=False)
    media: dict[int, bytes] | None = None  # by the position of the token that completes it
    media_bytes: int = 0  # most bytes of all media
    sent: int = -1  # position of the first token not sent to its client yet, or -1
    whole: bool = False  # its client gets all tokens with the terminal

    pool: str | None = None
    pin: tuple[str, str] | None = None  # role and endpoint
    strict: bool = False
    unchecked: bool = False  # no model card was known at its Submit

    began: float = NEVER  # when its Submit or Resume arrived
    gateway: str = ""
    traceparent: str = ""
    past: deque[Attempt] | None = None  # replaced attempts, for its story
    first_at: float = NEVER  # arrival of its first token or embedding
    ended_at: float = NEVER
    moved_to: str = ""  # router that serves it since
    times: WorkerTimes | None = None  # of the worker that ended it
    decoded: bool = False  # that was a decode worker
    started: bool = False  # its first token has arrived, in any attempt
    submitted_at: float = NEVER  # NEVER for a resumed request: it has no TTFT
    token_at: float = NEVER  # arrival of its last token
    terminal: Terminal | None = None

    deaths: int = 0  # deaths of workers that ran it
    doubts: frozenset[int] = frozenset()  # disconnected incarnations, perhaps dead
    blame: float = 0.0  # its shares of the blame for deaths
    early_moves: int = 0  # from suspect workers, since its last progress
    losses: int = 0
    lost_at: int = 0  # ``next`` at the last loss
    decode_tries: int = 0
    avoid: set[int] | None = None  # incarnations that were full in this round
    unreachable: str = ""  # error of the last failed pair, until the handoff
    shunned: tuple[int, ...] = ()  # incarnations of its failed pairs
    hashes: list[bytes] | None = None

    bytes: int = 0  # bytes charged by admission
    queued_tokens: int = 0
    retry_at: float = NEVER
    backoff: float = 0.0  # seconds until the current message is repeated
    patience: float = 0.0  # seconds of back-off after Busy
    slot: int = -1
    due_at: float = NEVER

    def __post_init__(self) -> None:
        """Derive the fields that depend on the context."""
        context = self.context
        self.limit = self.deadline
        self.base = self.next = len(context.tokens.array)
        work = self.work = work_of(context)
        self.max_new, self.embeds = work.tokens, work.vector
        self.emitted = array("i")
        self.logprobs = [] if context.log_probabilities else None

    def step(self, step: Step) -> None:
        """Take a step; raises InternalError for a step that is not in the table."""
        try:
            self.state = TRANSITIONS[self.state, step]  # looked up here: the simulator notes it
        except KeyError:
            raise InternalError(f"request cannot {step.value} when {self.state.value}") from None

    def positions_on(self, worker: Worker) -> int:
        """Return the positions of KV memory of ``worker`` that the whole request needs at most."""
        return kv_positions(self.context, self.work, worker.card.layout.block_size)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workers that the request needs."""
        return roles_for(self.context.task)

    @property
    def done(self) -> bool:
        """True if the terminal is known."""
        return self.state is _ENDED or self.state is _FORGOTTEN

    @property
    def running(self) -> bool:
        """True if a worker has accepted the current attempt."""
        return self.state in RUNNING

    @property
    def remaining(self) -> int:
        """Maximum number of tokens that the request may still generate."""
        return max(0, self.max_new - len(self.emitted))

    @property
    def rows_left(self) -> int:
        """Rows of the steps of its file that are not known to be computed; 0 without a file.

        The first token comes with the prompt, without a step.
        """
        work = self.work
        return min(self.remaining, work.tokens - 1) * work.rows if work.file else 0

    @property
    def progressed(self) -> bool:
        """True if the request is well past its last loss, so that position is harmless."""
        return self.next > self.lost_at + HARMLESS_TOKENS

    @property
    def suspect(self) -> bool:
        """True if this request may have crashed its workers; suspects never share a worker."""
        return self.deaths + len(self.doubts) >= SUSPECT_DEATHS and not self.progressed

    def keep(self, run: TokenRun) -> None:
        """Store a token run that starts at ``next``."""
        tokens = run.tokens
        if len(tokens) == 1:
            self.emitted.append(tokens[0])  # a third of the time of extend
            self.next += 1
        else:
            self.emitted.extend(tokens)
            self.next += len(tokens)
        if self.logprobs is not None:
            self.logprobs.extend(run.logprobs or [None] * len(tokens))
        if run.media is not None:
            self.media = self.media or {}
            self.media[self.next - 1] = run.media

    def runs_from(self, position: int) -> list[TokenRun]:
        """Return all stored tokens from ``position`` on: one run, or more if there are media.

        A run ends at the token that completes its media.
        """
        start = max(0, position - self.base)
        tokens = self.emitted[start:].tolist()
        if not tokens:
            return []
        logprobs = self._logprobs_from(start)
        number, base = self.attempt.number, self.base + start
        media = {at - base: found for at, found in (self.media or {}).items() if at >= base}
        runs, first = [], 0
        for last in sorted({*media, len(tokens) - 1}):
            part = None if logprobs is None else logprobs[first : last + 1]
            run = TokenRun(
                self.key, number, base + first, tokens[first : last + 1], part, media.get(last)
            )
            runs.append(run)
            first = last + 1
        return runs

    def _logprobs_from(self, start: int) -> list[TokenLogProbs] | None:
        if self.logprobs is None:
            return None
        known = [entry for entry in self.logprobs[start:] if entry is not None]
        # Tokens from a Resume have no log probabilities, and that client does not need them.
        return known if len(known) == len(self.logprobs) - start else None

    def check_integrity(self) -> None:
        """Raise InternalError if the attempt does not match :data:`HOLDINGS`."""
        attempt, holding = self.attempt, HOLDINGS[self.state]
        server = attempt.server.role if attempt.server is not None else ""
        held = Holding(
            attempt.prefill is not None,
            attempt.decode is not None,
            server,
            load=bool(attempt.prefill_cost or attempt.decode_cost),
            search=attempt.search is not None,
        )
        wrong = [*holding.wrong(held)]  # a copy: the list is cached
        if self.state is State.ASSIGNED and attempt.assignee is None:
            wrong.append("assignee")
        if wrong or (attempt.server is not None and not attempt.runs_on(attempt.server)):
            text = f"{self.request_id} is {self.state.value}, but its attempt holds {held}"
            raise InternalError(f"{text}: wrong {', '.join(wrong) or 'server'}")
        if self.next != self.base + len(self.emitted):
            raise InternalError(f"{self.request_id} has miscounted its tokens")
        if self.slot < 0:
            raise InternalError(f"{self.request_id} has no timer")


def context_bytes(context: WireContext, work: Work | None = None) -> int:
    """Return an upper bound, in bytes, of a request's memory until its end.

    ``work``: the context's work, if it is known.
    """
    work = work or work_of(context)
    likely = context.log_probabilities
    per_token = 4 + (128 + 12 * likely if likely > 0 else 0)
    total = RECORD_BYTES + context.tokens.array.nbytes + per_token * work.tokens
    total += work.result_bytes
    if context.log_probabilities_echo:
        total += records_bytes(len(context.tokens.array), max(0, likely))
    total += 40 * len(context.eos_token_ids)
    if type(context) is not WireContext and context.packed is not None:
        body, arrays = context.packed
        total += _FIELDS_FACTOR * len(body) + sum(map(len, arrays))
    for sequence in context.eos_sequences:
        total += 96 + 40 * len(sequence)
    if context.json_schema is not None:
        total += 4 * len(context.json_schema)
    for text in context.sampling.stop or ():
        total += 49 + 4 * len(text)
    return total + _BIAS_BYTES * len(context.sampling.logit_bias or ())
