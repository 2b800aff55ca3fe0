"""Events that the router's core handles, and actions that it returns.

Pure data. ``identity`` is the ZeroMQ routing id of a connection. Messages are not events: the
core receives them per envelope, through ``from_client`` and ``from_worker``.
"""

from __future__ import annotations

import msgspec

from ..proto.wire.messages import Message


class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """A client's connection was lost."""

    identity: bytes


class WorkerGone(msgspec.Struct, frozen=True, gc=False):
    """A worker's connection was lost."""

    identity: bytes


class ClientFull(msgspec.Struct, frozen=True, gc=False):
    """A client reads too slowly; send nothing to it until :class:`ClientWritable`."""

    identity: bytes


class ClientWritable(msgspec.Struct, frozen=True, gc=False):
    """A slow client has received all messages sent to it."""

    identity: bytes


class Tick(msgspec.Struct, frozen=True, gc=False):
    """The core's next timer is due."""


Event = ClientGone | WorkerGone | ClientFull | ClientWritable | Tick


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


Action = ToClient | ToWorker | Log
