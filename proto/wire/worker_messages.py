"""Messages between workers and routers; see :mod:`.messages` for the identities."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..layout import ModelCard
from ..limits import (
    MAX_BUCKETS,
    MAX_DROP_REASONS,
    MAX_EXTENSION_CHARS,
    MAX_EXTENSIONS,
    MAX_HISTOGRAMS,
    MAX_LABELS,
    MAX_LIST_ITEMS,
    MAX_ROUTERS,
)
from .bounds import (
    Attempt,
    Binary,
    Code,
    Count,
    ExitStatus,
    Name,
    Remaining,
    Seconds,
    TokenIds,
    Total,
    Word,
    WorkerName,
)
from .message_types import Message, WorkerTimes
from .wire_context import CarriedContext

# --------------------------------------------------------------------------- worker -> router


class RequestState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that a worker still holds, as listed in Hello."""

    request: Binary
    attempt: Attempt
    position: Count  # next token position the worker will produce
    prompt_length: Count
    done: bool = False
    router: Name = ""  # the router it belongs to; other routers ignore it
    proof: Binary = b""  # proves that a router gave this attempt to this worker (see .proofs)


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Unfinished work that one router has assigned to a worker."""

    requests: Count
    tokens: Count  # as routers count load: prompt tokens (prefill) or final lengths (decode)


class Buckets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A histogram since the worker's start; its name determines the bounds."""

    counts: Annotated[list[Count], Meta(max_length=MAX_BUCKETS)]
    total: Total  # sum of all values


ExtensionText = Annotated[str, Meta(max_length=MAX_EXTENSION_CHARS)]


class ExtensionCounts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Calls of a user's own class since the start of its process."""

    point: ExtensionText  # such as "policy"
    name: ExtensionText  # module:Class
    calls: Count = 0
    failures: Count = 0  # of these calls
    skipped: Count = 0  # calls that were not made, because the class had taken too long
    error: ExtensionText = ""  # of the last failure


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Load of a worker, for routing policies and ``baton status``."""

    kv_blocks_total: Count = 0
    kv_blocks_used: Count = 0  # owned by requests; without the prefix cache
    kv_blocks_cached: Count = 0
    requests_running: Count = 0
    requests_waiting: Count = 0
    tokens_waiting: Count = 0  # prompt tokens not yet computed
    prefix_hit_tokens: Count = 0
    prompt_tokens: Count = 0  # computed since start
    generated_tokens: Count = 0
    preemptions: Count = 0
    compute_seconds: Total = 0.0  # spent in steps of the engine
    step_rows: Count = 0  # of pictures: rows of all computed steps
    encode_seconds: Total = 0.0  # the part of compute_seconds that encoded images
    image_tokens: Count = 0  # of computed prompts; cached ones too
    encoder_tokens: Count = 0  # of pictures: tokens of all encoded prompts; cached ones too
    # By router, if there are several: shows each router the work that the others have assigned.
    shares: Annotated[dict[Name, Share], Meta(max_length=MAX_ROUTERS)] = {}
    histograms: Annotated[dict[Name, Buckets], Meta(max_length=MAX_HISTOGRAMS)] = {}


class Hello(Message, frozen=True, kw_only=True):
    """First message of a worker on every (re)connection."""

    version: Count
    worker: WorkerName
    role: Name  # "prefill" | "decode"
    incarnation: Word
    nonce: Binary = b""  # with the key of the connection it gives the incarnation
    pid: Count
    endpoint: Name  # the control endpoint; a target_endpoint names it
    pool: Name = "default"
    model: ModelCard
    max_batch: Count = 0
    load: WorkerLoad = WorkerLoad()
    requests: Annotated[list[RequestState], Meta(max_length=MAX_LIST_ITEMS)] = []
    draining: bool = False
    elsewhere: bool = False  # another router serves it: this router was cut off
    device: Name = ""  # "cuda:1 GPU-...", as this process numbers it, or "cpu, 2 threads (REASON)"
    shared_weights: Count = 0  # bytes of weights in memory that workers of the host share
    seal: Binary = b""  # SHA-256 of the secret in a DeathCertificate of this process
    labels: Annotated[dict[Name, Name], Meta(max_length=MAX_LABELS)] = {}  # such as its rack
    kv_events: Annotated[list[Name], Meta(max_length=2)] = []  # of events of its cache, and replays


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every 200 ms: the worker lives, and its engine's progress."""

    incarnation: Word
    progress: Word  # completed engine steps; must rise while the engine is busy
    busy: bool = False
    step_s: Seconds = 0.0  # predicted duration of the current step
    draining: bool = False
    load: WorkerLoad = WorkerLoad()
    dropped: Annotated[dict[Name, Count], Meta(max_length=MAX_DROP_REASONS)] = {}  # since start
    extensions: Annotated[list[ExtensionCounts], Meta(max_length=MAX_EXTENSIONS)] = []


class Accepted(Message, frozen=True, kw_only=True):
    """The worker has the request: answer to an Assign, also a repeated Assign, or an Adopt."""

    request: Binary
    attempt: Attempt
    proof: Binary = b""  # in answer to an Adopt: proves that a router gave it this attempt


class Busy(Message, frozen=True, kw_only=True):
    """No room now: a worker's answer to an Assign, a decode worker's answer to a Reserve."""

    request: Binary
    attempt: Attempt
    reason: Name = ""
    retry_after: Seconds = 0.05
    decode_full: bool = False  # prefill to router: choose another decode worker, this one is full
    proof: Binary = b""  # prefill to router, as in Accepted: of the returned attempt


class Aborted(Message, frozen=True, kw_only=True):
    """The worker has freed everything of this attempt and of lower ones."""

    request: Binary
    attempt: Attempt


class HandoffReport(Message, frozen=True, kw_only=True):
    """Prefill to router after Committed: the record of a handoff, which outlives the worker."""

    request: Binary
    attempt: Attempt
    prefill: WorkerName
    decode: WorkerName
    transport: Code
    bytes_sent: Count
    bytes_received: Count
    blocks: Count
    cached_tokens: Count
    frames: Count = 0
    resent_frames: Count = 0
    seconds: Seconds = 0.0
    times: WorkerTimes | None = None


class PeerLost(Message, frozen=True, kw_only=True):
    """Worker to router: the peer of a handoff does not answer."""

    endpoint: Name
    request: Binary
    attempt: Attempt
    reason: Name = ""
    refused: bool = False  # the peer answers, but is incompatible: a retry cannot help


class DeathCertificate(Message, frozen=True, kw_only=True):
    """Supervisor to router: a worker's process has ended. Repeated until CertificateReceived."""

    worker: WorkerName
    secret: Binary  # its hash is the seal in the Hello of the process; no worker has the secret
    status: ExitStatus


# --------------------------------------------------------------------------- router -> worker


class CertificateReceived(Message, frozen=True, kw_only=True):
    """Router to supervisor: the answer to a DeathCertificate, also of an unknown process."""

    secret: Binary


class Welcome(Message, frozen=True, kw_only=True):
    """The router has registered the worker."""

    router: Name  # stable name; Assign and Commit refer to it
    incarnation: Word
    key: Binary = b""  # known only to routers and this worker; tickets of Reserve are made from it


class Assign(Message, frozen=True, kw_only=True):
    """Prefill this request and hand it off to ``decode``. Repeated until Accepted or Busy.

    Sent to ``decode`` itself, it assigns the whole request there, without a handoff.
    """

    request: Binary
    attempt: Attempt
    request_id: Name = ""
    context: CarriedContext
    emitted: TokenIds = []  # replay: tokens already streamed; generation continues after them
    decode: Name = ""  # control endpoint of the decode worker; empty for embeddings
    decode_incarnation: Word = 0
    decode_key: Binary = b""  # CURVE key (z85) with which it registered; empty without keys
    deadline: Remaining
    waited: Remaining = 0.0  # seconds since the client's Submit
    slo_ttft: Remaining = 0.0  # the request's own TTFT limit; 0: the worker's
    step_limit: Remaining = 0.0  # most seconds of a step beside it; 0: no ITL limit
    proof: Binary = b""  # proves that this attempt was assigned to its receiver
    decode_proof: Binary = b""  # the same for the decode worker; Commit carries it there
    ticket: Binary = b""  # required by the decode worker to grant blocks; empty without a handoff
    arrays: Count = 0  # number of the envelope's frames that belong to this message


class Abort(Message, frozen=True, kw_only=True):
    """Free everything of this attempt and of lower ones; repeated until Aborted."""

    request: Binary
    attempt: Attempt
    reason: Name = ""


class Adopt(Message, frozen=True, kw_only=True):
    """Reroute the request's tokens to this router, and send those from ``position`` again."""

    request: Binary
    position: Count


class TerminalAck(Message, frozen=True, kw_only=True):
    """The router has received these terminals; the worker may delete them."""

    requests: Annotated[list[tuple[Binary, Attempt]], Meta(max_length=MAX_LIST_ITEMS)]


class PeerDead(Message, frozen=True, kw_only=True):
    """A worker's incarnation was declared dead: free everything that waits for it."""

    incarnation: Word
    endpoint: Name = ""
    key: Binary = b""  # CURVE key (z85) with which it registered; empty without keys
