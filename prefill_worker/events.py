"""What the prefill core is told and what it asks its shell to do; pure data."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.grammar import CompileGrammar, DropGrammar, GrammarDone
from ..engine.plan import Int32, StepPlan, StepResult
from ..kv_transfer import sender as handoff
from ..kv_transfer.sender import Key
from ..proto.messages import Message
from ..runtime.actions import (
    DrainRequested,
    Exit,
    FromRouter,
    Note,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
)


@dataclass(slots=True, frozen=True)
class FromPeer:
    """A decode worker said something."""

    endpoint: str
    message: Message


@dataclass(slots=True, frozen=True)
class NotSent:
    """No envelope can carry this message to a decode worker; ``reason`` says why."""

    endpoint: str
    message: Message
    reason: str


@dataclass(slots=True, frozen=True)
class PeerUp:
    """The connection to a decode endpoint stands (again)."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class PeerDown:
    """The connection to a decode endpoint was lost."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class DataUp:
    """The connection for KV frames to a decode endpoint stands (again)."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class DataDown:
    """There is no connection for KV frames to a decode endpoint, or not yet."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class LayersDone:
    """Inside the running step, a sequence's layers below ``layer_end`` are final."""

    sequence: bytes
    layer_end: int


@dataclass(slots=True, frozen=True)
class StepDone:
    """The compute thread has finished a step."""

    result: StepResult


@dataclass(slots=True, frozen=True)
class Packed:
    """A frame was packed and sent."""

    key: Key
    index: int
    checksum: int


@dataclass(slots=True, frozen=True)
class Connect:
    """Open the sockets to a decode endpoint."""

    endpoint: str


@dataclass(slots=True, frozen=True)
class OpenData:
    """The peer told where KV frames go."""

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
    """Gather these cells from the pool, send them, answer with :class:`Packed`.

    ``block_table``: int32, pool block of each logical block. ``shared``: the peer reads them
    there itself, so it is only told where they are.
    """

    send: handoff.SendFrame
    block_table: Int32
    shared: bool = False


@dataclass(slots=True, frozen=True)
class RunStep:
    """Give the plan to the compute thread."""

    plan: StepPlan


@dataclass(slots=True, frozen=True)
class AbandonStep:
    """Nobody waits for this step any more: answer it with :class:`StepDone` as soon as can be."""

    step: int


Event = (
    FromRouter | RouterUp | RouterDown | FromPeer | NotSent | PeerUp | PeerDown | DataUp | DataDown
    | LayersDone | StepDone | Packed | GrammarDone | Tick | DrainRequested
)  # fmt: skip
Action = (
    ToRouter | ToPeer | Connect | OpenData | Disconnect | PackFrame | RunStep | AbandonStep
    | CompileGrammar | DropGrammar | Note | Exit
)  # fmt: skip
