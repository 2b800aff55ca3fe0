"""What clients and routers say to each other; the tokens and ends of requests, also from workers.

See :mod:`.messages` for the identities and units in the fields.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .equality import same
from .layout import ModelCard
from .limits import MAX_LIST_ITEMS
from .message_types import (
    Attempt,
    Binaries,
    Binary,
    Count,
    LogProbs,
    Message,
    Name,
    Names,
    Seconds,
    Text,
    TokenIds,
    Word,
)
from .wire import CarriedArray, CarriedContext

# --------------------------------------------------------------------------- tokens, both ways


class TokenRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one request; forwarded by the router as it came."""

    request: Binary
    attempt: Attempt
    position: Count  # of tokens[0]; router and client pass only position == next
    tokens: TokenIds
    logprobs: LogProbs | None = None


class Tokens(Message, frozen=True, kw_only=True):
    """Worker to router and router to client: the tokens of one step, all requests of the peer."""

    runs: Annotated[list[TokenRun], Meta(max_length=MAX_LIST_ITEMS)]


class Terminal(Message, frozen=True, kw_only=True, eq=False):
    """Worker to router and router to client: the one end of a request.

    ``status`` is a GenerationStatus value for a finished request and ``None`` for a failed
    or refused one, which has ``code`` and ``message`` instead.
    """

    request: Binary
    attempt: Attempt = 0
    position: Count = 0  # the context's length at its end: tokens below it must have arrived
    status: Name | None = None
    code: Name | None = None
    message: Text = ""
    retry_after: Seconds | None = None
    request_id: Name = ""  # client: finds a refused request whose key it never learned
    cached_tokens: Count = 0
    prefill: Name = ""  # client: which workers served it
    decode: Name = ""
    embedding: CarriedArray = None  # float32 [dim], of a request to embed
    arrays: Count = 0  # how many of the envelope's frames are its own

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, n), getattr(other, n)) for n in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]  # holds an array


# --------------------------------------------------------------------------- client -> router


class Submit(Message, frozen=True, kw_only=True):
    """Start a request; sent again with the same content it re-attaches."""

    request_id: Name
    context: CarriedContext
    deadline: float | None = None  # the client's word: the router answers what is wrong with it
    pool: Name | None = None
    pin: Name = "prefer"  # "strict": a replay may not move the request off target_endpoint
    fallback: bool = False  # choose another worker when target_endpoint cannot take it
    serial: Word = 0  # which of the client's requests this is: a name used again is another one
    arrays: Count = 0  # how many of the envelope's frames are its own


class Resume(Message, frozen=True, kw_only=True):
    """Continue a stream after the connection or the router was lost."""

    request_id: Name
    request: Binary
    secret: Binary
    position: Count  # next token position the client waits for
    attempt: Attempt  # highest attempt the client saw
    context: CarriedContext  # a router that lost its memory starts again from this ...
    emitted: TokenIds = []  # ... and these tokens, already with the client
    deadline: float | None = None
    pool: Name | None = None
    pin: Name = "prefer"
    fallback: bool = False
    arrays: Count = 0  # how many of the envelope's frames are its own


class Cancel(Message, frozen=True, kw_only=True):
    """End a request; answered by its Terminal."""

    request_id: Name = ""
    request: Binary = b""
    serial: Word = 0  # of its Submit
    secret: Binary = b""  # of Submitted: needed on another connection than the request's


class FinalAck(Message, frozen=True, kw_only=True):
    """The client has these terminals; the router may forget them."""

    requests: Binaries


class Describe(Message, frozen=True, kw_only=True):
    """Ask for the model's card and, by name, its text files."""

    files: Names = []


class Status(Message, frozen=True, kw_only=True):
    """Ask for the cluster's state."""

    handoffs: Count = 16  # how many recent handoffs to list


class Drain(Message, frozen=True, kw_only=True):
    """Client (operator) to router, router to worker: take no new work, finish what runs."""

    worker: Name = ""  # worker id; for the router's own use empty
    force: bool = False  # also the last ready worker of its role


class Ping(Message, frozen=True, kw_only=True):
    """Any direction: are you there; carries nothing."""

    nonce: Word = 0


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping."""

    nonce: Word = 0


# --------------------------------------------------------------------------- router -> client


class Submitted(Message, frozen=True, kw_only=True):
    """The request was admitted; ``secret`` opens a later Resume."""

    request_id: Name
    request: Binary
    secret: Binary
    attempt: Attempt = 1


class Described(Message, frozen=True, kw_only=True):
    """The model's card, generation defaults and the text files asked for."""

    model: ModelCard | None = None
    folder: Text = ""
    files: dict[str, bytes] = {}
    available: Names = []


class StatusReport(Message, frozen=True, kw_only=True):
    """The object ``baton status --json`` prints, as JSON text."""

    report: bytes


class Moved(Message, frozen=True, kw_only=True):
    """Another router serves the request now: worker to the old router, which tells its client."""

    request: Binary
    router: Name = ""


class Drained(Message, frozen=True, kw_only=True):
    """Worker to router: nothing left in flight. Router to client: the drain was started or done."""

    worker: Name
    code: Name | None = None
    message: Text = ""


class Rejected(Message, frozen=True, kw_only=True):
    """A message could not be understood or is not allowed; the connection stays usable."""

    code: Name
    message: Text
    request_id: Name = ""
