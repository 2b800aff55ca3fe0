"""Workers of one cluster map one copy of the weights, also after a kill."""

import os
import re
import signal
from pathlib import Path

import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.engine.kernels.shared_weights import has_huge_pages
from baton.runtime.process.memory import family_of, share_of

from ..processes import alive, wait_until
from .driver import ask
from .test_determinism import same
from .test_threads import SHARED, job

pytestmark = pytest.mark.cluster
pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")


def mapped(pid: int) -> tuple[int, bool]:
    """Inode of the shared weights that a process maps, and whether it could write to them."""
    with Path(f"/proc/{pid}/maps").open() as maps:
        found = {
            (int(line.split()[4]), "w" in line.split()[1])
            for line in maps
            if "memfd:baton-weights" in line
        }
    assert len(found) == 1, found
    return found.pop()


def test_workers_map_one_copy_of_the_weights(cluster, tmp_path):
    model = write_checkpoint(tmp_path / "model", SHARED, "F32")
    with cluster(model=model, prefill=1, decode=1, share_weights="off").client() as client:
        alone = ask(client, job(70, 1))
    running = cluster(model=model, prefill=1, decode=2, share_weights="on")
    with running.client() as client:
        workers = {w["id"]: w for w in client.status()["workers"]}
        places = {mapped(worker["pid"]) for worker in workers.values()}
        assert len(places) == 1
        assert not next(iter(places))[1]
        assert len({w["shared_weights"] for w in workers.values()}) == 1
        assert same([ask(client, job(70, 1))], [alone])
        killed = workers["decode-0"]["pid"]
        os.kill(killed, signal.SIGKILL)

        def restarted():
            found = {w["id"]: w for w in client.status()["workers"]}
            worker = found["decode-0"]
            return worker["state"] == "ready" and worker["pid"] != killed and worker["pid"]

        pid = wait_until(restarted, what="a restarted worker")
        assert not alive(killed)
        assert mapped(pid) in places
        assert same([ask(client, job(70, 1))], [alone])
    assert "iB in memory that 3 of 3 workers share" in running.text()


LARGE = Shape("large", 4000, 1024, 2816, 4, 8, 4, 1024)
"""220 MB in float32: more than a process needs besides."""


def test_three_workers_need_little_more_than_one_copy_of_the_file(cluster, tmp_path):
    """The bar of published models: 1.25 times the file, and 150 MB for each process."""
    if not has_huge_pages():
        pytest.skip("no huge pages of shared memory, so weights are not shared by default")
    model = write_checkpoint(tmp_path / "model", LARGE, "F32")
    file = (model / "model.safetensors").stat().st_size
    running = cluster(model=model, prefill=1, decode=2)
    with running.client() as client:
        assert ask(client, job(70, 1)).tokens
    family = {pid: share_of(pid) for pid in family_of(running.process.pid)}
    assert len(family) == 5
    assert all(family.values())
    assert file < sum(family.values()) < 1.25 * file + 150e6 * len(family)
    workers = {worker["pid"] for worker in running.workers().values()}
    for pid in workers:
        assert family[pid] < 0.45 * file + 150e6, "a worker maps more than its share of a copy"
    line = re.search(r"^memory +([\d.]+) ([MG])iB on this host: ", status_of(running), re.M)
    assert line is not None
    shown = float(line[1]) * {"M": 1 << 20, "G": 1 << 30}[line[2]]
    assert shown == pytest.approx(sum(family.values()), rel=0.2)


def status_of(running) -> str:
    return running.command("status").stdout
