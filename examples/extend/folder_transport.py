"""A transport of KV blocks: files in a folder that both workers can read, such as a RAM disk.

    baton serve --kv-transport folder_transport:FolderTransport

The variable KV_FOLDER names the folder (default: /dev/shm). A file that no worker has read within
a minute belongs to a handoff that failed, and is removed.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

PREFIX = "baton-kv-"
FORGET_S = 60.0


class FolderTransport:
    """Writes each payload into a file, whose name is the ticket."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get("KV_FOLDER", "/dev/shm"))  # noqa: S108 -- of this machine's memory
        self._swept = time.monotonic()

    def put(self, payload: memoryview) -> bytes:
        """Keep a payload, and return its ticket; on the prefill worker."""
        self._sweep()
        name = PREFIX + token_hex(16)
        (self._folder / name).write_bytes(payload)
        return name.encode()

    def get(self, ticket: bytes, size: int) -> bytes:
        """Return the payload of a ticket; on the decode worker."""
        name = ticket.decode()
        if not name.startswith(PREFIX) or "/" in name:
            raise ValueError(f"{name!r} is no ticket")
        path = self._folder / name
        payload = path.read_bytes()
        path.unlink()
        return payload

    def _sweep(self) -> None:
        if time.monotonic() < self._swept + FORGET_S:
            return
        self._swept = time.monotonic()
        for path in self._folder.glob(f"{PREFIX}*"):
            with suppress(FileNotFoundError):  # another worker has just removed it
                if time.time() > path.stat().st_mtime + FORGET_S:
                    path.unlink()
