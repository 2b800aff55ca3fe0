"""What all sockets of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from ..keys.keyring import KeyRing
from .loop import Loop
from .sockets import Context


@dataclass(slots=True, frozen=True)
class Wiring:
    """A process's loop, its context of ZeroMQ and its keys; None without keys."""

    loop: Loop
    context: Context
    keys: KeyRing | None = None
