"""Asks the router for its status again and again, over the client socket like anyone else."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..proto.codec import EnvelopeDecoder, EnvelopeEncoder
from ..proto.errors import BatonError
from ..proto.messages import Drain, Message, RouterToClient, Status, StatusReport
from ..runtime.allowed_keys import ROUTER
from ..runtime.channel import Frames
from ..runtime.keyring import Keys, keys_for
from ..runtime.log import get_logger
from ..runtime.loop import Loop
from ..runtime.sockets import Context, DealerChannel
from .report import ClusterReport, parse_report

INTERVAL = 0.2
"""Seconds between questions."""
_log = get_logger()


class StatusMonitor:
    """Calls ``on_report`` with every answer; silence while the router is away."""

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
        self._channel = DealerChannel(
            context,
            address,
            b"supervisor-" + os.urandom(16),
            keys=keys_for(keys, address, ROUTER),
        )
        self._channel.attach(loop, self._on_message)
        self._timer = loop.call_later(0.0, self._ask)

    def drain(self, worker: str) -> None:
        """Have the router tell a worker to finish and leave; lost while the router is away."""
        self._channel.send(self._encoder.encode([Drain(worker=worker)]))

    def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()
        self._channel.close()

    def _ask(self) -> None:
        self._channel.send(self._encoder.encode([Status(handoffs=0)]))
        self._timer = self._loop.call_later(INTERVAL, self._ask)

    def _on_message(self, frames: Frames) -> None:
        try:
            for message in self._decoder.decode(frames):
                if isinstance(message, StatusReport):
                    self._on_report(parse_report(message.report))
        except BatonError as problem:
            _log.warning("supervisor.bad_report", error=str(problem))
