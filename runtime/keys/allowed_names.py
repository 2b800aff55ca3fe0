"""Which hosts and origins a request without an API key may name.

Without a key, any web page that is open on this machine could send requests otherwise, and the name
of its site may resolve to loopback.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from baton.proto.errors import ConfigError

FOREIGN = (
    "without an API key, Host and Origin must be localhost or a loopback address; "
    "--allowed-hosts and --allowed-origins add others"
)
"""The message for a request that is refused for its Host or Origin."""
_LOCAL = rb"localhost|127(?:\.\d{1,3}){3}|\[::1\]"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d{1,5})?")


class AllowedNames:
    """Checks the headers by which a browser names where a request goes to and comes from.

    ``hosts``: names and addresses besides those of this machine. ``origins``: as in a page's
    ``Origin`` header. Raises ConfigError for an entry that is none.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        known = rb"|".join([_LOCAL, *(re.escape(_host(one).encode()) for one in hosts)])
        host = rb"(?:%b)(?::\d{1,5})?" % known
        others = b"".join(b"|%b" % re.escape(one.encode()) for one in parse_origins(origins))
        self._values = {
            b"host": re.compile(host, re.IGNORECASE),
            b"origin": re.compile(rb"https?://%b%b" % (host, others), re.IGNORECASE),
        }

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return False if a Host or Origin is not known. Programs may leave out both.

        ``headers``: names in lower case, and values.
        """
        for name, value in headers:
            if name in self._values and self._values[name].fullmatch(value) is None:
                return False
        return True


def parse_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """Return origins in lower case, as browsers send them, or ``*``. Raises ConfigError."""
    found = tuple(one.strip().lower().rstrip("/") for one in origins)
    for one in found:
        if one != "*" and _ORIGIN.fullmatch(one) is None:
            raise ConfigError(
                f"allowed origins must be like https://chat.example or http://localhost:3000, "
                f"not {one[:80]!r}"
            )
    return found


def _host(text: str) -> str:
    host = text.strip().lower().strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if _NAME.fullmatch(host) is None:
            raise ConfigError(
                f"allowed hosts must be names or addresses without a port, not {text[:80]!r}"
            ) from None
        return host
    return host if address.version == 4 else f"[{host}]"
