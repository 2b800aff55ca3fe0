"""Events that the client's core handles, and actions that it returns. Pure data.

They are structs, because a frozen dataclass takes five times as long to make, and each message of
a router makes some.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import BatonError
from baton.proto.wire.messages import Begun, Message, ServedTimes
from baton.proto.wire.wire_context import WireContext


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The user's parameters of one request.

    ``deadline``: seconds from the request's start. ``slo_ttft``, ``slo_itl``: limits of its own of
    TTFT and ITL in seconds; None: those of the cluster. ``max_retries``: how often a request that
    the cluster refuses for lack of room is submitted again.
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
    whole: bool = False
    slo_ttft: float | None = None
    slo_itl: float | None = None


# --------------------------------------------------------------------------------- events


class Start(msgspec.Struct, frozen=True):
    """Start a request."""

    spec: RequestSpec


class Stop(msgspec.Struct, frozen=True):
    """Cancel a request. ``report``: still wait for its end and return an Ended."""

    request_id: str
    report: bool = False


class Ask(msgspec.Struct, frozen=True):
    """Send a query and wait up to ``timeout`` seconds. ``ticket``: id of the query."""

    ticket: int
    message: Message
    timeout: float


class Connected(msgspec.Struct, frozen=True):
    """The connection is open. ``identity``: the client's routing id on this connection."""

    identity: bytes


class Disconnected(msgspec.Struct, frozen=True):
    """The connection broke. The core answers with a Reconnect."""


class Reached(msgspec.Struct, frozen=True):
    """The router of a Look answered."""

    address: str


class Received(msgspec.Struct, frozen=True):
    """A message of the router arrived."""

    message: Message


class Malformed(msgspec.Struct, frozen=True):
    """The router sent bytes that are not a message of this protocol version."""

    error: BatonError


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


class Refused(msgspec.Struct, frozen=True):
    """A handshake failed. ``final``: the router does not allow the client's key."""

    error: BatonError
    final: bool


Event = (
    Start | Stop | Ask | Connected | Disconnected | Reached | Received | Malformed | Refused | Tick
)


# --------------------------------------------------------------------------------- actions


class Send(msgspec.Struct, frozen=True):
    """Send to the router. Without a connection, drop the message: the core repeats messages."""

    message: Message


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """The next tokens of a request, each once and in order.

    ``position``: of the first token. ``media``: result that is complete with the last one, such as
    samples of speech, or the preview of a picture. ``begun``: of a gateway's first tokens.
    """

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogProbs] | None = None
    media: bytes | None = None
    begun: Begun | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request, with a status if the request finished, or an error if it failed.

    ``embedding``: float32 ``[dim]``, only for an embedding request. ``media``: the PNG, only for a
    picture request. ``tokens_s``: seconds from the first tokens to the end, of a whole answer.
    ``served``: times of a gateway's request.
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
    tokens_s: float = 0.0
    served: ServedTimes | None = None


class Answered(msgspec.Struct, frozen=True):
    """The answer to a query, or the error that prevented an answer."""

    ticket: int
    answer: Message | BatonError


class Reconnect(msgspec.Struct, frozen=True):
    """Close the connection and connect to this router."""

    address: str


class Look(msgspec.Struct, frozen=True):
    """Ping this router on a second connection. An answer becomes a Reached event."""

    address: str


class Raised(msgspec.Struct, frozen=True):
    """An exception of our own code, for the log."""

    error: Exception


Action = Raised | Send | NewTokens | Ended | Answered | Reconnect | Look
