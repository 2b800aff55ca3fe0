"""Events and actions of the prefill core; pure data."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.engine.scheduling.plan import Int32
from baton.kv_transfer import sender_handoff as handoff
from baton.kv_transfer.sender_handoff import Key
from baton.proto.layout import KVLayout
from baton.proto.wire.messages import Message
from baton.worker.events import (
    AbandonStep,
    CheckImages,
    DrainRequested,
    Exit,
    Fault,
    FromRouter,
    ImagesChecked,
    Log,
    RouterDown,
    RouterUp,
    RunStep,
    StepDone,
    Tick,
    ToRouter,
)


@dataclass(slots=True, frozen=True)
class FromPeer:
    """A decode worker sent a message."""

    endpoint: str
    message: Message


@dataclass(slots=True, frozen=True)
class NotSent:
    """A message for a decode worker was too large to send; ``reason`` has the details."""

    endpoint: str
    message: Message
    reason: str


@dataclass(slots=True, frozen=True)
class PeerUp:
    """The control connection to a decode endpoint was made, or made again."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class PeerDown:
    """The control connection to a decode endpoint was lost."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class DataUp:
    """The data connection (KV frames) to a decode endpoint was made, or made again."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class DataDown:
    """The data connection (KV frames) to a decode endpoint is missing."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class LayersDone:
    """In the running step, the KV of a sequence's layers below ``layer_end`` is final."""

    sequence: bytes
    layer_end: int


@dataclass(slots=True, frozen=True)
class Packed:
    """A frame was packed and sent."""

    key: Key
    index: int
    checksum: int


@dataclass(slots=True, frozen=True)
class NotPacked:
    """A frame could not be packed: the device reported an error."""

    key: Key


@dataclass(slots=True, frozen=True)
class Connect:
    """Open the sockets to a decode endpoint."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class OpenData:
    """Connect to the peer's address for KV frames."""

    endpoint: str
    data_endpoint: str


@dataclass(slots=True, frozen=True)
class Disconnect:
    """Close the sockets to a decode endpoint."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class ToPeer:
    """Send a control message to a decode endpoint."""

    endpoint: str
    message: Message


@dataclass(slots=True, frozen=True)
class PackFrame:
    """Gather these cells from the pool, send them, report :class:`Packed` or :class:`NotPacked`.

    ``block_table``: int32, pool block of each logical block. ``shared``: the peer reads the
    blocks itself, so the frame carries only their ids. ``layout``: of the frame; None: as the
    pool's.
    """

    send: handoff.SendFrame
    block_table: Int32
    shared: bool = False
    layout: KVLayout | None = None


@dataclass(slots=True, frozen=True)
class Raised:
    """An exception of our own code in the handling of an output of the sender."""

    output: handoff.Output
    error: Exception


HandoffEvent = FromPeer | PeerUp | PeerDown | DataUp | DataDown | LayersDone | Packed | NotPacked
Event = (
    FromRouter | RouterUp | RouterDown | HandoffEvent | NotSent | StepDone | GrammarDone
    | ImagesChecked | Tick | DrainRequested
)  # fmt: skip
Action = (
    ToRouter | ToPeer | Connect | OpenData | Disconnect | PackFrame | RunStep | AbandonStep
    | CompileGrammar | DropGrammar | CheckImages | Log | Fault | Exit
)  # fmt: skip
