"""Which versions of the protocol understand each other.

The rule: a process of version N reads N-1, N and N+1, as far back as :data:`OLDEST_VERSION`. So a
change that a neighbour can read raises the version by one at most: fields with defaults, and
messages and values that are said only to those who have spoken the newer version. What a neighbour
could not read raises it so that the two refuse each other: :data:`OLDEST_VERSION` follows.
"""

from __future__ import annotations

from .errors import VersionMismatch
from .limits import PROTOCOL_VERSION

OLDEST_VERSION = 3
"""The oldest version understood: the one before, unless that one could not read ours."""
NEWEST_VERSION = PROTOCOL_VERSION + 1
"""The newest version understood: it keeps the rule."""


def check_version(version: int, peer: str = "the peer") -> None:
    """Raise VersionMismatch, which names both, unless ``version`` is understood here."""
    if OLDEST_VERSION <= version <= NEWEST_VERSION:
        return
    raise VersionMismatch(
        f"{peer} speaks protocol version {version}; this is version {PROTOCOL_VERSION},"
        f" which understands {OLDEST_VERSION} to {NEWEST_VERSION}"
    )
