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

from .layout import ModelCard
from .outputs import TokenLogProbs
from .wire import WireContext

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A number that cannot be negative; a decoder refuses others."""

Binary = bytes
"""For structs with a field named ``bytes``, which would hide the type."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all messages: a msgpack map with a ``type`` key; defaults do not travel."""


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one grant of one decode worker's life; a stale one never matches again."""

    incarnation: int
    slot: int
    generation: int


# --------------------------------------------------------------------------- tokens, both ways


class TokenRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one request; forwarded by the router as it came."""

    request: bytes
    attempt: int
    position: int  # of tokens[0]; router and client pass only position == next
    tokens: list[int]
    logprobs: list[TokenLogProbs] | None = None


class Tokens(Message, frozen=True, kw_only=True):
    """Worker to router and router to client: the tokens of one step, all requests of the peer."""

    runs: list[TokenRun]


class Terminal(Message, frozen=True, kw_only=True):
    """Worker to router and router to client: the one end of a request.

    ``status`` is a GenerationStatus value for a finished request and ``None`` for a failed
    or refused one, which has ``code`` and ``message`` instead.
    """

    request: bytes
    attempt: int = 0
    position: int = 0  # the context's length at its end: tokens below it must have arrived
    status: str | None = None
    code: str | None = None
    message: str = ""
    retry_after: float | None = None
    request_id: str = ""  # client: finds a refused request whose key it never learned
    cached_tokens: int = 0
    prefill: str = ""  # client: which workers served it
    decode: str = ""


# --------------------------------------------------------------------------- client -> router


class Submit(Message, frozen=True, kw_only=True):
    """Start a request; sent again with the same content it re-attaches."""

    request_id: str
    context: WireContext
    deadline: float | None = None
    pool: str | None = None
    pin: str = "prefer"  # "strict": a replay may not move the request off target_endpoint
    fallback: bool = False  # choose another worker when target_endpoint cannot take it


class Resume(Message, frozen=True, kw_only=True):
    """Continue a stream after the connection or the router was lost."""

    request_id: str
    request: bytes
    secret: bytes
    position: int  # next token position the client waits for
    attempt: int  # highest attempt the client saw
    context: WireContext  # a router that lost its memory starts again from this ...
    emitted: list[int] = []  # ... and these tokens, already with the client
    deadline: float | None = None
    pool: str | None = None
    pin: str = "prefer"
    fallback: bool = False


class Cancel(Message, frozen=True, kw_only=True):
    """End a request; answered by its Terminal."""

    request_id: str = ""
    request: bytes = b""


class FinalAck(Message, frozen=True, kw_only=True):
    """The client has these terminals; the router may forget them."""

    requests: list[bytes]


class Describe(Message, frozen=True, kw_only=True):
    """Ask for the model's card and, by name, its text files."""

    files: list[str] = []


class Status(Message, frozen=True, kw_only=True):
    """Ask for the cluster's state."""

    handoffs: int = 16  # how many recent handoffs to list


class Drain(Message, frozen=True, kw_only=True):
    """Client (operator) to router, router to worker: take no new work, finish what runs."""

    worker: str = ""  # worker id; for the router's own use empty


class Ping(Message, frozen=True, kw_only=True):
    """Any direction: are you there; carries nothing."""

    nonce: int = 0


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping."""

    nonce: int = 0


ClientToRouter = Submit | Resume | Cancel | FinalAck | Describe | Status | Drain | Ping | Pong


# --------------------------------------------------------------------------- router -> client


class Submitted(Message, frozen=True, kw_only=True):
    """The request was admitted; ``secret`` opens a later Resume."""

    request_id: str
    request: bytes
    secret: bytes
    attempt: int = 1


class Described(Message, frozen=True, kw_only=True):
    """The model's card, generation defaults and the text files asked for."""

    model: ModelCard | None = None
    folder: str = ""
    files: dict[str, bytes] = {}
    available: list[str] = []


class StatusReport(Message, frozen=True, kw_only=True):
    """The object ``baton status --json`` prints, as JSON text."""

    report: bytes


class Moved(Message, frozen=True, kw_only=True):
    """Another router serves the request now: worker to the old router, which tells its client."""

    request: bytes
    router: str = ""


class Drained(Message, frozen=True, kw_only=True):
    """Worker to router: nothing left in flight. Router to client: the drain was started or done."""

    worker: str
    code: str | None = None
    message: str = ""


class Rejected(Message, frozen=True, kw_only=True):
    """A message could not be understood or is not allowed; the connection stays usable."""

    code: str
    message: str
    request_id: str = ""


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

    request: bytes
    attempt: int
    position: int  # next token position the worker will produce
    prompt_length: int
    done: bool = False
    router: str = ""  # the router it belongs to; others leave it alone


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What policies and ``baton status`` need to know of a worker."""

    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # owned by requests; prefix cache not counted
    kv_blocks_cached: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    tokens_waiting: int = 0  # prompt tokens not yet computed
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0  # computed since start
    generated_tokens: int = 0
    preemptions: int = 0


class Hello(Message, frozen=True, kw_only=True):
    """First message of a worker on every (re)connection."""

    version: int
    worker: str
    role: str  # "prefill" | "decode"
    incarnation: int
    pid: int
    endpoint: str  # the control endpoint: what target_endpoint names
    pool: str = "default"
    model: ModelCard
    max_batch: int = 0
    load: WorkerLoad = WorkerLoad()
    requests: list[RequestState] = []
    draining: bool = False


class Heartbeat(Message, frozen=True, kw_only=True):
    """Every 200 ms: alive, and whether the engine makes progress."""

    incarnation: int
    progress: int  # engine steps done; a busy engine must raise it
    busy: bool = False
    step_s: float = 0.0  # predicted duration of the step that runs now
    draining: bool = False
    load: WorkerLoad = WorkerLoad()


class Accepted(Message, frozen=True, kw_only=True):
    """The worker has the request (also the answer to a repeated Assign)."""

    request: bytes
    attempt: int


class Busy(Message, frozen=True, kw_only=True):
    """No room now. Prefill to router for an Assign; decode to prefill for a Reserve."""

    request: bytes
    attempt: int
    reason: str = ""
    retry_after: float = 0.05
    decode_full: bool = False  # prefill to router: the decode side refused, choose another


class Aborted(Message, frozen=True, kw_only=True):
    """The worker holds nothing of this attempt or of lower ones any more."""

    request: bytes
    attempt: int


class HandoffReport(Message, frozen=True, kw_only=True):
    """Prefill to router after Committed; kept by the router, so it survives the worker."""

    request: bytes
    attempt: int
    prefill: str
    decode: str
    transport: str
    bytes_sent: int
    bytes_received: int
    blocks: int
    cached_tokens: int
    frames: int = 0
    resent_frames: int = 0
    seconds: float = 0.0


class PeerLost(Message, frozen=True, kw_only=True):
    """Worker to router: a handoff partner does not answer."""

    endpoint: str
    request: bytes
    attempt: int
    reason: str = ""


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

    router: str  # stable name; Assign and Commit refer to it
    incarnation: int


class Assign(Message, frozen=True, kw_only=True):
    """Prefill this; the handoff goes to ``decode``. Repeated until Accepted or Busy."""

    request: bytes
    attempt: int
    request_id: str = ""
    context: WireContext
    emitted: list[int] = []  # replay: tokens already streamed; generation goes on behind them
    decode: str  # control endpoint of the decode worker
    decode_incarnation: int = 0
    deadline: float  # remaining seconds


class Abort(Message, frozen=True, kw_only=True):
    """Free everything of this attempt and of lower ones; repeated until Aborted."""

    request: bytes
    attempt: int
    reason: str = ""


class Adopt(Message, frozen=True, kw_only=True):
    """Send the tokens from ``position`` on again, to this router from now on."""

    request: bytes
    position: int


class TerminalAck(Message, frozen=True, kw_only=True):
    """The router has these terminals; the worker may forget them."""

    requests: list[tuple[bytes, int]]


class PeerDead(Message, frozen=True, kw_only=True):
    """A worker's incarnation is finally dead: free what waits for it."""

    incarnation: int
    endpoint: str = ""


RouterToWorker = (
    Welcome | Assign | Abort | Adopt | TerminalAck | PeerDead | Drain | Rejected | Ping | Pong
)


# --------------------------------------------------------------------------- prefill -> decode


class Open(Message, frozen=True, kw_only=True):
    """First message on a link: who I am and what my blocks look like."""

    version: int
    worker: str
    incarnation: int
    model: ModelCard
    transports: list[str]


class Reserve(Message, frozen=True, kw_only=True):
    """Ask for blocks. Repeated with the same key it repeats the same answer."""

    request: bytes
    attempt: int
    incarnation: int  # of the prefill worker
    hashes: list[bytes]  # chained hashes of the full blocks of the tokens
    num_tokens: int  # tokens whose KV will arrive
    growth: int  # further tokens to have room for
    serial: int = 0  # per handoff started: a new one asks for a fresh grant
    layout_id: int = 0
    deadline: float


class Commit(Message, frozen=True, kw_only=True):
    """Everything was sent: manifest and the whole context with its first token."""

    request: Binary
    attempt: int
    grant: GrantRef
    frames: int
    bytes: int
    digest: int  # xor of all frames' checksums
    context: WireContext
    emitted: list[int]  # all generated tokens so far; the last one's KV is not computed yet
    logprobs: list[TokenLogProbs] | None = None  # of the last token
    router: str  # name of the router that streams to the client
    request_id: str = ""
    prefill: str = ""
    cached_tokens: int = 0
    deadline: float


class Release(Message, frozen=True, kw_only=True):
    """Give a grant back, or a Reserve that was not answered; repeated until Released."""

    request: bytes
    attempt: int
    grant: GrantRef | None = None


class Fence(Message, frozen=True, kw_only=True):
    """Device path: the sender wrote its last byte into a revoked grant."""

    grant: GrantRef


class Probe(Message, frozen=True, kw_only=True):
    """Anyone may ask an endpoint who it is."""

    nonce: int = 0


PrefillToDecode = Open | Reserve | Commit | Release | Fence | Probe | Ping | Pong


# --------------------------------------------------------------------------- decode -> prefill


class Opened(Message, frozen=True, kw_only=True):
    """The link stands; KV frames go to ``data_endpoint``."""

    worker: str
    incarnation: int
    transport: str
    data_endpoint: str
    layout_id: int = 0
    max_frame_bytes: int = 1 << 20


class OpenRefused(Message, frozen=True, kw_only=True):
    """The two workers cannot exchange blocks; ``field`` is the first that differs."""

    field: str
    ours: str
    theirs: str
    code: str = "model_mismatch"


class Grant(Message, frozen=True, kw_only=True):
    """Blocks are reserved and pinned; push up to ``credit`` bytes, then wait for Credit."""

    request: bytes
    attempt: int
    grant: GrantRef
    cached_tokens: int  # whole blocks the decode worker already has; not to be sent
    credit: int  # cumulative bytes of this grant the sender may have sent


class Credit(Message, frozen=True, kw_only=True):
    """Raised cumulative credit of a grant."""

    grant: GrantRef
    credit: int


class Committed(Message, frozen=True, kw_only=True):
    """The decode worker owns the request now; the sender may let go."""

    request: Binary
    attempt: int
    grant: GrantRef
    bytes: int
    frames: int


class Refused(Message, frozen=True, kw_only=True):
    """A Commit cannot be taken as it is.

    With ``frames`` the sender sends those again (lost or damaged) and commits again;
    without, the handoff has failed for good with ``code``.
    """

    request: bytes
    attempt: int
    grant: GrantRef
    code: str
    message: str = ""
    frames: list[int] = []
    credit: int = 0  # cumulative credit, raised for the repeated frames
    round: int = 0  # counts these refusals of a grant: one said again asks for nothing new


class Stale(Message, frozen=True, kw_only=True):
    """The grant does not exist any more; nothing was done."""

    grant: GrantRef | None = None
    request: bytes = b""
    attempt: int = 0


class Released(Message, frozen=True, kw_only=True):
    """Nothing of this attempt is held for the sender."""

    request: bytes
    attempt: int


class Revoke(Message, frozen=True, kw_only=True):
    """Device path: stop writing into this grant and answer Fence."""

    grant: GrantRef


class ProbeReply(Message, frozen=True, kw_only=True):
    """Who listens at this endpoint."""

    nonce: int
    version: int
    worker: str
    role: str
    incarnation: int


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


# --------------------------------------------------------------------------- KV frames


class KVFrame(msgspec.Struct, frozen=True, array_like=True, tag="KV", gc=False):
    """Header of one data message; the payload is the next frame.

    The payload is the C-ordered array
    ``[layer_count, block_count, 2, num_kv_heads, block_size, head_dim]``.
    """

    grant: GrantRef
    index: Count  # position of this frame in the manifest
    layer_start: Count
    layer_count: Count
    block_start: Count  # logical block index in the request, not a pool address
    block_count: Count
    nbytes: Count
    checksum: int  # XXH3-64 of the payload
