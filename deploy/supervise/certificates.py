"""Certificates of death: a supervisor proves to the routers that a worker's process has ended.

A closed connection only suggests that a process has ended, and the connection of a stopped process
closes late or not at all. The supervisor has the exit status at once. So that nobody else can
declare a worker dead, each process has a secret that only its supervisor has. The process gets the
hash of it, the seal, and shows it to the routers in Hello. The certificate reveals the secret
(docs/decisions/0042-supervisors-certify-the-death-of-workers.md).

Pure: times are seconds of one monotonic clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from baton.proto.wire.messages import DeathCertificate

SECRET_BYTES = 32
REPEAT_S = 0.2
"""Seconds after which an unacknowledged certificate is sent again."""
GIVE_UP_S = 30.0
"""Seconds after which it is dropped: the router has missed the worker's heartbeats by then."""


def new_secret() -> bytes:
    """Return the secret of a new process."""
    return secrets.token_bytes(SECRET_BYTES)


@dataclass(slots=True)
class _Due:
    certificate: DeathCertificate
    repeat_at: float
    until: float


class Certificates:
    """The certificates that some router has not acknowledged, by the router's address."""

    def __init__(self) -> None:
        self._due: dict[str, dict[bytes, _Due]] = {}

    @property
    def routers(self) -> set[str]:
        """Routers that owe an acknowledgement."""
        return set(self._due)

    def died(self, routers: Iterable[str], certificate: DeathCertificate, now: float) -> None:
        """Add a certificate for these routers. :meth:`due` returns it at once."""
        for router in routers:
            due = _Due(certificate, now, now + GIVE_UP_S)
            self._due.setdefault(router, {})[certificate.secret] = due

    def connected(self, router: str) -> None:
        """Send everything again over a new connection."""
        for due in self._due.get(router, {}).values():
            due.repeat_at = float("-inf")

    def acknowledged(self, router: str, secret: bytes) -> None:
        """Drop a certificate that the router has received."""
        waiting = self._due.get(router, {})
        waiting.pop(secret, None)
        if not waiting:
            self._due.pop(router, None)

    def due(self, now: float) -> dict[str, list[DeathCertificate]]:
        """Return the certificates to send now, by router, and drop those that are too old."""
        found: dict[str, list[DeathCertificate]] = {}
        for router, waiting in list(self._due.items()):
            for secret, due in list(waiting.items()):
                if now >= due.until:
                    self.acknowledged(router, secret)
                elif now >= due.repeat_at:
                    due.repeat_at = now + REPEAT_S
                    found.setdefault(router, []).append(due.certificate)
        return found
