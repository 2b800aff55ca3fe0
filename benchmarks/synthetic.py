"""Peers of a router that speak the protocol but compute nothing, and what runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq

from baton.proto.layout import KVLayout, ModelCard
from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import Hello, Message, RouterToWorker, Submit
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.router.config import AdmissionConfig, RouterConfig
from baton.runtime.process.main import dump_settings

PROMPT = 32
CARD = ModelCard(
    name="none",
    architecture="none",
    fingerprint="none",
    numerics="none",
    vocab_size=32_000,
    max_length=1 << 20,
    eos_token_ids=[2],
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16),
)
Context = zmq.Context[zmq.Socket[bytes]]
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Link:
    """One connection of a synthetic peer."""

    def __init__(self, context: Context, address: str, union: object, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._decoder = EnvelopeDecoder[Message](union)
        self._encoder = EnvelopeEncoder()
        self.out: list[Message] = []

    def read(self) -> list[Message]:
        """All messages that have arrived."""
        messages: list[Message] = []
        while True:
            try:
                messages += self._decoder.decode(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def read_one(self) -> list[Message]:
        """Messages of the next envelope, which may have to come first."""
        return self._decoder.decode(self.socket.recv_multipart())

    def flush(self) -> None:
        """Send the pending messages as one envelope."""
        if self.out:
            self.socket.send_multipart(self._encoder.encode(self.out))
            self.out = []


def worker_link(
    context: Context, address: str, role: str, number: int, card: ModelCard = CARD, slots: int = 0
) -> Link:
    """A worker's connection to the router at ``address``, with its Hello to be flushed."""
    link = Link(context, address, RouterToWorker, f"{role}-{number}")
    hello = Hello(
        version=PROTOCOL_VERSION,
        worker=f"{role}-{number}",
        role=role,
        incarnation=number + 1 + 2 * (role == "decode"),
        pid=os.getpid(),
        endpoint=f"ipc:///{role}-{number}",
        model=card,
        max_batch=slots,
    )
    link.out.append(hello)
    return link


def new_submit(number: int, new: int, prompt: int = PROMPT) -> Submit:
    """A request for ``new`` tokens after a prompt of ``prompt`` tokens."""
    tokens = np.arange(number, number + prompt, dtype=np.int32) % CARD.vocab_size
    sampling = WireSampling(temperature=0.8, top_p=0.95, max_new_tokens=new, seed=number)
    context = WireContext(
        tokens=WireTokens(tokens), max_length=prompt + new, sampling=sampling, eos_token_ids=[2]
    )
    return Submit(request_id=str(number), context=context)


def environment_of(source: Path | None) -> dict[str, str]:
    """Return the environment of a process that takes its packages from ``source``, if given."""
    return {**os.environ} if source is None else {**os.environ, "PYTHONPATH": str(source)}


@contextmanager
def child(arguments: list[str], source: Path | None = None) -> Iterator[int]:
    """A process of this interpreter; yields its pid, ends it."""
    command = [sys.executable, "-m", *arguments]
    environment = environment_of(source)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def router_in(folder: Path, model_folder: str = "") -> tuple[RouterConfig, list[str]]:
    """Settings of a router with its sockets in ``folder``, and the arguments of its process."""
    config = RouterConfig(
        client_address=f"ipc://{folder}/clients",
        worker_address=f"ipc://{folder}/workers",
        cluster_key="ab" * 32,
        admission=AdmissionConfig(max_context_bytes=4 << 30),
        model_folder=model_folder,
    )
    path = folder / "router.json"
    path.write_text(dump_settings(config))
    return config, ["baton.router", "--config", str(path)]


def serve_proxy(address: str) -> None:
    """``zmq.proxy`` between ``address-front`` (ROUTER) and ``address-back`` (DEALER)."""
    context: Context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    front.bind(f"{address}-front")
    back.bind(f"{address}-back")
    zmq.proxy(front, back)
