"""Captured kernels that may begin before the one before them has ended: asked of the driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.engine.kernels.cuda.tuning import Card, Tuning, read_table, table_path

CHAIN = """
import cupy
import numpy as np
from baton.engine.kernels.cuda import elementwise, linear
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.reference import to_bf16
from baton.engine.kernels.cuda.tuning import Tuning

rng, outs = np.random.default_rng(3), []
rows, wide, hidden = (to_bf16(rng.standard_normal(shape)) for shape in ((11, 64), (96, 64), (64,)))
usual = CupyDevice()
for device in (usual, usual.tuned(Tuning(dependent=True, skinny_ring=((0, 4),)))):
    x, weight, norm = (device.upload(each) for each in (rows, wide, hidden))
    normed = device.empty((11, 64), np.uint16)
    twice = [device.empty((11, 96), np.float32) for _ in range(2)]
    bias = device.upload(np.ones(96, np.float32))

    def work():
        elementwise.rms_norm(device, x, norm, 1e-6, normed)
        linear.linear(device, normed, weight, None, twice[0])
        linear.linear(device, normed, weight, bias, twice[1])

    graph = device.capture(work)
    for out in twice:
        device.write(out, np.zeros((11, 96), np.float32))
    device.write(x, rows[::-1].copy())
    graph.replay()
    outs.append([device.download(out) for out in twice])
    print(*cupy.cuda.early)
assert all((a == b).all() and a.any() for a, b in zip(*outs))
"""


def test_only_captured_kernels_of_such_a_card_are_launched_so(with_cupy: dict[str, str]) -> None:
    if not with_cupy:
        pytest.skip("a GPU does not say how kernels were launched")
    command = [sys.executable, "-P", "-c", CHAIN]
    run = subprocess.run(command, env=with_cupy, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    usual, early = run.stdout.split("\n")[:2]
    assert usual == ""
    assert early.split() == ["rms_norm", "ring_linear_4_f32", "ring_linear_4_f32"]


def test_no_card_has_chosen_it_and_old_ones_cannot() -> None:
    assert not Tuning().dependent
    assert not any(card.tuning.dependent for card in read_table(table_path()).cards)
    assert Tuning(dependent=True).numerics == "-dependent"
    for capability in ("90", "100", "120"):
        Card(name="one", capability=capability, commit="0", tuning=Tuning(dependent=True))
    with pytest.raises(ValueError, match="need capability 90, not 80"):
        Card(name="one", capability="80", commit="0", tuning=Tuning(dependent=True))
