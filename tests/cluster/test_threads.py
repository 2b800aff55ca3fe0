"""A cluster whose workers compute with several threads answers as one with single threads."""

import json
import subprocess
import sys

import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.proto.sampling import SamplingParams

from .driver import Job, ask, ask_all
from .test_determinism import random_prompt, same

pytestmark = pytest.mark.cluster
pytest.importorskip("baton.engine.kernels._cpu", reason="the C kernels are not built")

SHARED = Shape("shared", 600, 256, 704, 2, 4, 2, 1024)
"""The smallest model of which every matrix is worth sharing."""


def job(length: int, seed: int) -> Job:
    params = SamplingParams(temperature=0.8, seed=seed, max_new_tokens=12, ignore_eos=True)
    return Job(random_prompt(length, length), params, {"log_probabilities": 3})


def threads_of(running) -> dict[str, str]:
    with running.client() as client:
        return {w["role"]: w["device"].partition(" (")[0] for w in client.status()["workers"]}


def test_threads_change_no_bit(cluster, tmp_path):
    """Alone, in a batch, after a prefix hit; every answer has a handoff."""
    model = write_checkpoint(tmp_path / "model", SHARED, "F32")
    jobs = [job(length, 3 * length) for length in (1, 70, 333)]
    answers = []
    for threads in ({"threads": 1}, {"prefill_threads": 2, "decode_threads": 3}):
        running = cluster(model=model, prefill=1, decode=1, **threads)
        with running.client() as client:
            alone = [ask(client, each) for each in jobs]
            answers.append(alone)
            assert same(ask_all(client, [*jobs, job(40, 1), job(41, 2)], in_flight=5)[:3], alone)
            assert ask(client, jobs[2]).cached_tokens > 0
    assert same(*answers)
    assert threads_of(running) == {"prefill": "cpu, 2 threads", "decode": "cpu, 3 threads"}
    assert "  kernels    C, " in running.text()
    assert "prefill: 2 threads per worker (as set); decode: 3 threads" in running.text()


@pytest.fixture
def by_hand(tmp_path):
    """Start a decode worker without a supervisor; ends it with the test."""
    model = write_checkpoint(tmp_path / "model", SHARED, "F32")
    config = {
        "worker_id": "decode-0", "endpoint": f"ipc://{tmp_path}/d",
        "routers": {"router": f"ipc://{tmp_path}/r"},
        "runner": {"model": str(model), "num_blocks": 8},
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "baton.decode_worker", "--config", str(path), *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "device"),
    [((), "cpu, 1 thread (as set)"), (("--threads", "3"), "cpu, 3 threads (as set)")],
)
def test_a_worker_started_by_hand_takes_the_option(by_hand, options, device):
    worker = by_hand(*options)
    ready = next(json.loads(line) for line in worker.stdout if "worker.ready" in line)
    assert ready["device"] == device


def test_too_many_threads_are_refused(by_hand):
    worker = by_hand("--threads", "257")
    assert "threads 257 must be 0 to 256" in worker.communicate(timeout=60)[0]
    assert worker.returncode == 1
