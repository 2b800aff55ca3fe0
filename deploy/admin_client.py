"""An operator's side of the admin socket, blocking; for the verbs."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from ..proto.errors import AccessDenied, ConfigError, ConnectionLost, error_from_code
from ..runtime.allowed_keys import OPERATOR
from ..runtime.dealer import refusal
from ..runtime.keyring import CONTROLLER, GivenKeys, client_keys, keys_to
from ..runtime.monitor import HANDSHAKE_FAILURES, Monitor
from ..runtime.security import apply_client_keys, check_address, is_tcp
from .addresses import ipc_path
from .admin import MAGIC, Answers, Ask, Overview, Progress, Request, Result, decode_answer, encode
from .run_folder import socket_in_use

MAX_ANSWER_BYTES = 4 << 20
_POLL_MS = 50
_CREDENTIALS = struct.Struct("3i")
"""Of the kernel's ``struct ucred``: process, user, group."""
_ACCEPTS = "00010000"
"""Flag of a listening socket in the kernel's list."""


class AdminClient:
    """A connection to a controller. ``timeout``: seconds it may take to say the first word."""

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
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 3000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, b"operator-" + os.urandom(8))
        self._turn = 0  # which of the controller's keys is tried
        self._refused: AccessDenied | None = None
        self._monitor = Monitor(self._socket)
        try:
            self._keys = keys_to(client_keys(keys), address, OPERATOR, CONTROLLER)
            apply_client_keys(self._socket, self._keys)
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

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._context.destroy(linger=0)

    def overview(self) -> Overview:
        """What is wanted and what is there. Raises ConnectionLost, AccessDenied."""
        answer = next(self._answers(Ask(number=self._next())))
        if not isinstance(answer, Overview):
            raise ConnectionLost(f"the controller at {self.address} answered something else")
        return answer

    def ask(self, request: Request, *, wait: float | None = None) -> Iterator[Progress | Result]:
        """The answers until a Result, which ends well; a failure is raised as its typed error.

        ``wait``: seconds for all of them after the first; ConnectionLost when they are over, and
        when the controller is gone. AccessDenied where it does not let our key in.
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
        """``unheard``: what was asked, as long as nothing says that it arrived."""
        heard = unheard is None
        while True:
            if unheard is not None:
                self._read_handshakes(unheard)
            if self._socket.poll(_POLL_MS):
                data = self._socket.recv()
                if not data.startswith(MAGIC):
                    continue  # the channel's own probe: are you there
                answer = decode_answer(data)
                if answer.number in (number, 0):
                    return answer
            elif time.monotonic() >= until:
                if heard:
                    raise ConnectionLost("the time to wait is over")
                raise self._refused or ConnectionLost(self._silence())
            elif heard and not listens(self.address):
                raise ConnectionLost(f"the controller at {self.address} is gone")

    def _read_handshakes(self, unheard: bytes) -> None:
        """After one that failed try the next of the controller's keys, and ask again.

        Raises AccessDenied where the controller says that our key is not let in.
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
                with contextlib.suppress(zmq.ZMQError):  # where libzmq gave up nothing is left
                    self._socket.disconnect(self.address)
                apply_client_keys(self._socket, self._keys, self._turn)
                self._socket.connect(self.address)
                self._socket.send(unheard)  # what was queued went with that connection

    def _silence(self) -> str:
        """Why nothing may have come, and what to do."""
        pid = listener(self.address)
        if pid:
            return (
                f"the controller at {self.address} (pid {pid}) has not answered for "
                f"{self._timeout:g} s; give it more time, or end it with kill -9 {pid}: its "
                "workers end with it"
            )
        return f"no controller at {self.address}: is it that of a cluster, does it ask for keys?"


def listener(address: str) -> int:
    """Process id of whoever listens at an ipc address; 0: nobody, or it cannot be seen."""
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
    """Whether somebody may listen there: of an ipc address it can be seen."""
    path = ipc_path(address)
    return path is None or (path.exists() and (_is_listed(path) or socket_in_use(path)))


def _is_listed(path: Path) -> bool:
    """Whether the kernel lists a listening socket of this path; asking it disturbs nobody."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    fields = (line.split(maxsplit=7) for line in lines)
    return any(f[-1] == str(path) and f[3] == _ACCEPTS for f in fields if len(f) == 8)
