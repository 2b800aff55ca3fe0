"""The connections over which a supervisor sends certificates of death to the routers.

They open after a death and close after the routers' acknowledgements. They use the workers' socket
of each router and the key of the worker that died: a host with a worker has both.
"""

from __future__ import annotations

import os
from typing import Protocol, cast

import zmq

from baton.proto.errors import BatonError
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import (
    CertificateReceived,
    DeathCertificate,
    Message,
    RouterToSupervisor,
)
from baton.runtime.keys.allowed import ROUTER
from baton.runtime.keys.keyring import Keys, keys_for, load_keys
from baton.runtime.net.channel import Frames
from baton.runtime.net.loop import Loop, Periodic
from baton.runtime.net.sockets import Context, DealerChannel
from baton.runtime.process.log import get_logger

from .certificates import REPEAT_S, Certificates
from .process import ProcessSpec

_log = get_logger()


class _WorkerConfig(Protocol):
    """The settings of a worker that lead to its routers."""

    @property
    def routers(self) -> dict[str, str]:
        """Router name to worker-side address."""
        ...

    @property
    def keys(self) -> str:
        """Key folder; empty without keys."""
        ...


class Certifier:
    """Sends each certificate to all routers of the worker until they acknowledge it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._core = Certificates()
        self._context: Context | None = None
        self._channels: dict[str, DealerChannel] = {}  # by address
        self._dials: dict[str, tuple[str, Keys | None]] = {}  # router name and own keys, by address
        self._encoder = EnvelopeEncoder()
        self._decoder = EnvelopeDecoder[Message](RouterToSupervisor)
        self._repeats: Periodic | None = None

    def died(self, spec: ProcessSpec, secret: bytes, status: int) -> None:
        """Certify that the process of a worker ended with this exit code (negative: a signal)."""
        config = cast("_WorkerConfig", spec.config)
        try:
            keys = load_keys(config.keys, spec.role, spec.name)
            for name, address in config.routers.items():
                self._dials[address] = name, keys
                if address not in self._channels:
                    self._connect(address)
        except BatonError as problem:
            _log.warning("certificate.not_sent", worker=spec.name, error=str(problem))
        certificate = DeathCertificate(worker=spec.name, secret=secret, status=status)
        self._core.died(config.routers.values(), certificate, self._loop.now())
        self._send()
        if self._repeats is None:
            self._repeats = self._loop.every(REPEAT_S, self._repeat)

    def close(self) -> None:
        """Disconnect from all routers."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    # ------------------------------------------------------------- connections

    def _connect(self, address: str) -> None:
        """Open a connection with a new identity: the router may still hold the old one."""
        if self._context is None:
            self._context = zmq.Context()
        name, keys = self._dials[address]
        identity = b"supervisor-" + os.urandom(16)
        source = keys_for(keys, address, ROUTER, name)
        channel = DealerChannel(self._context, address, identity, keys=source, warns=False)
        self._channels[address] = channel
        channel.attach(
            self._loop,
            lambda frames: self._hear(address, frames),
            lambda: self._connected(address),
            lambda: self._reconnect(address),
        )

    def _reconnect(self, address: str) -> None:
        self._channels.pop(address).close()
        if address in self._core.routers:
            self._connect(address)

    def _connected(self, address: str) -> None:
        self._core.connected(address)
        self._send()

    def _hear(self, address: str, frames: Frames) -> None:
        try:
            messages = self._decoder.decode(frames)
        except BatonError as problem:
            _log.warning("certificate.bad_answer", router=address, error=str(problem))
            return
        for message in messages:
            if isinstance(message, CertificateReceived):
                self._core.acknowledged(address, message.secret)
        self._disconnect_idle()

    def _disconnect_idle(self) -> None:
        owing = self._core.routers
        for address in [address for address in self._channels if address not in owing]:
            self._channels.pop(address).close()

    # ------------------------------------------------------------- sending

    def _send(self) -> None:
        for address, certificates in self._core.due(self._loop.now()).items():
            channel = self._channels.get(address)
            if channel is not None and channel.connected:
                channel.send(self._encoder.encode(certificates))

    def _repeat(self) -> None:
        self._send()
        self._disconnect_idle()
        if not self._core.routers and self._repeats is not None:
            self._repeats.cancel()
            self._repeats = None
