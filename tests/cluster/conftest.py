"""A real cluster: ``baton serve`` as a user starts it, its processes, and its end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.cli.wait_ready import wait_ready
from baton.client import Client

from ..processes import alive, wait_until

READY_TIMEOUT = 60.0
END_TIMEOUT = 30.0


def command_environment(folder: Path) -> dict[str, str]:
    """The test's own environment without settings of the user's, with a private TMPDIR.

    Clusters start without gateways, unless a flag asks for them.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "XDG_RUNTIME"))}
    root = str(Path(__file__).parents[2])  # some tests start modules of this package
    path = os.pathsep.join([p for p in sys.path if p] + [root])
    return {**kept, "TMPDIR": str(folder), "PYTHONPATH": path, "BATON_GATEWAYS": "0"}


def baton(folder: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a ``baton`` command with its files in ``folder``. ``text``: its input."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        env=command_environment(folder),
        check=False,
    )


class Cluster:
    """A running ``baton serve``."""

    def __init__(self, folder: Path, prefill: int, decode: int, model, settings) -> None:
        self.folder = folder
        self.interrupts = 0
        self.size = (prefill, decode)
        if settings.get("mode") == "colocated":
            self.size = (0, settings.get("workers", prefill + decode))
        self.keys = settings.get("keys")
        module = settings.pop("module", "baton.cli")
        self.address = settings.pop("address", f"ipc://{folder}/s.sock")
        names = {key: f"--{key.replace('_', '-')}" for key in settings}
        flags = [names[k] if v is None else f"{names[k]}={v}" for k, v in settings.items()]
        command = [sys.executable, "-P", "-m", module, "serve"]
        if model is not None:
            command.append(str(model))
        command += [f"--prefill={prefill}", f"--decode={decode}", f"--address={self.address}"]
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=command_environment(folder),
            )

    def text(self) -> str:
        """Everything it printed so far."""
        return self.log.read_text(errors="replace")

    def wait_said(self, sentence: str) -> None:
        """Wait until it has printed this: the supervisor reports a child's act later."""
        wait_until(lambda: sentence in self.text(), what=f"the line {sentence!r}")

    def client(self) -> Client:
        """A new client of it."""
        return Client(self.address, keys=self.keys, connect_timeout=20.0)

    def wait_ready(self) -> "Cluster":
        """Wait for all workers."""
        wait_until(
            lambda: "ready: " in self.text() or self.process.poll() is not None,
            READY_TIMEOUT,
            "the banner",
        )
        assert self.process.poll() is None, self.text()[-2000:]
        with self.client() as client:
            wait_ready(client, *self.size, READY_TIMEOUT)
        return self

    def workers(self) -> dict[str, dict]:
        """Status of the workers by id."""
        with self.client() as client:
            return {worker["id"]: worker for worker in client.status()["workers"]}

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a ``baton`` command for this cluster."""
        return baton(self.folder, *words, f"--address={self.address}")

    def wait_idle(self) -> None:
        """Wait until no worker holds a block or a request."""

        def idle() -> bool:
            workers = self.workers().values()
            return len(workers) == sum(self.size) and all(
                w["kv_blocks_used"] == w["requests_running"] == w["requests_waiting"] == 0
                for w in workers
            )

        wait_until(idle, what="all blocks to be free")

    def pids(self) -> dict[str, int]:
        """Process ids of all children by name, as the kernel lists them."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended just now
                continue
            config = next((a for a in arguments if a.endswith(b".json")), b"")
            if config:
                found[Path(config.decode()).stem] = pid
        return found

    def wait_replaced(self, name: str, pid: int) -> None:
        """Wait until another process serves as this worker."""

        def replaced():
            worker = self.workers().get(name)
            return worker and worker["pid"] != pid and worker["state"] == "ready"

        wait_until(replaced, what=f"another {name}")

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.interrupts += 1
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Interrupt it if it runs, and wait; returns the exit code."""
        if self.process.poll() is None:
            self.interrupt()
        try:
            return self.process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def end_clean(self) -> None:
        """End it, and fail if it leaves a process or a file."""
        pids = self.pids() if self.process.poll() is None else {}
        # The second interrupt is a test's, or comes from here while the first one's end lasts.
        assert self.end() in ((0, 130) if self.interrupts > 1 else (0,)), self.text()[-2000:]
        assert [name for name, pid in pids.items() if alive(pid)] == []
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Files in its temporary folder beside the log."""
        return sorted(p.name for p in self.folder.rglob("*") if p != self.log and not p.is_dir())


STARTED: list[Cluster] = []


@pytest.fixture(autouse=True)
def show_logs():
    """Print the clusters' logs, for the report of a test that fails."""
    yield
    for cluster in STARTED:
        lines = cluster.text().splitlines()[-30:]
        print(f"--- {cluster.address}", *(line[:240] for line in lines), sep="\n")


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory):
    """Start clusters: ``start_cluster(prefill=1, decode=2, model=None, **settings)``."""
    started = STARTED

    def start(prefill=1, decode=2, model=None, **settings) -> Cluster:
        # Only a test that stops a worker wants it to be missed at once: on a busy machine
        # others may have to wait longer than a second for a processor.
        settings = {"kv_memory": "32MiB", "stats_interval": 0, "worker_timeout": 10.0, **settings}
        cluster = Cluster(tmp_path_factory.mktemp("c"), prefill, decode, model, settings)
        started.append(cluster)
        return cluster

    yield start
    for cluster in started:
        cluster.end()


def clusters_that_end_clean(start_cluster):
    started = []

    def start(**settings) -> Cluster:
        started.append(start_cluster(**settings))
        return started[-1].wait_ready()

    yield start
    for one in started:
        one.end_clean()


@pytest.fixture
def cluster(start_cluster):
    """As ``start_cluster``, but waits until it is ready and ends it with the test."""
    yield from clusters_that_end_clean(start_cluster)


KEPT_S = 40.0
"""Seconds for which an idle cluster takes less processor time than a start."""
LASTING: dict[str, Cluster] = {}
LEFT_AT: dict[str, float] = {}
"""When the last module that used a lasting cluster ended; not there while a module uses it."""


@pytest.fixture(scope="module")
def lasting_cluster(start_cluster):
    """As ``shared_cluster``, one for modules in succession that want these settings.

    It must be the same processes to its end, and another module's tests may have asked it before.
    """
    used = set()

    def start(**settings) -> Cluster:
        key = repr(sorted(settings.items()))
        if key not in LASTING:
            LASTING[key] = start_cluster(**settings).wait_ready()
        used.add(key)
        LEFT_AT.pop(key, None)
        return LASTING[key]

    yield start
    LEFT_AT.update(dict.fromkeys(used, time.monotonic()))


@pytest.hookimpl(trylast=True)  # after the fixtures' ends
def pytest_runtest_teardown(item, nextitem):
    """End the clusters that a module has left, and those of several that none uses soon."""
    if nextitem is not None and nextitem.path == item.path:
        return
    if getattr(item, "_finalizers_suspended", False):  # by pytest-rerunfailures, for a second try
        return
    last = nextitem is None or nextitem.path.parent != item.path.parent
    for key, left_at in list(LEFT_AT.items()):
        if last or time.monotonic() - left_at > KEPT_S:
            del LEFT_AT[key]
            LASTING.pop(key).end_clean()
    for cluster in STARTED:
        if cluster not in LASTING.values():
            cluster.end()


@pytest.fixture(scope="module")
def shared_cluster(start_cluster):
    """As ``cluster``, ended with the last test of the module."""
    yield from clusters_that_end_clean(start_cluster)


@pytest.fixture(scope="module")
def client(pools):
    """A client of the module's ``pools``."""
    with pools.client() as one:
        yield one


@pytest.fixture
def left_idle(pools):
    """All workers are there, and afterwards none holds a block."""
    pools.wait_ready()
    yield
    pools.wait_idle()


@pytest.fixture(scope="module")
def undisturbed(request, pools):
    """The tokens of the module's ``WORK`` in ``pools`` without disturbance."""
    from .streams import run, tokens

    return tokens(run(pools.address, request.module.WORK))


@pytest.fixture(scope="module")
def gateway(pools, tmp_path_factory):
    """A gateway of the module's ``pools``."""
    from .http import Gateway  # which imports this module

    one = Gateway(pools, tmp_path_factory.mktemp("g")).wait_ready()
    yield one
    assert one.end() == 0, one.text()
