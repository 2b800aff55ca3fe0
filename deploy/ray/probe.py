"""``python -m baton.deploy.ray.probe HOST:PORT SECONDS``: print facts about a Ray head as JSON.

This runs as a separate process because Ray's client has no reliable timeout: it blocks for minutes
if the head does not answer, and retries forever with a wrong token. :mod:`.connect` kills this
process after its time limit.
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
    timeout = float(sys.argv[2]) / _QUESTIONS  # calls may ignore it; then the parent kills us
    text = client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=timeout)
    facts = json.loads(text or b"{}")
    nodes = client.get_all_node_info(timeout=timeout)
    alive = [node.node_manager_address for node in nodes.values() if node.state == 0]
    known = {key: facts.get(key, "") for key in ("ray_version", "python_version")}
    sys.stdout.write(json.dumps({**known, "nodes": alive}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
