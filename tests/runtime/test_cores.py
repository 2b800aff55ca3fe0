"""The default number of compute threads: affinity, quotas of control groups, and the workers."""

import os
from pathlib import Path

import pytest

from baton.runtime.process.cores import MAX_THREADS, default_threads, usable_cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make a machine with cores, an affinity, and files of control groups below a root."""

    def make(cores: int, allowed: int, **files: str) -> Path:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(allowed)))
        for name, text in {"proc/self/cgroup": "0::/pod/worker\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


V2 = "sys/fs/cgroup/pod"
V1 = "sys/fs/cgroup/cpu/pod"


@pytest.mark.parametrize(
    ("allowed", "files", "title"),
    [
        (8, {}, "8 cores"),
        (3, {}, "3 of 8 cores (affinity)"),
        (8, {f"{V2}/worker/cpu.max": "250000 100000\n"}, "2 of 8 cores (CPU quota)"),
        (8, {f"{V2}/cpu.max": "400000 100000\n", f"{V2}/worker/cpu.max": "max 100000\n"},
         "4 of 8 cores (CPU quota)"),
        (8, {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, "1 of 8 cores (CPU quota)"),
        (2, {f"{V2}/cpu.max": "400000 100000\n"}, "2 of 8 cores (affinity)"),
        (8, {"proc/self/cgroup": "9:memory:/pod\n4:cpu,cpuacct:/pod\n",
             f"{V1}/cpu.cfs_quota_us": "300000\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
         "3 of 8 cores (CPU quota)"),
        (8, {"proc/self/cgroup": "4:cpu:/pod\n",
             f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, "8 cores"),
    ],
)  # fmt: skip
def test_the_tightest_limit_counts(machine, allowed, files, title):
    found = usable_cores(machine(8, allowed, **files))
    assert (found.title, found.count) == (title, int(title.split()[0]))


@pytest.mark.parametrize(
    ("workers", "taken", "threads"),
    [(1, 0, 8), (2, 0, 4), (3, 0, 2), (8, 0, 1), (100, 0, 1), (1, 6, 2), (2, 7, 1), (1, 20, 1)],
)
def test_workers_divide_the_cores_that_others_leave(machine, workers, taken, threads):
    found = default_threads(workers, taken, machine(8, 8))
    assert found.count == threads
    assert found.why.startswith("8 cores for ")
    assert found.why.endswith(f" beside {taken} threads") == bool(taken)


def test_a_large_machine_has_an_upper_bound(machine):
    assert default_threads(1, 0, machine(1024, 1024)).count == MAX_THREADS
