"""The supervisor of one member with real processes, without Ray."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from baton.deploy.ray import member
from baton.deploy.ray.member import State, Supervisor
from baton.deploy.supervise.certifier import Certifier
from baton.deploy.supervise.process import ProcessSpec
from baton.deploy.supervise.restart import RestartLimits

pytestmark = pytest.mark.cluster

LIMITS = RestartLimits(first_delay=0.05, max_delay=0.1)


class NoConfig(msgspec.Struct):
    """Settings of the process that replaces a worker."""

    say: str = ""
    keys: str = ""
    routers: dict[str, str] = {}


STAND_IN = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
parent = int(sys.argv[sys.argv.index("--parent") + 1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
say = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["say"]
if say:
    print(json.dumps({"level": "error", "event": "process.failed", "error": say}), file=sys.stderr)
    sys.exit(1)
print(json.dumps({"level": "info", "event": "stand_in.runs", "pid": os.getpid()}), file=sys.stderr)
if "STAND_IN_READY" in os.environ:
    Path(os.environ["STAND_IN_READY"]).touch()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a module that runs until SIGTERM, or fails with the error in its config."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stand_in"


@pytest.fixture
def supervise(module):
    started = []

    def start(say="", json_log=False) -> Supervisor:
        config = NoConfig(say)
        spec = ProcessSpec(
            name="decode-0", role="decode", module=module, config=config, json_log=json_log
        )
        started.append(Supervisor(spec, host="here", limits=LIMITS))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.close()


def wait_for(condition, what: str):
    until = time.monotonic() + 60
    while not (result := condition()):
        assert time.monotonic() < until, what
        time.sleep(0.01)
    return result


def running(supervisor: Supervisor, other_than: int = 0) -> int:
    def pid():
        report = supervisor.report()
        return report.pid if report.state is State.RUNNING and report.pid != other_than else 0

    return wait_for(pid, "a running child")


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_killed_child_is_started_again_and_the_log_says_why(supervise, capsys):
    supervisor = supervise()
    pid = running(supervisor)
    os.kill(pid, signal.SIGKILL)
    assert running(supervisor, other_than=pid)
    assert supervisor.report().why.startswith("killed by signal 9")
    assert supervisor.report().starts == 2
    assert "decode-0 ended (killed by signal 9" in capsys.readouterr().err


def test_a_change_of_role_reaches_the_child_and_its_later_starts(supervise, module, capsys):
    """The stand-in ends at the signal, so its next start shows the settings."""
    supervisor = supervise()
    pid = running(supervisor)
    process = ProcessSpec(name="decode-0", role="prefill", module=module, config=NoConfig())
    supervisor.turn(process)
    other = running(supervisor, other_than=pid)
    assert supervisor.report().role == "prefill"
    supervisor.turn(process)  # an order that was repeated
    os.kill(other, signal.SIGKILL)
    assert running(supervisor, other_than=other)
    assert supervisor.report().starts == 3
    assert capsys.readouterr().err.count("decode-0 turns to prefill") == 1
    refused = supervise("there is no such model")
    wait_for(lambda: refused.report().state is State.ENDED, "the end")
    refused.turn(process)
    assert refused.report().role == "decode"


def test_a_child_is_started_again_if_its_certificate_raises(supervise, monkeypatch):
    def raises(*_):
        raise KeyError("planted")

    monkeypatch.setattr(Certifier, "died", raises)
    supervisor = supervise()
    pid = running(supervisor)
    os.kill(pid, signal.SIGKILL)
    assert running(supervisor, other_than=pid)
    assert supervisor.report().starts == 2


def test_all_lines_are_json_if_the_cluster_logs_json(supervise, capsys):
    supervisor = supervise(json_log=True)
    pid = running(supervisor)
    os.kill(pid, signal.SIGKILL)
    assert running(supervisor, other_than=pid)
    refused = supervise("there is no such model", json_log=True)
    wait_for(lambda: refused.report().state is State.ENDED, "the end")
    seen: list[str] = []

    def runs() -> int:
        seen.append(capsys.readouterr().err)
        return "".join(seen).count("stand_in.runs")

    wait_for(runs, "the line of a process")  # the first may end before its line
    lines = [json.loads(line) for line in "".join(seen).splitlines()]
    assert all({"timestamp", "level", "process", "event"} <= line.keys() for line in lines)
    said = {(line["process"], line["event"].split(" (")[0]) for line in lines}
    assert ("supervisor", "decode-0 ended") in said
    assert ("decode-0", "stand_in.runs") in said
    assert ("supervisor", "decode-0 ended: there is no such model") in said


def test_the_supervising_thread_starts_every_child(supervise):
    """The kernel kills a child with the thread that started it, so this thread must live on."""
    supervisor = supervise()
    first = running(supervisor)
    os.kill(first, signal.SIGKILL)
    second = running(supervisor, other_than=first)
    thread = supervisor._thread.native_id
    children = Path(f"/proc/self/task/{thread}/children").read_text().split()
    assert str(second) in children


def test_a_hung_child_is_ended_only_if_it_still_is_the_one(supervise):
    supervisor = supervise()
    pid = running(supervisor)
    supervisor.kill_child(pid + 1)
    supervisor.kill_child(pid)
    assert running(supervisor, other_than=pid)
    assert supervisor.report().starts == 2


def test_a_stop_ends_it_for_good(supervise):
    supervisor = supervise()
    pid = running(supervisor)
    supervisor.stop(10.0)
    wait_for(lambda: supervisor.report().state is State.ENDED, "the end")
    assert not alive(pid)
    assert supervisor.report().code in (0, -15)  # -15: killed before it set its handler


def test_what_it_refuses_is_kept_for_the_report(supervise):
    supervisor = supervise("there is no such model")
    wait_for(lambda: supervisor.report().state is State.ENDED, "the end")
    report = supervisor.report()
    assert (report.code, report.reason, report.refused) == (1, "there is no such model", True)


def test_closing_leaves_no_child_and_no_file(supervise, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    supervisor = supervise()
    pid = running(supervisor)
    supervisor.close()
    assert not alive(pid)
    assert not list(tmp_path.glob("baton-*"))


SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from baton.deploy.supervise.certifier import Certifier
from baton.deploy.supervise.process import ProcessSpec
from baton.deploy.ray.member import Supervisor
from test_member import NoConfig
s = Supervisor(ProcessSpec(name="d", role="decode", module="stand_in", config=NoConfig()))
while not (s.report().pid and Path(os.environ["STAND_IN_READY"]).exists()):
    time.sleep(0.01)  # until the child has informed the kernel
print(s.report().pid, flush=True)
time.sleep(60)
"""


def test_the_child_dies_with_a_killed_supervisor(module, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_READY", str(tmp_path / "ready"))
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
        process.wait()
        wait_for(lambda: not alive(pid), "the child's end")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_full_disk_is_named_and_the_start_is_tried_again(supervise, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(member, "RunFolder", full)
    supervisor = supervise()
    report = wait_for(lambda: (r := supervisor.report()).ends >= 2 and r, "two tries")
    assert report.state is not State.ENDED
    assert "the disk of " in report.why
    assert " is full (No space left on device)" in report.why
    monkeypatch.undo()
    assert running(supervisor)
