"""Publish the events of a worker's prefix cache to subscribers, as vLLM does.

A PUB socket sends ``topic, number, batch``; the number counts batches in eight bytes, big-endian.
A ROUTER socket answers a number with all later batches that are kept, each as ``number, batch``,
and then with :data:`END` and an empty batch. The sockets have no keys, so that any
subscriber can use them.

Invariant: a subscriber costs the worker nothing but its buffer. Neither socket ever blocks, a
slow subscriber misses batches, and the kept batches are bounded in number and bytes. A separate
thread owns the sockets, so a replay delays no step.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from urllib.parse import urlsplit

import zmq

from baton.engine.cache.kv_events import KvEventLog
from baton.proto.errors import ConfigError
from baton.proto.layout import ModelCard
from baton.runtime.process.log import get_logger

KEPT_BATCHES = 10_000
KEPT_BYTES = 32 << 20
"""Batches that are kept for replays: at most so many, and so many bytes."""
SUBSCRIBER_BATCHES = 1_000
"""Batches in the queue of a subscriber that reads slowly; further ones are not sent to it."""
END = (-1).to_bytes(8, "big", signed=True)
_log = get_logger()
_Batch = tuple[bytes, bytes]


class KvPublisher:
    """Publishes what a :class:`KvEventLog` collects.

    ``address``: ``tcp://HOST:PORT`` of the PUB socket. The ROUTER socket has the next port; with
    port 0 both have free ports. Raises ConfigError if one is in use.
    """

    def __init__(self, log: KvEventLog, address: str, topic: str) -> None:
        self.log = log
        self._topic = topic.encode()
        self._kept: deque[_Batch] = deque()
        self._kept_bytes = 0
        self._new: deque[_Batch] = deque()  # not published yet
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._bound(zmq.PUB, address, SUBSCRIBER_BATCHES)
        try:
            self._replays = self._bound(zmq.ROUTER, next_port(address), KEPT_BATCHES + 1)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.addresses = [_address_of(self._events), _address_of(self._replays)]
        """Of the PUB and of the ROUTER socket."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def flush(self) -> None:
        """Publish the events since the last call. On the worker's I/O thread."""
        log = self.log
        if not log.pending:
            return
        if log.dropped:  # a subscriber finds the gap in the numbers
            _log.warning("kv_events.dropped", events=log.dropped)
            log.dropped = 0
            self._number += 1
        batch = (self._number.to_bytes(8, "big"), log.take(time.time()))
        self._number += 1
        if len(self._new) < KEPT_BATCHES:  # else the thread is stuck: another gap
            self._new.append(batch)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread and close the sockets."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wake)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        while not self._closing:
            try:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._publish()
                if self._replays in ready:
                    self._replay()
            except Exception as error:
                _log.error("kv_events.failed", exc_info=error)
                time.sleep(1.0)  # whatever it is, no busy loop

    def _publish(self) -> None:
        while self._new:
            number, batch = self._new.popleft()
            self._keep(number, batch)
            self._events.send_multipart((self._topic, number, batch), zmq.NOBLOCK)

    def _keep(self, number: bytes, batch: bytes) -> None:
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self) -> None:
        frames = self._replays.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # of no subscriber
        peer, first = frames[0], frames[2]
        for number, batch in self._kept:
            if number >= first:  # big-endian numbers of one length compare as numbers do
                self._replays.send_multipart((peer, b"", number, batch), zmq.NOBLOCK)
        self._replays.send_multipart((peer, b"", END, b""), zmq.NOBLOCK)

    def _bound(self, kind: int, address: str, queue: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.RCVHWM, 16)
        socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # of what a subscriber may send
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError as problem:
            socket.close()
            raise ConfigError(f"kv_events: cannot listen at {address}: {problem}") from problem
        return socket


def kv_publisher(
    address: str, topic: str, worker: str, card: ModelCard, *, on_host: bool
) -> KvPublisher | None:
    """Return the publisher of a worker, or None without an address. Raises ConfigError.

    ``topic`` may contain ``{worker}`` and ``{model}``. ``on_host``: the blocks are in host memory.
    """
    if not address:
        return None
    log = KvEventLog(card.layout.block_size, "CPU" if on_host else "GPU")
    topic = topic.replace("{worker}", worker).replace("{model}", card.name)
    publisher = KvPublisher(log, address, topic)
    _log.info("kv_events.listening", events=publisher.addresses[0], replay=publisher.addresses[1])
    return publisher


def check_address(address: str) -> None:
    """Raise ConfigError unless the address is ``tcp://HOST:PORT``."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as problem:
        raise ConfigError(f"kv_events is {address!r}: {problem}") from problem
    if parts.scheme != "tcp" or not parts.hostname or port is None or parts.path:
        raise ConfigError(f"kv_events is {address!r}, not of the form tcp://127.0.0.1:5557")


def next_port(address: str, further: int = 1) -> str:
    """Return the address with a port further on; port 0 stays."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + further}" if int(port) else address


def _address_of(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
