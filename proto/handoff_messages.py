"""What prefill and decode workers say to each other; see :mod:`.messages` for the identities."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .layout import ModelCard
from .limits import MAX_JSON_SCHEMA_CHARS, MAX_LIST_ITEMS
from .message_types import (
    Attempt,
    Binaries,
    Binary,
    Count,
    GrantRef,
    Message,
    Name,
    Names,
    Remaining,
    Text,
    TokenIds,
    Word,
)
from .wire import CarriedContext, EosTokenIds

# --------------------------------------------------------------------------- prefill -> decode


STREAMED, SHARED, DEVICE = "zmq", "shm", "cuda_ipc"
"""Transports of KV blocks: bytes over ZeroMQ, or read in the sender's memory, which may be a
GPU's, by a process of the same host."""
READ_IN_PLACE = frozenset((SHARED, DEVICE))


class PoolTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a process of the same host finds my KV memory: ``/proc/PID/fd/FD``.

    ``mark``: the first bytes there, so that nobody reads another's memory.
    """

    pid: Count
    fd: Count
    nbytes: Word
    mark: Binary


class DeviceTicket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a process of the same host finds my KV memory on a GPU: a CUDA IPC handle.

    ``host``: the boot id of the kernel it is valid on. ``offset``: bytes from the start of the
    allocation that the handle stands for to the pool of ``nbytes``.
    """

    host: Name
    handle: Binary
    offset: Word
    nbytes: Word


class Open(Message, frozen=True, kw_only=True):
    """First message on a link: who I am and what my blocks look like."""

    version: Count
    worker: Name
    incarnation: Word
    model: ModelCard
    transports: Names
    pool: PoolTicket | None = None  # for the transport "shm"
    device_pool: DeviceTicket | None = None  # for the transport "cuda_ipc"


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
    ticket: Binary = b""  # of the Assign: a router gave this attempt to the sender


class Commit(Message, frozen=True, kw_only=True):
    """Everything was sent: manifest and the whole context, as it is behind its first token.

    The newest token's KV is not computed yet.
    """

    request: Binary
    attempt: Attempt
    grant: GrantRef
    frames: Count
    bytes: Count
    digest: Word  # xor of all frames' checksums
    context: CarriedContext
    router: Name  # name of the router that streams to the client
    request_id: Name = ""
    prefill: Name = ""
    cached_tokens: Count = 0
    deadline: Remaining
    proof: Binary = b""  # of the Assign: a router chose this decode worker for the attempt
    arrays: Count = 0  # how many of the envelope's frames are its own


class Release(Message, frozen=True, kw_only=True):
    """Give a grant back, or a Reserve that was not answered; repeated until Released."""

    request: Binary
    attempt: Attempt
    grant: GrantRef | None = None
    incarnation: Word = 0  # of the prefill worker
    ticket: Binary = b""  # as in Reserve


class Fence(Message, frozen=True, kw_only=True):
    """Device path: the sender wrote its last byte into a revoked grant."""

    grant: GrantRef


class Probe(Message, frozen=True, kw_only=True):
    """Anyone may ask an endpoint who it is."""

    nonce: Word = 0


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
    arrived: Count | None = None  # bytes of frames that came, damaged ones too; None: does not say


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
    arrived: Count | None = None  # as in Grant
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
    checksum: Word  # of the payload: XXH3-64, between GPUs the digest of decision 12
    shared: bool = False
