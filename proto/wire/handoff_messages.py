"""Messages between prefill and decode workers; see :mod:`.messages` for the identities."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..layout import KVLayout, ModelCard
from ..limits import MAX_JSON_SCHEMA_CHARS, MAX_LIST_ITEMS
from .bounds import (
    Attempt,
    Binaries,
    Binary,
    Chunk,
    Count,
    EosTokenIds,
    Name,
    Names,
    Remaining,
    Text,
    TokenIds,
    Word,
)
from .message_types import GrantRef, Message
from .tickets import DeviceTicket, PoolTicket
from .wire_context import CarriedContext

# --------------------------------------------------------------------------- prefill -> decode


class Open(Message, frozen=True, kw_only=True):
    """First message on a link: the prefill worker's identity, model and block layout."""

    version: Count
    worker: Name
    incarnation: Word
    nonce: Binary = b""  # as in Hello
    model: ModelCard
    transports: Names
    pool: PoolTicket | None = None  # for the transport "shm"
    device_pool: DeviceTicket | None = None  # for the transport "cuda_ipc"


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Grammar of a structured answer, so that it compiles during the KV transfer."""

    schema: Annotated[str, Meta(max_length=MAX_JSON_SCHEMA_CHARS)]
    eos: EosTokenIds
    emitted: TokenIds  # generated before this attempt


class Reserve(Message, frozen=True, kw_only=True):
    """Request blocks. A repeated Reserve with the same key gets the same answer."""

    request: Binary
    attempt: Attempt
    incarnation: Word  # of the prefill worker
    hashes: Binaries  # chained hashes of the full blocks of the tokens
    num_tokens: Count  # tokens whose KV will arrive
    growth: Count  # additional tokens to reserve room for
    serial: Word = 0  # number of the handoff; a new number requests a new grant
    deadline: Remaining
    grammar: GrammarSpec | None = None
    ticket: Binary = b""  # of the Assign; proves that a router gave this attempt to the sender, and
    # limits the tokens and the deadline


class Commit(Message, frozen=True, kw_only=True):
    """Everything was sent: the manifest, and the whole context after its first generated token.

    The KV of the newest token is not computed yet.
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
    proof: Binary = b""  # of the Assign; proves that a router chose this decode worker
    media: Chunk | None = None  # as in the first token's TokenRun, which may be lost
    step_limit: Remaining = 0.0  # of the Assign
    arrays: Count = 0  # number of the envelope's frames that belong to this message


class Release(Message, frozen=True, kw_only=True):
    """Release a grant, or withdraw an unanswered Reserve. Repeated until Released."""

    request: Binary
    attempt: Attempt
    grant: GrantRef | None = None
    incarnation: Word = 0  # of the prefill worker
    ticket: Binary = b""  # as in Reserve


class Fence(Message, frozen=True, kw_only=True):
    """Device path: the sender has stopped writing into a revoked grant."""

    grant: GrantRef


class Probe(Message, frozen=True, kw_only=True):
    """Ask an endpoint for its worker's identity; allowed for every peer."""

    nonce: Word = 0


# --------------------------------------------------------------------------- decode -> prefill


class Opened(Message, frozen=True, kw_only=True):
    """The link is open; KV frames go to ``data_endpoint``.

    ``layout``: the decode worker's blocks, if they may differ from the sender's. Frames have these
    blocks, and the narrower of both types of keys and values.
    """

    worker: Name
    incarnation: Word
    transport: Name
    data_endpoint: Name
    max_frame_bytes: Count = 1 << 20
    layout: KVLayout | None = None


class OpenRefused(Message, frozen=True, kw_only=True):
    """The two workers cannot exchange blocks; ``field`` is the first field that differs."""

    field: Name
    ours: Text
    theirs: Text
    code: Name = "model_mismatch"


class Grant(Message, frozen=True, kw_only=True):
    """Blocks are reserved and pinned; send up to ``credit`` bytes, then wait for Credit."""

    request: Binary
    attempt: Attempt
    grant: GrantRef
    cached_tokens: Count  # tokens of whole blocks in the decode worker's cache; do not send them
    credit: Count  # cumulative bytes that the sender may have sent for this grant
    counted: Count = 0  # used credit, by the receiver's count: bytes that arrived or were lost
    arrived: Count | None = None  # bytes of received frames, also damaged ones; None: unknown


class Credit(Message, frozen=True, kw_only=True):
    """The new, higher cumulative credit of a grant."""

    grant: GrantRef
    credit: Count


class Committed(Message, frozen=True, kw_only=True):
    """The decode worker now owns the request; the sender may free its blocks."""

    request: Binary
    attempt: Attempt
    grant: GrantRef
    bytes: Count
    frames: Count


class Refused(Message, frozen=True, kw_only=True):
    """A Commit was refused.

    With ``frames``, the sender sends these lost or damaged frames again and repeats the Commit.
    Without ``frames``, the handoff has failed with ``code``.
    """

    request: Binary
    attempt: Attempt
    grant: GrantRef
    code: Name
    message: Text = ""
    frames: Annotated[list[Count], Meta(max_length=MAX_LIST_ITEMS)] = []
    credit: Count = 0  # cumulative credit, raised by the size of the repeated frames
    counted: Count = 0  # as in Grant
    arrived: Count | None = None  # as in Grant
    round: Count = 0  # number of the refusal of this grant; a repeated number requests nothing new


class Stale(Message, frozen=True, kw_only=True):
    """The grant no longer exists; the message had no effect."""

    grant: GrantRef | None = None
    request: Binary = b""
    attempt: Attempt = 0


class Released(Message, frozen=True, kw_only=True):
    """The decode worker holds nothing of this attempt for the sender."""

    request: Binary
    attempt: Attempt


class Revoke(Message, frozen=True, kw_only=True):
    """Device path: stop writing into this grant and answer Fence."""

    grant: GrantRef


class ProbeReply(Message, frozen=True, kw_only=True):
    """Identity of the worker that listens at this endpoint."""

    nonce: Word
    version: Count
    worker: Name
    role: Name
    incarnation: Word


# --------------------------------------------------------------------------- KV frames


class KVFrame(msgspec.Struct, frozen=True, array_like=True, tag="KV", gc=False):
    """Header of one data message; the payload is the next frame.

    The payload is the C-ordered array
    ``[layer_count, block_count, 2, num_kv_heads, block_size, row_length]``. With ``shared``, the
    next frame has the int32 block ids ``[block_count]`` in the sender's pool instead; the receiver
    reads the payload from these blocks.
    """

    grant: GrantRef
    index: Count  # position of this frame in the manifest
    layer_start: Count
    layer_count: Count
    block_start: Count  # logical block index in the request, not a pool address
    block_count: Count
    nbytes: Count
    checksum: Word  # of the payload: XXH3-64; between GPUs, the digest of decision 12
    shared: bool = False
