"""What the decode core is told and what it asks its shell to do; pure data."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.grammar import CompileGrammar, DropGrammar, GrammarDone
from ..engine.plan import StepPlan, StepResult
from ..proto.messages import DeviceTicket, KVFrame, Message, PoolTicket
from ..runtime.actions import (
    DrainRequested,
    Exit,
    Fault,
    FromRouter,
    Note,
    RouterDown,
    RouterUp,
    Tick,
    ToRouter,
)


@dataclass(slots=True, frozen=True)
class FromPeer:
    """A prefill worker said something; ``peer`` is its routing identity."""

    peer: bytes
    message: Message


@dataclass(slots=True, frozen=True)
class PeerGone:
    """A prefill worker's connection was lost."""

    peer: bytes


@dataclass(slots=True, frozen=True)
class FrameStored:
    """A located KV frame was checked (and, if intact, written into the pool)."""

    frame: KVFrame
    intact: bool


@dataclass(slots=True, frozen=True)
class StepDone:
    """The compute thread has finished a step."""

    result: StepResult


@dataclass(slots=True, frozen=True)
class ToPeer:
    """Send to a prefill worker."""

    peer: bytes
    message: Message


@dataclass(slots=True, frozen=True)
class MapPool:
    """Map a prefill worker's pool for ``transport``, answer with :class:`PoolMapped`."""

    peer: bytes
    incarnation: int
    ticket: PoolTicket | DeviceTicket
    transport: str


@dataclass(slots=True, frozen=True)
class PoolMapped:
    """Whether the pool can be read; ``failure`` says why not, and is empty when it can."""

    peer: bytes
    failure: str
    transport: str


@dataclass(slots=True, frozen=True)
class RunStep:
    """Give the plan to the compute thread."""

    plan: StepPlan


@dataclass(slots=True, frozen=True)
class AbandonStep:
    """Nobody waits for this step any more: answer it with :class:`StepDone` as soon as can be."""

    step: int


Event = (
    FromRouter
    | RouterUp
    | RouterDown
    | FromPeer
    | PeerGone
    | FrameStored
    | PoolMapped
    | StepDone
    | GrammarDone
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
    | Note
    | Fault
    | Exit
)
