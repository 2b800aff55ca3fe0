"""Identities of requests and of process incarnations.

All digests are BLAKE2b, each with a different personalisation, so that no digest can replace
another.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

KEY_BYTES = 16
"""Length of a request key, a resume secret and a context digest."""
NONCE_BYTES = 16
"""Length of the random part of a worker's incarnation."""


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class RequestID:
    """The name of a request, chosen by the client; on the wire the map ``{"value": ...}``."""

    value: str = field(default_factory=_new_id)

    def __str__(self) -> str:
        return self.value


def request_key(client: bytes, request_id: str, serial: int = 0) -> bytes:
    """Return the 16-byte key of a request: digest of client identity, request id and serial.

    ``serial``: number of the request at its client, so that a name can be used again; 0: none.
    """
    digest = _begun(client).copy()
    name = request_id.encode("utf-8", "surrogatepass")
    if serial:  # no text ends with this byte, so no other name gives the same digest
        name += b"\xff" + serial.to_bytes(8, "little")
    digest.update(name)
    return digest.digest()


@lru_cache(maxsize=1024)
def _begun(client: bytes) -> blake2b:
    """Return the common start of the digests of a client's requests."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"baton-request")
    digest.update(len(client).to_bytes(4, "little") + client)
    return digest


def worker_incarnation(key: bytes, nonce: bytes) -> int:
    """Return the 64-bit incarnation of a worker with this CURVE public key (z85), never 0.

    A receiver that gets ``nonce`` over a connection with a key can so check that the incarnation
    belongs to that key, without a table of earlier workers. ``key`` is empty without keys.
    """
    digest = blake2b(digest_size=8, person=b"baton-life")
    digest.update(len(key).to_bytes(4, "little") + key + nonce)
    return int.from_bytes(digest.digest(), "little") or 1


def new_nonce() -> bytes:
    """Return the random bytes of a worker's incarnation."""
    return os.urandom(NONCE_BYTES)


def new_incarnation(entropy: bytes | None = None) -> int:
    """Return a random 64-bit incarnation of a process, never 0.

    ``entropy`` (at least 8 bytes) replaces the system's randomness, for reproducible callers.
    """
    source = os.urandom(8) if entropy is None else entropy
    if len(source) < 8:
        raise ValueError("an incarnation needs at least 8 random bytes")
    return int.from_bytes(source[:8], "little") or 1


def resume_secret(cluster_key: bytes, request: bytes) -> bytes:
    """Return 16 bytes that prove that a client owns ``request``; the same at every router."""
    digest = _keyed(cluster_key).copy()
    digest.update(request)
    return digest.digest()


@lru_cache(maxsize=8)
def _keyed(cluster_key: bytes) -> blake2b:
    """Return the common start of all secrets, cached; see :func:`.wire.proofs._bound`."""
    secret = blake2b(cluster_key, digest_size=32, person=b"baton-secret").digest()
    return blake2b(secret, digest_size=KEY_BYTES, person=b"baton-resume")
