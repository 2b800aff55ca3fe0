"""Messages to systemd about the state of a service of ``Type=notify``."""

from __future__ import annotations

import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """Send a state to the service manager, if one has set ``NOTIFY_SOCKET``.

    A failure changes nothing: the service manager then ends the service after its own time.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # a name without a file
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(state.encode(), socket.MSG_DONTWAIT, address)
        except OSError:
            return
