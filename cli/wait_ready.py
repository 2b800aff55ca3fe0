"""``baton wait-ready``: block until every worker of a cluster can serve."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

from ..client import Client
from ..deploy.report import ClusterReport
from ..proto.errors import AccessDenied, ConnectionLost, TaskMismatch
from .cluster import addresses_of, keys_of, parsed
from .numbers import count
from .operator import add_operator, admin_of, has_controller, operator

EPILOG = """\
Without --prefill and --decode it waits for as many workers as the cluster should have, which its
controller knows. Where no controller can be asked, as from another host, one of each is enough.
"""
_PAUSE = 0.1
_ANSWER_S = 2.0
"""How long the controller may take to answer; then it is asked again."""

Expected = Callable[[], Mapping[str, int] | None]
"""Gives the number of workers there should be, by role; None while that is not known."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("wait-ready", help="wait until a cluster can serve", epilog=EPILOG)
    add_operator(parser, timeout=60.0)
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=count,
            metavar="N",
            help=f"enough {role} workers [all that the cluster should have]",
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say what is ready at every router of the list; ConnectionLost when the time runs out."""
    until, ready = time.monotonic() + arguments.timeout, dict[str, int]()
    asked = {"prefill": arguments.prefill, "decode": arguments.decode}
    for address in addresses_of(arguments):
        left = max(0.0, until - time.monotonic())
        with Client(address, keys=keys_of(arguments), connect_timeout=left) as client:
            ready = wait_ready(client, **asked, timeout=left, expected=lambda: targets(arguments))
    print(f"ready: {ready['prefill']} prefill, {ready['decode']} decode")
    if None in asked.values() and targets(arguments) is None:
        print(
            f"baton: no controller at {admin_of(arguments)} says how many workers there should be; "
            "--prefill and --decode wait for more than one",
            file=sys.stderr,
        )
    return 0


def targets(arguments: argparse.Namespace) -> Mapping[str, int] | None:
    """How many workers the controller wants by role; None if none can be asked."""
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
    """Wait until so many workers are ready; returns how many are, by role.

    None: as many as ``expected`` says, else one; an embedding model has no decode workers. Raises
    ConnectionLost when the time runs out, TaskMismatch when decode workers are asked for that
    an embedding model never has.
    """
    until = time.monotonic() + timeout
    ready, needed = {"prefill": 0, "decode": 0}, {"prefill": prefill or 1, "decode": decode or 1}
    answered = False
    while (left := until - time.monotonic()) > 0:
        try:
            report = parsed(client.status(handoffs=0, timeout=left))
        except ConnectionLost:
            if answered and time.monotonic() >= until:
                break  # the last question had next to no time; what is missing is known
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
    """Workers to wait for, by role."""
    embeds = report.router.task == "embed"
    if embeds and decode:
        raise TaskMismatch(
            f"--decode {decode}: an embedding model is served by prefill workers alone"
        )
    wanted = expected() if prefill is None or decode is None else None
    if wanted is None:
        wanted = {"prefill": 1, "decode": 0 if embeds else 1}
    return {
        "prefill": wanted.get("prefill", 1) if prefill is None else prefill,
        "decode": wanted.get("decode", 0) if decode is None else decode,
    }


def count_ready(report: ClusterReport) -> dict[str, int]:
    """Workers in state ready, by role."""
    return {
        role: sum(worker.state == "ready" for worker in report.of_role(role))
        for role in ("prefill", "decode")
    }
