"""What the client's core is told, and what it asks its shell to do. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..proto.errors import BatonError
from ..proto.messages import Message
from ..proto.outputs import TokenLogProbs
from ..proto.wire import WireContext


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestSpec:
    """One request as the user asked for it; ``deadline`` in seconds from its start."""

    request_id: str
    context: WireContext
    deadline: float | None = None
    pool: str | None = None
    pin: str = "prefer"
    fallback: bool = False


# --------------------------------------------------------------------------------- events


@dataclass(slots=True, frozen=True)
class Start:
    """Begin a request."""

    spec: RequestSpec


@dataclass(slots=True, frozen=True)
class Stop:
    """End a request early. ``report``: its end is still waited for and told."""

    request_id: str
    report: bool = False


@dataclass(slots=True, frozen=True)
class Ask:
    """Send a question and wait up to ``timeout`` seconds; ``ticket`` names it."""

    ticket: int
    message: Message
    timeout: float


@dataclass(slots=True, frozen=True)
class Connected:
    """The connection stands; ``identity`` is ours on it."""

    identity: bytes


@dataclass(slots=True, frozen=True)
class Disconnected:
    """The connection broke; a Reconnect says where the next one goes."""


@dataclass(slots=True, frozen=True)
class Reached:
    """The router that a Look was for is there."""

    address: str


@dataclass(slots=True, frozen=True)
class Received:
    """The router said something."""

    message: Message


@dataclass(slots=True, frozen=True)
class Malformed:
    """The router sent bytes that are no message of this protocol version."""

    error: BatonError


@dataclass(slots=True, frozen=True)
class Tick:
    """Time passed."""


@dataclass(slots=True, frozen=True)
class Refused:
    """A handshake failed; ``final`` where the router said that our key is not let in."""

    error: BatonError
    final: bool


Event = (
    Start | Stop | Ask | Connected | Disconnected | Reached | Received | Malformed | Refused | Tick
)


# --------------------------------------------------------------------------------- actions


@dataclass(slots=True, frozen=True)
class Send:
    """Send to the router; lost when there is no connection, since all is repeated."""

    message: Message


@dataclass(slots=True, frozen=True)
class NewTokens:
    """The next tokens of a request, each once and in order; ``position`` of the first."""

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogProbs] | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class Ended:
    """The one end of a request: a status when it finished, an error when it failed.

    ``embedding``: float32 ``[dim]``, of a request to embed.
    """

    request_id: str
    position: int
    status: str | None = None
    error: BatonError | None = None
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    embedding: npt.NDArray[np.float32] | None = None


@dataclass(slots=True, frozen=True)
class Answered:
    """A question's answer, or why there is none."""

    ticket: int
    answer: Message | BatonError


@dataclass(slots=True, frozen=True)
class Reconnect:
    """Give up the connection there is and make one to this router."""

    address: str


@dataclass(slots=True, frozen=True)
class Look:
    """See whether this router is there, beside the connection: a Reached says that it is."""

    address: str


Action = Send | NewTokens | Ended | Answered | Reconnect | Look
