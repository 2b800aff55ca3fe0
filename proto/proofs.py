"""Proofs of assignment: which worker a router gave an attempt to.

A router gives every attempt to one prefill and one decode worker. With the attempt each of them
gets a proof of it, bound to the request, the attempt and the worker's incarnation. All routers of
a cluster derive it from the cluster key, so a router that was restarted, or that never saw the
request, believes a worker without remembering anything. A prefill worker also gets a *ticket*:
by it the decode worker knows that a router sent this sender
(docs/decisions/0022-proofs-of-assignment.md).

An incarnation is bound to the key of its connection elsewhere (:mod:`baton.runtime.claims`), so a
proof or a ticket is of no use to anyone else.
"""

from __future__ import annotations

import hmac
from functools import lru_cache
from hashlib import blake2b

PROOF_BYTES = 16


def assignment_proof(cluster_key: bytes, request: bytes, attempt: int, incarnation: int) -> bytes:
    """16 bytes that prove that a router gave this attempt to the worker ``incarnation``."""
    digest = _keyed(cluster_key, b"baton-assigned").copy()
    digest.update(_what(request, attempt, incarnation))
    return digest.digest()


@lru_cache(maxsize=4096)
def worker_key(cluster_key: bytes, incarnation: int) -> bytes:
    """16 bytes that only the routers and the worker ``incarnation`` know; Welcome carries them."""
    digest = _keyed(cluster_key, b"baton-worker").copy()
    digest.update(incarnation.to_bytes(8, "little"))
    return digest.digest()


def reserve_ticket(key: bytes, request: bytes, attempt: int, incarnation: int) -> bytes:
    """16 bytes that let the prefill worker ``incarnation`` hand this attempt to a decode worker.

    ``key``: the decode worker's :func:`worker_key`.
    """
    digest = _keyed(key, b"baton-ticket").copy()
    digest.update(_what(request, attempt, incarnation))
    return digest.digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time; an empty one equals nothing."""
    return bool(one) and hmac.compare_digest(one, other)


def _what(request: bytes, attempt: int, incarnation: int) -> bytes:
    """Fixed-length fields first, so no two inputs give the same bytes."""
    return attempt.to_bytes(8, "little") + incarnation.to_bytes(8, "little") + request


@lru_cache(maxsize=4096)
def _keyed(key: bytes, person: bytes) -> blake2b:
    """The digest a proof begins with; taking up the key costs more than the rest."""
    short = key if len(key) <= 64 else blake2b(key).digest()
    return blake2b(digest_size=PROOF_BYTES, key=short, person=person)
