"""``baton install WHEEL``: put a release on every node of a Ray cluster, for a rollout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_EPILOG = """\
Run it on the head of the Ray cluster. Processes that run keep the program they have; `baton rollout
--wait` then replaces them without losing a request. Nodes that join later get the wheel of the
cluster file: name it there and run `ray up --no-restart` first.
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "install", help="put a wheel of Baton on every node of a Ray cluster", epilog=_EPILOG
    )
    parser.add_argument("wheel", metavar="WHEEL", type=Path)
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", default="auto", help="Ray's head [this machine's]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Install, and print what each node did; exit code 1 if any failed."""
    from ..deploy.ray.release import install_everywhere, read_wheel  # Ray is an extra

    wheel = read_wheel(arguments.wheel.expanduser())
    found = install_everywhere(wheel, arguments.ray_address)
    for address, problem in sorted(found.items()):
        if problem:
            print(f"baton: {address}: {problem}", file=sys.stderr)
        else:
            print(f"{address}: {wheel.version} installed")
    failed = sum(1 for problem in found.values() if problem)
    if failed:
        print(f"baton: {failed} of {len(found)} nodes failed; run this again", file=sys.stderr)
        return 1
    print("next: baton rollout --wait")
    return 0
