"""``python -m baton.deploy.ray.probe HOST:PORT SECONDS``: a Ray head's own facts, as JSON.

A process of its own, because Ray's client cannot be told to give up: against a head that does
not answer it blocks for minutes, and with a wrong token it tries for ever. :mod:`.connect`
ends this process when its time is over.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import sys

_QUESTIONS = 2


def main() -> int:
    """Print ``ray_version``, ``python_version`` and the addresses of the live nodes."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray._raylet import GcsClient

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    client = GcsClient(address=sys.argv[1])
    timeout = float(sys.argv[2]) / _QUESTIONS  # a call that ignores it is ended from outside
    text = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=timeout)
    facts = json.loads(text or b"{}")
    nodes = client.get_all_node_info(timeout=timeout)
    alive = [node.node_manager_address for node in nodes.values() if node.state == 0]
    known = {key: facts.get(key, "") for key in ("ray_version", "python_version")}
    sys.stdout.write(json.dumps({**known, "nodes": alive}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
