"""``baton top``: a live view of a running cluster, with keys to sort, select and drain."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from baton.client import Client
from baton.client.routers import separated
from baton.deploy.controller.admin import DrainWorker
from baton.proto.errors import BatonError

from .cluster import addresses_of, connect, keys_of, parsed
from .numbers import seconds
from .operator import add_operator, has_controller, operator, overview
from .top_view import Drain, Quit, Snapshot, Top

INTERVAL = 1.0
_ARROWS = {b"\x1b[A": b"k", b"\x1b[B": b"j", b"\x1bOA": b"k", b"\x1bOB": b"j"}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the terminal's second screen and hide the cursor, and back."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("top", help="live view of workers, queues, latencies and transfers")
    add_operator(parser)
    parser.add_argument(
        "--interval",
        type=seconds,
        default=INTERVAL,
        metavar="SECONDS",
        help=f"seconds between two updates [{INTERVAL:g}]",
    )
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the view until q is pressed; once, if the output or input is not a terminal."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    cluster = _Cluster(arguments)
    try:
        if arguments.once or not terminal:
            return _once(cluster, min(arguments.interval, INTERVAL))
        return _live(cluster, max(arguments.interval, 0.1))
    finally:
        cluster.close()


class _Cluster:
    """The routers and the controller. A router that does not answer is asked again each time.

    The controller knows all routers, so the address of one router is enough.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._clients: dict[str, Client] = {}
        self.addresses = addresses_of(arguments)

    def snapshot(self) -> Snapshot:
        """Ask all routers and the controller. Raises BatonError if no router answers."""
        found = overview(self._arguments)
        if found is not None:
            others = separated(found.address)
            self.addresses = tuple(dict.fromkeys((*self.addresses, *others)))
        reports, error = [], None
        for address in self.addresses:
            try:
                reports.append(parsed(self._client(address).status(handoffs=0)))
            except BatonError as problem:
                self._drop(address)
                error = problem
        if not reports and error is not None:
            raise error
        restarts = {} if found is None else {one.name: one.restarts for one in found.members}
        return Snapshot(time.monotonic(), reports, restarts)

    def drain(self, worker: str) -> str:
        """Drain a worker and return what the cluster answers at once."""
        if has_controller(self._arguments):
            with operator(self._arguments) as controller:
                for answer in controller.ask(DrainWorker(worker=worker)):
                    return answer.text  # the view shows the progress
        with connect(self._arguments) as client:
            return f"{worker}: {client.drain(worker)}"

    def _client(self, address: str) -> Client:
        if address not in self._clients:
            timeout = self._arguments.timeout
            keys = keys_of(self._arguments)
            self._clients[address] = Client(address, keys=keys, connect_timeout=timeout)
        return self._clients[address]

    def _drop(self, address: str) -> None:
        client = self._clients.pop(address, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        """Close all connections."""
        for address in list(self._clients):
            self._drop(address)


def _once(cluster: _Cluster, interval: float) -> int:
    top = Top(color=False)
    top.update(cluster.snapshot())
    time.sleep(interval)  # rates need two snapshots
    top.update(cluster.snapshot())
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    lines = top.lines(width, height=4096)
    print("\n".join(lines[:-1]))  # without the keys
    return 0


def _live(cluster: _Cluster, interval: float) -> int:
    top = Top(color="NO_COLOR" not in os.environ)
    top.update(cluster.snapshot())  # an error here is reported like that of any command
    with _screen():
        due = time.monotonic() + interval
        while True:
            _draw(top)
            for key in _keys(max(0.0, due - time.monotonic())):
                command = top.key(key)
                if isinstance(command, Quit):
                    return 0
                if isinstance(command, Drain):
                    try:
                        top.message = cluster.drain(command.worker)
                    except BatonError as problem:
                        top.message = str(problem)
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                try:
                    top.update(cluster.snapshot())
                except BatonError as problem:
                    top.message = str(problem)


@contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's second screen, and read keys without waiting for Enter."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _draw(top: Top) -> None:
    size = shutil.get_terminal_size()
    lines = top.lines(size.columns, size.lines)
    sys.stdout.write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
    sys.stdout.flush()


def _keys(patience: float) -> list[str]:
    """Return the keys that are pressed within ``patience`` seconds, q at the end of the input."""
    descriptor = sys.stdin.fileno()
    readable, _, _ = select.select([descriptor], [], [], patience)
    if not readable:
        return []
    data = os.read(descriptor, 256)
    if not data:
        return ["q"]
    for sequence, name in _ARROWS.items():
        data = data.replace(sequence, name)
    return [chr(byte) for byte in data]
