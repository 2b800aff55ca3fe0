"""``python -m baton.deploy.ray.leave``: empty this host before it goes, as a pod's preStop does.

Ray is told to put nothing more here, the controller to drain the workers of this host and to start
others elsewhere. Returns when none is left here, or when the time is over; then whoever ends the
host ends them, and the routers replay their requests.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from ...proto.errors import BatonError
from .actors import CONTROLLER
from .connect import NAMESPACE, PATIENCE, connect

PAUSE = 0.5
ANSWER_TIMEOUT = 5.0


def main() -> int:
    """Exit code 0: the host is empty. 1: it is not, or there is nobody to ask."""
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
    """Empty this host by ``until`` (monotonic seconds); returns the workers that are left."""
    ray = connect(patience=min(PATIENCE, max(1.0, until - time.monotonic())))
    host = str(ray.util.get_node_ip_address())
    _close_to_ray(ray, until - time.monotonic())
    left = ["all of them: no controller answers"]
    while time.monotonic() < until:
        left = _ask(ray, host, left)
        if not left:
            break
        time.sleep(PAUSE)
    return left


def _ask(ray: Any, host: str, before: list[str]) -> list[str]:
    """The controller's answer; ``before`` while there is none, as it may be just restarting."""
    from ray.exceptions import GetTimeoutError, RayError

    try:
        controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        found: list[str] = ray.get(controller.leave.remote(host), timeout=ANSWER_TIMEOUT)
    except ValueError:
        return []  # Baton does not run, or has ended meanwhile
    except (GetTimeoutError, RayError):
        return before
    return found


def _close_to_ray(ray: Any, seconds: float) -> None:
    """No further actor comes to this node; when its last has gone, its raylet ends itself."""
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    context = ray.get_runtime_context()
    deadline = int((time.time() + max(0.0, seconds)) * 1000)
    client = ray._raylet.GcsClient(address=context.gcs_address)
    client.drain_node(
        context.get_node_id(), DRAIN_NODE_REASON_PREEMPTION, "its host is about to go", deadline
    )


if __name__ == "__main__":
    sys.exit(main())
