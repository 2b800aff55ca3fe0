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
    return _digest(_bound(cluster_key, b"baton-assigned", incarnation), request, attempt)


@lru_cache(maxsize=4096)
def worker_key(cluster_key: bytes, incarnation: int) -> bytes:
    """16 bytes that only the routers and the worker ``incarnation`` know; Welcome carries them."""
    return _bound(cluster_key, b"baton-worker", incarnation).digest()


def reserve_ticket(key: bytes, request: bytes, attempt: int, incarnation: int) -> bytes:
    """16 bytes that let the prefill worker ``incarnation`` hand this attempt to a decode worker.

    ``key``: the decode worker's :func:`worker_key`.
    """
    return _digest(_bound(key, b"baton-ticket", incarnation), request, attempt)


def assignment(
    cluster_key: bytes, request: bytes, attempt: int, prefill: int, decode: int | None
) -> tuple[bytes, bytes, bytes]:
    """What an Assign carries: the proof of each worker, by incarnation, and the ticket.

    The last two are empty without a decode worker.
    """
    first, second, third = _pair(cluster_key, prefill, decode)
    what = _what(request, attempt)
    proof = first.copy()
    proof.update(what)
    if second is None or third is None:
        return proof.digest(), b"", b""
    decode_proof, ticket = second.copy(), third.copy()
    decode_proof.update(what)
    ticket.update(what)
    return proof.digest(), decode_proof.digest(), ticket.digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time; an empty one equals nothing."""
    return bool(one) and hmac.compare_digest(one, other)


def _digest(bound: blake2b, request: bytes, attempt: int) -> bytes:
    digest = bound.copy()
    digest.update(_what(request, attempt))
    return digest.digest()


def _what(request: bytes, attempt: int) -> bytes:
    """Fixed-length fields first, so no two inputs give the same bytes."""
    return attempt.to_bytes(8, "little") + request


@lru_cache(maxsize=4096)
def _bound(key: bytes, person: bytes, incarnation: int) -> blake2b:
    """What all digests of one worker begin with; taking up the key costs more than the rest."""
    short = key if len(key) <= 64 else blake2b(key).digest()
    start = blake2b(digest_size=PROOF_BYTES, key=short, person=person)
    start.update(incarnation.to_bytes(8, "little"))
    return start


@lru_cache(maxsize=4096)
def _pair(
    cluster_key: bytes, prefill: int, decode: int | None
) -> tuple[blake2b, blake2b | None, blake2b | None]:
    proof = _bound(cluster_key, b"baton-assigned", prefill)
    if decode is None:
        return proof, None, None
    ticket = _bound(worker_key(cluster_key, decode), b"baton-ticket", prefill)
    return proof, _bound(cluster_key, b"baton-assigned", decode), ticket
