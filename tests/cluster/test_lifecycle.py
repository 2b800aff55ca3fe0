"""Starting, losing and ending the processes of a real cluster."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from baton.deploy.config import demo_model_folder
from baton.proto.errors import CapacityError
from baton.proto.sampling import SamplingParams

from .conftest import alive, command_environment, wait_until

pytestmark = pytest.mark.cluster

PROMPT = list(range(20, 60))
LONG = 1900
"""Tokens of a stream that still runs when something is done to it."""


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0.8, seed=7)


def tokens_of(client, count: int) -> list[int]:
    return [t for output in client.generate(PROMPT, params(count)) for t in output.tokens]


def baton(folder, *arguments: str, text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-P", "-m", "baton.cli", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=command_environment(folder),
        check=False,
    )


def test_an_interrupt_ends_everything_and_leaves_nothing(cluster):
    running = cluster()
    with running.client() as client:
        assert len(tokens_of(client, 8)) == 8
    pids = running.pids()
    assert set(pids) == {"router", "prefill-0", "decode-0", "decode-1"}
    assert running.end() == 0
    assert [name for name, pid in pids.items() if alive(pid)] == []
    assert running.leftovers() == []


def test_running_requests_finish_and_new_ones_are_refused(cluster):
    running = cluster(max_length=2048)
    with running.client() as client, running.client() as late:
        late.describe()
        generation = client.generate(PROMPT, params(600))
        got = list(next(generation).tokens)
        running.interrupt()
        wait_until(lambda: "draining" in running.text(), what="the announcement")
        with pytest.raises(CapacityError):
            tokens_of(late, 1)
        got += [t for output in generation for t in output.tokens]
    assert len(got) == 600
    assert running.end() == 0


def test_a_second_interrupt_stops_at_once(cluster):
    running = cluster(max_length=2048)
    with running.client() as client, client.generate(PROMPT, params(LONG)) as generation:
        next(generation)
        pids = running.pids()
        running.interrupt()
        wait_until(lambda: "draining" in running.text(), what="the announcement")
        running.interrupt()
        assert running.process.wait(5) == 0
    assert not any(alive(pid) for pid in pids.values())
    assert running.leftovers() == []


@pytest.fixture(scope="module")
def durable(start_cluster):
    """One cluster for the tests after which it is whole again."""
    return start_cluster(max_length=2048, log_level="info").wait_ready()


@pytest.fixture(scope="module")
def undisturbed(durable):
    with durable.client() as client:
        return tokens_of(client, LONG)


def pick(cluster, role: str) -> tuple[str, int]:
    """Name and pid of the busy decode worker, or of the prefill worker."""

    def found():
        workers = [w for w in cluster.workers().values() if w["role"] == role]
        return next((w for w in workers if role == "prefill" or w["requests_running"]), None)

    worker = wait_until(found, timeout=1.0, what=f"a busy {role} worker")
    return worker["id"], worker["pid"]


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_lost_worker_is_replaced_and_its_streams_go_on(durable, undisturbed, role, sig):
    with durable.client() as client:
        generation = client.generate(PROMPT, params(LONG))
        got = list(next(generation).tokens)
        name, pid = pick(durable, role)
        os.kill(pid, sig)
        got += [t for output in generation for t in output.tokens]
    assert got == undisturbed
    durable.wait_replaced(name, pid)
    assert not alive(pid)


def test_the_router_comes_back_and_streams_resume(durable, undisturbed):
    with durable.client() as client:
        generation = client.generate(PROMPT, params(LONG))
        got = list(next(generation).tokens)
        os.kill(durable.pids()["router"], signal.SIGKILL)
        assert len(got) < LONG // 2
        got += [t for output in generation for t in output.tokens]
        assert got == undisturbed
        assert tokens_of(client, LONG) == undisturbed


def test_no_block_is_left_behind_after_all_that(durable, undisturbed):
    durable.wait_ready()
    wait_until(
        lambda: all(w["kv_blocks_used"] == 0 for w in durable.workers().values()),
        what="all blocks to be free",
    )


def test_a_killed_supervisor_takes_its_children_along_and_the_next_start_cleans_up(
    start_cluster, cluster
):
    running = start_cluster(prefill=1, decode=1).wait_ready()
    pids = running.pids()
    running.process.kill()
    running.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids.values()), what="the children to end")
    again = baton(running.folder, "serve", "--dry-run", f"--address={running.address}")
    assert again.returncode == 0
    successor = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "serve", f"--address={running.address}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=command_environment(running.folder),
    )
    with successor:
        limit = threading.Timer(60, successor.kill)
        limit.start()
        assert any(line.startswith("ready: ") for line in successor.stdout)
        successor.send_signal(signal.SIGINT)
        successor.stdout.read()
        limit.cancel()  # or the interpreter would wait for it
    assert successor.returncode == 0
    assert running.leftovers() == []


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_an_address_in_use_is_refused_with_one_line(cluster, tmp_path, scheme):
    settings = {} if scheme == "ipc" else {"address": f"tcp://127.0.0.1:{free_port()}"}
    running = cluster(prefill=1, decode=1, **settings)
    second = baton(tmp_path, "serve", f"--address={running.address}")
    assert second.returncode == 2
    assert "in use" in second.stderr
    assert second.stderr.count("\n") == 1
    with running.client() as client:
        assert len(tokens_of(client, 4)) == 4


def damaged_model(folder, name: str):
    model = folder / "m"
    shutil.copytree(demo_model_folder(), model)
    if name == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif name == "truncated":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    elif name == "other shapes":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 385}))
    elif name == "unknown architecture":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"]}))
    return model


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("truncated", "model.safetensors"),
        ("other shapes", "has shape"),
        ("unknown architecture", "Mamba"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line_and_leaves_nothing(
    tmp_path_factory, name, complaint
):
    folder = tmp_path_factory.mktemp("b")
    model = damaged_model(folder, name)
    refused = baton(folder, "serve", str(model), f"--address=ipc://{folder}/s.sock")
    assert refused.returncode == 1
    assert complaint in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert [p for p in folder.iterdir() if p != model] == []


def test_a_model_without_a_tokenizer_serves_token_ids_and_refuses_text(cluster, tmp_path):
    running = cluster(prefill=1, decode=1, model=damaged_model(tmp_path, "no tokenizer"))
    with running.client() as client:
        assert len(tokens_of(client, 4)) == 4
    refused = baton(running.folder, "generate", "hello", f"--address={running.address}")
    assert refused.returncode == 1
    assert "tokenizer.json" in refused.stderr


def free_port() -> int:
    from baton.deploy.addresses import free_ports

    return free_ports(1)[0]


def test_the_verbs_find_a_cluster_by_the_users_default_address(start_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("v")
    serve = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "serve", "--kv-memory=8MiB"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=command_environment(folder),
    )
    try:
        assert baton(folder, "wait-ready").returncode == 0
        answer = baton(folder, "generate", "--chat", "What is Baton?", "--temperature", "0")
        assert "two pools of workers" in answer.stdout
        talk = baton(folder, "chat", "--temperature=0", text="Who are you?\n\nThank you!\n/quit\n")
        assert talk.stdout.splitlines()[0].startswith("I am the demo model of Baton")
        assert len(talk.stdout.splitlines()) == 2
        assert "decode-0" in baton(folder, "status").stdout
        drained = baton(folder, "drain", "decode-0")
        assert (drained.returncode, drained.stdout) == (0, "decode-0: draining\n")
        unknown = baton(folder, "drain", "decode-9")
        assert unknown.returncode == 1
        assert "decode-9" in unknown.stderr
    finally:
        serve.send_signal(signal.SIGINT)
        assert serve.wait(30) == 0
