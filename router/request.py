"""One request as the router sees it, and every state it may take.

Invariant: a request ends once; what may follow what is :data:`TRANSITIONS`, and a step that
is not in the table raises. The record knows no socket and no clock.

::

          submit                   resume, unknown here
            v                              v
          QUEUED <------ requeue ----- RECOVERING
           |  ^                            |
    assign |  | requeue                    | adopt
           v  |                            v
         ASSIGNED -- accept, tokens --> RUNNING -- requeue --> QUEUED

    any of these -- end --> ENDED -- acknowledged, expired --> FORGOTTEN
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

from ..proto.errors import InternalError
from ..proto.limits import MAX_EMBEDDING_SIZE
from ..proto.messages import Terminal, TokenRun
from ..proto.outputs import TokenLogProbs
from ..proto.wire import WireContext
from .registry import roles_for

if TYPE_CHECKING:
    from .clients import Client
    from .registry import Worker
    from .search import Sought


class State(Enum):
    """Where a request stands."""

    RECOVERING = "recovering"  # resumed after a restart: workers may still report it
    QUEUED = "queued"  # waits for workers
    ASSIGNED = "assigned"  # sent to a prefill worker that has not answered yet
    RUNNING = "running"  # a worker has it
    ENDED = "ended"  # its terminal is known and kept until acknowledged
    FORGOTTEN = "forgotten"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow


class Step(Enum):
    """What moves a request on."""

    ASSIGN = "assign"
    ACCEPT = "accept"
    ADOPT = "adopt"
    REQUEUE = "requeue"
    END = "end"
    FORGET = "forget"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.RECOVERING, Step.ADOPT): State.RUNNING,
    (State.RECOVERING, Step.REQUEUE): State.QUEUED,
    (State.RECOVERING, Step.END): State.ENDED,
    (State.QUEUED, Step.ASSIGN): State.ASSIGNED,
    (State.QUEUED, Step.END): State.ENDED,
    (State.ASSIGNED, Step.ACCEPT): State.RUNNING,
    (State.ASSIGNED, Step.REQUEUE): State.QUEUED,
    (State.ASSIGNED, Step.END): State.ENDED,
    (State.RUNNING, Step.REQUEUE): State.QUEUED,
    (State.RUNNING, Step.END): State.ENDED,
    (State.ENDED, Step.FORGET): State.FORGOTTEN,
}
"""Every legal step."""

RECORD_BYTES = 2048
"""Memory of a record without its arrays, rounded up."""
NEVER = float("inf")
SUSPECT_DEATHS = 2
HARMLESS_TOKENS = 8
"""More tokens than are on their way from a worker when it dies."""
_QUEUED, _ENDED, _FORGOTTEN = State.QUEUED, State.ENDED, State.FORGOTTEN


class Request:
    """One request from its admission until its terminal is acknowledged.

    ``base``: position of the first generated token. ``next``: position of the next token to
    pass on; ``emitted`` holds all below it. ``server``: the worker it runs on as far as is
    known; ``handed``: the decode worker was heard, so prefill is no longer needed.
    """

    __slots__ = (
        "attempt", "avoid", "backoff", "base", "blame", "bytes", "client", "context",
        "deadline", "deaths", "decode", "decode_cost", "decode_tries", "doubts", "due_at", "embeds",
        "emitted", "followed", "foreign", "grace_until", "handed", "hashes", "heard", "identity",
        "key", "limit", "logprobs", "losses", "lost_at", "max_new", "next", "own", "owner",
        "patience", "pending", "pin", "pool", "prefill", "prefill_cost", "queued_tokens",
        "request_id", "retry_at", "sent", "server", "shunned", "slot", "sought", "started", "state",
        "strict", "submitted_at", "terminal", "token_at", "unchecked", "unheard", "unreachable",
    )  # fmt: skip

    def __init__(
        self, key: bytes, request_id: str, context: WireContext, deadline: float, attempt: int
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.context = context
        self.deadline = deadline
        self.limit = deadline  # earlier while its client is away
        self.attempt = attempt
        self.own = NEVER  # first attempt of this router's life; others are an earlier life's
        self.foreign = False  # its attempts were counted elsewhere, perhaps are still
        self.sought: Sought | None = None  # while workers are asked who has it
        self.followed = False  # taken over from a prefill worker, and where it goes is not known
        self.state = _QUEUED
        self.client: Client | None = None
        self.identity = b""  # the connection it was served to last
        self.owner = b""  # the key of that connection; empty where there are no keys
        self.base = self.next = len(context.tokens.array)
        self.max_new = new_tokens(context)
        self.embeds = context.task == "embed"  # a vector is asked for instead of text
        self.emitted = array("i")
        self.logprobs: list[TokenLogProbs | None] | None = [] if context.log_probabilities else None
        self.sent = -1  # first token a slow client was not given, -1 when it has all

        self.pool: str | None = None
        self.pin: tuple[str, str] | None = None  # role and endpoint the client named
        self.strict = False
        self.unchecked = False  # no worker had told the model when it was submitted

        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.server: Worker | None = None
        self.handed = False
        self.started = False  # its first token was seen, so no prompt is waiting any more
        self.heard = True  # since the last Adopt
        self.unheard = 0  # Adopts without an answer
        self.prefill_cost = self.decode_cost = 0
        self.submitted_at = NEVER  # or resumed, so nobody waits for a first token
        self.token_at = NEVER  # when its last token came

        self.terminal: Terminal | None = None
        self.pending: Terminal | None = None  # waits for tokens that are missing

        self.deaths = 0  # workers that died with it
        self.doubts: frozenset[int] = frozenset()  # incarnations that hung up, perhaps dead of it
        self.blame = 0.0  # each death shared among the most suspicious requests there
        self.losses = 0
        self.lost_at = 0  # what was next when it was lost the last time
        self.decode_tries = 0
        self.avoid: set[int] | None = None  # incarnations not to ask again in this round
        self.unreachable = ""  # which pair failed it last, until it is handed over
        self.shunned: tuple[int, ...] = ()  # the incarnations of all pairs that failed it
        self.hashes: list[bytes] | None = None

        self.bytes = 0  # what admission charged
        self.queued_tokens = 0
        self.grace_until = NEVER
        self.retry_at = NEVER
        self.backoff = 0.0  # of what is repeated now
        self.patience = 0.0  # of refusals for want of room
        self.slot = -1
        self.due_at = NEVER

    def step(self, step: Step) -> None:
        """Move on; a step the table does not know is our own bug and raises."""
        try:
            self.state = TRANSITIONS[self.state, step]
        except KeyError:
            raise InternalError(f"request cannot {step.value} when {self.state.value}") from None

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workers it needs."""
        return roles_for(self.context.task)

    @property
    def done(self) -> bool:
        """Whether its terminal is known."""
        return self.state is _ENDED or self.state is _FORGOTTEN

    @property
    def remaining(self) -> int:
        """Most tokens it may still generate."""
        return max(0, self.max_new - len(self.emitted))

    @property
    def progressed(self) -> bool:
        """Whether it got well beyond where it was lost, so that place is harmless."""
        return self.next > self.lost_at + HARMLESS_TOKENS

    @property
    def suspect(self) -> bool:
        """Whether it may be what killed its workers: it runs apart from others like it."""
        return self.deaths + len(self.doubts) >= SUSPECT_DEATHS and not self.progressed

    def keep(self, run: TokenRun) -> None:
        """Remember a run that starts at ``next``."""
        tokens = run.tokens
        self.emitted.extend(tokens)
        self.next += len(tokens)
        if self.logprobs is not None:
            self.logprobs.extend(run.logprobs or [None] * len(tokens))

    def run_from(self, position: int) -> TokenRun | None:
        """All kept tokens from ``position`` on as one run, or None when there are none."""
        start = max(0, position - self.base)
        tokens = self.emitted[start:].tolist()
        if not tokens:
            return None
        return TokenRun(
            self.key, self.attempt, self.base + start, tokens, self._logprobs_from(start)
        )

    def _logprobs_from(self, start: int) -> list[TokenLogProbs] | None:
        if self.logprobs is None:
            return None
        known = [entry for entry in self.logprobs[start:] if entry is not None]
        # Tokens a resuming client brought itself have none, and it does not ask for them.
        return known if len(known) == len(self.logprobs) - start else None


def new_tokens(context: WireContext) -> int:
    """Most tokens a context may generate."""
    room = context.max_length - len(context.tokens.array)
    asked = context.sampling.max_new_tokens
    if asked is not None and asked < room:
        room = asked
    return room if room > 0 else 0


def context_bytes(context: WireContext) -> int:
    """Upper bound of the memory a request may take until its end, in bytes."""
    likely = context.log_probabilities
    per_token = 4 + (128 + 12 * likely if likely > 0 else 0)
    total = RECORD_BYTES + context.tokens.array.nbytes + per_token * new_tokens(context)
    total += 40 * len(context.eos_token_ids)
    if context.task == "embed":
        total += 4 * MAX_EMBEDDING_SIZE
    for sequence in context.eos_sequences:
        total += 96 + 40 * len(sequence)
    if context.json_schema is not None:
        total += 4 * len(context.json_schema)
    for text in context.sampling.stop or ():
        total += 49 + 4 * len(text)
    return total
