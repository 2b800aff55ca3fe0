"""A cluster on Ray in separate namespaces (``in_namespaces``); outside them tests are skipped."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.client import Client

from ..cluster.conftest import wait_until
from .bed import Bed, inside, processes

WAIT = 60.0
SILENCE = 60.0
"""What dies here has to be seen by its connection. Heartbeats are not waited for, and a worker that
gets no processor while nodes start is not taken for dead."""
ADDRESS = "tcp://127.0.0.1:7070"
_figures: list[str] = []
BATON = (sys.executable, "-P", "-m", "baton.cli")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.deploy)
    if not inside():
        item.add_marker(pytest.mark.skip(reason="in namespaces of its own only: make test-deploy"))


class RayCluster:
    """A cluster on a bed, controlled only by the ``baton`` command.

    This process does not connect to Ray, because a client of Ray exits with the head.
    """

    def __init__(self, bed: Bed, folder: Path, **settings: object) -> None:
        self.bed = bed
        self.address = ADDRESS
        self.config = folder / "baton.toml"
        fixed = {"kv_memory": "64MiB", "grace": 20.0, "address": ADDRESS, "gateways": 0}
        fixed["worker_timeout"] = SILENCE
        settings = {**fixed, **settings}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        self.config.write_text("\n".join(lines).replace("'", '"') + "\n")

    def baton(self, *words: str, code: int = 0, timeout: float = WAIT) -> str:
        """Run a ``baton`` command; return its output."""
        environment = {**os.environ, "BATON_ADDRESS": self.address}
        done = subprocess.run(
            [*BATON, *words], env=environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == code, done.stdout + done.stderr + self.bed.logs()
        return done.stdout + done.stderr

    def launch(self) -> None:
        self.baton("launch", "--backend", "ray", "--config", str(self.config))

    def wait_ready(self, prefill: int, decode: int, *more: str) -> None:
        self.baton("wait-ready", "--prefill", str(prefill), "--decode", str(decode), *more)

    def client(self) -> Client:
        return Client(self.address, connect_timeout=WAIT)

    def workers(self) -> dict[str, dict]:
        """Return the router's status of the workers by id."""
        with self.client() as client:
            return {worker["id"]: worker for worker in client.status()["workers"]}

    def pools(self) -> dict[str, int]:
        """Return the number of ready workers of each role."""
        ready = [w["role"] for w in self.workers().values() if w["state"] == "ready"]
        return {role: ready.count(role) for role in ("prefill", "decode")}

    def pid(self, name: str) -> int:
        """Return the pid of a member's child."""
        found = [pid for pid, line in processes().items() if f"/{name}.json --parent" in line]
        assert len(found) == 1, (name, found)
        return found[0]

    def members(self) -> list[str]:
        """Return the command lines of all existing children."""
        return [line for line in processes().values() if ".json --parent" in line]

    def replaced(self, name: str, pid: int) -> bool:
        """Whether another process serves as this worker."""
        worker = self.workers().get(name)
        return bool(worker) and worker["pid"] != pid and worker["state"] == "ready"

    def wait_replaced(self, name: str, pid: int) -> None:
        """Wait until another process serves as this worker."""
        wait_until(lambda: self.replaced(name, pid), what=f"another {name}", timeout=WAIT)

    def wait_nodes(self, prefill: int, decode: int) -> None:
        wanted = {"prefill": prefill, "decode": decode}
        wait_until(lambda: self.bed.nodes() == wanted, what=f"nodes {wanted}", timeout=WAIT)


@contextlib.contextmanager
def launched(
    folder: Path, settings: dict, keys: Path | None = None, **environment: str
) -> Iterator[RayCluster]:
    bed = Bed(folder, **environment)
    bed.start()
    try:
        cluster = RayCluster(bed, folder, **settings)
        cluster.launch()
        cluster.wait_ready(1, 1, *(("--keys", str(keys)) if keys else ()))
        yield cluster
    finally:
        print(bed.logs())
        bed.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[RayCluster]:
    """A router and one worker of each role, each on a separate node."""
    with launched(tmp_path_factory.mktemp("bed"), {}) as cluster:
        yield cluster


def timed(what: str, condition: Callable[[], object], within: float = 0.0) -> None:
    """Wait for ``condition``, and record the elapsed time with its target."""
    began = time.monotonic()
    wait_until(condition, what=what, timeout=WAIT)
    note(what, time.monotonic() - began, within)


def note(what: str, seconds: float, within: float = 0.0) -> None:
    """Record a result for the end of the run. It fails no test, since machines differ."""
    bar = f" (bar {within:g} s{', MISSED' if seconds > within else ''})" if within else ""
    _figures.append(f"{what}: {seconds:.2f} s{bar}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(_figures))
