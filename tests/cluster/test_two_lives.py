"""Two processes of one name: whatever their order, the healthy one is not lost."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ..processes import alive, wait_until
from ..suite.short import some_long
from .streams import begun, jobs, run, tokens

pytestmark = pytest.mark.cluster

NAMES = some_long("decode-0", "prefill-0")
WORK = jobs(8, prompt=200, new=300)


@pytest.fixture(scope="module")
def pools(shared_cluster):
    return shared_cluster(prefill=1, decode=1, kv_memory="64MiB", worker_timeout=5.0)


def config_of(pid: int) -> Path:
    """The settings file a worker was started with."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return Path(next(a for a in arguments if a.endswith(b".json")).decode())


@contextmanager
def twin(pools, name: str, folder: Path):
    """Another process under a worker's name, at a different address."""
    settings = msgspec.json.decode(config_of(pools.pids()[name]).read_bytes())
    settings["endpoint"] = f"ipc://{folder}/twin.sock"
    if "data_endpoint" in settings:
        settings["data_endpoint"] = f"ipc://{folder}/twin-data.sock"
    settings["log_level"] = "info"
    config, log = folder / "twin.json", folder / "twin.log"
    config.write_bytes(msgspec.json.encode(settings))
    module = f"baton.{name.partition('-')[0]}_worker"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def registered(pools, name: str) -> tuple[int, str]:
    worker = pools.workers().get(name, {})
    return worker.get("pid", 0), worker.get("state", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_second_process_of_a_name_waits_while_the_first_is_healthy(
    pools, undisturbed, tmp_path, name
):
    pid, incarnation = pools.pids()[name], pools.workers()[name]["incarnation"]
    with twin(pools, name, tmp_path) as (process, log):
        wait_until(lambda: "name_taken" in log.read_text(), what="the second one to be refused")
        assert tokens(run(pools.address, WORK)) == undisturbed
        assert pools.workers()[name]["incarnation"] == incarnation
        assert registered(pools, name) == (pid, "ready")
        assert alive(process.pid), "it asks again, for the first one may end"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_changes_hands_without_a_wrong_token(pools, undisturbed, tmp_path, name):
    """The first is paused, the second takes over; the first returns and waits; then it is back."""
    pid = pools.pids()[name]
    with twin(pools, name, tmp_path) as (process, log):
        wait_until(lambda: "name_taken" in log.read_text(), what="the second one to be refused")

        def second_serves() -> bool:
            return registered(pools, name) == (process.pid, "ready")

        async def change_hands(streams) -> None:
            await begun(streams, len(WORK))
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.to_thread(wait_until, second_serves, what="the second")
            finally:
                os.kill(pid, signal.SIGCONT)

        assert tokens(run(pools.address, WORK, change_hands)) == undisturbed
        assert alive(pid)
        assert tokens(run(pools.address, WORK)) == undisturbed
        assert second_serves()
        process.kill()
        process.wait()
        wait_until(lambda: registered(pools, name) == (pid, "ready"), what="the first again")
    assert tokens(run(pools.address, WORK)) == undisturbed
