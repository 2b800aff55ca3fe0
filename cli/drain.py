"""``baton drain WORKER``: let a worker finish what it has and take nothing new."""

from __future__ import annotations

import argparse
import sys
import time

from ..client import Client
from ..deploy.admin import DrainWorker
from ..deploy.report import DRAINED, ClusterReport, WorkerReport
from ..proto.errors import BatonError, CapacityError, RequestFailed
from .cluster import connect, parsed
from .numbers import seconds
from .operator import add_operator, carry_out, has_controller, operator

_PAUSE = 0.2
_FOREVER = float("inf")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("drain", help="take a worker out after its requests")
    parser.add_argument("worker", metavar="WORKER", help="its id, such as decode-1")
    add_operator(parser)
    parser.add_argument(
        "--force", action="store_true", help="drain the last ready worker of its role as well"
    )
    parser.add_argument("--wait", action="store_true", help="return when the worker has left")
    parser.add_argument(
        "--wait-timeout",
        type=seconds,
        default=_FOREVER,
        metavar="SECONDS",
        help="how long --wait waits for it at most [no limit]",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the controller, which bounds it by the grace; without one the router."""
    with connect(arguments) as client:
        before = parsed(client.status(handoffs=0))
        worker = find(before, arguments.worker)
        if has_controller(arguments):
            with operator(arguments) as controller:
                request = DrainWorker(worker=arguments.worker[:128], force=arguments.force)
                state = carry_out(controller, request, wait=False)
        else:
            state = client.drain(arguments.worker, force=arguments.force)
        print(f"{arguments.worker}: {state}", flush=True)
        if worker is not None and is_last(before, worker):
            print(last_word(worker), file=sys.stderr, flush=True)
        if arguments.wait and worker is not None:
            wait_left(client, worker, arguments.wait_timeout)
            print(f"{worker.id}: left")
    return 0


def find(report: ClusterReport, name: str) -> WorkerReport | None:
    """The live worker of this id or endpoint."""
    return next((w for w in report.workers if w.alive and name in (w.id, w.endpoint)), None)


def is_last(report: ClusterReport, worker: WorkerReport) -> bool:
    """Whether no other worker of its role takes requests."""
    others = (w for w in report.of_role(worker.role) if w.id != worker.id)
    return not any(w.state == "ready" for w in others)


def last_word(worker: WorkerReport) -> str:
    """What follows for requests when the last one of a role leaves."""
    return (
        f"baton: {worker.id} is the last {worker.role} worker that is ready: no new request is "
        f"served until there is another (baton scale {worker.role}=1)"
    )


def wait_left(client: Client, worker: WorkerReport, timeout: float) -> None:
    """Show what it still has until it has left; raises when it died or the time is over."""
    until = time.monotonic() + timeout
    said = ""
    while True:
        now = progress(parsed(client.status(handoffs=0)), worker)
        if now is None:
            return
        if now != said:
            said = now
            print(f"{worker.id}: {now}", flush=True)
        left = until - time.monotonic()
        if left <= 0:
            raise CapacityError(f"{worker.id} has not left after {timeout:g} s: {now}")
        time.sleep(min(_PAUSE, left))


def progress(report: ClusterReport, worker: WorkerReport) -> str | None:
    """What a draining incarnation still has, None when it has left; raises when it died."""
    found = next((w for w in report.workers if w.id == worker.id), None)
    if found is None:  # a restarted router does not know those that left before
        return None
    if found.incarnation == worker.incarnation:
        if found.alive:
            return f"{found.requests_running} running, {found.requests_waiting} waiting"
        if found.reason == DRAINED:
            return None
    raise _died(worker, found)


def _died(worker: WorkerReport, found: WorkerReport) -> BatonError:
    why = "another took its place" if found.incarnation != worker.incarnation else found.reason
    return RequestFailed(f"{worker.id} died before it had finished ({why}); others go on for it")
