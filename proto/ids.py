"""Identities: who a request is, which life of a process speaks, what a context contains.

All digests are BLAKE2b with a personalisation of their own, so none can stand for another.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

KEY_BYTES = 16
"""Length of a request key, a resume secret and a context digest."""


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class RequestID:
    """A request's name, made once at the edge; on the wire the map ``{"value": ...}``."""

    value: str = field(default_factory=_new_id)

    def __str__(self) -> str:
        return self.value


_REQUEST = blake2b(digest_size=KEY_BYTES, person=b"baton-request")


def request_key(client: bytes, request_id: str, serial: int = 0) -> bytes:
    """16-byte key of a request: digest of the client's identity, the request id and the serial.

    ``serial``: which of the client's requests it is, so that a name can be used again; 0 for none.
    """
    digest = _REQUEST.copy()
    name = request_id.encode("utf-8", "surrogatepass")
    digest.update(len(client).to_bytes(4, "little") + client + name)
    if serial:  # no text ends in this byte, so no other name gives the same digest
        digest.update(b"\xff" + serial.to_bytes(8, "little"))
    return digest.digest()


def new_incarnation(entropy: bytes | None = None) -> int:
    """Random 64-bit number of one process life, never 0.

    ``entropy`` (at least 8 bytes) replaces the system's randomness where a caller must be
    reproducible.
    """
    source = os.urandom(8) if entropy is None else entropy
    if len(source) < 8:
        raise ValueError("an incarnation needs at least 8 random bytes")
    return int.from_bytes(source[:8], "little") or 1


def resume_secret(cluster_key: bytes, request: bytes) -> bytes:
    """16 bytes that prove a client owns ``request``; every router with the key derives the same."""
    digest = _keyed(cluster_key).copy()
    digest.update(request)
    return digest.digest()


@lru_cache(maxsize=8)
def _keyed(cluster_key: bytes) -> blake2b:
    """The digest a secret begins with; the key takes longer than the request."""
    key = cluster_key if len(cluster_key) <= 64 else blake2b(cluster_key).digest()
    return blake2b(digest_size=KEY_BYTES, key=key, person=b"baton-resume")
