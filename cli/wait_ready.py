"""``baton wait-ready``: wait until every worker of a cluster is ready."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

from baton.client import Client
from baton.deploy.report import ClusterReport
from baton.proto.errors import AccessDenied, ConnectionLost, TaskMismatch

from .cluster import addresses_of, keys_of, parsed
from .numbers import count
from .operator import add_operator, admin_is_given, admin_of, has_controller, operator

EPILOG = """\
Without --prefill and --decode, wait for the target sizes of the pools, which the controller
reports. If no controller answers, as from another host, one worker of each role is enough.
"""
_PAUSE = 0.1
_ANSWER_S = 2.0
"""Seconds to wait for the controller's answer before asking again."""

Expected = Callable[[], Mapping[str, int] | None]
"""Returns the target number of workers by role, or None while it is unknown."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("wait-ready", help="wait until a cluster can serve", epilog=EPILOG)
    add_operator(parser, timeout=60.0)
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=count,
            metavar="N",
            help=f"{role} workers to wait for [the target size of the pool]",
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait at each router of the list, then print the ready workers. Raises ConnectionLost."""
    until, ready = time.monotonic() + arguments.timeout, dict[str, int]()
    asked = {"prefill": arguments.prefill, "decode": arguments.decode}
    for address in addresses_of(arguments):
        left = max(0.0, until - time.monotonic())
        with Client(address, keys=keys_of(arguments), connect_timeout=left) as client:
            ready = wait_ready(client, **asked, timeout=left, expected=lambda: targets(arguments))
    print(f"ready: {ready['prefill']} prefill, {ready['decode']} decode")
    if None in asked.values() and targets(arguments) is None:
        print(f"baton: {no_controller(arguments)}", file=sys.stderr)
    return 0


def no_controller(arguments: argparse.Namespace) -> str:
    """Return the warning that no controller answers, with the way to name a guessed address."""
    guessed = "" if admin_is_given(arguments) else "; name it with --admin"
    return (
        f"no controller answers at {admin_of(arguments)}, so the target sizes are unknown; "
        f"to wait for more than one worker, give --prefill and --decode{guessed}"
    )


def targets(arguments: argparse.Namespace) -> Mapping[str, int] | None:
    """Return the controller's target sizes by role, or None if no controller answers."""
    if not has_controller(arguments):
        return None
    try:
        with operator(arguments, min(_ANSWER_S, arguments.timeout)) as controller:
            return controller.overview().targets
    except (ConnectionLost, AccessDenied):
        return None


def wait_ready(
    client: Client,
    prefill: int | None,
    decode: int | None,
    timeout: float,
    expected: Expected = lambda: None,
) -> dict[str, int]:
    """Wait until enough workers are ready. Return the number of ready workers by role.

    ``prefill`` and ``decode``: workers to wait for; None: the result of ``expected``, else one.
    An embedding model has no decode workers. Raises ConnectionLost after ``timeout`` seconds, and
    TaskMismatch if ``decode`` is not 0 for an embedding model.
    """
    until = time.monotonic() + timeout
    ready, needed = {"prefill": 0, "decode": 0}, {"prefill": prefill or 1, "decode": decode or 1}
    answered = False
    while (left := until - time.monotonic()) > 0:
        try:
            report = parsed(client.status(handoffs=0, timeout=left))
        except ConnectionLost:
            if answered and time.monotonic() >= until:
                break  # the last query had almost no time, and `ready` is known already
            raise
        answered = True
        ready, needed = count_ready(report), _needed(report, prefill, decode, expected)
        if all(ready[role] >= needed[role] for role in needed):
            return ready
        time.sleep(min(_PAUSE, left))
    raise ConnectionLost(
        f"not ready after {round(timeout, 2):g} s: {ready['prefill']} of {needed['prefill']} "
        f"prefill and {ready['decode']} of {needed['decode']} decode workers are; "
        "see baton status"
    )


def _needed(
    report: ClusterReport, prefill: int | None, decode: int | None, expected: Expected
) -> dict[str, int]:
    """Number of workers to wait for, by role. Raises TaskMismatch."""
    embeds = report.router.task == "embed"
    if embeds and decode:
        raise TaskMismatch(
            f"--decode {decode}: an embedding model has no decode workers; leave out --decode"
        )
    wanted = expected() if prefill is None or decode is None else None
    if wanted is None:
        alone = report.router.mode == "colocated" and not embeds
        wanted = {"prefill": 0 if alone else 1, "decode": 0 if embeds else 1}
    return {
        "prefill": wanted.get("prefill", 1) if prefill is None else prefill,
        "decode": wanted.get("decode", 0) if decode is None else decode,
    }


def count_ready(report: ClusterReport) -> dict[str, int]:
    """Count the ready workers by role."""
    return {
        role: sum(worker.state == "ready" for worker in report.of_role(role))
        for role in ("prefill", "decode")
    }
