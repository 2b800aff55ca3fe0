"""A TCP proxy that keeps the requests of HTTP clients, and the file format of such recordings.

A recording is a file of records: a line ``>>> STATUS LENGTH``, then a request as the client sent
it, LENGTH bytes with the host's name replaced, then a newline.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HOST = re.compile(rb"(?i)^(host|referer):[^\r]*", re.MULTILINE)
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked")


class Recorder:
    """Listens at :attr:`port` and passes everything on to ``target``, a port of this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._exchanges: list[tuple[bytearray, bytearray]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            exchange = (bytearray(), bytearray())
            self._exchanges.append(exchange)
            for source, sink, kept in ((client, server, 0), (server, client, 1)):
                work = (source, sink, exchange[kept])
                threading.Thread(target=_pass_on, args=work, daemon=True).start()

    def close(self) -> list[tuple[int, bytes]]:
        """Stop listening; returns the requests that differ in their form, with their statuses."""
        self._listener.close()
        found: dict[object, tuple[int, bytes]] = {}
        for sent, answered in self._exchanges:
            statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answered)
            # A client that closes its connection gets no answer to its last request.
            for request, status in zip(_requests(bytes(sent)), statuses, strict=False):
                if b" /v1/" not in request[:20]:  # such as /metrics, which varies by version
                    continue
                form = _form(request)
                found.setdefault(
                    (form, status), (int(status), _HOST.sub(rb"\1: localhost", request))
                )
        return list(found.values())


def _pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    try:
        while part := source.recv(1 << 16):
            kept += part
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        sink.close()


def _requests(content: bytes) -> Iterator[bytes]:
    """Yield the whole requests of a connection."""
    while b"\r\n\r\n" in content:
        head = content.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        length = _LENGTH.search(head)
        size = len(head) + (int(length[1]) if length else 0)
        if _CHUNKED.search(head):
            size = content.index(b"0\r\n\r\n", len(head)) + 5
        if len(content) < size:
            return
        yield content[:size]
        content = content[size:]


def _form(request: bytes) -> object:
    """A request's kind: the first line and the names of the body's fields."""
    head, _, body = request.partition(b"\r\n\r\n")
    try:
        decoded = json.loads(body)
    except ValueError:
        decoded = {}
    fields = decoded if isinstance(decoded, dict) else {}
    flags = (fields.get("stream"), str(fields.get("encoding_format")), str(fields.get("stop")))
    return head.split(b"\r\n")[0], tuple(sorted(fields)), flags


def body_of(request: bytes) -> Any:
    """Return the decoded JSON of a request's body, or None."""
    head, _, body = request.partition(b"\r\n\r\n")
    if _CHUNKED.search(head):
        sizes_and_parts = body.split(b"\r\n")
        body = b"".join(sizes_and_parts[1::2])
    return json.loads(body) if body else None


def write_recording(path: Path, requests: list[tuple[int, bytes]]) -> None:
    """Write requests with their statuses."""
    parts = [b">>> %d %d\n%s\n" % (status, len(one), one) for status, one in requests]
    path.write_bytes(b"".join(parts))


def read_recording(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the requests of a file with their statuses."""
    content = path.read_bytes()
    while content:
        line, _, content = content.partition(b"\n")
        mark, status, length = line.split()
        assert mark == b">>>"
        yield int(status), content[: int(length)]
        content = content[int(length) + 1 :]
