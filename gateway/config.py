"""Settings of one gateway process."""

from __future__ import annotations

import ipaddress

import msgspec

from ..client.routers import router_addresses
from ..proto.errors import ConfigError
from ..runtime.process.log import Level
from .bodies import MAX_BODY_BYTES


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one gateway.

    ``routers``: client addresses of the routers, the first of which is used first. ``host`` and
    ``port``: where to listen; port 0 chooses one. ``api_keys``: SHA-256 digests of the API keys in
    hexadecimal; an address that other machines reach requires one. ``keys``: key folder for
    routers that require CURVE. ``model_names``: names of the model in requests, the first of which
    answers have. ``ssl_certfile``, ``ssl_keyfile``: files for HTTPS.
    """

    routers: tuple[str, ...]
    name: str = "gateway"
    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    keys: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    max_body_bytes: int = MAX_BODY_BYTES
    head_timeout_s: float = 10.0
    max_connections: int = 4096
    log_level: Level = "info"

    def __post_init__(self) -> None:
        """Raise ConfigError, with the name of the field, for an invalid value."""
        router_addresses(self.routers)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("give both ssl_certfile and ssl_keyfile, or none")
        for digest in self.api_keys:
            if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
                raise ConfigError("api_keys must be SHA-256 digests of 64 hexadecimal digits")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(f"host {self.host} is reachable from other machines: give an API key")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
