"""A cluster in the background, and everything operators do to it: the verbs as users type them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.cli.command import main
from baton.client import Client
from baton.deploy.controller.admin_client import AdminClient
from baton.deploy.plan.addresses import free_ports

from ..processes import alive, wait_until
from ..suite.short import some_long
from .conftest import baton, command_environment
from .driver import greedy

pytestmark = pytest.mark.cluster


class Background:
    """A cluster made by ``baton launch`` with its files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/s.sock"

    def verb(self, *arguments):
        return baton(self.folder, *arguments, f"--address={self.address}")

    def launch(self, *settings):
        return self.verb("launch", "--kv-memory=8MiB", *settings)

    def controller(self) -> dict:
        with AdminClient(f"{self.address}.admin", timeout=20.0) as client:
            return msgspec.to_builtins(client.overview()) | {"number": 0}

    def pids(self) -> dict[str, int]:
        found = self.controller()
        return {m["name"]: m["pid"] for m in found["members"]} | {"controller": found["pid"]}

    def left(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir() if not p.name.endswith(".log"))


@pytest.fixture
def background(tmp_path_factory):
    running = Background(tmp_path_factory.mktemp("l"))
    yield running
    running.verb("down", "--now")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    running = Background(tmp_path_factory.mktemp("l"))
    done = running.launch("--decode=2", "--decode-max=4")
    assert done.returncode == 0, done.stderr
    yield running
    ended = running.verb("down")
    assert ended.returncode == 0, ended.stderr


def ask(running, tokens=4):
    with Client(running.address) as client:
        return list(client.generate([5, 6, 7], greedy(tokens)))


def test_launch_returns_when_it_serves_and_again_says_so(background):
    web = ("--gateways=1", "--http-port=0")
    done = background.launch(*web)
    assert done.returncode == 0, done.stderr
    serving, http, dashboard = done.stdout.splitlines()
    assert serving.startswith(f"serving at {background.address} (pid ")
    root = http.removeprefix("HTTP at ").removesuffix("/v1")
    assert root.startswith("http://127.0.0.1:")
    assert dashboard == f"dashboard at {root}/dashboard"
    pids = background.pids()
    again = background.launch(*web)
    assert (again.returncode, background.pids()) == (0, pids)
    assert again.stdout.startswith(f"already running at {background.address}")
    other = background.launch("--max-num-seqs=7", *web)
    assert other.returncode == 1
    assert "whose max_num_seqs is 32, not 7" in other.stderr
    assert other.stderr.count("\n") == 1
    down = background.verb("down")
    assert down.returncode == 0, down.stderr
    assert "no process and no socket is left" in down.stdout
    assert not any(alive(pid) for pid in pids.values())
    assert background.left() == []
    nothing = background.verb("down")
    assert (nothing.returncode, nothing.stdout) == (0, f"no cluster runs at {background.address}\n")


def test_a_cluster_that_cannot_start_is_one_line_and_leaves_nothing(background):
    model = background.folder / "m"
    model.mkdir()
    refused = background.launch(str(model))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    model.rmdir()
    assert background.left() == []


@pytest.mark.parametrize("sent", some_long(signal.SIGKILL, signal.SIGTERM))
def test_a_launch_that_is_killed_while_it_waits_leaves_nothing(background, sent):
    launch = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.cli", "launch", f"--address={background.address}"],
        stdout=subprocess.DEVNULL,
        env=command_environment(background.folder),
    )
    with launch:
        wait_until(lambda: "s.sock.admin" in background.left(), what="its controller")
        pids = [pid for pid in background.pids().values() if pid]
        launch.send_signal(sent)
    wait_until(lambda: not any(map(alive, pids)), what="the end of everything")
    assert background.left() == []


def test_a_killed_controller_takes_its_children_along_and_the_next_launch_cleans_up(background):
    assert background.launch().returncode == 0
    pids = background.pids()
    os.kill(pids["controller"], signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids.values()), what="all ends")
    assert background.left() != []
    assert background.launch().returncode == 0
    assert not set(background.pids().values()) & set(pids.values())
    assert len([name for name in background.left() if name.startswith("baton-run-")]) == 1
    assert background.verb("down").returncode == 0
    assert background.left() == []


def test_down_finds_what_a_killed_controller_left(background):
    assert background.launch().returncode == 0
    os.kill(background.pids()["controller"], signal.SIGKILL)
    wait_until(lambda: "baton-run-" in str(background.left()))
    down = background.verb("down")
    assert down.returncode == 0
    wait_until(lambda: background.verb("down") and background.left() == [], what="no file left")


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["scale", "decode=-1"], 2, "'-1' is not a number of workers"),
        (["scale", "prefill=0"], 1, "prefill must be at least 1, not 0"),
        (["scale", "decode=5"], 1, "decode must be at most 4 (decode_max), not 5"),
        (["scale", "prefill=1025"], 1, "prefill must be at most 1024, not 1025"),
        (["scale", "prefill=99999999999"], 2, "the number of workers or gateways is too large"),
        (["scale", "prefill=1000"], 1, " of memory, "),
        (["scale", "draft=1"], 2, "no pool 'draft'; scale prefill, decode or gateway"),
        (["scale", "decode=two"], 2, "'two' is not a number of workers"),
        (["scale", "decode"], 2, "is not NAME=VALUE"),
        (["scale", "decode=1", "decode=2"], 2, "decode is given twice"),
        (["rollout", "colour=red"], 2, "no setting 'colour'"),
        (["rollout", "max_num_seqs=0"], 2, "max_num_seqs must be at least 1"),
        (["rollout", "decode=3"], 2, "a rollout cannot change decode; use baton scale"),
        (["rollout", "transport=tcp"], 2, "a rollout cannot change transport"),
        (["rollout", "model=/no/such"], 2, "no model folder /no/such"),
        (["rollout", "--config=/no/such.toml"], 2, "cannot read /no/such.toml"),
        (["drain", "decode-9"], 1, "no worker 'decode-9'; workers: decode-0, decode-1, prefill-0"),
        (["drain", "router"], 1, "no worker 'router'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_and_nothing_happens(
    launched, capsys, monkeypatch, words, code, complaint
):
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    before = launched.controller()
    # In this process: to start one for each sentence takes longer than all they do.
    returned = main([*words, f"--address={launched.address}"])
    said = capsys.readouterr().err
    assert (returned, said.count("\n")) == (code, 1), said
    assert complaint in said
    assert launched.controller() == before


def test_a_file_with_an_unknown_key_is_refused(launched, tmp_path):
    (tmp_path / "c.toml").write_text("max_num_seqs = 4\ncolour = 'red'\n")
    refused = launched.verb("rollout", f"--config={tmp_path}/c.toml")
    assert refused.returncode == 2
    assert "no setting 'colour'" in refused.stderr


def test_scale_and_drain_change_the_targets_and_status_shows_them(launched):
    scaled = launched.verb("scale", "decode=3", "--wait")
    assert scaled.stdout.splitlines()[-1] == "reached prefill=1 decode=3"
    assert set(launched.pids()) == {
        "controller", "router", "prefill-0", "decode-0", "decode-1", "decode-2",
    }  # fmt: skip
    assert "decode       3 of 3 ready" in launched.verb("status").stdout
    shown = json.loads(launched.verb("status", "--json").stdout)
    assert shown["controller"]["targets"] == {"prefill": 1, "decode": 3}
    drained = launched.verb("drain", "decode-2", "--wait")
    assert drained.stdout.splitlines()[-1] == "decode-2: left"
    wait_until(lambda: "decode-2" not in launched.pids(), what="its end")
    assert launched.controller()["targets"] == {"prefill": 1, "decode": 2}
    assert len(ask(launched)) > 0


def test_down_fails_while_somebody_serves_there_without_a_controller_of_ours(launched, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        tcp = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        refused = baton(tmp_path, "down", f"--address={tcp}")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert f"a process listens at {tcp}, but no controller" in refused.stderr
    wrong = launched.verb("down", f"--admin=ipc://{tmp_path}/other.admin")
    assert wrong.returncode == 1
    assert len(ask(launched)) > 0


def test_without_a_controller_verbs_say_what_to_do(tmp_path_factory):
    nobody = Background(tmp_path_factory.mktemp("n"))
    for words in (["scale", "decode=2"], ["rollout"]):
        refused = nobody.verb(*words)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "start a cluster with baton launch" in refused.stderr


@pytest.mark.long
def test_an_embedding_model_has_no_decode_pool(background):
    model = Path(__file__).parents[1] / "data/embedders/bert"
    done = background.launch(str(model))
    assert done.returncode == 0, done.stderr
    refused = background.verb("scale", "decode=2")
    assert refused.returncode == 1
    assert "has no decode workers" in refused.stderr
    assert background.verb("scale", "prefill=2", "--wait").returncode == 0
    rolled = background.verb("rollout", "--wait")
    assert rolled.returncode == 0, rolled.stderr
    assert background.controller()["targets"] == {"prefill": 2, "decode": 0}


def test_over_tcp_only_an_operator_s_key_gives_orders(tmp_path_factory):
    running = Background(tmp_path_factory.mktemp("k"))
    keys, clients = running.folder / "keys", running.folder / "clients"
    assert baton(running.folder, "keygen", str(keys)).returncode == 0
    clients.mkdir(mode=0o700)
    for name in ("allowed.toml", "client.key"):
        shutil.copy(keys / name, clients / name)
    port, controller = free_ports(2)
    running.address = f"tcp://127.0.0.1:{port}"
    admin = f"--admin=tcp://127.0.0.1:{controller}"
    done = running.launch("--transport=tcp", f"--keys={keys}", admin)
    assert done.returncode == 0, done.stderr
    again = running.launch("--transport=tcp", f"--keys={keys}", admin)
    assert again.stdout.startswith("already running"), again.stderr
    scaled = running.verb("scale", "decode=2", "--wait", f"--keys={keys}", admin)
    assert (scaled.returncode, scaled.stderr) == (0, "")
    for folder in ([], [f"--keys={clients}"]):
        refused = running.verb("scale", "decode=1", admin, *folder, "--timeout=1")
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
    with AdminClient(f"tcp://127.0.0.1:{controller}", keys=keys) as client:
        assert client.overview().targets == {"prefill": 1, "decode": 2}
    down = running.verb("down", f"--keys={keys}", admin)
    assert down.returncode == 0, down.stderr
