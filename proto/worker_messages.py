"""What workers and routers say to each other; see :mod:`.messages` for the identities."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .layout import ModelCard
from .limits import MAX_DROP_REASONS, MAX_LIST_ITEMS, MAX_ROUTERS
from .message_types import (
    Attempt,
    Binary,
    Count,
    Message,
    Name,
    Remaining,
    Seconds,
    TokenIds,
    Total,
    Word,
)
from .wire import CarriedContext

# --------------------------------------------------------------------------- worker -> router


class RequestState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request a worker still holds, as listed in Hello."""

    request: Binary
    attempt: Attempt
    position: Count  # next token position the worker will produce
    prompt_length: Count
    done: bool = False
    router: Name = ""  # the router it belongs to; others leave it alone
    proof: Binary = b""  # that a router gave this attempt to this worker (see .proofs)


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one router has given a worker and is not done."""

    requests: Count
    tokens: Count  # as routers count load: of prompts to compute, or of contexts at their end


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
    # By router, where there are several: each sees by it what the others have given the worker.
    shares: Annotated[dict[Name, Share], Meta(max_length=MAX_ROUTERS)] = {}


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
    elsewhere: bool = False  # another router has it: one that gave it up was itself cut off


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
    """The worker has the request (also the answer to a repeated Assign, and to an Adopt)."""

    request: Binary
    attempt: Attempt
    proof: Binary = b""  # with the answer to an Adopt: a router gave it this attempt


class Busy(Message, frozen=True, kw_only=True):
    """No room now. Prefill to router for an Assign; decode to prefill for a Reserve."""

    request: Binary
    attempt: Attempt
    reason: Name = ""
    retry_after: Seconds = 0.05
    decode_full: bool = False  # prefill to router: the decode side refused, choose another
    proof: Binary = b""  # prefill to router, as in Accepted: of an attempt that is given back


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
    refused: bool = False  # it answers, but the two do not fit together: waiting does not help


# --------------------------------------------------------------------------- router -> worker


class Welcome(Message, frozen=True, kw_only=True):
    """The router knows the worker now."""

    router: Name  # stable name; Assign and Commit refer to it
    incarnation: Word
    key: Binary = b""  # known to routers and this worker alone; tickets of Reserve are made with it


class Assign(Message, frozen=True, kw_only=True):
    """Prefill this; the handoff goes to ``decode``. Repeated until Accepted or Busy."""

    request: Binary
    attempt: Attempt
    request_id: Name = ""
    context: CarriedContext
    emitted: TokenIds = []  # replay: tokens already streamed; generation goes on behind them
    decode: Name = ""  # control endpoint of the decode worker; none is needed to embed
    decode_incarnation: Word = 0
    deadline: Remaining
    waited: Remaining = 0.0  # seconds since the client asked
    proof: Binary = b""  # that this attempt was given to the prefill worker
    decode_proof: Binary = b""  # the same for the decode worker; Commit carries it there
    ticket: Binary = b""  # the decode worker grants blocks for it alone
    arrays: Count = 0  # how many of the envelope's frames are its own


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
