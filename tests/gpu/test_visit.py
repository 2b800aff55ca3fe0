"""A visit to a GPU from its first call to its last, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from baton.benchmarks.gpu import peers
from baton.benchmarks.gpu.lines import HELD, SKIPPED
from baton.benchmarks.gpu.visit import INTERRUPTED

from ..processes import wait_until

SLOW = """
import sys, time
from pathlib import Path
from baton.benchmarks.gpu import visit
from baton.benchmarks.gpu.lines import checked
from baton.benchmarks.gpu.parts import Part
from baton.benchmarks.gpu.visit_plan import Planned

def quick(stage):
    yield checked("quick", True, "yes")

def slow(stage):
    yield checked("begun", True, "yes")
    time.sleep(600)

def stage(folder):
    import types
    return types.SimpleNamespace()

visit.PLAN = (
    Planned(Part("slow", "some_visit:slow", SLOW_S), 0, "w"),
    Planned(Part("quick", "some_visit:quick", 60), 0, "w"),
)
if __name__ == "__main__":
    sys.exit(visit.main())
"""


def command(out: Path, *more: str, module: str = "baton.benchmarks.gpu.visit") -> list[str]:
    return [sys.executable, "-P", "-m", module, "--out", str(out), "--commit", "0123abc", *more]


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gpu-visit.json").read_text())
    return found


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_visit_on_the_emulated_gpu(tmp_path: Path, with_cupy: dict[str, str]) -> None:
    """Cheap parts in two calls: one JSON and one table, with commit and card."""
    stage = ["--stage", "gpu_stage:small"]
    for names in (["probes", "peers"], ["probes", "draw", "handoffs"]):
        run = subprocess.run(
            command(tmp_path, *names, *stage), capture_output=True, text=True, env=with_cupy,
            check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
    assert "\nprobes: " not in run.stdout  # not again
    found = report(tmp_path)
    assert [part["name"] for part in found["parts"]] == ["peers", "draw", "handoffs", "probes"]
    assert found["machine"]["commit"] == "0123abc" and not found["failed"]
    assert "cluster" in found["missing"] and found["progress"]["calls"] == 2
    assert 0 < found["progress"]["spent_s"] < 300 and not found["progress"]["begun"]
    page = (tmp_path / "gpu-visit.md").read_text()
    assert "commit 0123abc" in page and "mean nothing" in page and "| handoffs | " in page
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 200_000


def test_the_order_is_printed_without_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "baton.benchmarks.gpu.visit", "--dry", "--call", "300"],
        capture_output=True, text=True, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    lines = run.stdout.splitlines()
    assert lines[1].split()[:6] == ["1", "0", "s", "45", "s", "compile"]
    assert "never begun" not in run.stdout and lines[-1].startswith("From: ")


def place(tmp_path: Path, slow_s: int) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "some_visit.py").write_text(SLOW.replace("SLOW_S", str(slow_s)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    called = command(tmp_path / "out", "--stage", "some_visit:stage", module="some_visit")
    return called, environment


def test_a_part_that_exceeds_its_budget_is_cut_and_named(tmp_path: Path) -> None:
    called, environment = place(tmp_path, 12)
    run = subprocess.run(called, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED or cut: slow" in run.stdout
    found = report(tmp_path / "out")
    (slow, quick) = found["parts"]
    assert slow["error"] == "not done after 12 s" and slow["lines"][0]["what"] == "begun"
    assert quick["lines"][0]["state"] == HELD and not quick["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_part_keeps_its_lines_and_comes_last(
    tmp_path: Path, number: signal.Signals
) -> None:
    called, environment = place(tmp_path, 400)
    lines = tmp_path / "out/parts/slow.lines"
    with subprocess.Popen(called, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: lines.exists() and "begun" in lines.read_text(), 60.0)
        process.send_signal(number)
    assert report(tmp_path / "out")["progress"]["begun"].keys() == (
        {"slow"} if number == signal.SIGKILL else set()
    )
    began = time.monotonic()
    # The rest of this call is too short for it, so only the next part runs.
    again = subprocess.run(
        [*called, "--call", "100"], capture_output=True, text=True, env=environment, check=False
    )
    took = time.monotonic() - began
    found = report(tmp_path / "out")
    slow, quick = found["parts"]
    assert slow["error"] == INTERRUPTED and slow["lines"][0]["what"] == "begun"
    assert quick["lines"] and not quick["error"]
    assert again.returncode == 3 and "left for another call: slow" in again.stdout
    assert found["progress"]["tries"] == {"slow": 1} and found["progress"]["calls"] == 2
    assert found["progress"]["spent_s"] < took + 400


def test_a_peer_that_cannot_be_imported_is_named() -> None:
    assert peers.peer("json", "JSON").result.startswith("json ")
    line = peers.peer("no_such_peer", "nothing")
    assert line.state == SKIPPED and "no_such_peer is left out: ModuleNotFoundError" in line.result
