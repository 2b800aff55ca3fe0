"""Names of the links to decode workers.

An endpoint proves nothing: another worker may state the same one. So a link is named by the
endpoint and by the CURVE key with which the router saw the decode worker register. A connection of
the link succeeds only with that key.
"""

from __future__ import annotations


def link_name(endpoint: str, key: bytes) -> str:
    """Return ``ENDPOINT KEY``, or the endpoint alone without a key (z85, which has no blanks)."""
    return f"{endpoint} {key.decode('ascii', 'replace')}" if key else endpoint


def endpoint_and_key(link: str) -> tuple[str, bytes]:
    """Return the endpoint and the key (empty without keys) of a link's name."""
    endpoint, _, key = link.partition(" ")
    return endpoint, key.encode()
