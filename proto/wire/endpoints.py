"""Syntax of socket addresses, checked before an address is used."""

from __future__ import annotations

import re

from ..errors import InputError
from ..limits import MAX_ENDPOINT_BYTES

MAX_IPC_PATH_BYTES = 107
"""Longest path of a Unix socket."""
_SHOWN_CHARS = 120
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")


def check_endpoint(text: str) -> str:
    """Return ``text`` if it is ``tcp://host:port``, ``ipc://path`` or ``inproc://name``.

    Raises InputError with the reason otherwise. A port is 1 to 65535, an IPv6 host is in
    brackets, an ipc path has 1 to 107 bytes.
    """
    if not isinstance(text, str):
        raise InputError(f"an endpoint is text, not {type(text).__name__}")
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in ("tcp", "ipc", "inproc"):
        hint = _meant(text)
        raise InputError(
            f"endpoint {_shown(text)} must start with tcp://, ipc:// or inproc://{hint}"
        )
    if len(text.encode("utf-8", "replace")) > MAX_ENDPOINT_BYTES:
        raise InputError(f"endpoint {_shown(text)} is longer than {MAX_ENDPOINT_BYTES} bytes")
    if scheme == "tcp":
        _check_tcp(text, rest)
    elif not rest or not rest.isprintable():
        raise InputError(f"endpoint {_shown(text)} needs a printable name after {scheme}://")
    elif scheme == "ipc" and len(rest.encode("utf-8", "replace")) > MAX_IPC_PATH_BYTES:
        raise InputError(f"endpoint {_shown(text)}: path longer than {MAX_IPC_PATH_BYTES} bytes")
    return text


def check_target_endpoint(text: str) -> str:
    """Check like :func:`check_endpoint`, but allow only ``tcp`` and ``ipc``."""
    if not text.startswith(("tcp://", "ipc://")):
        hint = _meant(text)
        raise InputError(f"target_endpoint {_shown(text)} must start with tcp:// or ipc://{hint}")
    return check_endpoint(text)


def _check_tcp(text: str, rest: str) -> None:
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not colon or not name or not name.isascii() or not name.isprintable():
        raise InputError(f"endpoint {_shown(text)} must be tcp://host:port")
    if any(c in " /[]" for c in name) or (":" in name) != bracketed:
        raise InputError(f"endpoint {_shown(text)} must be tcp://host:port")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise InputError(f"endpoint {_shown(text)}: the port must be 1 to 65535")


def _meant(text: str) -> str:
    """Return a hint with the endpoint that was probably meant by one without its scheme."""
    if "://" in text or len(text) > _SHOWN_CHARS:
        return ""
    try:
        if text.startswith("/"):
            return f"; did you mean {check_endpoint(f'ipc://{text}')}?"
        if not _IPV4.fullmatch(text):
            return f"; did you mean {check_endpoint(f'tcp://{text}')}?"
        return f"; did you mean tcp://{text}:PORT?"
    except InputError:
        return ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")
