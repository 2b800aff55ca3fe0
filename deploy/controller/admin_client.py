"""The client side of the admin socket, blocking, for the operators' commands."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import zmq

from baton.proto.errors import AccessDenied, ConfigError, ConnectionLost, error_from_code
from baton.runtime.keys.allowed import OPERATOR
from baton.runtime.keys.curve import apply_client_keys, check_address, is_tcp
from baton.runtime.keys.identity_owners import tagged
from baton.runtime.keys.keyring import CONTROLLER, GivenKeys, client_keys, keys_to
from baton.runtime.net.dealer import refusal
from baton.runtime.net.monitor import HANDSHAKE_FAILURES, Monitor

from ..local.run_folder import socket_in_use
from ..plan.addresses import ipc_path
from .admin import MAGIC, Answers, Ask, Overview, Progress, Request, Result, decode_answer, encode

MAX_ANSWER_BYTES = 4 << 20
_POLL_MS = 50
_CREDENTIALS = struct.Struct("3i")
"""Layout of the kernel's ``struct ucred``: process, user, group."""
_ACCEPTS = "00010000"
"""Flags of a listening socket in ``/proc/net/unix``."""


class AdminClient:
    """A connection to a controller. ``timeout``: seconds to wait for the first answer."""

    def __init__(self, address: str, *, keys: GivenKeys = None, timeout: float = 5.0) -> None:
        check_address(address)
        self.address = address
        self._timeout = timeout
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_ANSWER_BYTES),
            (zmq.RCVHWM, 0),  # at its limit, libzmq aborts if the controller ends (decision 45)
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 3000),
        ):
            self._socket.setsockopt(option, value)
        self._turn = 0  # index of the controller's key in use
        self._refused: AccessDenied | None = None
        self._monitor = Monitor(self._socket)
        try:
            self._keys = keys_to(client_keys(keys), address, OPERATOR, CONTROLLER)
            apply_client_keys(self._socket, self._keys)
            public = b"" if self._keys is None else self._keys.public
            self._socket.setsockopt(zmq.IDENTITY, tagged(b"operator-" + os.urandom(8), public))
        except BaseException:
            self.close()
            raise
        try:
            self._socket.connect(address)
        except zmq.ZMQError as problem:
            self.close()
            raise ConfigError(f"cannot connect to {address}: {problem.strerror}") from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._context.destroy(linger=0)

    def overview(self) -> Overview:
        """Return the cluster's target and actual state. Raises ConnectionLost, AccessDenied."""
        answer = next(self._answers(Ask(number=self._next())))
        if not isinstance(answer, Overview):
            raise ConnectionLost(f"the controller at {self.address} sent an unexpected answer")
        return answer

    def ask(self, request: Request, *, wait: float | None = None) -> Iterator[Progress | Result]:
        """Send a request and yield its answers, up to a successful Result.

        ``wait``: seconds for all answers after the first. Raises the typed error of a failed
        request, ConnectionLost after ``wait`` seconds or if the controller is gone, and
        AccessDenied if the controller does not allow this key.
        """
        for answer in self._answers(msgspec.structs.replace(request, number=self._next()), wait):
            if isinstance(answer, Result) and answer.code:
                raise error_from_code(answer.code, answer.text)
            if isinstance(answer, Overview):
                continue
            yield answer
            if isinstance(answer, Result):
                return

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _answers(self, request: Request, wait: float | None = None) -> Iterator[Answers]:
        data = encode(request)
        self._socket.send(data)
        until = time.monotonic() + self._timeout
        heard = False
        while True:
            answer = self._receive(until, request.number, None if heard else data)
            if not heard:
                heard, until = True, float("inf") if wait is None else time.monotonic() + wait
            yield answer

    def _receive(self, until: float, number: int, unheard: bytes | None) -> Answers:
        """Wait for an answer. ``unheard``: the request's bytes until the first answer, then None.

        Raises ConnectionLost, AccessDenied.
        """
        heard = unheard is None
        while True:
            if unheard is not None:
                self._read_handshakes(unheard)
            if self._socket.poll(_POLL_MS):
                data = self._socket.recv()
                if not data.startswith(MAGIC):
                    continue  # a keep-alive message of the channel
                answer = decode_answer(data)
                if answer.number in (number, 0):
                    return answer
            elif time.monotonic() >= until:
                if heard:
                    raise ConnectionLost("no further answer from the controller in time")
                raise self._refused or ConnectionLost(self._silence())
            elif heard and not listens(self.address):
                raise ConnectionLost(f"the controller at {self.address} is gone")

    def _read_handshakes(self, unheard: bytes) -> None:
        """After a failed handshake, try the next of the controller's keys and send again.

        Raises AccessDenied if the controller does not allow this key.
        """
        while (report := self._monitor.read()) is not None:
            if not is_tcp(self.address) or not report[0] & HANDSHAKE_FAILURES:
                continue
            denied = report[0] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._refused = refusal(self.address, denied, keyed=self._keys is not None)
            if denied:
                raise self._refused
            if self._keys is not None and len(self._keys.servers) > 1:
                self._turn += 1
                with contextlib.suppress(zmq.ZMQError):  # libzmq may have disconnected already
                    self._socket.disconnect(self.address)
                apply_client_keys(self._socket, self._keys, self._turn)
                self._socket.connect(self.address)
                self._socket.send(unheard)  # the disconnect dropped queued messages

    def _silence(self) -> str:
        """Error text for a controller that does not answer, with the remedy."""
        pid = listener(self.address)
        if pid:
            return (
                f"the controller at {self.address} (pid {pid}) has not answered for "
                f"{self._timeout:g} s; give a longer --timeout, or end the controller and its "
                f"workers with kill -9 {pid}"
            )
        return (
            f"no controller at {self.address}: check the address, and whether the cluster needs "
            "--keys"
        )


def listener(address: str) -> int:
    """Return the id of the process that listens at an ipc address, or 0 if unknown."""
    path = ipc_path(address)
    if path is None:
        return 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return 0
        pid, _user, _group = _CREDENTIALS.unpack(
            probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return int(pid)


def listens(address: str) -> bool:
    """Whether a process listens at an ipc address. Always True for tcp, which is not checked."""
    path = ipc_path(address)
    return path is None or (path.exists() and (_is_listed(path) or socket_in_use(path)))


def _is_listed(path: Path) -> bool:
    """Whether the kernel lists a listening socket with this path. Needs no connection."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    fields = (line.split(maxsplit=7) for line in lines)
    return any(f[-1] == str(path) and f[3] == _ACCEPTS for f in fields if len(f) == 8)
