"""Starting a real cluster, its verbs, and its end."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading

import pytest

from baton.cli import chat
from baton.client import Client
from baton.deploy.config import demo_model_folder
from baton.proto.errors import ConnectionLost
from baton.proto.sampling import SamplingParams

from ..processes import alive, wait_until
from ..suite.short import some_long
from .conftest import baton, command_environment

pytestmark = pytest.mark.cluster

PROMPT = list(range(20, 60))
LONG = 1900
"""Tokens of a stream that still runs when something is done to it."""


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0.8, seed=7)


def tokens_of(client, count: int) -> list[int]:
    return [t for output in client.generate(PROMPT, params(count)) for t in output.tokens]


def test_ctrl_c_at_a_terminal_reaches_the_supervisor_alone(tmp_path_factory):
    """The terminal signals its whole foreground group; running requests may still finish."""
    folder = tmp_path_factory.mktemp("t")
    address = f"ipc://{folder}/s.sock"
    ours, theirs = pty.openpty()
    serve = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "serve", f"--address={address}"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=command_environment(folder),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    with os.fdopen(ours, "r+b", 0) as terminal:
        said = b""
        while b"ready: " not in said:
            said += terminal.read(1 << 16)
        with Client(address) as client, client.generate(PROMPT, params(LONG)) as generation:
            count = len(next(generation).tokens)
            terminal.write(b"\x03")
            count += sum(len(output.tokens) for output in generation)
        assert count == LONG
        with contextlib.suppress(OSError):  # EIO: no process has it open any more
            while part := terminal.read(1 << 16):
                said += part
    assert b"draining" in said
    assert b"restarting in" not in said
    assert serve.wait(30) == 0
    assert list(folder.iterdir()) == []


def test_a_second_interrupt_stops_at_once(cluster):
    """The first would have let the streams end."""
    running = cluster(max_model_len=2048)
    with Client(running.address, connect_timeout=20.0, reconnect_timeout=0.5) as client:
        generations = [client.generate(PROMPT, params(LONG)) for _ in range(8)]
        count = sum(len(next(generation).tokens) for generation in generations)
        pids = running.pids()
        running.interrupt()
        running.wait_said("draining")
        running.interrupt()
        assert running.process.wait(60) == 130
        for generation in generations:
            with contextlib.suppress(ConnectionLost):
                count += sum(len(output.tokens) for output in generation)
    assert count < LONG * len(generations)
    assert not any(alive(pid) for pid in pids.values())
    assert running.leftovers() == []


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


@pytest.mark.parametrize("scheme", some_long("tcp", "ipc"))
def test_an_address_in_use_is_refused_with_one_line_and_an_interrupt_leaves_nothing(
    cluster, tmp_path, scheme
):
    settings = {} if scheme == "ipc" else {"address": f"tcp://127.0.0.1:{free_port()}"}
    running = cluster(prefill=1, decode=1, **settings)
    second = baton(tmp_path, "serve", f"--address={running.address}")
    assert second.returncode == 2
    assert "in use" in second.stderr
    assert second.stderr.count("\n") == 1
    with running.client() as client:
        assert len(tokens_of(client, 4)) == 4
    pids = running.pids()
    assert set(pids) == {"router", "prefill-0", "decode-0"}
    assert running.end() == 0
    assert [name for name, pid in pids.items() if alive(pid)] == []
    assert running.leftovers() == []


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
    from baton.deploy.plan.addresses import free_ports

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
        talk = baton(folder, "chat", text="/help\n/rest\n/no\n/reset\n/quit\n")
        assert (talk.returncode, talk.stdout) == (1, f"{chat.HELP}\n")
        assert talk.stderr.splitlines() == [
            "baton: no chat command /rest; did you mean /reset?",
            "baton: no chat command /no; /help lists the commands",
        ]
        lines = f"Who are you?\n{'too long ' * 3000}\nThank you!\n"
        talk = baton(folder, "chat", "--temperature=0", text=lines)
        assert (talk.returncode, len(talk.stdout.splitlines())) == (1, 2)
        assert talk.stderr.startswith("baton: prompt too long")
        dry = baton(folder, "serve", "--dry-run")
        assert dry.returncode == 0, dry.stderr
        assert "decode-0" in baton(folder, "status").stdout
        refused = baton(folder, "drain", "decode-0")
        assert refused.returncode != 0
        assert (
            "decode must keep at least 1 ready worker, and decode-0 is the last" in refused.stderr
        )
        drained = baton(folder, "drain", "decode-0", "--force")
        assert (drained.returncode, drained.stdout) == (0, "decode-0: draining\n")
        unknown = baton(folder, "drain", "decode-9")
        assert unknown.returncode == 1
        assert "decode-9" in unknown.stderr
    finally:
        serve.send_signal(signal.SIGINT)
        assert serve.wait(30) == 0
