"""A man in the middle of a ZeroMQ connection over a Unix socket, which may damage messages.

He takes the place of a listening socket's file, so neither process knows of him, reads the
frames of ZMTP 3 in both directions, and passes everything on.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

GREETING = 64
MORE, LONG, COMMAND = 1, 2, 4

Hand = Callable[[bytearray, bool], object]
"""Sees the body of a frame and whether another follows, and may change it in place."""


def keep(body: bytearray, more: bool) -> None:
    """Leave everything as it is."""


class WireTap:
    """Between all later connections to ``path``, and its listener.

    ``hand`` sees the bytes for the listener, ``back`` its answers.
    """

    def __init__(self, path: Path, hand: Hand = keep, back: Hand = keep) -> None:
        self.hand, self.back = hand, back
        self.frames = 0
        self._path, self._real = path, path.with_name(path.name + ".real")
        path.rename(self._real)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut all connections and give the listener its name back."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._path.unlink(missing_ok=True)
        if self._real.exists():
            self._real.rename(self._path)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._real))
                self._open += [near, far]
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, near: socket.socket, far: socket.socket, forward: bool) -> None:
        """One direction of a connection, frame by frame."""
        with contextlib.suppress(OSError), near.makefile("rb") as stream:
            for _ in range(GREETING):  # both sides wait for each other within it
                far.sendall(stream.read(1))
            while head := stream.read(1):
                flags = head[0]
                size = stream.read(8 if flags & LONG else 1)
                body = bytearray(stream.read(int.from_bytes(size, "big")))
                if not flags & COMMAND:
                    self.frames += forward
                    (self.hand if forward else self.back)(body, bool(flags & MORE))
                far.sendall(head + size + body)
            far.shutdown(socket.SHUT_RDWR)
