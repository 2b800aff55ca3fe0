"""The routers a client may use, and which of them it tries next. Pure.

Invariant: as long as one router of the list answers, a client that tries comes to it: the list
is walked round, and only a router that speaks another protocol version is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..proto.endpoints import check_endpoint
from ..proto.errors import ConfigError, InputError

FIRST_TRY_S = 0.3
"""How long a router may take to accept a connection while others have not been tried."""
LAST_TRY_S = 2.0
RETURN_S = 10.0
"""How often a client that is not at its first router looks whether that one is back."""
_SEPARATOR = re.compile(r"\s*,\s*(?=(?:ipc|tcp|inproc)://|$)")
"""A comma may be part of a path, so only one before another address separates."""


def router_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses of a list, or of a text that separates them by commas; each once, in order.

    Raises ConfigError for an address that is none, and for an empty list.
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
    """The addresses of a text, unchecked."""
    return _SEPARATOR.split(text.strip())


class Routers:
    """The list, walked round; the first is home, where a client comes back to when it can."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._at = 0
        self._tries = 0  # since the last connection
        self._tried_at = float("-inf")
        self._refused: set[int] = set()  # routers of another version
        self._look_at = float("inf")  # when to see whether home is back
        self.home_is_back = False

    @property
    def several(self) -> bool:
        """Whether there is another one to go to."""
        return len(self._addresses) > 1

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._addresses)

    @property
    def current(self) -> str:
        """The router that is connected or tried."""
        return self._addresses[self._at]

    @property
    def home(self) -> str:
        """The router that is preferred."""
        return self._addresses[0]

    @property
    def away(self) -> bool:
        """Whether the current one is not home."""
        return self._at != 0

    @property
    def shown(self) -> str:
        """All of them, for error messages."""
        return ", ".join(self._addresses)

    # ------------------------------------------------------------------ moving

    def trying(self, now: float) -> None:
        """The connection to the current one is being made from now on."""
        self._tried_at = now

    def connected(self, now: float) -> None:
        """The current one is there."""
        self._tries = 0
        self.home_is_back = False
        self._look_at = now + RETURN_S if self.away else float("inf")

    def overdue(self, now: float) -> bool:
        """Whether the current one took too long to accept, so that another may be better."""
        patience = min(FIRST_TRY_S * 2 ** (self._tries // self.count), LAST_TRY_S)
        return self.several and now - self._tried_at > patience

    def move(self, now: float) -> str:
        """Leave the current one for the next that may serve us."""
        self._tries += 1
        self._tried_at = now
        for _ in self._addresses:
            self._at = (self._at + 1) % self.count
            if self._at not in self._refused:
                break
        return self.current

    def go_home(self, now: float) -> str:
        """Leave for the first."""
        self._at = 0
        self._tried_at = now
        return self.current

    # ------------------------------------------------------------------ versions, coming back

    def refuse(self) -> bool:
        """The current one speaks another version; whether none is left."""
        self._refused.add(self._at)
        if len(self._refused) < self.count:
            return False
        self._refused.clear()  # another process may listen there by the next request
        return True

    def wants_look(self, now: float) -> bool:
        """Whether to see now if home is back; the answer is :attr:`home_is_back`."""
        if now < self._look_at or self.home_is_back:
            return False
        self._look_at = now + RETURN_S
        return True
