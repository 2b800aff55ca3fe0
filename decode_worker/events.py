"""Events and actions of the decode core; pure data."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.audio.chunks import I32, Window
from baton.engine.grammar.constraint import CompileGrammar, DropGrammar, GrammarDone
from baton.proto.wire.messages import DeviceTicket, KVFrame, Message, PoolTicket
from baton.worker.attempts import Key
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
    """A prefill worker sent a message.

    ``peer``: its routing identity. ``key``: the CURVE key of its connection; empty without keys.
    """

    peer: bytes
    message: Message
    key: bytes = b""


@dataclass(slots=True, frozen=True)
class PeerGone:
    """A prefill worker's connection was lost."""

    peer: bytes


@dataclass(slots=True, frozen=True)
class FrameStored:
    """A located KV frame was checked and, if intact, written into the pool."""

    frame: KVFrame
    intact: bool


@dataclass(slots=True, frozen=True)
class FrameFailed:
    """Our own code raised while it located a KV frame or wrote it into the pool."""

    frame: KVFrame
    error: Exception


@dataclass(slots=True, frozen=True)
class ToPeer:
    """Send a message to a prefill worker."""

    peer: bytes
    message: Message


@dataclass(slots=True, frozen=True)
class MapPool:
    """Map a prefill worker's pool for ``transport``, then report :class:`PoolMapped`."""

    peer: bytes
    incarnation: int
    ticket: PoolTicket | DeviceTicket
    transport: str


@dataclass(slots=True, frozen=True)
class PoolMapped:
    """The result of :class:`MapPool`; ``failure``: why the pool cannot be read, else empty."""

    peer: bytes
    failure: str
    transport: str


@dataclass(slots=True, frozen=True)
class DecodeChunk:
    """Decode a chunk of samples, then report :class:`ChunkDecoded`.

    ``entries``: codebook entries of frames ``window.start..window.stop``, int32.
    """

    key: Key
    window: Window
    entries: I32


@dataclass(slots=True, frozen=True)
class ChunkDecoded:
    """Samples as little-endian 16-bit integers, or the error of the codec."""

    key: Key
    frame: int
    samples: bytes | Exception


HandoffEvent = FromPeer | PeerGone | FrameStored | PoolMapped
Event = (
    FromRouter
    | RouterUp
    | RouterDown
    | HandoffEvent
    | FrameFailed
    | StepDone
    | GrammarDone
    | ImagesChecked
    | ChunkDecoded
    | Tick
    | DrainRequested
)
Action = (
    ToRouter
    | ToPeer
    | MapPool
    | RunStep
    | AbandonStep
    | CompileGrammar
    | DropGrammar
    | CheckImages
    | DecodeChunk
    | Log
    | Fault
    | Exit
)
