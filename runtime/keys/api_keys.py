"""API keys of HTTP sockets: kept as digests, compared in constant time.

HTTP has no CURVE. An address that other machines reach requires an API key instead.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable

from baton.proto.errors import ConfigError

from ..small_files import read_small

KEY_VARIABLE = "BATON_API_KEY"
"""Environment variable with one API key."""

_COMMENT = re.compile(r"(?:^|\s)\s*#.*")


def digest_of(key: str) -> str:
    """Return the SHA-256 digest of an API key in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def api_key_digests(file: str, keys: Iterable[str | None]) -> tuple[str, ...]:
    """Return the hexadecimal SHA-256 digests of the API keys of a file (one per line) and ``keys``.

    A ``#`` at the start of a line or after a space begins a comment. Keys themselves are not kept.
    Raises ConfigError for an unreadable file or a wrong key.
    """
    found = list(keys)
    if file:
        try:
            found += (_COMMENT.sub("", line) for line in read_small(file).decode().splitlines())
        except UnicodeDecodeError:
            raise ConfigError(f"--api-key-file {file}: it is not UTF-8 text") from None
        except OSError as error:
            raise ConfigError(f"--api-key-file {file}: {error.strerror}") from None
    stripped = [key.strip() for key in found if key and key.strip()]
    for key in stripped:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("API keys must be printable ASCII without spaces, one per line")
    if file and not stripped:
        raise ConfigError(f"--api-key-file {file} has no key")
    return tuple(dict.fromkeys(map(digest_of, stripped)))


def check_http_access(host: str, digests: Iterable[str], what: str) -> None:
    """Raise ConfigError for malformed digests, or if other machines reach ``host`` without a key.

    ``what``: name of the option with the host, for the message.
    """
    known = tuple(digests)
    for digest in known:
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ConfigError("api_keys must be SHA-256 digests of 64 hexadecimal digits")
    if not known and not is_loopback(host):
        raise ConfigError(
            f"{what} {host} is reachable from other machines: give an API key "
            f"(--api-key-file or {KEY_VARIABLE})"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class ApiKeys:
    """The keys that requests must have one of; without keys every request may pass."""

    def __init__(self, digests: Iterable[str]) -> None:
        self._digests = tuple(bytes.fromhex(digest) for digest in digests)

    def __bool__(self) -> bool:
        """True if a key is required."""
        return bool(self._digests)

    def admit(self, authorization: bytes, *, basic: bool = False) -> bool:
        """True if the value of an Authorization header has a known key, or none is required.

        ``basic``: the key may also be the password of Basic, which browsers can send.
        """
        if not self._digests:
            return True
        kind, _, key = authorization.partition(b" ")
        key = key.strip()
        if basic and kind.lower() == b"basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except ValueError:
                return False
            return self.knows(key)
        return kind.lower() == b"bearer" and self.knows(key)

    def knows(self, key: bytes) -> bool:
        """True for a known key. The time does not depend on which key it is."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)
