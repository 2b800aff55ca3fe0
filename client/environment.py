"""The cluster of a client whose caller names none: found as by the ``baton`` command.

``BATON_ADDRESS`` names the routers and ``BATON_KEYS`` the key folder; otherwise the client uses
the default address of this user's cluster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.runtime.keys.keyring import GivenKeys
from baton.runtime.net.user_address import trusted_default_address

from .routers import router_addresses

ADDRESS_VARIABLE = "BATON_ADDRESS"
KEYS_VARIABLE = "BATON_KEYS"


def find_cluster(
    address: str | Sequence[str] | None, keys: GivenKeys
) -> tuple[tuple[str, ...], GivenKeys]:
    """Return the routers' addresses and the keys. Raises ConfigError for a wrong address.

    The variables count only without ``address``, the key folder also only without ``keys``.
    """
    if address is not None:
        return router_addresses(address), keys
    found = os.environ.get(ADDRESS_VARIABLE) or trusted_default_address()
    return router_addresses(found), os.environ.get(KEYS_VARIABLE) if keys is None else keys
