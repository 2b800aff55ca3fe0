"""Proofs of assignment: they prove that a router gave an attempt to a worker.

A router assigns every attempt to one prefill and one decode worker. Each of the two gets a proof,
bound to the request, the attempt, and the worker's key and incarnation (:class:`Holder`). All
routers of a cluster derive proofs from the cluster key. So a router that was restarted, or that
does not know the request, can check a worker's claim without stored state. A prefill worker also
gets a *ticket*, which proves to the decode worker that a router chose this sender, and states how
much memory the request needs and for how long
(docs/decisions/0022-workers-prove-their-assignment-to-routers.md).

A receiver takes the key from the connection, so proofs and tickets are useless to other processes.
"""

from __future__ import annotations

import hmac
from functools import lru_cache
from hashlib import blake2b, sha256
from struct import Struct, error
from typing import NamedTuple

import msgspec
from msgspec.structs import astuple

PROOF_BYTES = 16
_TERMS = Struct("<III")
_MOST = (1 << 32) - 1


class Holder(NamedTuple):
    """One incarnation of a worker that connects with a key (z85; empty without keys)."""

    incarnation: int
    key: bytes = b""


def assignment_proof(cluster_key: bytes, request: bytes, attempt: int, holder: Holder) -> bytes:
    """Return 16 bytes that prove that a router gave this attempt to ``holder``."""
    return _digest(_bound(cluster_key, b"baton-assigned", holder), request, attempt)


def seal_of(secret: bytes) -> bytes:
    """Return the seal of a process, which its Hello has.

    Only the supervisor of the process has the secret, and reveals it in a DeathCertificate.
    """
    return sha256(secret).digest()


@lru_cache(maxsize=4096)
def worker_key(cluster_key: bytes, holder: Holder, router: int) -> bytes:
    """Return 16 bytes known only to routers and worker ``holder``; sent in Welcome.

    ``router``: incarnation of the router, so that tickets end with it.
    """
    start = _bound(cluster_key, b"baton-worker", holder).copy()
    start.update(router.to_bytes(8, "little"))
    return start.digest()


class Terms(msgspec.Struct, frozen=True, gc=False):
    """What a ticket allows: blocks for ``tokens`` tokens, for ``seconds`` from ``issued`` on.

    ``issued``: whole seconds of the router's clock.
    """

    tokens: int
    issued: int
    seconds: int

    def encode(self) -> bytes:
        """Return the beginning of a ticket; numbers that do not fit are cut to the largest."""
        try:
            return _TERMS.pack(self.tokens, self.issued, self.seconds)
        except error:  # rare, so that the numbers are not compared for every Assign
            return _TERMS.pack(*(min(number, _MOST) for number in astuple(self)))


def reserve_ticket(key: bytes, request: bytes, attempt: int, holder: Holder, terms: Terms) -> bytes:
    """Return 28 bytes that allow prefill worker ``holder`` to hand off this attempt on ``terms``.

    ``key``: the decode worker's :func:`worker_key`.
    """
    said, digest = terms.encode(), _bound(key, b"baton-ticket", holder).copy()
    digest.update(_what(request, attempt) + said)
    return said + digest.digest()


def terms_of(ticket: bytes) -> Terms | None:
    """Return what a ticket states, whether it is valid or not; None if it has another form."""
    if len(ticket) != _TERMS.size + PROOF_BYTES:
        return None
    return Terms(*_TERMS.unpack_from(ticket))


def assignment(
    cluster_key: bytes,
    request: bytes,
    attempt: int,
    prefill: Holder,
    decode: Holder | None,
    router: int,
    terms: Terms,
) -> tuple[bytes, bytes, bytes]:
    """Return the prefill worker's proof, the decode worker's proof and the ticket of an Assign.

    Without a decode worker, the last two are empty. ``router``: incarnation of the router.
    ``terms``: of the ticket.
    """
    first, second, third = _pair(cluster_key, prefill, decode, router)
    what = attempt.to_bytes(8, "little") + request  # as _what, which costs a call
    proof = first.copy()
    proof.update(what)
    if second is None or third is None:
        return proof.digest(), b"", b""
    decode_proof, ticket = second.copy(), third.copy()
    decode_proof.update(what)
    said = terms.encode()
    ticket.update(what + said)
    return proof.digest(), decode_proof.digest(), said + ticket.digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time; False for empty proofs."""
    return bool(one) and hmac.compare_digest(one, other)


def _digest(bound: blake2b, request: bytes, attempt: int) -> bytes:
    digest = bound.copy()
    digest.update(_what(request, attempt))
    return digest.digest()


def _what(request: bytes, attempt: int) -> bytes:
    """Encode a request and attempt, fixed length first, so that no two give the same bytes."""
    return attempt.to_bytes(8, "little") + request


@lru_cache(maxsize=4096)
def _bound(key: bytes, person: bytes, holder: Holder) -> blake2b:
    """Return the common start of a worker's digests, cached.

    The secret begins the hashed bytes. As BLAKE2's own key it would fill a block of 128 bytes,
    which every digest hashes again; so all bytes of a proof share one block, in two thirds of the
    time. BLAKE2 has no length extension, so both are as hard to forge.
    """
    secret = blake2b(key, digest_size=32, person=b"baton-secret").digest()
    start = blake2b(secret, digest_size=PROOF_BYTES, person=person)
    start.update(holder.incarnation.to_bytes(8, "little"))
    start.update(len(holder.key).to_bytes(4, "little") + holder.key)
    return start


@lru_cache(maxsize=4096)
def _pair(
    cluster_key: bytes, prefill: Holder, decode: Holder | None, router: int
) -> tuple[blake2b, blake2b | None, blake2b | None]:
    proof = _bound(cluster_key, b"baton-assigned", prefill)
    if decode is None:
        return proof, None, None
    ticket = _bound(worker_key(cluster_key, decode, router), b"baton-ticket", prefill)
    return proof, _bound(cluster_key, b"baton-assigned", decode), ticket
