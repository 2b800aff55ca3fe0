"""The sockets that processes listen on, by the kernel; and strangers that connect there."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

_LISTEN = "0A"


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:  # grows while it is walked
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def listening_ports(pid: int) -> list[int]:
    """TCP ports a process listens on, of any address."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def replies(
    port: int, sent: list[bytes], check: Callable[[bytes], None], wait: float = 30.0
) -> None:
    """Send each of these bytes over a separate TCP connection until the other side ends it.

    ``check`` is given all that has come back on a connection, whenever more of it comes.
    """
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in sent]
    heard = dict.fromkeys(peers, b"")
    try:
        for peer, data in zip(peers, sent, strict=True):
            with contextlib.suppress(OSError):
                peer.sendall(data)
        waiting, until = set(peers), time.monotonic() + wait
        while waiting and (left := until - time.monotonic()) > 0:
            for peer in select.select(list(waiting), [], [], left)[0]:
                data = b""
                with contextlib.suppress(OSError):
                    data = peer.recv(65536)
                heard[peer] += data
                check(heard[peer])
                if not data:
                    waiting.discard(peer)
        assert not waiting, f"port {port} keeps {len(waiting)} strangers"
    finally:
        for peer in peers:
            peer.close()
