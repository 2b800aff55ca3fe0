"""Workers that cannot take part are refused with the reason; the others notice nothing."""

import json
import subprocess
import sys

import pytest

from .conftest import command_environment
from .driver import Job, ask, greedy
from .raw import RawPeer, envelope, hello_map
from .reference import DATA, cases_of

pytestmark = pytest.mark.cluster

MODEL = "llama_plain"


@pytest.fixture(scope="module")
def running(lasting_cluster):
    """A cluster that must be the same processes to the end."""
    running = lasting_cluster(model=DATA / MODEL, prefill=1, decode=2)
    before = running.pids()
    yield running
    assert running.pids() == before
    case = cases_of(MODEL)[4]
    with running.client() as client:
        assert ask(client, Job(case.prompt, greedy(64))).tokens == case.greedy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": str(DATA / "qwen2")}, "architecture is Qwen2ForCausalLM"),
        ({"kv_type": "int8"}, "/kv-int8, the cluster has "),
        ({"backend": "numpy"}, "numerics is numpy"),
    ],
    ids=["model", "rounding", "numerics"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_another_kind_is_refused(running, tmp_path, role, changes, message):
    (path,) = running.folder.glob(f"baton-run-*/{role}-0.json")
    config = json.loads(path.read_text())
    config |= {"worker_id": "stranger", "endpoint": f"ipc://{tmp_path}/s", "data_endpoint": ""}
    if role == "prefill":
        del config["data_endpoint"]
    config["runner"] |= changes
    (tmp_path / "stranger.json").write_text(json.dumps(config))
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            f"baton.{role}_worker",
            "--config",
            tmp_path / "stranger.json",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=command_environment(tmp_path),
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    refused = running.workers()["stranger"]
    assert refused["state"] == "refused"
    assert message in refused["reason"]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"version": 1}, "version_mismatch", "has protocol version 1; this process has version 3"),
        ({"role": "judge"}, "protocol", "must be prefill or decode"),
        ({"endpoint": "nowhere"}, "input", "must start with"),
    ],
)
def test_a_wrong_hello_is_refused(running, changes, code, message):
    wrong = hello_map() | changes
    address = f"ipc://{next(running.folder.glob('baton-run-*/router.sock'))}"
    with RawPeer(address) as peer:
        peer.send(envelope(wrong))
        answer = peer.hear()
    assert (answer["type"], answer["code"]) == ("Rejected", code)
    assert message in answer["message"]
    assert wrong["worker"] not in running.workers()
