"""Compatible versions of the protocol.

The rule: a process of version N reads N-1, N and N+1, but nothing before :data:`OLDEST_VERSION`. A
change that version N-1 can read raises the version by one at most. Such changes are new fields
with defaults, and new messages and values that are only sent to peers of the new version. An
incompatible change raises :data:`OLDEST_VERSION` too, so that the two versions refuse each other.
"""

from __future__ import annotations

from ..errors import VersionMismatch
from ..limits import PROTOCOL_VERSION

OLDEST_VERSION = 3
"""The oldest compatible version: the previous version, unless it cannot read this version."""
NEWEST_VERSION = PROTOCOL_VERSION + 1
"""The newest compatible version."""


def check_version(version: int, peer: str = "the peer") -> None:
    """Raise VersionMismatch, with both versions, unless ``version`` is compatible."""
    if OLDEST_VERSION <= version <= NEWEST_VERSION:
        return
    raise VersionMismatch(
        f"{peer} has protocol version {version}; this process has version {PROTOCOL_VERSION} "
        f"and accepts {OLDEST_VERSION} to {NEWEST_VERSION}"
    )
