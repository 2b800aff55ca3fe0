"""The differential suite of ``tests/cuda``, the same files, on the device of the stage."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

from .lines import Line, checked, wrong
from .machine import ROOT
from .stage import Stage

TESTS = ROOT / "tests/cuda"
CLUSTERS = ROOT / "tests/gpu"
ATTENTION = (
    "test_attention.py", "test_int8_attention.py", "test_int8_rows.py", "test_prefill_wgmma.py",
)  # fmt: skip
WORDS = "test_host_execution.py"
"""Must not run beside other parts, or before them: a hang would cost them their time."""


def attention(stage: Stage) -> Iterator[Line]:
    """Decode and prefill attention, and rows of int8 pools."""
    return _suite(stage, ATTENTION)


def blocks(stage: Stage) -> Iterator[Line]:
    """Gather, scatter, copies and digests."""
    return _suite(stage, ["test_blocks.py"])


def sampling(stage: Stage) -> Iterator[Line]:
    """The sampler."""
    return _suite(stage, ["test_sampling.py"])


def others(stage: Stage) -> Iterator[Line]:
    """Elementwise kernels, products, graphs, streams, whole models."""
    own = {*ATTENTION, "test_blocks.py", "test_sampling.py", WORDS}
    names = sorted(path.name for path in TESTS.glob("test_*.py") if path.name not in own)
    return _suite(stage, names)


def kinds(stage: Stage) -> Iterator[Line]:
    """Pictures, images, speech, narrow weights and KV: each by two workers on the GPU."""
    names = ["test_drawing.py", "test_images.py", "test_speech.py::test_a_cluster_speaks"]
    names += ["test_demos.py", "test_fp8.py", "test_int8.py"]
    return _suite(stage, names, CLUSTERS)


def words(stage: Stage) -> Iterator[Line]:
    """The words of CUDA that kernels use, by themselves: one of the tests spins on a lock."""
    return _suite(stage, [WORDS])


def _suite(stage: Stage, files: Sequence[str], folder: Path = TESTS) -> Iterator[Line]:
    """One line per file; with ``tiny`` only the graphs' tests are run."""
    if stage.tiny:
        files, folder = ["test_graphs.py"], TESTS
    report = stage.scratch / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=200",
        "-m",
        "",
    ]
    command += [f"--junit-xml={report}", "-o", "junit_family=xunit1"]
    command += [str(folder / name) for name in files]
    device = "cuda" if stage.cupy is not None else "host"
    environment = {**os.environ, "BATON_CUDA_DEVICES": device}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(run.stdout, flush=True)  # the part's log shows where a test failed
    if not report.exists():
        yield wrong("pytest runs", (run.stdout + run.stderr).strip()[-300:])
        return
    yield from read_report(report)
    if run.returncode not in (0, 1):
        yield wrong("pytest ends", run.stdout.strip().splitlines()[-1][:200])


def read_report(report: Path) -> Iterator[Line]:
    """Lines of a JUnit file: passed, failed and skipped tests per test file; names of failed."""
    counts: dict[str, dict[str, int]] = {}
    failed: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = Path(case.get("file") or "?").name
        found = {child.tag for child in case}
        kind = "failed" if found & {"failure", "error"} else "passed"
        kind = "skipped" if "skipped" in found else kind
        row = counts.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0})
        row[kind] += 1
        if kind == "failed":
            why = next(child.get("message", "") for child in case if child.tag != "system-out")
            failed.setdefault(name, []).append(f"{case.get('name')}: {why[:160]}")
    if not counts:
        yield wrong("tests are there", "no test was run")
    for name, row in counts.items():
        text = ", ".join(f"{count} {kind}" for kind, count in row.items() if count)
        right = not row["failed"] and row["passed"] > 0
        yield checked(name, right, text, "all pass", **{k: float(v) for k, v in row.items()})
        for words in failed.get(name, [])[:8]:
            yield wrong(name, words.replace("\n", " "))
