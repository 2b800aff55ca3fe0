"""``baton role WORKER ROLE``: change the role of a worker, whose weights stay loaded."""

from __future__ import annotations

import argparse

from baton.deploy.controller.admin import TurnWorker

from .operator import add_operator, carry_out, operator
from .output import say
from .parser import one_of, shown

ROLES = ("prefill", "decode")
EPILOG = """\
The worker takes no new requests in its present role and finishes the running ones; after --grace
seconds of the cluster other workers take them over, with the same tokens. Then it registers in the
other pool under its old name, with an empty cache. The sizes of both pools follow. In a cluster
with keys the worker's host needs the keys of both roles.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "role", help="change the role of a worker without loading its weights again", epilog=EPILOG
    )
    parser.add_argument("worker", metavar="WORKER", help="id or endpoint, such as decode-1")
    parser.add_argument("role", metavar=shown(ROLES), type=one_of(ROLES), help="its new role")
    add_operator(parser)
    parser.add_argument("--wait", action="store_true", help="return after it serves in this role")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Order the change. The controller rejects an impossible order and changes nothing."""
    request = TurnWorker(worker=arguments.worker[:128], role=arguments.role)
    with operator(arguments) as client:
        text = carry_out(client, request, wait=arguments.wait)
    state = "serves as" if arguments.wait else "turns to"
    say(f"{arguments.worker} {state} {arguments.role}; pools: {text}")
    return 0
