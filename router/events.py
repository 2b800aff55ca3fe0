"""Events that the router's core handles, and actions that it returns.

Pure data. ``identity`` is the ZeroMQ routing id of a connection.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.proto.errors import BatonError
from baton.proto.wire.messages import Message


class FromClient(msgspec.Struct, frozen=True, gc=False):
    """A client sent an envelope."""

    identity: bytes
    messages: Sequence[Message]


class FromWorker(msgspec.Struct, frozen=True, gc=False):
    """A worker sent an envelope."""

    identity: bytes
    messages: Sequence[Message]


class ClientInputRejected(msgspec.Struct, frozen=True, gc=False):
    """A client sent bytes that cannot be decoded, about ``request_id`` if it is known."""

    identity: bytes
    error: BatonError
    request_id: str = ""


class WorkerInputRejected(msgspec.Struct, frozen=True, gc=False):
    """A worker sent bytes that cannot be decoded, or a Hello that its key does not allow."""

    identity: bytes
    error: BatonError


class NotSent(msgspec.Struct, frozen=True, gc=False):
    """A message to a worker is too large for any envelope."""

    message: Message
    reason: str


class StopRequested(msgspec.Struct, frozen=True, gc=False):
    """Reject new requests; running requests continue."""


class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """A client's connection was lost."""

    identity: bytes


class WorkersGone(msgspec.Struct, frozen=True, gc=False):
    """The connections of these workers were lost: all that the shell has learnt of by now."""

    identities: Sequence[bytes]


class ClientFull(msgspec.Struct, frozen=True, gc=False):
    """A client reads too slowly; send nothing to it until :class:`ClientWritable`."""

    identity: bytes


class ClientWritable(msgspec.Struct, frozen=True, gc=False):
    """A slow client has received all messages sent to it."""

    identity: bytes


class Tick(msgspec.Struct, frozen=True, gc=False):
    """The core's next timer is due."""


Event = (
    FromClient
    | FromWorker
    | ClientInputRejected
    | WorkerInputRejected
    | NotSent
    | StopRequested
    | ClientGone
    | WorkersGone
    | ClientFull
    | ClientWritable
    | Tick
)


class ToClient(msgspec.Struct, frozen=True, gc=False):
    """Send to a client."""

    identity: bytes
    message: Message


class ToWorker(msgspec.Struct, frozen=True, gc=False):
    """Send to a worker."""

    identity: bytes
    message: Message


class Log(msgspec.Struct, frozen=True, gc=False):
    """Write a log line: dotted event name and fields."""

    event: str
    fields: dict[str, object]


class Fault(msgspec.Struct, frozen=True, gc=False):
    """Log an exception of our own code with its traceback."""

    event: str
    error: Exception
    fields: dict[str, object]


Action = ToClient | ToWorker | Log | Fault
