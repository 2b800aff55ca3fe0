"""Events the router's core takes and actions it asks for.

Pure data. Identities are the ZeroMQ routing ids of the peers' connections. Messages are no
events: they come in whole envelopes, through ``from_client`` and ``from_worker``.
"""

from __future__ import annotations

import msgspec

from ..proto.messages import Message


class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """A client's connection was lost."""

    identity: bytes


class WorkerGone(msgspec.Struct, frozen=True, gc=False):
    """A worker's connection was lost."""

    identity: bytes


class ClientFull(msgspec.Struct, frozen=True, gc=False):
    """A client reads too slowly: give it nothing more until :class:`ClientWritable`."""

    identity: bytes


class ClientWritable(msgspec.Struct, frozen=True, gc=False):
    """A slow client has caught up with what was handed over."""

    identity: bytes


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time passed; the core evaluates its timers."""


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
    """An event worth a log line: dotted name and keys."""

    event: str
    fields: dict[str, object]


Action = ToClient | ToWorker | Log
