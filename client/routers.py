"""The list of routers of a client, and the choice of the next router. Pure.

Invariant: as long as one router of the list answers, the client reaches that router. The client
tries the routers in turn and skips only routers with another protocol version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.proto.errors import ConfigError, InputError
from baton.proto.wire.endpoints import check_endpoint

FIRST_TRY_S = 0.3
"""Seconds for a router to accept a connection, in the first round through the list."""
LAST_TRY_S = 2.0
RETURN_S = 10.0
"""Seconds between checks whether the first router is back, while another router is in use."""
_SEPARATOR = re.compile(r"\s*,\s*(?=(?:ipc|tcp|inproc)://|$)")
"""A comma separates only before another address or the end: a path may contain commas."""


def router_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse a list of addresses, or a text with addresses separated by commas.

    Duplicates are removed; the order is kept. Raises ConfigError for an invalid address and for
    an empty list.
    """
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ConfigError(f"an address is text or a list of texts, not {type(given).__name__}")
    parts = separated(given) if isinstance(given, str) else given
    try:
        checked = dict.fromkeys(check_endpoint(address) for address in parts)
    except InputError as error:
        raise ConfigError(str(error)) from None
    if not checked:
        raise ConfigError("no router address is given")
    return tuple(checked)


def separated(text: str) -> list[str]:
    """Split a text into addresses, without checking them."""
    return _SEPARATOR.split(text.strip())


class Routers:
    """The routers of a client, used in turn. The client returns to the first, ``home``."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._at = 0
        self._tries = 0  # since the last connection
        self._tried_at = float("-inf")
        self._refused: set[int] = set()  # routers with another version, or that reject the key
        self._look_at = float("inf")  # time of the next check whether home is back
        self.home_is_back = False

    @property
    def several(self) -> bool:
        """Whether the list has more than one router."""
        return len(self._addresses) > 1

    @property
    def count(self) -> int:
        """Number of routers."""
        return len(self._addresses)

    @property
    def current(self) -> str:
        """The router that the client is connected or connecting to."""
        return self._addresses[self._at]

    @property
    def home(self) -> str:
        """The preferred router, the first of the list."""
        return self._addresses[0]

    @property
    def away(self) -> bool:
        """Whether the current router is not home."""
        return self._at != 0

    @property
    def shown(self) -> str:
        """All addresses, for error messages."""
        return ", ".join(self._addresses)

    # ------------------------------------------------------------------ moving

    def trying(self, now: float) -> None:
        """Record that connecting to the current router starts now."""
        self._tried_at = now

    def connected(self, now: float) -> None:
        """Record that the current router accepted the connection."""
        self._tries = 0
        self.home_is_back = False
        self._look_at = now + RETURN_S if self.away else float("inf")

    def overdue(self, now: float) -> bool:
        """Whether connecting to the current router takes so long that the next should be tried."""
        patience = min(FIRST_TRY_S * 2 ** (self._tries // self.count), LAST_TRY_S)
        return self.several and now - self._tried_at > patience

    def move(self, now: float) -> str:
        """Choose the next router that has not refused the client, and return its address."""
        self._tries += 1
        self._tried_at = now
        for _ in self._addresses:
            self._at = (self._at + 1) % self.count
            if self._at not in self._refused:
                break
        return self.current

    def go_home(self, now: float) -> str:
        """Choose the first router, and return its address."""
        self._at = 0
        self._tried_at = now
        return self.current

    # ------------------------------------------------------------------ versions, coming back

    def refuse(self) -> bool:
        """Skip the current router from now on. Returns True if all routers are skipped."""
        self._refused.add(self._at)
        if len(self._refused) < self.count:
            return False
        self._refused.clear()  # by the next request, other processes may listen there
        return True

    def wants_look(self, now: float) -> bool:
        """Whether to check now if home is back. The caller stores the result in home_is_back."""
        if now < self._look_at or self.home_is_back:
            return False
        self._look_at = now + RETURN_S
        return True
