"""Every message on every socket, one tagged union per direction.

A ZeroMQ message is one *envelope*: a first frame of ``b"BT"``, one version byte and a
msgpack array of these structs, then one frame per large array of the contexts inside
(see :mod:`.envelope`). All messages for one peer share an envelope, so a hop costs time per
step, not per token.

Identities in the structs:

* ``request``: 16 bytes, BLAKE2b of the client's identity, the request id and its number
  (:func:`..ids.request_key`).
* ``attempt``: number of the attempt, from 1; a higher attempt supersedes lower ones.
* ``incarnation``: random 64 bits per process start; a restarted worker is another worker.
* ``grant``: :class:`GrantRef`, blocks that the decode worker has reserved.

All durations are seconds; ``deadline`` fields are *remaining* seconds, because clocks differ.
``position`` is the absolute index of a token in its context (the prompt starts at 0).

The structs are defined by conversation (:mod:`.client_messages`, :mod:`.worker_messages`,
:mod:`.handoff_messages`, :mod:`.tickets`); this module exports them all.
"""

from __future__ import annotations

from .bounds import (
    Attempt,
    Binaries,
    Binary,
    Code,
    Count,
    Name,
    Names,
    Remaining,
    Seconds,
    Text,
    TokenIds,
    Total,
    Word,
    WorkerName,
)
from .client_messages import (
    Begun,
    Cancel,
    Describe,
    Described,
    Drain,
    Drained,
    FinalAck,
    Moved,
    Ping,
    Pong,
    Rejected,
    Resume,
    Status,
    StatusReport,
    Submit,
    Submitted,
    Terminal,
    TokenRun,
    Tokens,
)
from .handoff_messages import (
    Commit,
    Committed,
    Credit,
    Fence,
    GrammarSpec,
    Grant,
    KVFrame,
    Open,
    Opened,
    OpenRefused,
    Probe,
    ProbeReply,
    Refused,
    Release,
    Released,
    Reserve,
    Revoke,
    Stale,
)
from .message_types import GrantRef, LogProbs, Message, ServedTimes, WorkerTimes
from .tickets import DEVICE, READ_IN_PLACE, SHARED, STREAMED, DeviceTicket, PoolTicket
from .worker_messages import (
    Abort,
    Aborted,
    Accepted,
    Adopt,
    Assign,
    Buckets,
    Busy,
    CertificateReceived,
    DeathCertificate,
    ExtensionCounts,
    HandoffReport,
    Heartbeat,
    Hello,
    PeerDead,
    PeerLost,
    RequestState,
    Share,
    TerminalAck,
    Welcome,
    WorkerLoad,
)

__all__ = [
    "DEVICE",
    "READ_IN_PLACE",
    "SHARED",
    "STREAMED",
    "UNSEALED",
    "Abort",
    "Aborted",
    "Accepted",
    "Adopt",
    "Assign",
    "Attempt",
    "Begun",
    "Binaries",
    "Binary",
    "Buckets",
    "Busy",
    "Cancel",
    "CertificateReceived",
    "ClientToRouter",
    "Code",
    "Commit",
    "Committed",
    "Count",
    "Credit",
    "DeathCertificate",
    "DecodeToPrefill",
    "Describe",
    "Described",
    "DeviceTicket",
    "Drain",
    "Drained",
    "ExtensionCounts",
    "Fence",
    "FinalAck",
    "GrammarSpec",
    "Grant",
    "GrantRef",
    "HandoffReport",
    "Heartbeat",
    "Hello",
    "KVFrame",
    "LogProbs",
    "Message",
    "Moved",
    "Name",
    "Names",
    "Open",
    "OpenRefused",
    "Opened",
    "PeerDead",
    "PeerLost",
    "Ping",
    "Pong",
    "PoolTicket",
    "PrefillToDecode",
    "Probe",
    "ProbeReply",
    "Refused",
    "Rejected",
    "Release",
    "Released",
    "Remaining",
    "RequestState",
    "Reserve",
    "Resume",
    "Revoke",
    "RouterToClient",
    "RouterToSupervisor",
    "RouterToWorker",
    "Seconds",
    "ServedTimes",
    "Share",
    "Stale",
    "Status",
    "StatusReport",
    "Submit",
    "Submitted",
    "Terminal",
    "TerminalAck",
    "Text",
    "TokenIds",
    "TokenRun",
    "Tokens",
    "Total",
    "Welcome",
    "Word",
    "WorkerLoad",
    "WorkerName",
    "WorkerTimes",
    "WorkerToRouter",
]

ClientToRouter = Submit | Resume | Cancel | FinalAck | Describe | Status | Drain | Ping | Pong

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
    | DeathCertificate
)

RouterToSupervisor = CertificateReceived | Rejected | Ping | Pong

RouterToWorker = (
    Welcome | Assign | Abort | Adopt | TerminalAck | PeerDead | Drain | Rejected | Ping | Pong
)

PrefillToDecode = Open | Reserve | Commit | Release | Fence | Probe | Ping | Pong

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
"""Messages that workers accept from peers without a digest (see :mod:`.envelope`)."""
