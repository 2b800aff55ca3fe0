"""The router's record of one request, and its state machine.

Invariant: a request ends once. :data:`TRANSITIONS` lists all legal steps; any other step raises.

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

from ..proto.contexts.outputs import TokenLogProbs
from ..proto.errors import InternalError
from ..proto.limits import MAX_EMBEDDING_SIZE
from ..proto.wire.messages import Terminal, TokenRun
from ..proto.wire.wire_context import WireContext
from .workers import roles_for

if TYPE_CHECKING:
    from .clients import Client
    from .takeover import Sought
    from .workers import Worker


class State(Enum):
    """State of a request."""

    RECOVERING = "recovering"  # resumed without a record here: a worker may hold it
    QUEUED = "queued"  # waits for workers
    ASSIGNED = "assigned"  # Assign sent to a prefill worker, not answered yet
    RUNNING = "running"  # a worker has accepted it
    ENDED = "ended"  # its terminal is known and kept until acknowledged
    FORGOTTEN = "forgotten"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow


class Step(Enum):
    """Step from one state to the next."""

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
"""More tokens than can be in transit when their worker dies."""
_QUEUED, _ENDED, _FORGOTTEN = State.QUEUED, State.ENDED, State.FORGOTTEN


class Request:
    """One request from its admission until its terminal is acknowledged.

    ``base``: position of the first generated token. ``next``: position of the next token to
    relay; ``emitted`` has all tokens from ``base`` up to it. ``server``: the worker that runs the
    request, as far as known. ``handed``: the handoff is finished, so the request no longer needs
    its prefill worker.
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
        self.limit = deadline  # earlier while its client is disconnected
        self.attempt = attempt
        self.own = NEVER  # first attempt since this router's start; lower ones are older
        self.foreign = False  # another router counts its attempts, or did
        self.sought: Sought | None = None  # the running search for its worker
        self.followed = False  # adopted from a prefill worker; decode worker unknown
        self.state = _QUEUED
        self.client: Client | None = None
        self.identity = b""  # routing id of its last client connection
        self.owner = b""  # CURVE key of that connection, or empty
        self.base = self.next = len(context.tokens.array)
        self.max_new = new_tokens(context)
        self.embeds = context.task == "embed"  # its result is an embedding, without tokens
        self.emitted = array("i")
        self.logprobs: list[TokenLogProbs | None] | None = [] if context.log_probabilities else None
        self.sent = -1  # position of the first token not sent to a slow client, or -1

        self.pool: str | None = None
        self.pin: tuple[str, str] | None = None  # role and endpoint
        self.strict = False
        self.unchecked = False  # no model card was known at its Submit

        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.server: Worker | None = None
        self.handed = False
        self.started = False  # its first token has arrived
        self.heard = True  # the worker has answered the last Adopt
        self.unheard = 0  # number of unanswered Adopts
        self.prefill_cost = self.decode_cost = 0
        self.submitted_at = NEVER  # NEVER for a resumed request: it has no TTFT
        self.token_at = NEVER  # arrival of its last token

        self.terminal: Terminal | None = None
        self.pending: Terminal | None = None  # a terminal that waits for missing tokens

        self.deaths = 0  # deaths of workers that ran it
        self.doubts: frozenset[int] = frozenset()  # disconnected incarnations, perhaps dead
        self.blame = 0.0  # its shares of the blame for deaths
        self.losses = 0
        self.lost_at = 0  # ``next`` at the last loss
        self.decode_tries = 0
        self.avoid: set[int] | None = None  # incarnations that were full in this round
        self.unreachable = ""  # error of the last failed pair, until the handoff
        self.shunned: tuple[int, ...] = ()  # incarnations of its failed pairs
        self.hashes: list[bytes] | None = None

        self.bytes = 0  # bytes charged by admission
        self.queued_tokens = 0
        self.grace_until = NEVER
        self.retry_at = NEVER
        self.backoff = 0.0  # seconds until the current message is repeated
        self.patience = 0.0  # seconds of back-off after Busy
        self.slot = -1
        self.due_at = NEVER

    def step(self, step: Step) -> None:
        """Take a step; raises InternalError for a step that is not in the table."""
        try:
            self.state = TRANSITIONS[self.state, step]
        except KeyError:
            raise InternalError(f"request cannot {step.value} when {self.state.value}") from None

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the workers that the request needs."""
        return roles_for(self.context.task)

    @property
    def done(self) -> bool:
        """True if the terminal is known."""
        return self.state is _ENDED or self.state is _FORGOTTEN

    @property
    def remaining(self) -> int:
        """Maximum number of tokens that the request may still generate."""
        return max(0, self.max_new - len(self.emitted))

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
        self.emitted.extend(tokens)
        self.next += len(tokens)
        if self.logprobs is not None:
            self.logprobs.extend(run.logprobs or [None] * len(tokens))

    def run_from(self, position: int) -> TokenRun | None:
        """Return all stored tokens from ``position`` on as one run, or None without tokens."""
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
        # Tokens from a Resume have no log probabilities, and that client does not need them.
        return known if len(known) == len(self.logprobs) - start else None


def new_tokens(context: WireContext) -> int:
    """Return the maximum number of tokens that a context may generate."""
    room = context.max_length - len(context.tokens.array)
    asked = context.sampling.max_new_tokens
    if asked is not None and asked < room:
        room = asked
    return room if room > 0 else 0


def context_bytes(context: WireContext) -> int:
    """Return an upper bound, in bytes, of a request's memory until its end."""
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
