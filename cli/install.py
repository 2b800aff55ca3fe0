"""``baton install WHEEL``: install a release on every node of a Ray cluster, before a rollout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .output import say

_EPILOG = """\
Run this on the head of the Ray cluster. Running processes keep their version; `baton rollout
--wait` then replaces them without losing a request. Nodes that join later install the wheel of the
cluster file: put the new wheel there and run `ray up --no-restart` first.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "install", help="install a wheel of Baton on every node of a Ray cluster", epilog=_EPILOG
    )
    parser.add_argument("wheel", metavar="WHEEL", type=Path, help="file of the wheel")
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", default="auto", help="Ray's head [this machine's]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Install, and print each node's result. Return 1 if any node failed, else 0."""
    from baton.deploy.ray.release import install_everywhere, read_wheel  # Ray is an extra

    wheel = read_wheel(arguments.wheel.expanduser())
    found = install_everywhere(wheel, arguments.ray_address)
    for address, problem in sorted(found.items()):
        if problem:
            say(f"baton: {address}: {problem}", error=True)
        else:
            say(f"{address}: {wheel.version} installed")
    failed = sum(1 for problem in found.values() if problem)
    if failed:
        print(f"baton: {failed} of {len(found)} nodes failed; run this again", file=sys.stderr)
        return 1
    print("next: baton rollout --wait")
    return 0
