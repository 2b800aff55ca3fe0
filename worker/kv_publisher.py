"""Publish the events of a worker's prefix cache to subscribers, as vLLM does.

A PUB socket sends ``topic, number, batch``; the number counts batches in eight bytes, big-endian.
A ROUTER socket answers a number with all later batches that are kept, each as ``number, batch``,
and then with :data:`END` and an empty batch. The sockets have no keys, so that any
subscriber can use them.

Invariant: subscribers cost the worker bounded memory, whatever they send and however little they
read. Neither socket ever blocks, and a slow subscriber misses batches. Replays are sent in pieces,
one for each peer and :data:`REPLAYS` at once; further requests wait. The kept batches are bounded
in number and bytes, and so is what waits in the queues of each socket. A separate thread owns the
sockets, so a replay delays no step.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from urllib.parse import urlsplit

import zmq

from baton.engine.cache.kv_events import BATCH_BYTES, KvEventLog
from baton.proto.errors import ConfigError
from baton.proto.layout import ModelCard
from baton.runtime.process.log import get_logger

KEPT_BATCHES = 10_000
KEPT_BYTES = 32 << 20
"""Batches that are kept for replays: at most so many, and so many bytes."""
NEW_BATCHES = KEPT_BYTES // BATCH_BYTES
"""Batches that wait for the thread."""
SUBSCRIBER_BATCHES = 256
"""Batches in the queue of a subscriber that reads slowly; further ones are not sent to it."""
REPLAY_BATCHES = 64
"""Batches of a replay in the queue of its peer; the next ones follow as it reads."""
REPLAYS = 16
"""Replays at once. Further ones wait."""
WANTED = 1_024
"""Replays at once and waiting. Further requests are ignored."""
REPLAY_TIMEOUT = 10.0
"""Seconds after which a replay ends whose peer has read nothing."""
QUEUED_BYTES = 64 << 20
"""Bytes of batches in all queues of one socket; further ones are not sent."""
END = (-1).to_bytes(8, "big", signed=True)
_log = get_logger()
_Batch = tuple[bytes, bytes]


@dataclass(slots=True)
class _Replay:
    first: bytes
    """Number of the next batch."""
    progress: float = 0.0
    """When its peer's queue last had room; 0 until the replay starts."""


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
        self._wanted: dict[bytes, _Replay] = {}  # by peer
        try:
            self._events = self._bound(zmq.PUB, address, SUBSCRIBER_BATCHES)
            self._replays = self._bound(zmq.ROUTER, next_port(address), REPLAY_BATCHES)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._replays.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error
        self.addresses = [_address_of(self._events.socket), _address_of(self._replays.socket)]
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
        while log.pending:
            batch = (self._number.to_bytes(8, "big"), log.take(time.time()))
            self._number += 1
            if len(self._new) < NEW_BATCHES:  # else the thread is stuck: another gap
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
        poller.register(self._replays.socket, zmq.POLLIN)
        pause = _STALLED
        while not self._closing:
            try:
                ready = dict(poller.poll(int(pause * 1000) if self._wanted else None))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._publish()
                if self._replays.socket in ready:
                    self._request()
                pause = _TURN if self._continue(time.monotonic()) else _STALLED
            except Exception as error:
                _log.error("kv_events.failed", exc_info=error)
                time.sleep(1.0)  # whatever it is, no busy loop

    def _publish(self) -> None:
        while self._new:
            number, batch = self._new.popleft()
            self._keep(number, batch)
            self._events.send(self._topic, number, batch)

    def _keep(self, number: bytes, batch: bytes) -> None:
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _request(self) -> None:
        """Take a request, instead of the one that its peer may have.

        Requests are read although they may have to wait: libzmq detects a closed connection only
        after its last request.
        """
        frames = self._replays.socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # of no subscriber
        if replay := self._wanted.get(frames[0]):
            replay.first = frames[2]
        elif len(self._wanted) < WANTED:
            self._wanted[frames[0]] = _Replay(frames[2])

    def _continue(self, now: float) -> bool:
        """Send a piece of each replay. Return whether any queue had room."""
        progress = False
        for peer, replay in list(islice(self._wanted.items(), REPLAYS)):
            replay.progress = replay.progress or now
            try:
                sent, ended = self._piece(peer, replay)
            except zmq.ZMQError as problem:
                if problem.errno != zmq.EHOSTUNREACH:  # the peer is gone
                    raise
                sent, ended = False, True
            if sent:
                replay.progress, progress = now, True
            elif now - replay.progress > REPLAY_TIMEOUT:
                _log.warning("kv_events.replay_ended", seconds=REPLAY_TIMEOUT)
                ended = True
            if ended:
                del self._wanted[peer]
        return progress

    def _piece(self, peer: bytes, replay: _Replay) -> tuple[bool, bool]:
        """Send what a peer's queue has room for. Return whether anything, and whether all."""
        sent = False
        # Big-endian numbers of one length compare as numbers do.
        start = bisect_left(self._kept, replay.first, key=itemgetter(0))
        for number, batch in islice(self._kept, start, start + REPLAY_BATCHES):
            if not self._replays.send(peer, b"", number, batch):
                return sent, False
            sent = True
            replay.first = (int.from_bytes(number, "big") + 1).to_bytes(8, "big")
        if start + REPLAY_BATCHES < len(self._kept):
            return sent, False
        ended = self._replays.send(peer, b"", END, b"")
        return sent or ended, ended

    def _bound(self, kind: int, address: str, queue: int) -> _Outbox:
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
        return _Outbox(socket)


_TURN, _STALLED = 0.001, 0.02
"""Seconds to the next piece of the replays, and if no queue had room."""


class _Outbox:
    """A socket whose queues hold at most :data:`QUEUED_BYTES` of batches.

    The queues refer to the kept batches instead of copying them.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        socket.copy_threshold = _COPIED
        self.queued = 0
        """Bytes of batches in the queues, at most."""
        self._sent: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._counted = 0.0

    def send(self, *frames: bytes) -> bool:
        """Send frames, of which the last is a batch. Return False if the queue is full."""
        size = len(frames[-1])
        self._count(size)
        if self.queued + size > QUEUED_BYTES:
            return False
        try:
            tracker = self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            return False
        if size >= _COPIED and tracker is not None:
            self._sent.append((tracker, size))
            self.queued += size
        return True

    def _count(self, size: int) -> None:
        """Subtract the batches that have left the queues."""
        sent = self._sent
        while sent and sent[0][0].done:
            self.queued -= sent.popleft()[1]
        now = time.monotonic()
        if self.queued + size > QUEUED_BYTES and now - self._counted > _STALLED:
            self._counted = now
            self._sent = deque(one for one in sent if not one[0].done)
            self.queued = sum(size for _, size in self._sent)


_COPIED = 4096
"""Bytes below which a batch is copied into a queue: their number alone is a bound."""


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
