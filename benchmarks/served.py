"""A real cluster, as a user starts it, for the time of a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import zmq

from baton.client import Client
from baton.proto.errors import BatonError
from baton.proto.layout import ModelCard
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import Message, RouterToClient
from baton.runtime.process.os_settings import die_with_parent

READY_S = 120.0
END_S = 30.0


class Served:
    """``baton serve`` with ``flags``, which ends with this process.

    ``model``: a folder, or None for the embedded model. Its output is in ``log``. ``workers``: how
    many there will be, if the flags make it another number.
    """

    def __init__(
        self,
        scratch: Path,
        model: Path | None = None,
        *,
        prefill: int = 1,
        decode: int = 1,
        flags: tuple[str, ...] = (),
        ready_s: float = READY_S,
        workers: int = 0,
    ) -> None:
        self.address = f"ipc://{scratch}/bench.sock"
        self.log = scratch / "serve.log"
        command = [sys.executable, "-P", "-m", "baton.cli", "serve"]
        command += [] if model is None else [str(model)]
        command += [f"--prefill={prefill}", f"--decode={decode}", f"--address={self.address}"]
        command.append("--no-http")
        parent = os.getpid()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
                preexec_fn=lambda: die_with_parent(parent),  # no thread runs yet
            )
        try:
            self.client = self._connect(workers or prefill + decode, ready_s)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster."""
        self.client.close()
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _connect(self, workers: int, ready_s: float) -> Client:
        # Waits little for the router, so that a cluster that has ended is seen.
        client = Client(self.address, connect_timeout=1.0)
        until = time.monotonic() + ready_s
        while time.monotonic() < until and self._process.poll() is None:
            try:
                states = [worker["state"] for worker in client.status()["workers"]]
            except BatonError:
                states = []
            if states.count("ready") == workers:
                return client
            time.sleep(0.1)
        client.close()
        raise RuntimeError(f"the cluster did not become ready: {self.log.read_text()[-500:]}")


def served_card(address: str) -> ModelCard:
    """What the cluster serves."""
    with Client(address) as client:
        return client.describe().card


class Peer:
    """One client's connection, without the client's core: it sends and reads messages."""

    def __init__(self, address: str, name: str) -> None:
        self.identity = name.encode()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self.identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._decoder = EnvelopeDecoder[Message](RouterToClient)
        self._encoder = EnvelopeEncoder()

    def say(self, *messages: Message) -> None:
        """Send at once."""
        self.socket.send_multipart(self._encoder.encode(messages))

    def read(self) -> Iterator[Message]:
        """All messages that have arrived."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield from self._decoder.decode(frames)
