"""Settings of one gateway process."""

from __future__ import annotations

import msgspec

from baton.client.routers import router_addresses
from baton.proto.errors import ConfigError
from baton.runtime.keys.allowed_names import AllowedNames
from baton.runtime.keys.api_keys import check_http_access
from baton.runtime.metrics.vllm import METRICS_COMPAT
from baton.runtime.process.log import Level

from .bodies import MAX_BODY_BYTES
from .chat_style import check_parsers
from .image_fetch import parse_hosts

MAX_CONNECTIONS = 4096
"""Of one gateway, if its limit on open files allows as many."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one gateway.

    ``routers``: client addresses of the routers, the first of which is used first. ``host`` and
    ``port``: where to listen; port 0 chooses one. ``api_keys``: SHA-256 digests of the API keys in
    hexadecimal; an address that other machines reach requires one. ``keys``: key folder for
    routers that require CURVE. ``model_names``: names of the model in requests, the first of which
    answers have. ``ssl_certfile``, ``ssl_keyfile``: files for HTTPS. ``share_port``: other gateways
    listen at the same port, and the kernel deals connections out to them. ``grace_s``: seconds that
    open requests may take after a stop signal. ``worker_grace_s``: seconds that a request waits for
    a router, as the router would wait for a worker. ``model_folder``: the operator's own folder of
    the model, whose chat template this process renders itself. ``otlp_endpoint``: URL of an
    OpenTelemetry collector for spans (extra ``otel``). ``tool_call_parser``, ``reasoning_parser``:
    how answers write calls and reasoning; ``auto`` asks the chat template. ``image_hosts``: hosts
    from which images of requests are fetched: names, addresses, networks. ``metrics_host``,
    ``metrics_ports``: where ``/metrics`` is served once more, at the first free port of these,
    because several gateways may share ``port``; none: nowhere.
    ``strict_parameters``: fields of bodies that have no effect are refused, not named as ignored.
    ``metrics_compat``: "vllm" also exports vLLM's metric names. ``allowed_hosts``: names of this
    machine that requests without a key may use. ``allowed_origins``: web pages of other sites that
    may send requests and read answers; ``*`` allows all, with a key.
    """

    routers: tuple[str, ...]
    name: str = "gateway"
    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    model_folder: str = ""
    api_keys: tuple[str, ...] = ()
    keys: str = ""
    otlp_endpoint: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    image_hosts: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    head_timeout_s: float = 10.0
    share_port: bool = False
    grace_s: float = 10.0
    worker_grace_s: float = 30.0
    max_connections: int = MAX_CONNECTIONS
    metrics_host: str = "127.0.0.1"
    metrics_ports: tuple[int, ...] = ()
    metrics_compat: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    strict_parameters: bool = False
    log_level: Level = "info"

    def __post_init__(self) -> None:
        """Raise ConfigError, with the name of the field, for an invalid value."""
        if self.metrics_compat not in METRICS_COMPAT:
            raise ConfigError(f"metrics_compat must be vllm or empty, not {self.metrics_compat!r}")
        router_addresses(self.routers)
        _check_names(self.model_names)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("give both ssl_certfile and ssl_keyfile, or none")
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        parse_hosts(self.image_hosts)
        check_http_access(self.host, self.api_keys, "--host")
        AllowedNames(self.allowed_hosts, self.allowed_origins)
        if "*" in self.allowed_origins and not self.api_keys:
            raise ConfigError("--allowed-origins * needs an API key")
        if self.metrics_ports:
            check_http_access(self.metrics_host, self.api_keys, "--metrics-host")


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not name or name != name.strip() or not name.isprintable():
            raise ConfigError(f"{name[:40]!r} cannot be a name of the served model")
        if names.count(name) > 1:
            raise ConfigError(f"{name[:40]!r} is given twice as a name of the served model")
