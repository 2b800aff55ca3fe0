"""The GPU verbs from beginning to end on the CPU: every part's code runs, with tiny shapes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from baton.benchmarks.gpu import bench, check, verb
from baton.benchmarks.gpu.lines import HELD
from baton.engine.kernels.cuda.tuning import read_table, table_path


def run(
    verb: str, names: list[str], out: Path, environment: dict[str, str], stage: str
) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-P", "-m", f"baton.benchmarks.gpu.{verb}", *names]
    command += ["--stage", stage, "--out", str(out), "--commit", "0123abc"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout, json.loads((out / f"gpu-{verb}.json").read_text())


def assert_complete(text: str, report: dict[str, Any], names: list[str]) -> None:
    assert "the figures mean nothing" in text and "mean nothing" in report["note"]
    assert {part["name"] for part in report["parts"]} == {*names}
    assert report["machine"]["commit"] == "0123abc" and not report["failed"]
    for part in report["parts"]:
        assert part["lines"] and not part["error"]


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_check_runs_without_a_gpu(tmp_path: Path, with_cupy: dict[str, str]) -> None:
    """Prefill and decode workers are two processes there, and hand blocks over as on a GPU."""
    left_out = ("attention", "blocks", "sampling", "kinds")
    names = [part.name for part in check.PARTS if part.name not in left_out]
    text, report = run("check", names, tmp_path, with_cupy, "gpu_stage:small")
    assert_complete(text, report, names)
    found = {line["what"]: line for part in report["parts"] for line in part["lines"]}
    assert found["how blocks travelled"]["result"].startswith("cuda_ipc for ")
    assert found["another process reads memory through CUDA IPC"]["state"] == HELD
    assert found["CuPy's product while a graph is captured"]["result"].startswith("refused")


@pytest.mark.timeout(300)
def test_the_benchmarks_run_without_a_gpu(tmp_path: Path, environment: dict[str, str]) -> None:
    names = [part.name for part in bench.PARTS]
    found = run("bench", names, tmp_path, environment, "host_stage:on_host")
    assert_complete(*found, names)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_the_model_s_parts_share_its_checkpoint(tmp_path: Path, with_cupy: dict[str, str]) -> None:
    """The cluster's blocks travel as on a GPU, and nothing of the checkpoint stays."""
    names = ["model", "cluster"]
    with tempfile.TemporaryDirectory() as place:  # paths of sockets are too long below tmp_path
        environment = {**with_cupy, "TMPDIR": place}
        _, report = run("bench", names, tmp_path, environment, "gpu_stage:small")
        assert not [*Path(place).glob("baton-*")]
    logs = [(tmp_path / f"{name}.log").read_text() for name in names]
    (one,), (same,) = (re.findall(r"^(\S+/tiny): written in", log, re.MULTILINE) for log in logs)
    assert one == same and not Path(one).parent.exists()
    found = {line["what"]: line for part in report["parts"] for line in part["lines"]}
    assert found["how blocks travelled"]["result"].startswith("cuda_ipc for ")
    assert found["blocks given back"]["state"] == HELD
    assert found["no error in the cluster's log"]["state"] == HELD


def test_a_sweep_writes_the_card_s_entry(tmp_path: Path, with_cupy: dict[str, str]) -> None:
    _, report = run("bench", ["sweep"], tmp_path, with_cupy, "gpu_stage:small")
    (part,) = report["parts"]
    entry = json.loads(part["lines"][-1]["result"])
    assert (entry["name"], entry["capability"]) == ("Host memory", "80")
    same = [line for line in part["lines"] if line["what"].endswith("same results")]
    assert len(same) == 2 and all(line["state"] == HELD for line in same)
    # The installed table is only for real cards.
    assert "Host memory" not in {card.name for card in read_table(table_path()).cards}


def test_parts_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-bench", "--list"])
    assert verb.run_verb("gpu-bench", bench.PARTS, "") == 0
    text = capsys.readouterr().out
    assert all(f"{part.name} " in text for part in bench.PARTS)


def test_without_a_gpu_there_is_one_sentence_and_a_code(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "baton.benchmarks.gpu.check", "--out", str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 2 and not found.stdout
    assert found.stderr.startswith("gpu-check: ") and len(found.stderr.splitlines()) == 1
