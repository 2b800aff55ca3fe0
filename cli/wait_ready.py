"""``baton wait-ready``: block until a cluster can serve."""

from __future__ import annotations

import argparse
import time

from ..client import Client
from ..deploy.report import ClusterReport
from ..proto.errors import ConnectionLost, TaskMismatch
from .cluster import add_address, addresses_of, keys_of, parsed
from .numbers import count

_PAUSE = 0.1


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("wait-ready", help="wait until a cluster can serve")
    add_address(parser, timeout=60.0)
    parser.add_argument("--prefill", type=count, default=1, help="prefill workers needed [1]")
    parser.add_argument(
        "--decode", type=count, help="decode workers needed [1; an embedding model has none]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say what is ready at every router of the list; ConnectionLost when the time runs out."""
    until, ready = time.monotonic() + arguments.timeout, dict[str, int]()
    for address in addresses_of(arguments):
        left = max(0.0, until - time.monotonic())
        with Client(address, keys=keys_of(arguments), connect_timeout=left) as client:
            ready = wait_ready(client, arguments.prefill, arguments.decode, left)
    print(f"ready: {ready['prefill']} prefill, {ready['decode']} decode")
    return 0


def wait_ready(client: Client, prefill: int, decode: int | None, timeout: float) -> dict[str, int]:
    """Wait until so many workers are ready; returns how many are, by role.

    ``decode``: None for one, or for none when the router serves an embedding model. Raises
    ConnectionLost when the time runs out, TaskMismatch when decode workers are asked for that
    an embedding model never has.
    """
    until = time.monotonic() + timeout
    ready, needed = {"prefill": 0, "decode": 0}, 1 if decode is None else decode
    answered = False
    while (left := until - time.monotonic()) > 0:
        try:
            report = parsed(client.status(handoffs=0, timeout=left))
        except ConnectionLost:
            if answered and time.monotonic() >= until:
                break  # the last question had next to no time; what is missing is known
            raise
        answered = True
        ready, needed = count_ready(report), _decode_needed(report, decode)
        if ready["prefill"] >= prefill and ready["decode"] >= needed:
            return ready
        time.sleep(min(_PAUSE, left))
    raise ConnectionLost(
        f"not ready after {round(timeout, 2):g} s: {ready['prefill']} of {prefill} prefill and "
        f"{ready['decode']} of {needed} decode workers are; see baton status"
    )


def _decode_needed(report: ClusterReport, asked: int | None) -> int:
    if report.router.task != "embed":
        return 1 if asked is None else asked
    if asked:
        raise TaskMismatch(
            f"--decode {asked}: an embedding model is served by prefill workers alone"
        )
    return 0


def count_ready(report: ClusterReport) -> dict[str, int]:
    """Workers in state ready, by role."""
    return {
        role: sum(worker.state == "ready" for worker in report.of_role(role))
        for role in ("prefill", "decode")
    }
