"""The supervisor when the system refuses a start, and when it is stopped early."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.decode_worker.config import DecodeWorkerConfig
from baton.deploy.controller.backend import MemberSpec
from baton.deploy.local.cluster import LocalBackend
from baton.deploy.supervise.process import ProcessSpec
from baton.engine.loading.runner_config import RunnerConfig
from baton.runtime.keys.keyring import add_key, make_folder

REFUSED = """
import sys
from baton.deploy.local import cluster as local
from baton.deploy.config import ServeSettings
from baton.deploy.supervise import children

def refuse(*_):
    raise OSError(28, "No space left on device")

children.Child = refuse
cluster = local.LocalCluster(ServeSettings(run_dir=sys.argv[1]), print, private=True)
print(cluster.run(), cluster.failure)
"""


def test_children_that_cannot_be_started_end_the_cluster_and_leave_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stderr == ""
    assert ended.stdout.startswith("1 router cannot run: cannot be started: ")
    assert "is full (No space left on device); see df -h " in ended.stdout
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from baton.deploy.local.cluster import LocalCluster
from baton.deploy.config import ServeSettings

cluster = LocalCluster(ServeSettings(run_dir=sys.argv[1], address=sys.argv[2]), print)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_removes_the_run_folder_of_a_killed_cluster_with_another_run_dir(tmp_path):
    parents = [tmp_path / "a", tmp_path / "b"]
    for parent in parents:
        parent.mkdir()
        subprocess.run(
            [sys.executable, "-c", KILLED, str(parent), f"ipc://{tmp_path}/s"],
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    (folder,) = tmp_path.glob("*/baton-run-*")
    assert folder.parent == parents[1]


INTERRUPTED = """
import os, signal, sys
from baton.deploy.local import cluster as local
from baton.deploy.config import ServeSettings

interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)
real, early = local.make_plan, sys.argv[2] == "within"
if early:
    local.make_plan = lambda *given: (interrupt(), real(*given))[1]
cluster = local.LocalCluster(ServeSettings(run_dir=sys.argv[1]), print, private=True)
if not early:
    interrupt()
print(cluster.run(), cluster.interrupted)
"""


@pytest.mark.parametrize("moment", ["within", "behind"])
def test_an_interrupt_before_anything_runs_is_no_less_an_interrupt(tmp_path, moment):
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), moment],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.stdout, ended.stderr) == ("0 True\n", "")
    assert list(tmp_path.iterdir()) == []


GIVES_UP = """
import sys
import msgspec
from baton.deploy.local import cluster as local
from baton.deploy.config import ServeSettings
from baton.deploy.supervise import children
from baton.deploy.supervise.restart import RestartLimits

core = local.SupervisorCore
local.SupervisorCore = lambda **given: core(RestartLimits(first_delay=0.01), **given)
started = []

class Child(children.Child):
    def __init__(self, spec, *arguments):
        if spec.name == "decode-0":
            spec = msgspec.structs.replace(spec, module="nothing_of_this_name")
        super().__init__(spec, *arguments)
        started.append((spec.name, self.pid))

children.Child = Child
cluster = local.LocalCluster(ServeSettings(run_dir=sys.argv[1]), print, private=True)
print(cluster.run())
print(cluster.failure)
print(*(name for name, _ in started))
print(*(pid for _, pid in started))
"""


def test_a_child_that_never_runs_ends_the_cluster_with_its_last_words_and_no_orphan(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", GIVES_UP, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stderr == ""
    *said, code, failure, names, pids = ended.stdout.splitlines()
    assert code == "1"
    assert failure.startswith("decode-0 ended repeatedly before the cluster was ready; ")
    assert "No module named nothing_of_this_name" in failure
    assert names.split().count("decode-0") == 6
    waits = [line.rsplit(" in ", 1)[1] for line in said if "restarting" in line]
    assert waits == ["0.0 s", "0.0 s", "0.0 s", "0.1 s", "0.2 s"]  # 0.01 s, doubled
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.split())
    assert list(tmp_path.iterdir()) == []


class Children:
    """Starts and stops nothing."""

    def start(self, process):
        pass

    def stop(self, name, grace):
        pass


@pytest.mark.parametrize("end", [lambda b: b.stop("decode-1", 5.0), lambda b: b.kill("decode-1")])
def test_the_own_key_of_a_worker_that_has_left_refuses_no_change_of_role(tmp_path, end):
    keys = tmp_path / "keys"
    make_folder(keys)
    add_key(keys, "decode", ["decode-1"])
    backend = LocalBackend(Children(), lambda _: "")
    for name in ("decode-0", "decode-1"):
        config = DecodeWorkerConfig(
            worker_id=name,
            endpoint="ipc:///w",
            routers={"router": "ipc:///r"},
            runner=RunnerConfig(model="m"),
            keys=str(keys),
        )
        process = ProcessSpec(name=name, role="decode", module="baton.decode_worker", config=config)
        backend.start(MemberSpec(name=name, role="decode", revision=0, process=process))
    assert backend.turn_refusal().startswith("decode-1 cannot be a prefill worker")
    end(backend)
    assert backend.turn_refusal() == ""
