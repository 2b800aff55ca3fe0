"""Variants of kernels that no card has chosen yet are timed beside those that it uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton.benchmarks.gpu.bench_attention import PrefillBench
from baton.benchmarks.gpu.bench_rows import products
from baton.benchmarks.gpu.lines import FAILED
from baton.benchmarks.gpu.stage import Stage, WallClock
from baton.benchmarks.gpu.sweep import sweep_prefills, sweep_rings
from baton.engine.kernels.cuda.tuning import Tuning

from ..cuda.host_device import HostDevice


def stage_of(device: HostDevice, scratch: Path, **choices: object) -> Stage:
    tuned = device.tuned(Tuning(**choices))  # type: ignore[arg-type]
    return Stage(tuned, WallClock(tuned), scratch, "", tiny=True)


def drained(sweep):
    """The lines of a sweep, and what it returns."""
    lines = []
    while True:
        try:
            lines.append(next(sweep))
        except StopIteration as end:
            return lines, end.value


def test_prompts_are_copied_both_ways(host_device: HostDevice, tmp_path: Path) -> None:
    for kind, other in (("wgmma", "bulk"), ("bulk", "wgmma")):
        bench = PrefillBench(stage_of(host_device, tmp_path, prefill=kind), 1, 16, 24)
        assert f"ours by {other} seconds" in bench.line(1e12).figures
    bench = PrefillBench(stage_of(host_device, tmp_path), 1, 16, 24)
    assert not [name for name in bench.line(1e12).figures if "ours by" in name]


def test_a_sweep_compares_the_ways_to_copy_prompts(host_device: HostDevice, tmp_path: Path) -> None:
    stage = stage_of(host_device, tmp_path, prefill="wgmma")
    lines, best = drained(sweep_prefills(stage, stage.device.tuning))
    timed = [line for line in lines if {"wgmma", "mma", "bulk"} <= set(line.figures)]
    assert len(timed) == 2 and not [line for line in lines if line.state == FAILED]
    assert best.prefill in {"wgmma", "mma", "bulk"}


def test_products_of_16_rows_are_computed_in_all_ways(
    host_device: HostDevice, tmp_path: Path
) -> None:
    stage = stage_of(host_device, tmp_path)
    found = [line for line in products(stage) if "ring of 4 tiles seconds" in line.figures]
    assert [" ".join(line.what.split()[:2]) for line in found] == [
        "qkv 16", "down 16", "gate-up 16", "head 16",
    ]  # fmt: skip
    lines, best = drained(sweep_rings(replace(stage), Tuning()))
    assert len([line for line in lines if {"0", "1", "2", "4"} <= set(line.figures)]) == 2
    assert not [line for line in lines if line.state == FAILED]
    assert best.skinny_ring[0][0] == 0
