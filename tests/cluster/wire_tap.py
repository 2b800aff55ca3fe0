"""A man in the middle of a ZeroMQ connection over a Unix socket, who may damage what passes.

He takes the place of a listening socket's file, so neither process knows of him, reads the
frames of ZMTP 3 on their way to the listener, and passes everything else on as it is.
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
    """Between everyone who connects to ``path`` from now on, and its listener."""

    def __init__(self, path: Path) -> None:
        self.hand: Hand = keep
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
                for pump, ends in ((self._forward, (near, far)), (copy, (far, near))):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """Towards the listener, frame by frame."""
        with contextlib.suppress(OSError), near.makefile("rb") as stream:
            for _ in range(GREETING):  # both sides wait for each other within it
                far.sendall(stream.read(1))
            while head := stream.read(1):
                flags = head[0]
                size = stream.read(8 if flags & LONG else 1)
                body = bytearray(stream.read(int.from_bytes(size, "big")))
                if not flags & COMMAND:
                    self.frames += 1
                    self.hand(body, bool(flags & MORE))
                far.sendall(head + size + body)
            far.shutdown(socket.SHUT_RDWR)


def copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
