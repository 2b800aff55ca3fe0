"""``baton drain WORKER``: let a worker finish what it has and take nothing new."""

from __future__ import annotations

import argparse

from .cluster import add_address, connect


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("drain", help="let a worker finish and take no new work")
    parser.add_argument("worker", metavar="WORKER", help="its id, such as decode-1")
    add_address(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask the router, which answers when it has told the worker."""
    with connect(arguments) as client:
        state = client.drain(arguments.worker)
    print(f"{arguments.worker}: {state}")
    return 0
