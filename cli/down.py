"""``baton down``: drain a cluster, end all of it, and look whether anything is left."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from pathlib import Path

from ..deploy.address_lock import AddressLock
from ..deploy.admin import GoDown, Overview, Result
from ..deploy.admin_client import AdminClient, listens
from ..deploy.run_folder import sweep
from ..proto.errors import ConnectionLost, RequestFailed
from .cluster import addresses_of
from .operator import add_operator, admin_of, has_controller, operator

_SPARE_S = 30.0
"""How much longer than the cluster's grace the end may take."""
_FOLLOW_S = 2.0
_PAUSE = 0.05


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("down", help="end a cluster and verify that nothing is left")
    add_operator(parser)
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="without a controller end all there is on this Ray cluster (auto: this machine's)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing runs and nothing is left, also when nothing ran; 1 names what is left."""
    if arguments.ray_address and not has_controller(arguments):
        return end_on_ray(arguments.ray_address)
    if not has_controller(arguments):
        refuse_while_served(addresses_of(arguments)[0], admin_of(arguments))
        swept = sweep()
        AddressLock.sweep(admin_of(arguments))
        print(f"no cluster runs at {addresses_of(arguments)[0]}")
        for path in swept:
            print(f"removed {path}, which a killed cluster had left")
        return 0
    with operator(arguments) as client:
        before = client.overview()
        end(client, before, at_once=arguments.now)
    left = wait_gone(before, until=time.monotonic() + _SPARE_S)
    if left:
        raise RequestFailed(f"left behind: {', '.join(left)}")
    count = len(before.members) + 1
    print(f"down: {count} processes have ended, no process and no socket is left")
    return 0


def refuse_while_served(address: str, admin: str) -> None:
    """RequestFailed where somebody listens although there is no controller to give orders to.

    Routers of a controller that was killed just now have a moment to follow it.
    """
    until = time.monotonic() + _FOLLOW_S
    while is_served(address):
        if time.monotonic() >= until:
            raise RequestFailed(
                f"something listens at {address}, but no controller at {admin}: end the cluster on "
                "its host as the user who started it, or give its --admin; on Ray without a "
                "controller: baton down --ray-address auto"
            )
        time.sleep(_PAUSE)


def is_served(address: str) -> bool:
    """Whether somebody listens at a client address."""
    if not address.startswith("tcp://"):
        return listens(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def end_on_ray(address: str) -> int:
    """End what is left of a cluster whose controller is not to be had."""
    from ..deploy.ray.launch import end_actors  # Ray is an extra

    ended = end_actors(address)
    print(f"ended on Ray: {', '.join(ended) or 'nothing was left'}")
    return 0


def end(client: AdminClient, before: Overview, *, at_once: bool) -> None:
    """Order the end and wait for it; a controller that is gone has ended."""
    grace = float(before.settings.get("grace", 0.0))
    with contextlib.suppress(ConnectionLost):
        for answer in client.ask(GoDown(at_once=at_once), wait=grace + _SPARE_S):
            print(answer.text, flush=True)
            if isinstance(answer, Result):
                return


def wait_gone(before: Overview, until: float) -> list[str]:
    """What is still there when the time is over: processes of this host, and files."""
    pids = {"controller": before.pid}
    pids |= {member.name: member.pid for member in before.members if not member.host}
    while True:
        left = [f"{name} (pid {pid})" for name, pid in pids.items() if pid and runs(pid)]
        left += [path for path in before.paths if os.path.lexists(path)]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(_PAUSE)


def runs(pid: int) -> bool:
    """Whether a process of this number runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
