"""Processes of other protocol versions beside a cluster: neighbours work, others stay out."""

import json
import re
import subprocess
import sys

import pytest

from baton.proto.errors import FeatureMissing
from baton.proto.limits import PROTOCOL_VERSION

from ..processes import wait_until
from .conftest import command_environment
from .driver import Job, ask, greedy

pytestmark = pytest.mark.cluster

AS_VERSION = """
import runpy, sys
number, oldest, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import baton.proto.limits as limits
limits.PROTOCOL_VERSION = number
for name in [n for n in sys.modules if n.startswith("baton.") and n != "baton.proto.limits"]:
    del sys.modules[name]
import baton.proto.wire.versions as versions
versions.OLDEST_VERSION = oldest
sys.argv = [module, *sys.argv[4:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""A process of another version: it states its version, and accepts that version's messages."""
WITHOUT_FEATURES = """
import runpy, sys
import baton.proto.layout as layout
layout.FEATURES = ()
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A process of this version from before its newest parameters of requests."""
JOB = Job([5, 6, 7], greedy(40))


@pytest.fixture(scope="module")
def running(lasting_cluster):
    """A cluster that must be the same processes to the end."""
    running = lasting_cluster(prefill=1, decode=2)
    before = running.pids()
    yield running
    assert running.pids() == before


@pytest.fixture(scope="module")
def truth(running):
    with running.client() as client:
        return ask(client, JOB).tokens


def start(folder, version, oldest, module, *arguments, script=AS_VERSION):
    command = [sys.executable, "-P", "-c", script, str(version), str(oldest), module]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=command_environment(folder),
    )


def start_worker(running, folder, role, version, oldest, script=AS_VERSION):
    (path,) = running.folder.glob(f"baton-run-*/{role}-0.json")
    config = json.loads(path.read_text())
    config |= {"worker_id": f"other-{role}", "endpoint": f"ipc://{folder}/o"}
    if role == "decode":
        config["data_endpoint"] = ""
    (folder / "other.json").write_text(json.dumps(config))
    module = f"baton.{role}_worker"
    options = ("--config", folder / "other.json")
    return start(folder, version, oldest, module, *options, script=script)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_the_next_version_takes_part(running, truth, tmp_path, role):
    version = PROTOCOL_VERSION + 1
    process = start_worker(running, tmp_path, role, version, PROTOCOL_VERSION)
    try:
        name = f"other-{role}"
        wait_until(
            lambda: running.workers().get(name, {}).get("state") == "ready", what="the newer worker"
        )
        state = running.workers()[name]
        options = {"target_endpoint": state["endpoint"], "pin": "strict"}
        with running.client() as client:
            answer = ask(client, Job(JOB.prompt, JOB.params, options))
        assert answer.tokens == truth
        assert name in (answer.prefill, answer.decode)
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    wait_until(lambda: running.workers()[name]["state"] == "dead", what="it to have left")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("version", "oldest"), [(PROTOCOL_VERSION - 1, 1), (PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1)]
)
def test_a_worker_of_a_version_not_understood_ends_and_says_why(
    running, truth, tmp_path, role, version, oldest
):
    process = start_worker(running, tmp_path, role, version, oldest)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert re.search(r"protocol version \d", said)
    assert str(version) in said and str(PROTOCOL_VERSION) in said
    assert running.workers().get(f"other-{role}", {}).get("state") != "ready"
    with running.client() as client:
        assert ask(client, JOB).tokens == truth


def test_a_worker_that_would_ignore_a_parameter_does_not_get_it(running, tmp_path):
    params = greedy(4)
    params.logit_bias = {7: 100.0}
    process = start_worker(running, tmp_path, "decode", PROTOCOL_VERSION, 0, WITHOUT_FEATURES)
    try:
        wait_until(
            lambda: running.workers().get("other-decode", {}).get("state") == "ready",
            what="the older worker",
        )
        old = {"target_endpoint": running.workers()["other-decode"]["endpoint"]}
        with running.client() as client:
            assert ask(client, Job(JOB.prompt, greedy(4), old)).decode == "other-decode"
            with pytest.raises(FeatureMissing, match="newer worker than other-decode"):
                ask(client, Job(JOB.prompt, params, old))
            answers = [ask(client, Job(JOB.prompt, params)) for _ in range(6)]
        assert all(answer.tokens == [7, 7, 7, 7] for answer in answers)
        assert "other-decode" not in {answer.decode for answer in answers}
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said


def generate(running, folder, version, oldest):
    arguments = ["generate", "--address", running.address, "--max-new-tokens", "4", "Once"]
    process = start(folder, version, oldest, "baton.cli", *arguments)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def test_a_client_of_the_next_version_is_served(running, tmp_path):
    same = generate(running, tmp_path, PROTOCOL_VERSION, PROTOCOL_VERSION)
    assert same[0] == 0, same
    newer = generate(running, tmp_path, PROTOCOL_VERSION + 1, PROTOCOL_VERSION)
    assert newer[0] == 0, newer


@pytest.mark.parametrize(
    ("version", "oldest"), [(PROTOCOL_VERSION - 1, 1), (PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1)]
)
def test_a_client_of_a_version_not_understood_hears_both_versions(
    running, tmp_path, version, oldest
):
    code, said = generate(running, tmp_path, version, oldest)
    assert code == 1
    assert f"version {version}" in said and f"version {PROTOCOL_VERSION}" in said
