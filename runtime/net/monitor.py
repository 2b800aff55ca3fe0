"""Connection events of one socket, read from libzmq's monitor."""

from __future__ import annotations

import os
import struct

import zmq

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | HANDSHAKE_FAILURES
)
MAX_WAITING = 2000
"""Maximum unread events: the high-water marks of both ends, 1,000 each by default."""
_HEAD = struct.Struct("=Hi")
_PROTOCOL_ERRORS = {
    int(getattr(zmq, name)): name.removeprefix("PROTOCOL_ERROR_").lower().replace("_", " ")
    for name in dir(zmq)
    if name.startswith("PROTOCOL_ERROR_")
}


def describe_refusal(event: int, value: int) -> str:
    """Return the text for one of :data:`HANDSHAKE_FAILURES`."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"protocol violation: {_PROTOCOL_ERRORS.get(value, f'error {value:#x}')}"
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"key refused: status {value}"
    return f"connection closed during the handshake: {os.strerror(value)}"


class Monitor:
    """Reads ``(event, value)``: the descriptor, for an accept, a connect or a disconnect."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)
        self._polled = [(self.socket, int(zmq.POLLIN))]

    def read(self) -> tuple[int, int] | None:
        """Return the next event, or None."""
        try:
            head, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        event, value = _HEAD.unpack(head)
        return event, value

    @property
    def pending(self) -> bool:
        """Whether an event is waiting; cheaper than a read without one, or the option EVENTS."""
        return bool(zmq.zmq_poll(self._polled, 0))

    def close(self) -> None:
        """Stop monitoring."""
        self._watched.disable_monitor()
        self.socket.close(0)  # without linger, or the context's end would wait for this socket
