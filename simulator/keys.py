"""The keys of a simulated cluster with rogues, and the checks of its sockets.

Each role has one honest key and one rogue key. A connection's identity begins with the name of its
process, and names that begin with ``rogue`` have the rogue key of their role.
"""

from __future__ import annotations

from functools import cache

from baton.proto.errors import BatonError
from baton.proto.wire.messages import Hello, Message
from baton.router.authorization import hello_refusal
from baton.router.records import Caller, WorkerCaller
from baton.runtime.keys.allowed import CLIENT, DECODE, PREFILL, Z85_LENGTH, AllowedKeys, KeyEntry

ROGUE = "rogue"
ROLES = (PREFILL, DECODE, CLIENT)


@cache
def key_of(name: str) -> bytes:
    """Return the key of a process: ``prefill-0``, or ``rogue-prefill``."""
    first, _, rest = name.partition("-")
    owner, role = (ROGUE, rest.partition("-")[0]) if first == ROGUE else ("honest", first)
    return f"{role}/{owner}".ljust(Z85_LENGTH, "0").encode()


ALLOWED = AllowedKeys(
    [
        KeyEntry(public=key_of(name).decode(), role=role)
        for role in ROLES
        for name in (role, f"{ROGUE}-{role}")
    ]
)


def key_behind(identity: bytes) -> bytes:
    """Return the key of a connection."""
    return key_of(identity.partition(b":")[0].decode())


def is_rogue(key: bytes) -> bool:
    """True if a key is not one of the cluster's own processes."""
    return key.partition(b"/")[2].startswith(ROGUE.encode())


def client_caller(identity: bytes) -> Caller:
    """Return what a client's connection proves, as the router's shell does."""
    return Caller(key_behind(identity), operator=False)


def worker_caller(identity: bytes, _name: str) -> WorkerCaller:
    """Return what a worker's connection proves, as the router's shell does."""
    return WorkerCaller(key_behind(identity))


def refusal(identity: bytes, message: Message) -> BatonError | None:
    """Return why a router's socket for workers does not accept a message, or None."""
    if not isinstance(message, Hello):
        return None
    return hello_refusal(ALLOWED, ALLOWED.get(key_behind(identity)), message)
