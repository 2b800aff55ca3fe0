"""Parts of a GPU verb do not affect each other."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.gpu import bench, check, machine, suite
from baton.benchmarks.gpu.lines import (
    FAILED,
    HELD,
    MISSED,
    Line,
    PartResult,
    Report,
    checked,
    from_json,
    measured,
    table,
    to_json,
)
from baton.benchmarks.gpu.models import TINY, write_random
from baton.benchmarks.gpu.parts import Part, run_parts
from baton.benchmarks.gpu.stage import Stage
from baton.benchmarks.gpu.verb import CALL_S
from baton.benchmarks.gpu.wheels import pins
from baton.engine.loading.checkpoint import load_checkpoint
from baton.engine.loading.safetensors import widened

PARTS = """
import os, subprocess, sys, time, types
from baton.benchmarks.gpu.lines import checked

def stage(folder):
    return types.SimpleNamespace()

def good(stage):
    yield checked("it works", True, "yes")

def late(stage):
    yield checked("begun", True, "yes")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield checked("child", True, str(child.pid))
    time.sleep(600)

def broken(stage):
    yield checked("first", True, "yes")
    raise RuntimeError("no such kernel")

def dead(stage):
    yield checked("first", True, "yes")
    os.kill(os.getpid(), 11)

def silent(stage):
    return []

def writer(stage):
    (stage.shared / "kept").touch()
    yield checked("folder", True, str(stage.shared))

def reader(stage):
    yield checked("folder", (stage.shared / "kept").exists(), str(stage.shared))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_parts.py").write_text(PARTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "some_parts"


def run(
    module: str, names: str, tmp_path: Path, limit_s: float = 60.0, budget_s: float = 600.0
) -> dict[str, PartResult]:
    parts = [Part(n, f"{module}:{n}", limit_s, together=n != "good") for n in names.split()]
    found = run_parts(parts, f"{module}:stage", tmp_path / "out", budget_s)
    return {result.name: result for result in found}


def test_one_part_s_failure_hides_no_other(module: str, tmp_path: Path) -> None:
    found = run(module, "broken dead silent good", tmp_path)
    assert "no such kernel" in found["broken"].error
    assert [line.what for line in found["broken"].lines] == ["first"]
    assert "exit code -11" in found["dead"].error and len(found["dead"].lines) == 1
    assert found["silent"].error == "found nothing out"
    assert not found["good"].failed and found["good"].lines == [checked("it works", True, "yes")]


def test_parts_of_a_call_share_a_folder_that_is_gone_afterwards(
    module: str, tmp_path: Path
) -> None:
    parts = [Part(name, f"{module}:{name}", 60) for name in ("writer", "reader")]
    written, read = run_parts(parts, f"{module}:stage", tmp_path / "out", 600)
    assert not read.failed and read.lines == written.lines
    assert not Path(read.lines[0].result).exists()


def test_what_is_late_is_ended_with_all_it_started(module: str, tmp_path: Path) -> None:
    found = run(module, "late good", tmp_path, limit_s=12.0)
    assert found["late"].error.startswith("not done after 12 s")
    begun, child = found["late"].lines
    assert begun.result == "yes"
    state = Path(f"/proc/{child.result}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not found["good"].failed


def test_a_part_that_may_not_fit_is_left_for_another_call(module: str, tmp_path: Path) -> None:
    assert not run(module, "good silent", tmp_path, limit_s=60, budget_s=59)
    parts = [Part("good", f"{module}:good", 1), Part("silent", f"{module}:silent", 90)]
    parts.append(Part("later", f"{module}:good", 1))
    found = run_parts(parts, f"{module}:stage", tmp_path / "out", 60)
    assert [result.name for result in found] == ["good"]


def test_every_part_fits_into_one_call() -> None:
    for part in (*check.PARTS, *bench.PARTS):
        assert part.limit_s <= CALL_S <= 540


def test_a_line_survives_its_text() -> None:
    line = measured("speed", "3 µs", "2 µs", held=False, seconds=3e-6)
    assert from_json(to_json(line)) == line and line.state == MISSED


def test_a_missed_bar_fails_nothing_and_a_wrong_line_does(tmp_path: Path) -> None:
    slow = PartResult("slow", [measured("speed", "3", "2", held=False)])
    bad = PartResult("bad", [checked("sum", False, "4", "5")])
    assert not slow.failed and bad.failed
    text = table([slow, bad, PartResult("gone", error="not done after 9 s")])
    assert [line.split()[-1] for line in text.splitlines()[1:]] == [MISSED, FAILED, FAILED]
    gathered = Report("gpu-check", {"commit": "abc"}, "n", {"slow": slow, "bad": bad})
    gathered.write(tmp_path / "new/report.json", ["bad", "slow", "later"])
    report = json.loads((tmp_path / "new/report.json").read_text())
    assert report["failed"] == ["bad"] and report["missing"] == ["later"]
    assert report["machine"]["commit"] == "abc" and report["note"] == "n"
    assert [part["name"] for part in report["parts"]] == ["bad", "slow"]
    page = (tmp_path / "new/report.md").read_text()
    assert "| bad | sum | 4 | 5 | FAILED |" in page and "commit abc" in page


def test_calls_on_one_machine_gather_one_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    machine = {"commit": "abc", "sources": "1", "gpu": "H200"}
    first = PartResult("first", [Line("rate | share", "3")], 1.5)
    Report("gpu-bench", machine, "", {"first": first}).write(path, ["first", "next"])
    later = Report("gpu-bench", machine | {"commit": "abc+"})  # a part may write the table
    later.read(path)
    assert later.results == {"first": first}
    assert "rate \\| share" in path.with_suffix(".md").read_text()
    for change in ({"commit": "xyz"}, {"sources": "2"}, {"gpu": "H100"}):
        other = Report("gpu-bench", machine | change)
        other.read(path)
        assert not other.results
    noted = Report("gpu-bench", machine, "mean nothing")
    noted.read(path)
    path.write_text("{")
    noted.read(path)
    noted.read(tmp_path / "absent.json")
    assert not noted.results


def test_what_a_machine_lacks_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"msgspec", "zmq"}
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: None if name not in there else object()
    )
    why = machine.why_not()
    assert "structlog" in why and "cupy" in why and "msgspec" not in why and "zmq" not in why
    assert "WHEELS=FOLDER" in why and "\n" not in why
    assert "cupy" not in machine.why_not(needs_gpu=False)


def test_the_machine_is_described() -> None:
    found = machine.description("0123abc")
    assert found["commit"] == "0123abc" and "numpy" in found["packages"]
    assert len(found["sources"]) == 16 and "cores" in found["processor"]


def test_the_wheels_are_the_lock_s() -> None:
    assert [
        pin.partition("==")[0] for pin in pins((machine.ROOT / "requirements.lock").read_text())
    ] == [*machine.CARRIED]


REPORT = """<testsuites><testsuite>
<testcase name="test_a[cuda]" file="tests/cuda/test_x.py"/>
<testcase name="test_b[cuda]" file="tests/cuda/test_x.py">
<failure message="wrong sum">e</failure></testcase>
<testcase name="test_c[cuda]" file="tests/cuda/test_y.py"><skipped message="no"/></testcase>
<testcase name="test_d[cuda]" file="tests/cuda/test_z.py"/>
</testsuite></testsuites>"""


def test_a_test_report_becomes_lines(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = [(line.what, line.result, line.state) for line in suite.read_report(path)]
    assert found == [
        ("test_x.py", "1 passed, 1 failed", FAILED),
        ("test_x.py", "test_b[cuda]: wrong sum", FAILED),
        ("test_y.py", "1 skipped", FAILED),
        ("test_z.py", "1 passed", HELD),
    ]
    path.write_text("<testsuites><testsuite/></testsuites>")
    assert [line.state for line in suite.read_report(path)] == [FAILED]


def test_lines_without_a_bar_say_nothing_of_right_or_wrong() -> None:
    assert not PartResult("told", [Line("rate", "3 TB/s")]).failed


def test_a_kept_folder_is_written_once_and_whole(tmp_path: Path) -> None:
    first, next_one = (Stage(None, None, tmp_path, "", shared=tmp_path) for _ in range(2))

    def fails(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("no space")

    def writes(folder: Path) -> None:
        folder.mkdir()
        (folder / "whole").touch()

    with pytest.raises(OSError, match="no space"):
        first.kept("model", fails)
    assert [path.name for path in first.kept("model", writes).iterdir()] == ["whole"]
    assert next_one.kept("model", fails) == tmp_path / "model"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_in_shards_is_whole(tmp_path: Path) -> None:
    shape = replace(TINY, layers=3)
    write_random(tmp_path / "model", shape)
    found = load_checkpoint(tmp_path / "model")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1
    assert {name: found.tensors.entry(name).shape for name in found.tensors} == shape.tensors()
    up, head = (widened(found.tensors.tensor(f"{name}.weight")) for name in (
        "model.layers.1.mlp.up_proj", "lm_head"
    ))  # fmt: skip
    assert up.std() == pytest.approx(shape.hidden**-0.5, rel=0.05)
    assert not np.array_equal(up[: len(head)], head)
