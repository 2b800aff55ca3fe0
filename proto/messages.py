"""Every message on every socket, one tagged union per direction.

A ZeroMQ message is one *envelope*: a first frame of ``b"BT"``, one version byte and a
msgpack array of these structs, then one frame per large array of the contexts inside
(see :mod:`.codec`). Many messages for one peer share an envelope, so the cost of a hop
is paid per step and not per token.

Identities in the structs:

* ``request``: 16 bytes, BLAKE2b of the client's identity and the request id
  (:func:`.ids.request_key`).
* ``attempt``: counts the tries of one request, from 1; a higher one supersedes.
* ``incarnation``: random 64 bit per process start; a restarted worker is another worker.
* ``grant``: :class:`GrantRef`, the decode worker's promise of blocks.

All durations are seconds; ``deadline`` fields are *remaining* seconds, since clocks differ.
``position`` is the absolute index of a token in its context (the prompt starts at 0).
Field comments say who needs the field.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .equality import same
from .layout import ModelCard
from .limits import (
    MAX_ATTEMPT,
    MAX_CONTEXT_TOKENS,
    MAX_COUNT,
    MAX_DROP_REASONS,
    MAX_DURATION_S,
    MAX_JSON_SCHEMA_CHARS,
    MAX_KEY_BYTES,
    MAX_LIST_ITEMS,
    MAX_NAME_CHARS,
    MAX_TEXT_CHARS,
)
from .outputs import TokenLogProbs
from .wire import AnyArray, AnyWireContext, EosTokenIds, TokenId

# A decoder refuses a message with a value outside these, so no arithmetic behind it overflows.
Word = Annotated[int, Meta(ge=0)]
"""Unsigned 64 bit: identities and checksums."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""How many of something there are, or where one is: tokens, blocks, frames, bytes."""
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
"""A duration; never NaN."""
Total = Annotated[float, Meta(ge=0.0)]
"""Seconds of work since start; never NaN."""
Remaining = Annotated[float, Meta(ge=-MAX_DURATION_S, le=MAX_DURATION_S)]
"""Seconds until a deadline, negative behind it; never NaN."""
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
"""An id, an endpoint, a pool, a code."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""What people read."""
Binary = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
"""A key, a secret or a hash."""
Binaries = Annotated[list[Binary], Meta(max_length=MAX_LIST_ITEMS)]
Names = Annotated[list[Name], Meta(max_length=MAX_LIST_ITEMS)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_CONTEXT_TOKENS)]
LogProbs = Annotated[list[TokenLogProbs], Meta(max_length=MAX_CONTEXT_TOKENS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all messages: a msgpack map with a ``type`` key; defaults do not travel."""


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one grant of one decode worker's life; a stale one never matches again."""

    incarnation: Word
    slot: Word
    generation: Word


# --------------------------------------------------------------------------- tokens, both ways


class TokenRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one request; forwarded by the router as it came."""

    request: Binary
    attempt: Attempt
    position: Count  # of tokens[0]; router and client pass only position == next
    tokens: TokenIds
    logprobs: LogProbs | None = None


class Tokens(Message, frozen=True, kw_only=True):
    """Worker to router and router to client: the tokens of one step, all requests of the peer."""

    runs: Annotated[list[TokenRun], Meta(max_length=MAX_LIST_ITEMS)]


class Terminal(Message, frozen=True, kw_only=True, eq=False):
    """Worker to router and router to client: the one end of a request.

    ``status`` is a GenerationStatus value for a finished request and ``None`` for a failed
    or refused one, which has ``code`` and ``message`` instead.
    """

    request: Binary
    attempt: Attempt = 0
    position: Count = 0  # the context's length at its end: tokens below it must have arrived
    status: Name | None = None
    code: Name | None = None
    message: Text = ""
    retry_after: Seconds | None = None
    request_id: Name = ""  # client: finds a refused request whose key it never learned
    cached_tokens: Count = 0
    prefill: Name = ""  # client: which workers served it
    decode: Name = ""
    embedding: AnyArray | None = None  # float32 [dim], of a request to embed

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, n), getattr(other, n)) for n in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]  # holds an array


# --------------------------------------------------------------------------- client -> router


class Submit(Message, frozen=True, kw_only=True):
    """Start a request; sent again with the same content it re-attaches."""

    request_id: Name
    context: AnyWireContext
    deadline: float | None = None  # the client's word: the router answers what is wrong with it
    pool: Name | None = None
    pin: Name = "prefer"  # "strict": a replay may not move the request off target_endpoint
    fallback: bool = False  # choose another worker when target_endpoint cannot take it


class Resume(Message, frozen=True, kw_only=True):
    """Continue a stream after the connection or the router was lost."""

    request_id: Name
    request: Binary
    secret: Binary
    position: Count  # next token position the client waits for
    attempt: Attempt  # highest attempt the client saw
    context: AnyWireContext  # a router that lost its memory starts again from this ...
    emitted: TokenIds = []  # ... and these tokens, already with the client
    deadline: float | None = None
    pool: Name | None = None
    pin: Name = "prefer"
    fallback: bool = False


class Cancel(Message, frozen=True, kw_only=True):
    """End a request; answered by its Terminal."""

    request_id: Name = ""
    request: Binary = b""


class FinalAck(Message, frozen=True, kw_only=True):
    """The client has these terminals; the router may forget them."""

    requests: Binaries


class Describe(Message, frozen=True, kw_only=True):
    """Ask for the model's card and, by name, its text files."""

    files: Names = []


class Status(Message, frozen=True, kw_only=True):
    """Ask for the cluster's state."""

    handoffs: Count = 16  # how many recent handoffs to list


class Drain(Message, frozen=True, kw_only=True):
    """Client (operator) to router, router to worker: take no new work, finish what runs."""

    worker: Name = ""  # worker id; for the router's own use empty


class Ping(Message, frozen=True, kw_only=True):
    """Any direction: are you there; carries nothing."""

    nonce: Word = 0


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping."""

    nonce: Word = 0


ClientToRouter = Submit | Resume | Cancel | FinalAck | Describe | Status | Drain | Ping | Pong


# --------------------------------------------------------------------------- router -> client


class Submitted(Message, frozen=True, kw_only=True):
    """The request was admitted; ``secret`` opens a later Resume."""

    request_id: Name
    request: Binary
    secret: Binary
    attempt: Attempt = 1


class Described(Message, frozen=True, kw_only=True):
    """The model's card, generation defaults and the text files asked for."""

    model: ModelCard | None = None
    folder: Text = ""
    files: dict[str, bytes] = {}
    available: Names = []


class StatusReport(Message, frozen=True, kw_only=True):
    """The object ``baton status --json`` prints, as JSON text."""

    report: bytes


class Moved(Message, frozen=True, kw_only=True):
    """Another router serves the request now: worker to the old router, which tells its client."""

    request: Binary
    router: Name = ""


class Drained(Message, frozen=True, kw_only=True):
    """Worker to router: nothing left in flight. Router to client: the drain was started or done."""

    worker: Name
    code: Name | None = None
    message: Text = ""


class Rejected(Message, frozen=True, kw_only=True):
    """A message could not be understood or is not allowed; the connection stays usable."""

    code: Name
    message: Text
    request_id: Name = ""


RouterToClient = (
    Submitted
    | Tokens
    | Terminal
    | Described
    | StatusReport
    | Moved
    | Drained
    | Rejected
    | Ping
    | Pong
)


# --------------------------------------------------------------------------- worker -> router


class RequestState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request a worker still holds, as listed in Hello."""

    request: Binary
    attempt: Attempt
    position: Count  # next token position the worker will produce
    prompt_length: Count
    done: bool = False
    router: Name = ""  # the router it belongs to; others leave it alone


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What policies and ``baton status`` need to know of a worker."""

    kv_blocks_total: Count = 0
    kv_blocks_used: Count = 0  # owned by requests; prefix cache not counted
    kv_blocks_cached: Count = 0
    requests_running: Count = 0
    requests_waiting: Count = 0
    tokens_waiting: Count = 0  # prompt tokens not yet computed
    prefix_hit_tokens: Count = 0
    prompt_tokens: Count = 0  # computed since start
    generated_tokens: Count = 0
    preemptions: Count = 0
    compute_seconds: Total = 0.0  # spent in steps of the engine


class Hello(Message, frozen=True, kw_only=True):
    """First message of a worker on every (re)connection."""

    version: Count
    worker: Name
    role: Name  # "prefill" | "decode"
    incarnation: Word
    pid: Count
    endpoint: Name  # the control endpoint: what target_endpoint names
    pool: Name = "default"
    model: ModelCard
    max_batch: Count = 0
    load: WorkerLoad = WorkerLoad()
    requests: Annotated[list[RequestState], Meta(max_length=MAX_LIST_ITEMS)] = []
    draining: bool = False


class Heartbeat(Message, frozen=True, kw_only=True):
    """Every 200 ms: alive, and whether the engine makes progress."""

    incarnation: Word
    progress: Word  # engine steps done; a busy engine must raise it
    busy: bool = False
    step_s: Seconds = 0.0  # predicted duration of the step that runs now
    draining: bool = False
    load: WorkerLoad = WorkerLoad()
    dropped: Annotated[dict[Name, Count], Meta(max_length=MAX_DROP_REASONS)] = {}  # since start


class Accepted(Message, frozen=True, kw_only=True):
    """The worker has the request (also the answer to a repeated Assign)."""

    request: Binary
    attempt: Attempt


class Busy(Message, frozen=True, kw_only=True):
    """No room now. Prefill to router for an Assign; decode to prefill for a Reserve."""

    request: Binary
    attempt: Attempt
    reason: Name = ""
    retry_after: Seconds = 0.05
    decode_full: bool = False  # prefill to router: the decode side refused, choose another


class Aborted(Message, frozen=True, kw_only=True):
    """The worker holds nothing of this attempt or of lower ones any more."""

    request: Binary
    attempt: Attempt


class HandoffReport(Message, frozen=True, kw_only=True):
    """Prefill to router after Committed; kept by the router, so it survives the worker."""

    request: Binary
    attempt: Attempt
    prefill: Name
    decode: Name
    transport: Name
    bytes_sent: Count
    bytes_received: Count
    blocks: Count
    cached_tokens: Count
    frames: Count = 0
    resent_frames: Count = 0
    seconds: Seconds = 0.0


class PeerLost(Message, frozen=True, kw_only=True):
    """Worker to router: a handoff partner does not answer."""

    endpoint: Name
    request: Binary
    attempt: Attempt
    reason: Name = ""


WorkerToRouter = (
    Hello
    | Heartbeat
    | Accepted
    | Busy
    | Tokens
    | Terminal
    | Aborted
    | HandoffReport
    | PeerLost
    | Drained
    | Moved
    | Ping
    | Pong
)


# --------------------------------------------------------------------------- router -> worker


class Welcome(Message, frozen=True, kw_only=True):
    """The router knows the worker now."""

    router: Name  # stable name; Assign and Commit refer to it
    incarnation: Word


class Assign(Message, frozen=True, kw_only=True):
    """Prefill this; the handoff goes to ``decode``. Repeated until Accepted or Busy."""

    request: Binary
    attempt: Attempt
    request_id: Name = ""
    context: AnyWireContext
    emitted: TokenIds = []  # replay: tokens already streamed; generation goes on behind them
    decode: Name = ""  # control endpoint of the decode worker; none is needed to embed
    decode_incarnation: Word = 0
    deadline: Remaining


class Abort(Message, frozen=True, kw_only=True):
    """Free everything of this attempt and of lower ones; repeated until Aborted."""

    request: Binary
    attempt: Attempt
    reason: Name = ""


class Adopt(Message, frozen=True, kw_only=True):
    """Send the tokens from ``position`` on again, to this router from now on."""

    request: Binary
    position: Count


class TerminalAck(Message, frozen=True, kw_only=True):
    """The router has these terminals; the worker may forget them."""

    requests: Annotated[list[tuple[Binary, Attempt]], Meta(max_length=MAX_LIST_ITEMS)]


class PeerDead(Message, frozen=True, kw_only=True):
    """A worker's incarnation is finally dead: free what waits for it."""

    incarnation: Word
    endpoint: Name = ""


RouterToWorker = (
    Welcome | Assign | Abort | Adopt | TerminalAck | PeerDead | Drain | Rejected | Ping | Pong
)


# --------------------------------------------------------------------------- prefill -> decode


STREAMED, SHARED = "zmq", "shm"
"""Transports of KV blocks: bytes over ZeroMQ, or read from the sender's memory on one host."""


class PoolTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a process of the same host finds my KV memory: ``/proc/PID/fd/FD``.

    ``mark``: the first bytes there, so that nobody reads another's memory.
    """

    pid: Count
    fd: Count
    nbytes: Word
    mark: Binary


class Open(Message, frozen=True, kw_only=True):
    """First message on a link: who I am and what my blocks look like."""

    version: Count
    worker: Name
    incarnation: Word
    model: ModelCard
    transports: Names
    pool: PoolTicket | None = None  # for the transport "shm"


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a structured answer is held to, so that its grammar compiles while its KV travels."""

    schema: Annotated[str, Meta(max_length=MAX_JSON_SCHEMA_CHARS)]
    eos: EosTokenIds
    emitted: TokenIds  # generated before this attempt


class Reserve(Message, frozen=True, kw_only=True):
    """Ask for blocks. Repeated with the same key it repeats the same answer."""

    request: Binary
    attempt: Attempt
    incarnation: Word  # of the prefill worker
    hashes: Binaries  # chained hashes of the full blocks of the tokens
    num_tokens: Count  # tokens whose KV will arrive
    growth: Count  # further tokens to have room for
    serial: Word = 0  # per handoff started: a new one asks for a fresh grant
    layout_id: Word = 0
    deadline: Remaining
    grammar: GrammarSpec | None = None


class Commit(Message, frozen=True, kw_only=True):
    """Everything was sent: manifest and the whole context with its first token."""

    request: Binary
    attempt: Attempt
    grant: GrantRef
    frames: Count
    bytes: Count
    digest: Word  # xor of all frames' checksums
    context: AnyWireContext
    emitted: TokenIds  # all generated tokens so far; the last one's KV is not computed yet
    logprobs: LogProbs | None = None  # of the last token
    router: Name  # name of the router that streams to the client
    request_id: Name = ""
    prefill: Name = ""
    cached_tokens: Count = 0
    deadline: Remaining


class Release(Message, frozen=True, kw_only=True):
    """Give a grant back, or a Reserve that was not answered; repeated until Released."""

    request: Binary
    attempt: Attempt
    grant: GrantRef | None = None


class Fence(Message, frozen=True, kw_only=True):
    """Device path: the sender wrote its last byte into a revoked grant."""

    grant: GrantRef


class Probe(Message, frozen=True, kw_only=True):
    """Anyone may ask an endpoint who it is."""

    nonce: Word = 0


PrefillToDecode = Open | Reserve | Commit | Release | Fence | Probe | Ping | Pong


# --------------------------------------------------------------------------- decode -> prefill


class Opened(Message, frozen=True, kw_only=True):
    """The link stands; KV frames go to ``data_endpoint``."""

    worker: Name
    incarnation: Word
    transport: Name
    data_endpoint: Name
    layout_id: Word = 0
    max_frame_bytes: Count = 1 << 20


class OpenRefused(Message, frozen=True, kw_only=True):
    """The two workers cannot exchange blocks; ``field`` is the first that differs."""

    field: Name
    ours: Text
    theirs: Text
    code: Name = "model_mismatch"


class Grant(Message, frozen=True, kw_only=True):
    """Blocks are reserved and pinned; push up to ``credit`` bytes, then wait for Credit."""

    request: Binary
    attempt: Attempt
    grant: GrantRef
    cached_tokens: Count  # whole blocks the decode worker already has; not to be sent
    credit: Count  # cumulative bytes of this grant the sender may have sent
    counted: Count = 0  # of it used up as the receiver sees it: arrived, or given up as lost


class Credit(Message, frozen=True, kw_only=True):
    """Raised cumulative credit of a grant."""

    grant: GrantRef
    credit: Count


class Committed(Message, frozen=True, kw_only=True):
    """The decode worker owns the request now; the sender may let go."""

    request: Binary
    attempt: Attempt
    grant: GrantRef
    bytes: Count
    frames: Count


class Refused(Message, frozen=True, kw_only=True):
    """A Commit cannot be taken as it is.

    With ``frames`` the sender sends those again (lost or damaged) and commits again;
    without, the handoff has failed for good with ``code``.
    """

    request: Binary
    attempt: Attempt
    grant: GrantRef
    code: Name
    message: Text = ""
    frames: Annotated[list[Count], Meta(max_length=MAX_LIST_ITEMS)] = []
    credit: Count = 0  # cumulative credit, raised for the repeated frames
    counted: Count = 0  # as in Grant
    round: Count = 0  # counts these refusals of a grant: one said again asks for nothing new


class Stale(Message, frozen=True, kw_only=True):
    """The grant does not exist any more; nothing was done."""

    grant: GrantRef | None = None
    request: Binary = b""
    attempt: Attempt = 0


class Released(Message, frozen=True, kw_only=True):
    """Nothing of this attempt is held for the sender."""

    request: Binary
    attempt: Attempt


class Revoke(Message, frozen=True, kw_only=True):
    """Device path: stop writing into this grant and answer Fence."""

    grant: GrantRef


class ProbeReply(Message, frozen=True, kw_only=True):
    """Who listens at this endpoint."""

    nonce: Word
    version: Count
    worker: Name
    role: Name
    incarnation: Word


DecodeToPrefill = (
    Opened
    | OpenRefused
    | Grant
    | Busy
    | Credit
    | Committed
    | Refused
    | Stale
    | Released
    | Revoke
    | Aborted
    | ProbeReply
    | Rejected
    | Ping
    | Pong
)

UNSEALED: frozenset[type[Message]] = frozenset({Probe, ProbeReply, Rejected, Ping, Pong})
"""What workers hear of each other and of strangers without a digest (see :mod:`.codec`)."""


# --------------------------------------------------------------------------- KV frames


class KVFrame(msgspec.Struct, frozen=True, array_like=True, tag="KV", gc=False):
    """Header of one data message; the payload is the next frame.

    The payload is the C-ordered array
    ``[layer_count, block_count, 2, num_kv_heads, block_size, head_dim]``. ``shared``: the next
    frame names the int32 blocks of the sender's pool, ``[block_count]``, where it is to be read.
    """

    grant: GrantRef
    index: Count  # position of this frame in the manifest
    layer_start: Count
    layer_count: Count
    block_start: Count  # logical block index in the request, not a pool address
    block_count: Count
    nbytes: Count
    checksum: Word  # XXH3-64 of the payload
    shared: bool = False
