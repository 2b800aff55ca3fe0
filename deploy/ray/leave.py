"""``python -m baton.deploy.ray.leave``: drain this host before its end, e.g. as a preStop hook.

The command asks Ray to start no more actors here, and the controller to drain this host's workers
and to start replacements elsewhere. It returns when no worker is left here, or after ``--within``
seconds. Workers that are left then end with the host, and the routers replay their requests.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from baton.proto.errors import BatonError

from .actors import CONTROLLER
from .connect import NAMESPACE, PATIENCE, connect

PAUSE = 0.5
ANSWER_TIMEOUT = 5.0


def main() -> int:
    """Return 0 if no worker is left on this host, 1 otherwise or without a controller."""
    parser = argparse.ArgumentParser(prog="baton.deploy.ray.leave", description=__doc__)
    parser.add_argument("--within", type=float, default=90.0, metavar="SECONDS")
    arguments = parser.parse_args()
    try:
        left = leave(time.monotonic() + arguments.within)
    except BatonError as problem:
        sys.stderr.write(f"baton: {problem}\n")
        return 1
    if left:
        sys.stderr.write(f"baton: still here: {', '.join(left)}\n")
    return 1 if left else 0


def leave(until: float) -> list[str]:
    """Drain this host until ``until`` (monotonic seconds); return the workers that are left."""
    ray = connect(patience=min(PATIENCE, max(1.0, until - time.monotonic())))
    host = str(ray.util.get_node_ip_address())
    _close_to_ray(ray, until - time.monotonic())
    left = ["all workers: the controller does not answer"]
    while time.monotonic() < until:
        left = _ask(ray, host, left)
        if not left:
            break
        time.sleep(PAUSE)
    return left


def _ask(ray: Any, host: str, before: list[str]) -> list[str]:
    """Return the controller's answer, or ``before`` while it does not answer (a restart)."""
    from ray.exceptions import GetTimeoutError, RayError

    try:
        controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        found: list[str] = ray.get(controller.leave.remote(host), timeout=ANSWER_TIMEOUT)
    except ValueError:
        return []  # no cluster runs, or it has ended meanwhile
    except (GetTimeoutError, RayError):
        return before
    return found


def _close_to_ray(ray: Any, seconds: float) -> None:
    """Let Ray place no more actors on this node; its raylet ends after the last actor."""
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    context = ray.get_runtime_context()
    deadline = int((time.time() + max(0.0, seconds)) * 1000)
    client = ray._raylet.GcsClient(address=context.gcs_address)
    client.drain_node(
        context.get_node_id(), DRAIN_NODE_REASON_PREEMPTION, "its host will be removed", deadline
    )


if __name__ == "__main__":
    sys.exit(main())
