"""Events that the client's core handles, and actions that it returns. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ..proto.contexts.outputs import TokenLogProbs
from ..proto.errors import BatonError
from ..proto.wire.messages import Message
from ..proto.wire.wire_context import WireContext


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestSpec:
    """The user's parameters of one request.

    ``deadline``: seconds from the request's start. ``max_retries``: how often a request that the
    cluster refuses for lack of room is submitted again.
    """

    request_id: str
    context: WireContext
    deadline: float | None = None
    pool: str | None = None
    pin: str = "prefer"
    fallback: bool = False
    max_retries: int = 0
    gateway: str = ""
    traceparent: str = ""


# --------------------------------------------------------------------------------- events


@dataclass(slots=True, frozen=True)
class Start:
    """Start a request."""

    spec: RequestSpec


@dataclass(slots=True, frozen=True)
class Stop:
    """Cancel a request. ``report``: still wait for its end and return an Ended."""

    request_id: str
    report: bool = False


@dataclass(slots=True, frozen=True)
class Ask:
    """Send a query and wait up to ``timeout`` seconds. ``ticket``: id of the query."""

    ticket: int
    message: Message
    timeout: float


@dataclass(slots=True, frozen=True)
class Connected:
    """The connection is open. ``identity``: the client's routing id on this connection."""

    identity: bytes


@dataclass(slots=True, frozen=True)
class Disconnected:
    """The connection broke. The core answers with a Reconnect."""


@dataclass(slots=True, frozen=True)
class Reached:
    """The router of a Look answered."""

    address: str


@dataclass(slots=True, frozen=True)
class Received:
    """A message of the router arrived."""

    message: Message


@dataclass(slots=True, frozen=True)
class Malformed:
    """The router sent bytes that are not a message of this protocol version."""

    error: BatonError


@dataclass(slots=True, frozen=True)
class Tick:
    """Time passed."""


@dataclass(slots=True, frozen=True)
class Refused:
    """A handshake failed. ``final``: the router does not allow the client's key."""

    error: BatonError
    final: bool


Event = (
    Start | Stop | Ask | Connected | Disconnected | Reached | Received | Malformed | Refused | Tick
)


# --------------------------------------------------------------------------------- actions


@dataclass(slots=True, frozen=True)
class Send:
    """Send to the router. Without a connection, drop the message: the core repeats messages."""

    message: Message


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """The next tokens of a request, each once and in order. ``position``: of the first token."""

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogProbs] | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Ended:
    """The end of a request, with a status if the request finished, or an error if it failed.

    ``embedding``: float32 ``[dim]``, only for an embedding request. ``media``: the PNG, only for a
    picture request.
    """

    request_id: str
    position: int
    status: str | None = None
    error: BatonError | None = None
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    embedding: npt.NDArray[np.float32] | None = None
    media: bytes | None = None


@dataclass(slots=True, frozen=True)
class Answered:
    """The answer to a query, or the error that prevented an answer."""

    ticket: int
    answer: Message | BatonError


@dataclass(slots=True, frozen=True)
class Reconnect:
    """Close the connection and connect to this router."""

    address: str


@dataclass(slots=True, frozen=True)
class Look:
    """Ping this router on a second connection. An answer becomes a Reached event."""

    address: str


Action = Send | NewTokens | Ended | Answered | Reconnect | Look
