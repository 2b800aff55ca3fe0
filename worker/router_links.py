"""A worker's connections to all its routers, and the batching of its messages to them.

Messages to an unreachable router are dropped: the core repeats every message until the router
answers. A terminal too large for an envelope is replaced by one with LimitExceeded.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable

from baton.proto.errors import AccessDenied, LimitExceeded, ProtocolError, VersionMismatch
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import Message, Rejected, RouterToWorker, Terminal
from baton.runtime.keys.allowed import ROUTER
from baton.runtime.keys.keyring import keys_for
from baton.runtime.liveness import DEFAULT_WORKER_TIMEOUT_S, connection_timeout
from baton.runtime.net.channel import Buffers, ChannelOptions, Frames, SendResult
from baton.runtime.net.outbox import Outbox
from baton.runtime.net.sockets import DealerChannel
from baton.runtime.net.wiring import Wiring
from baton.runtime.process.log import get_logger

from .events import FromRouter, RouterDown, RouterUp

_NAME_BYTES = 64
"""Bytes of the name in an identity, which ZeroMQ limits to 255 bytes."""
_log = get_logger()

LinkEvent = FromRouter | RouterUp | RouterDown


def routing_identity(worker: str) -> bytes:
    """Return a routing identity for one connection of this worker.

    It is unpredictable, also for peers that saw the identities of earlier connections. ZeroMQ
    ignores a connection whose identity another open connection has taken before.
    """
    return worker.encode()[:_NAME_BYTES] + b"/" + secrets.token_hex(16).encode()


class RouterLinks:
    """One DealerChannel per router; messages and connection changes go to ``deliver``.

    ``worker``: its name, the readable part of the routing identities. ``dropped`` counts messages
    that could not be decoded or encoded, by reason.
    """

    def __init__(
        self,
        wiring: Wiring,
        routers: dict[str, str],
        worker: str,
        deliver: Callable[[LinkEvent], object],
        dropped: Counter[str] | None = None,
        worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S,
    ) -> None:
        self._deliver = deliver
        self._options = ChannelOptions(heartbeat_timeout_s=connection_timeout(worker_timeout_s))
        self._decoder: EnvelopeDecoder[RouterToWorker] = EnvelopeDecoder(RouterToWorker)
        self._outbox: Outbox[str] = Outbox(self._send, on_refused=self._too_large)
        self._channels: dict[str, DealerChannel] = {}
        self._wiring = wiring
        self._routers = routers
        self._worker = worker
        self._denied: set[str] = set()  # routers that refused our key; logged once each
        self._dropped = Counter[str]() if dropped is None else dropped
        for name in routers:
            self._connect(name)

    def _connect(self, name: str) -> None:
        identity = routing_identity(self._worker)
        address = self._routers[name]
        keys = keys_for(self._wiring.keys, address, ROUTER, name)
        channel = DealerChannel(
            self._wiring.context, address, identity, keys=keys, options=self._options
        )
        self._channels[name] = channel
        channel.attach(
            self._wiring.loop,
            lambda frames: self._hear(name, frames),
            lambda: self._deliver(RouterUp(name)),
            lambda: self._lost(name),
            lambda error, final: self._refused(name, error, final=final),
        )

    def _lost(self, name: str) -> None:
        """Reconnect with a new identity.

        A router that was paused still holds the old connection and would ignore a second
        connection with the same identity.
        """
        self._channels[name].close()
        self._connect(name)
        self._deliver(RouterDown(name))

    def _refused(self, name: str, error: AccessDenied, *, final: bool) -> None:
        """Log the refusal once. The channel retries: the router's key list may be outdated."""
        if final and name not in self._denied:
            self._denied.add(name)
            _log.error("router.denied", router=name, error=str(error))

    def _hear(self, name: str, frames: Frames) -> None:
        try:
            messages = self._decoder.decode(frames)
        except ProtocolError as error:
            self._dropped[f"router_{error.code}"] += 1
            _log.warning("router.malformed", router=name, error=str(error))
            if isinstance(error, VersionMismatch):  # perhaps a Rejected in another version
                rejected = Rejected(code=error.code, message=str(error))
                self._deliver(FromRouter(name, rejected))
            return
        for message in messages:
            self._deliver(FromRouter(name, message))

    def send(self, router: str, message: Message) -> None:
        """Queue ``message``; :meth:`flush` sends it."""
        self._outbox.put(router, message)

    def flush(self) -> None:
        """Send queued messages to connected routers; drop those to the other routers."""
        for name, channel in self._channels.items():
            if not channel.connected:
                self._outbox.drop(name)
        self._outbox.flush()

    def _send(self, router: str, frames: Buffers) -> SendResult:
        channel = self._channels.get(router)
        return SendResult.UNREACHABLE if channel is None else channel.send(frames)

    def _too_large(self, router: str, message: Message, reason: str) -> None:
        """Replace a terminal that cannot be encoded, or the client would wait for the deadline."""
        self._dropped["not_encodable"] += 1
        if isinstance(message, Terminal) and message.code is None:
            terminal = Terminal(
                request=message.request,
                attempt=message.attempt,
                position=message.position,
                code=LimitExceeded.code,
                message=reason,
                request_id=message.request_id,
            )
            self._outbox.put(router, terminal)

    def close(self) -> None:
        """Disconnect from all routers."""
        for channel in self._channels.values():
            channel.close()
