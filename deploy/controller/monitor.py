"""Polls a router's status over the client socket."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...proto.errors import BatonError
from ...proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from ...proto.wire.messages import Drain, Message, RouterToClient, Status, StatusReport
from ...runtime.keys.allowed import ROUTER
from ...runtime.keys.keyring import Keys, keys_for
from ...runtime.net.channel import Frames
from ...runtime.net.loop import Loop
from ...runtime.net.sockets import Context, DealerChannel
from ...runtime.process.log import get_logger
from ..report import ClusterReport, parse_report

INTERVAL = 0.2
"""Seconds between polls."""
PATIENCE = 2.0
"""Seconds without an answer before the connection is replaced."""
_log = get_logger()


class StatusMonitor:
    """Calls ``on_report`` with every answer of the router.

    A connection without answers is replaced by a connection with another identity. After a network
    failure, the router may still hold the old connection, and would ignore a second connection
    with the same identity. A serving router would then seem to hang.
    """

    def __init__(
        self,
        loop: Loop,
        context: Context,
        address: str,
        on_report: Callable[[ClusterReport], object],
        keys: Keys | None = None,
    ) -> None:
        self._loop = loop
        self._on_report = on_report
        self._encoder = EnvelopeEncoder()
        self._decoder = EnvelopeDecoder[Message](RouterToClient)
        self._context = context
        self._address = address
        self._keys = keys_for(keys, address, ROUTER)
        self._channel = self._connect()
        self._timer = loop.call_later(0.0, self._ask)

    def drain(self, worker: str) -> None:
        """Ask the router to drain a worker. The message is lost while the router is away.

        ``force``, because the controller has already checked the drain. It has more information
        than a router, for example about the next worker of a rollout.
        """
        self._channel.send(self._encoder.encode([Drain(worker=worker, force=True)]))

    def close(self) -> None:
        """Stop polling and disconnect."""
        self._timer.cancel()
        self._channel.close()

    def _connect(self) -> DealerChannel:
        identity = b"supervisor-" + os.urandom(16)
        channel = DealerChannel(self._context, self._address, identity, keys=self._keys)
        channel.attach(self._loop, self._on_message)
        self._fresh_until = self._loop.now() + PATIENCE
        return channel

    def _ask(self) -> None:
        if self._loop.now() >= self._fresh_until:
            self._channel.close()
            self._channel = self._connect()
        self._channel.send(self._encoder.encode([Status(handoffs=0)]))
        self._timer = self._loop.call_later(INTERVAL, self._ask)

    def _on_message(self, frames: Frames) -> None:
        try:
            for message in self._decoder.decode(frames):
                if isinstance(message, StatusReport):
                    self._fresh_until = self._loop.now() + PATIENCE
                    self._on_report(parse_report(message.report))
        except BatonError as problem:
            _log.warning("supervisor.bad_report", error=str(problem))
