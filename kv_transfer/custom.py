"""A transport of KV payloads of the user's own; see docs/extend.md.

The prefill worker gives each payload to the extension and sends the ticket that it returns. The
decode worker gets the payload for the ticket. Its checksum is compared as that of any payload, so a
transport that returns wrong bytes costs a repeated frame, never a wrong token.

If the prefill worker's side fails, the frame carries its payload itself. If the decode worker's
side fails, the frame counts as damaged.
"""

from __future__ import annotations

import numpy as np

from baton.extend import TRANSPORT, ExtensionError, Transport, resolve
from baton.extend.guard import Guard, Report

from .frames import Bytes

MAX_TICKET = 1024
"""Bytes of a ticket."""


class CustomTransport:
    """One worker's side of a transport. Raises ExtensionError if it cannot be loaded."""

    def __init__(self, name: str, folder: str, report: Report) -> None:
        self._transport: Transport = resolve(TRANSPORT, name, folder)
        # Without a clock: its calls move megabytes, and there is nothing else to call meanwhile.
        self.guard = Guard(TRANSPORT, name, report)

    def put(self, payload: Bytes) -> Bytes | None:
        """Return a ticket for the payload, or None: send the payload itself."""
        return self.guard.call(lambda: self._put(payload))

    def _put(self, payload: Bytes) -> Bytes:
        ticket = self._transport.put(payload.data.toreadonly())
        if not isinstance(ticket, bytes) or len(ticket) > MAX_TICKET:
            raise ExtensionError(f"put() returned {ticket!r:.80}, not at most {MAX_TICKET} bytes")
        if len(ticket) == payload.nbytes:
            raise ExtensionError("put() returned a ticket of the payload's length")
        return np.frombuffer(ticket, np.uint8)

    def get(self, ticket: bytes, size: int) -> Bytes | None:
        """Return the payload of ``size`` bytes for a ticket, or None: it is lost.

        A ticket that is too long never reaches the extension, and is no failure of it.
        """
        if len(ticket) > MAX_TICKET:
            return None
        return self.guard.call(lambda: self._get(ticket, size))

    def _get(self, ticket: bytes, size: int) -> Bytes:
        payload = np.frombuffer(self._transport.get(ticket, size), np.uint8)
        if payload.nbytes != size:
            raise ExtensionError(f"get() returned {payload.nbytes} bytes instead of {size}")
        return payload
