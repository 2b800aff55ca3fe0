"""``baton drain WORKER``: remove a worker after its running requests."""

from __future__ import annotations

import argparse
import time

from baton.client import Client
from baton.deploy.controller.admin import DrainWorker
from baton.deploy.report import DRAINED, ClusterReport, WorkerReport
from baton.proto.errors import BatonError, CapacityError, RequestFailed

from .cluster import connect, parsed
from .numbers import seconds
from .operator import add_operator, carry_out, has_controller, operator
from .output import say

_PAUSE = 0.2
_FOREVER = float("inf")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("drain", help="remove a worker or gateway after its requests")
    parser.add_argument("worker", metavar="WORKER", help="worker or gateway, such as decode-1")
    add_operator(parser)
    parser.add_argument(
        "--force", action="store_true", help="drain also the last ready worker of a role"
    )
    parser.add_argument("--wait", action="store_true", help="return after the worker has exited")
    parser.add_argument(
        "--wait-timeout",
        type=seconds,
        default=_FOREVER,
        metavar="SECONDS",
        help="maximum seconds that --wait waits [no limit]",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Drain through the controller, which enforces the grace, or else through the router."""
    with connect(arguments) as client:
        before = parsed(client.status(handoffs=0))
        worker = find(before, arguments.worker)
        if has_controller(arguments):
            with operator(arguments) as controller:
                request = DrainWorker(worker=arguments.worker[:128], force=arguments.force)
                # The routers, which are asked below, do not know gateways.
                state = carry_out(controller, request, wait=arguments.wait and worker is None)
        else:
            state = client.drain(arguments.worker, force=arguments.force)
        say(f"{arguments.worker}: {state}")
        if worker is not None and is_last(before, worker):
            say(last_word(worker), error=True)
        if arguments.wait and worker is not None:
            wait_left(client, worker, arguments.wait_timeout)
            say(f"{worker.id}: left")
    return 0


def find(report: ClusterReport, name: str) -> WorkerReport | None:
    """Return the live worker with this id or endpoint, or None."""
    return next((w for w in report.workers if w.alive and name in (w.id, w.endpoint)), None)


def is_last(report: ClusterReport, worker: WorkerReport) -> bool:
    """Whether no other worker of the same role takes requests."""
    others = (w for w in report.of_role(worker.role) if w.id != worker.id)
    return not any(w.state == "ready" for w in others)


def last_word(worker: WorkerReport) -> str:
    """Warning that the last worker of its role is drained."""
    return (
        f"baton: {worker.id} is the last ready {worker.role} worker: no new request is "
        f"served until another is ready (baton scale {worker.role}=1)"
    )


def wait_left(client: Client, worker: WorkerReport, timeout: float) -> None:
    """Print the worker's remaining requests until it has exited.

    Raises RequestFailed if the worker died, CapacityError after ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    said = ""
    while True:
        now = progress(parsed(client.status(handoffs=0)), worker)
        if now is None:
            return
        if now != said:
            said = now
            say(f"{worker.id}: {now}")
        left = until - time.monotonic()
        if left <= 0:
            raise CapacityError(f"{worker.id} has not left after {timeout:g} s: {now}")
        time.sleep(min(_PAUSE, left))


def progress(report: ClusterReport, worker: WorkerReport) -> str | None:
    """Count a draining worker's requests; None after it exited. Raises RequestFailed if it died."""
    found = next((w for w in report.workers if w.id == worker.id), None)
    if found is None:  # a restarted router has no record of workers that exited before
        return None
    if found.incarnation == worker.incarnation:
        if found.alive:
            return f"{found.requests_running} running, {found.requests_waiting} waiting"
        if found.reason == DRAINED:
            return None
    raise _died(worker, found)


def _died(worker: WorkerReport, found: WorkerReport) -> BatonError:
    why = "it was restarted" if found.incarnation != worker.incarnation else found.reason
    return RequestFailed(
        f"{worker.id} died before it had finished ({why}); its requests move to other workers"
    )
