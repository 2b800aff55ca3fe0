"""Messages between clients and routers. Workers also send the tokens and ends of requests.

See :mod:`.messages` for the identities and units in the fields.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..contexts.equality import same
from ..layout import ModelCard
from ..limits import MAX_LIST_ITEMS
from .bounds import (
    Attempt,
    Binaries,
    Binary,
    Chunk,
    Code,
    Count,
    Name,
    Names,
    Result,
    Seconds,
    Text,
    TokenIds,
    Word,
    WorkerName,
)
from .message_types import LogProbs, Message, ServedTimes, WorkerTimes
from .wire_context import CarriedArray, CarriedContext

# --------------------------------------------------------------------------- tokens, both ways


class TokenRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one request; a router forwards the run unchanged."""

    request: Binary
    attempt: Attempt
    position: Count  # of tokens[0]; router and client pass only position == next
    tokens: TokenIds
    logprobs: LogProbs | None = None
    media: Chunk | None = None  # result that is complete with the run's last token: see protocol.md


class Begun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The workers of a request of a gateway whose first token arrived, as they are then."""

    request: Binary
    prefill: WorkerName
    decode: WorkerName
    times: ServedTimes


class Tokens(Message, frozen=True, kw_only=True):
    """Worker to router and router to client: the tokens of one step, all requests of the peer."""

    runs: Annotated[list[TokenRun], Meta(max_length=MAX_LIST_ITEMS)]
    begun: Annotated[list[Begun], Meta(max_length=MAX_LIST_ITEMS)] = []  # to a gateway alone


class Terminal(Message, frozen=True, kw_only=True, eq=False):
    """Worker to router and router to client: the end of a request; each request has only one.

    ``status``: a GenerationStatus value for a finished request, None for a failed or refused
    request, which has ``code`` and ``message`` instead.
    """

    request: Binary
    attempt: Attempt = 0
    position: Count = 0  # the context's length at its end: tokens below it must have arrived
    status: Code | None = None
    code: Code | None = None
    message: Text = ""
    retry_after: Seconds | None = None
    request_id: Name = ""  # identifies a refused request to a client that has not got its key
    cached_tokens: Count = 0
    prefill: WorkerName = ""  # workers that served the request, for the client
    decode: WorkerName = ""
    embedding: CarriedArray = None  # float32 [dim], of a request for embeddings
    times: WorkerTimes | None = None  # from a worker to the router alone
    tokens_s: Seconds = 0.0  # of a whole answer: from its first tokens to its end
    served: ServedTimes | None = None  # to a gateway alone
    media: Result | None = None  # a binary result that is not streamed, such as a picture
    arrays: Count = 0  # number of the envelope's frames that belong to this message

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, n), getattr(other, n)) for n in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]  # holds an array


# --------------------------------------------------------------------------- client -> router


class Submit(Message, frozen=True, kw_only=True):
    """Start a request. Sent again with the same content, it re-attaches to the request."""

    request_id: Name
    context: CarriedContext
    deadline: float | None = None  # not bounded here: the router answers with an InputError
    pool: Name | None = None
    pin: Name = "prefer"  # "strict": a replay may not move the request off target_endpoint
    fallback: bool = False  # choose another worker if target_endpoint cannot take the request
    serial: Word = 0  # number of the request at its client; distinguishes requests of one name
    gateway: Name = ""  # name of the gateway that sends it for an HTTP client
    traceparent: Name = ""  # trace that the request belongs to, as in W3C Trace Context
    slo_ttft: float | None = None  # its own limits in seconds, in place of the cluster's; not ...
    slo_itl: float | None = None  # ... bounded here: the router answers with an InputError
    whole: bool = False  # send the tokens with the terminal, all at once
    refusals: Count = 0  # of this request so far, for lack of room: it is counted as refused once
    arrays: Count = 0  # number of the envelope's frames that belong to this message


class Resume(Message, frozen=True, kw_only=True):
    """Continue a stream after the connection or the router was lost."""

    request_id: Name
    request: Binary
    secret: Binary
    position: Count  # next token position the client waits for
    attempt: Attempt  # highest attempt the client saw
    context: CarriedContext  # a router that does not know the request starts again from this ...
    emitted: TokenIds = []  # ... and these tokens, which the client already has
    deadline: float | None = None
    pool: Name | None = None
    pin: Name = "prefer"
    fallback: bool = False
    gateway: Name = ""  # as in Submit, like the next fields
    traceparent: Name = ""
    slo_ttft: float | None = None
    slo_itl: float | None = None
    arrays: Count = 0  # number of the envelope's frames that belong to this message


class Cancel(Message, frozen=True, kw_only=True):
    """Cancel a request; its Terminal is the answer."""

    request_id: Name = ""
    request: Binary = b""
    serial: Word = 0  # of its Submit
    secret: Binary = b""  # of Submitted; required on another connection than the request's


class FinalAck(Message, frozen=True, kw_only=True):
    """The client has received these terminals; the router may delete them."""

    requests: Binaries


class Describe(Message, frozen=True, kw_only=True):
    """Request the model's card and the named text files of the model."""

    files: Names = []


class Status(Message, frozen=True, kw_only=True):
    """Request the cluster's state."""

    handoffs: Count = 16  # number of recent handoffs to list
    requests: Count = 0  # number of ended requests to describe, the latest ones
    request: Name = ""  # describe all requests with this id, key, or part of the id
    failed: Count = 0  # number of failed requests, and of refused ones, to describe
    history: Count = 0  # number of samples of the last 15 minutes, the latest ones
    metrics: bool = False  # report also the families of metrics
    nonce: Word = 0  # repeated in the answer; 0: none


class Drain(Message, frozen=True, kw_only=True):
    """Client (operator) to router, router to worker: finish running requests, take no new ones."""

    worker: Name = ""  # worker id; empty from router to worker
    force: bool = False  # drain also the last ready worker of a role


class Ping(Message, frozen=True, kw_only=True):
    """Any direction: ask whether the peer answers."""

    nonce: Word = 0


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping."""

    nonce: Word = 0


# --------------------------------------------------------------------------- router -> client


class Submitted(Message, frozen=True, kw_only=True):
    """The request was admitted; a later Resume must carry ``secret``."""

    request_id: Name
    request: Binary
    secret: Binary
    attempt: Attempt = 1


class Described(Message, frozen=True, kw_only=True):
    """The model's card and the requested text files."""

    model: ModelCard | None = None
    folder: Text = ""
    files: dict[str, bytes] = {}
    available: Names = []


class StatusReport(Message, frozen=True, kw_only=True):
    """The output of ``baton status --json``, as JSON text."""

    report: bytes
    nonce: Word = 0  # of the Status that it answers


class Moved(Message, frozen=True, kw_only=True):
    """Another router now serves the request: worker to old router, old router to client."""

    request: Binary
    router: Name = ""


class Drained(Message, frozen=True, kw_only=True):
    """Worker to router: no requests are left. Router to client: the drain has begun or ended."""

    worker: Name
    code: Name | None = None
    message: Text = ""


class Rejected(Message, frozen=True, kw_only=True):
    """A message was malformed or not allowed; the connection stays usable."""

    code: Name
    message: Text
    request_id: Name = ""
