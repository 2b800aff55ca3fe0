"""Taps on all sockets of a running cluster that keep the contexts of its messages.

Only the envelope is taken apart by hand, as docs/protocol.md explains.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .wire_tap import WireTap

if TYPE_CHECKING:
    from .conftest import Cluster

PREFIX = {b"BT": 3, b"BS": 11}
"""Bytes before the messages in the first frame of an envelope, plain and sealed."""


class Message(msgspec.Struct):
    """The fields of a message that are read without the protocol."""

    type: str
    request_id: str = ""
    context: msgspec.Raw = msgspec.Raw(b"")
    arrays: int = 0
    emitted: list[int] = []


class Kept:
    """Contexts that passed a tap, by type of message and name of request."""

    def __init__(self) -> None:
        self.contexts: dict[tuple[str, str], list[list[bytes]]] = defaultdict(list)
        self._parts = threading.local()  # of the message under way; a thread per direction

    def __call__(self, body: bytearray, more: bool) -> None:
        """One frame of a message."""
        parts = self._parts.__dict__.setdefault("parts", [])
        parts.append(bytes(body))
        if more:
            return
        self._parts.parts = []
        start = PREFIX.get(parts[0][:2])
        if start is None:  # frames of another protocol would be lost otherwise
            return
        frame = 1
        for message in msgspec.msgpack.decode(parts[0][start:], type=list[Message]):
            arrays = parts[frame : frame + message.arrays]
            frame += message.arrays
            if memoryview(message.context).nbytes:
                key = (message.type, message.request_id)
                self.contexts[key].append([bytes(message.context), *arrays])

    def frames(self, kind: str, name: str) -> list[bytes]:
        """Those of the one context of a request in messages of one type."""
        found = self.contexts[kind, name]
        assert found and all(frames == found[0] for frames in found), (kind, name, len(found))
        return found[0]


def tap_of(folder: Path, name: str, kept: Kept) -> WireTap:
    (path,) = folder.rglob(name)
    return WireTap(path, kept, kept)


@contextmanager
def kept_contexts(running: Cluster) -> Iterator[Kept]:
    """Tap all sockets of a cluster. Its only prefill worker is replaced."""
    kept, before = Kept(), running.pids()
    names = sorted(path.name for path in running.folder.rglob("*.sock"))
    control = [name for name in names if "decode-0" not in name and "prefill-0" not in name]
    handoff = [name for name in names if name == "decode-0.sock"]
    taps = [tap_of(running.folder, name, kept) for name in (*control, *handoff)]
    try:
        os.kill(before["prefill-0"], signal.SIGKILL)  # the next one connects through the taps
        running.wait_replaced("prefill-0", before["prefill-0"])
        running.wait_ready()
        yield kept
    finally:
        for tap in taps:
            tap.close()
