"""``baton down``: drain a cluster, stop all its processes, and verify that nothing is left."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from pathlib import Path

from baton.deploy.controller.admin import GoDown, Overview, Result
from baton.deploy.controller.admin_client import AdminClient, listens
from baton.deploy.local.address_lock import AddressLock
from baton.deploy.local.run_folder import remove_dead_socket, sweep, sweep_one
from baton.deploy.plan.addresses import ipc_path
from baton.proto.errors import ConnectionLost, RequestFailed

from .cluster import addresses_of
from .operator import add_operator, admin_of, has_controller, operator
from .output import say
from .settings import variable

_SPARE_S = 30.0
"""Seconds beyond the cluster's grace that the shutdown may take."""
_FOLLOW_S = 2.0
_PAUSE = 0.05


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("down", help="stop a cluster and verify that nothing is left")
    add_operator(parser)
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="if no controller runs: stop all Baton processes on this Ray cluster (auto: the Ray "
        "cluster of this machine)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop the cluster and return 0, also if no cluster ran. Raises RequestFailed for leftovers."""
    if arguments.ray_address and not has_controller(arguments):
        return end_on_ray(arguments.ray_address)
    if not has_controller(arguments):
        refuse_while_served(addresses_of(arguments)[0], admin_of(arguments))
        folder = AddressLock.sweep(admin_of(arguments))
        swept = [folder] if folder is not None and sweep_one(folder) else []
        run_dir = os.environ.get(variable("run_dir"))
        swept += [*sweep(), *(sweep(Path(run_dir)) if run_dir else ())]
        remove_sockets([*addresses_of(arguments), admin_of(arguments)])
        print(f"no cluster runs at {addresses_of(arguments)[0]}")
        for path in swept:
            say(f"removed {path}, left by a killed cluster")
        return 0
    with operator(arguments) as client:
        before = client.overview()
        end(client, before, at_once=arguments.now)
    left = wait_gone(before, until=time.monotonic() + _SPARE_S)
    if left:
        raise RequestFailed(f"still there: {', '.join(left)}")
    count = len(before.members) + 1
    print(f"down: {count} processes have ended, no process and no socket is left")
    return 0


def remove_sockets(addresses: list[str]) -> None:
    """Remove the socket files without a listening process at these addresses."""
    for address in addresses:
        path = ipc_path(address)
        if path is not None:
            remove_dead_socket(path)


def refuse_while_served(address: str, admin: str) -> None:
    """Raise RequestFailed if a process listens at ``address`` although no controller runs.

    After a controller was killed, its routers exit within a short time; wait for that first.
    """
    until = time.monotonic() + _FOLLOW_S
    while is_served(address):
        if time.monotonic() >= until:
            raise RequestFailed(
                f"a process listens at {address}, but no controller at {admin}: run baton down on "
                "the cluster's host as the user that started it, or give its --admin; on Ray "
                "without a controller: baton down --ray-address auto"
            )
        time.sleep(_PAUSE)


def is_served(address: str) -> bool:
    """Whether a process listens at a client address."""
    if not address.startswith("tcp://"):
        return listens(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def end_on_ray(address: str) -> int:
    """Stop the remaining processes of a cluster whose controller is gone."""
    from baton.deploy.ray.launch import end_actors  # Ray is an extra

    ended = end_actors(address)
    say(f"ended on Ray: {', '.join(ended) or 'nothing was left'}")
    return 0


def end(client: AdminClient, before: Overview, *, at_once: bool) -> None:
    """Order the controller to stop the cluster, and wait. A lost connection counts as stopped."""
    grace = float(before.settings.get("grace", 0.0))
    with contextlib.suppress(ConnectionLost):
        for answer in client.ask(GoDown(at_once=at_once), wait=grace + _SPARE_S):
            say(answer.text)
            if isinstance(answer, Result):
                return


def wait_gone(before: Overview, until: float) -> list[str]:
    """Return the processes of this host and the files that still exist at time ``until``."""
    pids = {"controller": before.pid}
    pids |= {member.name: member.pid for member in before.members if not member.host}
    while True:
        left = [f"{name} (pid {pid})" for name, pid in pids.items() if pid and runs(pid)]
        left += [path for path in before.paths if os.path.lexists(path)]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(_PAUSE)


def runs(pid: int) -> bool:
    """Whether a process with this id runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
