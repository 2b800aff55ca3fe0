"""A worker's connections to all its routers, and the batching of what it says to them.

What cannot be sent is dropped: everything a worker says is repeated by its core until it is
answered. An end that no envelope can carry is replaced by one that says so.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable

from ..proto.codec import EnvelopeDecoder
from ..proto.errors import AccessDenied, LimitExceeded, ProtocolError, VersionMismatch
from ..proto.messages import Message, Rejected, RouterToWorker, Terminal
from .actions import FromRouter, RouterDown, RouterUp
from .allowed_keys import ROUTER
from .channel import Buffers, ChannelOptions, Frames, SendResult
from .keyring import Keys, keys_for
from .liveness import DEFAULT_WORKER_TIMEOUT_S, connection_timeout
from .log import get_logger
from .loop import Loop
from .outbox import Outbox
from .sockets import Context, DealerChannel

_log = get_logger()

LinkEvent = FromRouter | RouterUp | RouterDown


def routing_identity(worker: str) -> bytes:
    """What a worker's connections of this process begin with; nobody else can know it.

    Who knows the identity of another's connection can ask ZeroMQ for it when that one ends.
    """
    return f"{worker}:{secrets.token_hex(16)}".encode()


class RouterLinks:
    """One DealerChannel per router; ``deliver`` hears what happens on them.

    ``identity`` must be new for every process start; each connection adds its number.
    ``dropped`` counts what could not be understood.
    """

    def __init__(
        self,
        loop: Loop,
        context: Context,
        routers: dict[str, str],
        identity: bytes,
        deliver: Callable[[LinkEvent], object],
        keys: Keys | None = None,
        dropped: Counter[str] | None = None,
        worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S,
    ) -> None:
        self._deliver = deliver
        self._options = ChannelOptions(heartbeat_timeout_s=connection_timeout(worker_timeout_s))
        self._decoder: EnvelopeDecoder[RouterToWorker] = EnvelopeDecoder(RouterToWorker)
        self._outbox: Outbox[str] = Outbox(self._send, on_refused=self._too_large)
        self._channels: dict[str, DealerChannel] = {}
        self._loop = loop
        self._context = context
        self._routers = routers
        self._identity = identity
        self._keys = keys
        self._connections = 0
        self._denied: set[str] = set()  # routers that do not know our key; said once
        self._dropped = Counter[str]() if dropped is None else dropped
        for name in routers:
            self._connect(name)

    def _connect(self, name: str) -> None:
        identity = b"%b/%d" % (self._identity, self._connections)
        self._connections += 1
        address = self._routers[name]
        keys = keys_for(self._keys, address, ROUTER, name)
        channel = DealerChannel(self._context, address, identity, keys=keys, options=self._options)
        self._channels[name] = channel
        channel.attach(
            self._loop,
            lambda frames: self._hear(name, frames),
            lambda: self._deliver(RouterUp(name)),
            lambda: self._lost(name),
            lambda error, final: self._refused(name, error, final=final),
        )

    def _lost(self, name: str) -> None:
        """Come back under another identity.

        A router that paused has not noticed yet that the old connection is gone, and would
        never read a second one of the same name.
        """
        self._channels[name].close()
        self._connect(name)
        self._deliver(RouterDown(name))

    def _refused(self, name: str, error: AccessDenied, *, final: bool) -> None:
        """The list of a router may be older than our key: say it, and let the channel go on."""
        if final and name not in self._denied:
            self._denied.add(name)
            _log.error("router.denied", router=name, error=str(error))

    def _hear(self, name: str, frames: Frames) -> None:
        try:
            messages = self._decoder.decode(frames)
        except ProtocolError as error:
            self._dropped[f"router_{error.code}"] += 1
            _log.warning("router.malformed", router=name, error=str(error))
            if isinstance(error, VersionMismatch):  # it may have said just that
                rejected = Rejected(code=error.code, message=str(error))
                self._deliver(FromRouter(name, rejected))
            return
        for message in messages:
            self._deliver(FromRouter(name, message))

    def send(self, router: str, message: Message) -> None:
        """Queue for the end of the turn."""
        self._outbox.put(router, message)

    def flush(self) -> None:
        """Send what was queued to the routers that are connected."""
        for name, channel in self._channels.items():
            if not channel.connected:
                self._outbox.drop(name)
        self._outbox.flush()

    def _send(self, router: str, frames: Buffers) -> SendResult:
        channel = self._channels.get(router)
        return SendResult.UNREACHABLE if channel is None else channel.send(frames)

    def _too_large(self, router: str, message: Message, reason: str) -> None:
        """End a request whose end cannot be sent; its client would wait for the deadline."""
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
