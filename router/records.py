"""The records of a router: requests, their attempts, workers and clients. Plain data.

A :class:`Request` is what a client asked. An :class:`Attempt` is one try at it: the workers, and
the messages that still need an answer. A retry replaces the attempt, so nothing of the failed try
is left. A request keeps what must outlive an attempt: its tokens, its limits, and its losses.
A :class:`Worker` is one incarnation of a worker, a :class:`Client` one connection of a client.

The records name each other, so they are in one module; their states and the legal changes are in
:mod:`.states`. The tables (:mod:`.request_table`, :mod:`.clients`, :mod:`.registry`) keep the
records; :mod:`.lifecycle` and the modules beside it change them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import msgspec

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import InternalError
from baton.proto.layout import ModelCard
from baton.proto.requests import computes_prompts
from baton.proto.wire.messages import (
    Begun,
    ExtensionCounts,
    HandoffReport,
    Hello,
    RequestState,
    Terminal,
    TokenRun,
    WorkerLoad,
    WorkerTimes,
)
from baton.proto.wire.proofs import Holder
from baton.proto.wire.wire_context import WireContext
from baton.proto.work import Work, kv_positions, work_of
from baton.runtime.metrics.latency import Latency

from . import states
from .states import LIVE, RUNNING, State, Step, WorkerState

NEVER = float("inf")
CLIENT_GONE = "client gone"
"""Why a request was aborted whose client disconnected."""
ENDED_KEEP_S = 5.0
"""Minimum seconds for which a terminal is kept, also after the deadline."""
SUSPECT_DEATHS = 2
HARMLESS_TOKENS = 8
"""More tokens than can be in transit when their worker dies."""
TAKEOVER = 1024
"""Added to the attempt number when this router replays a request of another router.

The other router may still raise its own attempt numbers, and the two ranges must not overlap."""
_ENDED, _FORGOTTEN = State.ENDED, State.FORGOTTEN  # before Python 3.12, member access is slow

# --------------------------------------------------------------------------- connections


@dataclass(slots=True, frozen=True)
class Caller:
    """The sender of a query: the key of its connection, and whether it is an operator."""

    key: bytes = b""
    operator: bool = True


ANYBODY = Caller()
"""Sender at a socket without keys: an operator, since only this machine's user can connect."""


@dataclass(slots=True, frozen=True)
class WorkerCaller:
    """What a worker's connection proves: its key, and whether the key list spells out its name."""

    key: bytes = b""
    vouched: bool = False


NO_KEY = WorkerCaller()
"""A worker at a socket without keys."""


@dataclass(slots=True, frozen=True)
class Authentication:
    """What connections prove.

    ``client``: maps a client's routing id to its key and rights. ``worker``: maps a worker's
    routing id and name to what its connection proves.
    """

    client: Callable[[bytes], Caller] = lambda _identity: ANYBODY
    worker: Callable[[bytes, str], WorkerCaller] = lambda _identity, _name: NO_KEY


NO_KEYS = Authentication()
"""Sockets without keys."""


@dataclass(slots=True, eq=False)
class Client:
    """One connection of a client and its requests.

    ``runs``, ``begun``: for the Tokens message that is being built. ``behind``: it reads too
    slowly.
    """

    identity: bytes
    requests: dict[bytes, Request] = field(default_factory=dict)
    runs: list[TokenRun] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    behind: bool = False


# --------------------------------------------------------------------------- workers


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker, made from its Hello."""

    identity: bytes
    hello: InitVar[Hello]
    now: InitVar[float]
    caller: InitVar[WorkerCaller] = NO_KEY

    id: str = field(init=False)
    role: str = field(init=False)
    incarnation: int = field(init=False)
    pid: int = field(init=False)
    endpoint: str = field(init=False)
    pool: str = field(init=False)
    card: ModelCard = field(init=False)
    max_batch: int = field(init=False)
    device: str = field(init=False)
    seal: bytes = field(init=False)
    shared_weights: int = field(init=False)
    labels: dict[str, str] = field(init=False)
    kv_events: list[str] = field(init=False)
    holder: Holder = field(init=False)  # its incarnation and key
    vouched: bool = field(init=False)  # the key list names it, so no other key may use its name
    computes_prompts: bool = field(init=False)  # a decode worker that needs no prefill worker

    state: WorkerState = WorkerState.JOINING
    reason: str = ""  # of its state
    connected: bool = True  # its connection is open
    hung_up: bool = False  # the process closed the connection, so it has probably ended
    draining: bool = field(init=False)  # it takes no new requests, also after it was suspect
    drain_at: float = NEVER  # when to repeat an operator's Drain
    finished: bool = False  # it was drained and has no requests left
    seen_at: float = field(init=False)
    progress_at: float = field(init=False)
    progress: int = -1
    busy: bool = False

    requests: dict[bytes, Request] = field(default_factory=dict)  # whose attempt needs this worker
    reported: dict[bytes, RequestState] = field(init=False)  # requests of its last Hello
    aborts: dict[bytes, tuple[int, float, float]] = field(default_factory=dict)
    """Unconfirmed Aborts by request: attempt, time to repeat, time to give up."""
    doubted: list[Request] = field(default_factory=list)
    """Requests that moved when its connection closed; if it is declared dead, they count that."""

    load: WorkerLoad = field(init=False)
    outstanding: int = 0  # unfinished tokens assigned by this router
    others: int = 0  # tokens of other routers, from the last heartbeat
    others_requests: int = 0
    uncached: int = 0  # tokens of prompts to be computed, of this router in mode adaptive
    late: int = 0  # the same of late prompts
    prompts: int = 0  # number of both
    turned: float = field(init=False)  # when the last of these prompts left
    recent: float = 0.0  # recently assigned tokens, as of the policy's placement ``recent_at``
    recent_at: int = 0
    step_s: float = 0.0
    stream_step_s: float = 0.0  # its last reported step without prompt tokens
    added_s: float = -1.0  # by which a prompt token makes steps of streams longer, -1: not measured
    local_s: float = 0.0  # seconds per prompt token of steps with streams
    latency: Latency = field(default_factory=Latency)  # TTFT of a prefill, ITL of a decode worker
    dropped: dict[str, int] = field(default_factory=dict)  # messages that it dropped, by reason
    extensions: list[ExtensionCounts] = field(default_factory=list)  # calls of users' classes in it

    def __post_init__(self, hello: Hello, now: float, caller: WorkerCaller) -> None:
        """Take over what the Hello states and what the connection proves."""
        self.id, self.role, self.pid = hello.worker, hello.role, hello.pid
        self.incarnation = hello.incarnation
        self.endpoint, self.pool = hello.endpoint, hello.pool
        self.card, self.max_batch, self.device = hello.model, hello.max_batch, hello.device
        self.seal, self.shared_weights = hello.seal, hello.shared_weights
        self.labels, self.kv_events = hello.labels, hello.kv_events
        self.load, self.draining = hello.load, hello.draining
        self.reported = {held.request: held for held in hello.requests}
        self.holder, self.vouched = Holder(hello.incarnation, caller.key), caller.vouched
        self.computes_prompts = self.role == "decode" and computes_prompts(self.card)
        self.seen_at = self.progress_at = self.turned = now

    def has(self, features: Sequence[str]) -> bool:
        """Return whether the worker reads these parameters of requests."""
        return all(feature in self.card.features for feature in features)

    def enter(self, state: WorkerState, reason: str = "") -> None:
        """Change state; raises InternalError for a change that is not in the table."""
        if state not in states.WORKER_TRANSITIONS[self.state]:
            raise InternalError(f"worker cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.reason = reason

    @property
    def key(self) -> bytes:
        """CURVE key (z85) with which the worker registered; empty without keys."""
        return self.holder.key

    @property
    def burden(self) -> int:
        """Outstanding tokens of all routers."""
        return self.outstanding + self.others

    @property
    def live(self) -> bool:
        """True if the worker is registered: it may hold requests and receive messages."""
        return self.state in LIVE


def roles_for(task: str) -> tuple[str, ...]:
    """Return the roles that a task needs; embeddings need no decode worker."""
    return ("prefill",) if task == "embed" else ("prefill", "decode")


# --------------------------------------------------------------------------- attempts

Margin = tuple[float, str, float, int]
"""Cost of the chosen worker, id and cost of the next best one, and the number of candidates."""


class Chosen(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What else than the costs of a policy has chosen a worker.

    ``by``: what chose it. ``candidates``: number of workers to choose from. ``instead_of``: a
    user's class that should have chosen; ``because``: why it did not. ``margin``: of ``by``.
    """

    by: str
    candidates: int
    instead_of: str = ""
    because: str = ""
    margin: Margin | None = None


Preference = Margin | Chosen | None
"""Why a worker was chosen; None without an alternative or cost."""
Route = tuple[str, int, int, Preference, int, int, Preference, str]
"""Why a pair was chosen: the role of the pinned worker, or empty. Then of the prefill worker, and
again of the decode worker (zeros without one): its load in tokens before the request, the tokens of
the prompt that it has probably cached, and the margin by which it was preferred. Last, why the
request takes its way: over a prefill worker, which needs no reason, or local."""


@dataclass(slots=True)
class OpenSearch:
    """State of one search: its end, the workers without an answer, and the round."""

    until: float
    waiting: dict[int, Worker] = field(default_factory=dict)  # by incarnation
    second_round: bool = False


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
        if self.uncached < 0:
            return
        worker = self.assignee
        if worker is not None:
            if self.late:
                worker.late -= self.uncached
            else:
                worker.uncached -= self.uncached
            worker.prompts -= 1
        self.uncached = -1

    def leave(self, key: bytes) -> None:
        """Remove the attempt from the load of its workers, none of which runs it any more."""
        if self.uncached >= 0:  # else two calls for every request
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
        prefill = self.prefill
        if prefill is not None:
            if self.uncached >= 0:
                self.leave_prompt()
            prefill.requests.pop(key, None)
            prefill.outstanding -= self.prefill_cost
            self.prefill_cost = 0

    def leave_decode(self, key: bytes) -> None:
        """Remove the attempt from the load of its decode worker."""
        if self.decode is not None:
            if self.prefill is None:
                self.leave_prompt()
            self.decode.requests.pop(key, None)
            self.decode.outstanding -= self.decode_cost
            self.decode_cost = 0


# --------------------------------------------------------------------------- requests


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
    slo_ttft: float = 0.0  # its own limits in seconds; 0: the cluster's
    slo_itl: float = 0.0
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
            self.state = states.NEXT[self.state][step]  # looked up there: the simulator notes it
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

    def start_over(self) -> None:
        """Clear deaths, doubts and blame if the request has progressed since its last loss."""
        if self.progressed:
            self.losses = self.deaths = self.early_moves = 0
            self.doubts = frozenset()
            self.blame = 0.0
        self.lost_at = self.next

    def keep(self, run: TokenRun) -> None:
        """Store a token run that starts at ``next``.

        The tokens come last, so that after an error none is without what belongs to it.
        """
        tokens = run.tokens
        if self.logprobs is not None:
            self.logprobs.extend(run.logprobs or [None] * len(tokens))
        if run.media is not None:
            self.media = self.media or {}
            self.media[self.next + len(tokens) - 1] = run.media
        if len(tokens) == 1:
            self.emitted.append(tokens[0])  # a third of the time of extend
            self.next += 1
        else:
            self.emitted.extend(tokens)
            self.next += len(tokens)
