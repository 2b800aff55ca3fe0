"""Fetches the images of ``image_url`` from hosts that the operator allows.

Invariants: a name is resolved once, and only checked addresses are connected to. Private addresses
must be allowed themselves. No redirect leads to another host. Size and time of a fetch are limited.
Slow hosts do not keep a gateway from fetching of others: each has its own limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

import httptools

from baton.images.processor import MAX_IMAGE_BYTES
from baton.proto.errors import ConfigError, InputError

from .errors import GatewayBusy

FETCH_TIMEOUT_S = 10.0
"""Of one image, with all redirects. As long may a fetch wait before it begins."""
MAX_FETCHES = 32
"""Images of one gateway that are fetched at a time."""
MAX_HOST_FETCHES = 8
"""The same, from one host and port."""
MAX_HOST_WAITING = 16
"""Images of one host and port that wait to be fetched."""
MAX_FETCHED_BYTES = 256 << 20
"""Of the fetched images of all requests of one gateway, until they are prepared."""
MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
_MAX_HEAD_BYTES = 32 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ImageHostRefused(InputError):
    """The gateway fetches no images from this host."""

    code = "image_host_refused"


class ImageNotFetched(InputError):
    """The host did not send an image in time, or sent too many bytes."""

    code = "image_not_fetched"


class ImageFetcher:
    """Fetches images over HTTP.

    ``hosts``: names (``example.com``), addresses or networks (``10.0.0.0/8``), which also allow
    private addresses. Raises ConfigError for other entries.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        timeout: float = FETCH_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._names, self._networks = parse_hosts(hosts)
        self._timeout = timeout
        self._tls = tls
        self._room = asyncio.Semaphore(MAX_FETCHES)
        self._hosts: dict[tuple[str, int], _Host] = {}
        self.held_bytes = 0

    def check(self, url: str) -> SplitResult:
        """Return the parts of an allowed URL. Raises ImageHostRefused, InputError."""
        if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
            raise InputError(f"the URL of an image must have at most {MAX_URL_CHARS} ASCII letters")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InputError(f"the URL of an image is invalid: {error}") from None
        if parts.scheme not in _PORTS or not host or port == 0:
            raise InputError("the URL of an image must be data:, http: or https:")
        if parts.username is not None or parts.password is not None:
            raise InputError("the URL of an image must have no user name")
        if not self._names and not self._networks:
            raise ImageHostRefused("this gateway fetches no images; send them as data URLs")
        address = _address(host)
        allowed = host in self._names if address is None else self._in_networks(address)
        if not allowed:
            raise ImageHostRefused(f"this gateway fetches no images from {host[:80]}")
        return parts

    async def fetch(self, url: str, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
        """Return the content of an allowed URL. Raises InputError, as the classes above.

        Its bytes count as held until :meth:`release`. Raises GatewayBusy if all requests together
        would hold too many, or if no fetch ends in time.
        """
        parts = self.check(url)
        try:
            async with self._slot(parts), asyncio.timeout(self._timeout):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(parts, max_bytes)
                    if found.location is None:
                        return bytes(found.body)
                    self.release(len(found.body))
                    further = self.check(urljoin(parts.geturl(), found.location))
                    if not _same_host(parts, further):
                        raise ImageHostRefused(f"{parts.hostname} redirects to another host")
                    parts = further
        except TimeoutError:
            text = f"no image within {self._timeout:g} s from {parts.hostname}"
            raise ImageNotFetched(text) from None
        except ssl.SSLCertVerificationError as error:
            text = f"the certificate of {parts.hostname}: {error.verify_message}"
            raise ImageNotFetched(text) from None
        except OSError:  # without its text, which would show addresses and open ports
            raise ImageNotFetched(f"{parts.hostname} cannot be reached") from None
        except httptools.HttpParserError as error:
            text = f"{parts.hostname}: {str(error)[:100] or type(error).__name__}"
            raise ImageNotFetched(text) from None
        raise ImageNotFetched(f"{parts.hostname} redirects more than {MAX_REDIRECTS} times")

    @asynccontextmanager
    async def _slot(self, parts: SplitResult) -> AsyncIterator[None]:
        """Wait until a fetch may begin, and take its place meanwhile. Raises GatewayBusy."""
        key = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        host = self._hosts.setdefault(key, _Host())
        if host.users >= MAX_HOST_FETCHES + MAX_HOST_WAITING:
            raise GatewayBusy(f"too many images of {key[0]} are fetched", retry_after=1.0)
        host.users += 1
        try:
            try:
                async with asyncio.timeout(self._timeout):
                    await _both(host.room, self._room)
            except TimeoutError:
                text = f"no room to fetch an image of {key[0]} within {self._timeout:g} s"
                raise GatewayBusy(text, retry_after=1.0) from None
            try:
                yield
            finally:
                self._room.release()
                host.room.release()
        finally:
            host.users -= 1
            if not host.users:
                del self._hosts[key]

    async def _get(self, parts: SplitResult, max_bytes: int) -> _Answer:
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        tls = None
        if parts.scheme == "https":
            if self._tls is None:  # reading the certificates takes about 20 ms
                self._tls = ssl.create_default_context()
            tls = self._tls
        reader, writer = await asyncio.open_connection(
            await self._resolve(host, port), port, ssl=tls, server_hostname=host if tls else None
        )
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            named = f"[{host}]" if ":" in host else host
            named += "" if port == _PORTS[parts.scheme] else f":{port}"
            head = f"GET {target} HTTP/1.1\r\nhost: {named}\r\naccept: image/*\r\n"
            writer.write(f"{head}user-agent: baton\r\nconnection: close\r\n\r\n".encode())
            answer = _Answer(host, max_bytes)
            held = 0
            try:
                while not answer.complete:
                    part = await reader.read(1 << 16)
                    if not part:
                        answer.ended()
                        break
                    answer.feed(part)
                    self.held_bytes += len(answer.body) - held
                    held = len(answer.body)
                    if self.held_bytes > MAX_FETCHED_BYTES:
                        raise GatewayBusy("too many bytes of fetched images", retry_after=1.0)
            except BaseException:
                self.release(held)
                raise
            return answer
        finally:
            writer.transport.abort()

    def release(self, count: int) -> None:
        """Stop counting bytes that nothing holds any more."""
        self.held_bytes -= count

    async def _resolve(self, host: str, port: int) -> str:
        """Return an address of a name. Raises ImageHostRefused if one of them is not allowed."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        for one in addresses:
            address = _address(one)
            if address is None or not (_is_public(address) or self._in_networks(address)):
                raise ImageHostRefused(
                    f"{host[:80]} is at a private address, which this gateway does not allow"
                )
        if not addresses:
            raise ImageNotFetched(f"{host[:80]} has no address")
        return addresses[0]

    def _in_networks(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


@dataclass(slots=True)
class _Host:
    """One host and port. ``users``: fetches that run or wait."""

    users: int = 0
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_HOST_FETCHES))


async def _both(first: asyncio.Semaphore, second: asyncio.Semaphore) -> None:
    """Take a place in both, in this order, or in none."""
    await first.acquire()
    try:
        await second.acquire()
    except BaseException:
        first.release()
        raise


@dataclass(slots=True)
class _Answer:
    """An HTTP answer as it arrives."""

    host: str
    max_bytes: int
    location: str | None = None
    complete: bool = False
    body: bytearray = field(default_factory=bytearray)
    _parser: httptools.HttpResponseParser = field(init=False)
    _head: int = 0
    _in_head: bool = True
    _idle: int = 0  # bytes since the last part of the body: of trailers and chunk headers
    _length: int | None = None
    _chunked: bool = False
    _failure: str = ""

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take received bytes."""
        if self._in_head:
            self._head += len(data)
        else:
            self._idle += len(data)
        self._parser.feed_data(data)
        if self._failure:
            raise ImageNotFetched(f"{self.host} {self._failure}")
        if not self.complete and self._idle > _MAX_HEAD_BYTES:
            raise ImageNotFetched(f"{self.host} sent too many trailers")
        if self._in_head and self._head > _MAX_HEAD_BYTES:
            raise ImageNotFetched(f"{self.host} sent too many headers")

    def ended(self) -> None:
        """Handle the end of the connection, which ends an answer of unknown length."""
        if self._in_head or self._chunked or self._length is not None:
            raise ImageNotFetched(f"{self.host} closed the connection before the end")

    # Callbacks of the parser, which must not raise.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the headers that matter; ignore trailers and what follows the answer."""
        if not self._in_head:
            return
        key, value = name.lower(), value.rstrip(b" \t")  # the parser removes what is in front
        if key == b"location":
            self.location = value.decode("latin-1")
        elif key == b"content-length" and value.isdigit():
            self._length = int(value[:20])
        elif key == b"transfer-encoding":
            self._chunked = True

    def on_headers_complete(self) -> None:
        """Check the status and the announced size."""
        status = self._parser.get_status_code()
        if not self._in_head or 100 <= status < 200:  # a further answer; an informational one
            return
        self._in_head = False
        if status in _REDIRECTS and self.location is not None:
            self.complete = True
            return
        self.location = None
        if status != 200:
            self._failure = f"answered with status {status}"
        self._check(self._length or 0)

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._idle = 0
        if not self.complete:
            self._check(len(self.body) + len(data))
            if not self._failure:
                self.body += data

    def on_message_complete(self) -> None:
        """Note the end, unless it is that of an informational answer."""
        self.complete = not self._in_head

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            self._failure = self._failure or f"sent more than {self.max_bytes} bytes"


def parse_hosts(hosts: Iterable[str]) -> tuple[frozenset[str], tuple[Network, ...]]:
    """Return names and networks. Raises ConfigError for an entry that is neither."""
    names: set[str] = set()
    networks: list[Network] = []
    for entry in (part.strip().lower() for host in hosts for part in host.split(",")):
        if not entry:
            continue
        try:
            networks.append(ipaddress.ip_network(entry))
            continue
        except ValueError:
            pass
        if _NAME.fullmatch(entry) is None or entry.replace(".", "").isdigit():
            raise ConfigError(
                f"image hosts must be names, addresses or networks, not {entry[:80]!r}"
            )
        names.add(entry)
    return frozenset(names), tuple(networks)


def _address(host: str) -> Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _same_host(one: SplitResult, other: SplitResult) -> bool:
    """True if a redirect keeps host, port and scheme, or goes from HTTP to HTTPS."""
    ports = [part.port or _PORTS[part.scheme] for part in (one, other)]
    same = one.scheme == other.scheme and ports[0] == ports[1]
    upgraded = (one.scheme, other.scheme, ports) == ("http", "https", [80, 443])
    return one.hostname == other.hostname and (same or upgraded)


_NEVER = [
    ipaddress.ip_network(one)
    for one in (
        "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10",
        "192.0.0.0/24", "168.63.129.16/32",
    )
]  # fmt: skip
"""Addresses that contain another address, or belong to the hosts of a cloud."""


def _is_public(address: Address) -> bool:
    special = address.is_multicast or address.is_reserved
    return address.is_global and not special and not any(address in one for one in _NEVER)
