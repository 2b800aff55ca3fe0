"""Kernels that may begin before the one before them has ended touch nothing until it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda.dependent import SOURCES
from baton.engine.kernels.cuda.device import Kernel
from baton.engine.kernels.cuda.tuning import Tuning
from baton.engine.pipeline import device_steps

from .host_device import HostDevice, LaunchFailed
from .small_model import SHAPE
from .test_linear import random_bf16, run_linear
from .test_look_ahead import answers, mixed

EARLY = Tuning(dependent=True, fuse_from=0, norm_rows=2, skinny_ring=((0, 2),))
KERNELS = """
#include "device.cuh"
extern "C" __global__ void waits(float* x) {
    begin_after_previous();
    x[threadIdx.x] += 1.0f;
}
extern "C" __global__ void writes(float* x) {
    if (threadIdx.x == 3) x[0] = 1.0f;
    begin_after_previous();
}
extern "C" __global__ void reads(const float* x, float* y) {
    const float early = x[threadIdx.x];
    begin_after_previous();
    y[threadIdx.x] = early;
}
extern "C" __global__ void never(float* x) { x[threadIdx.x] = 1.0f; }
"""


def test_accesses_before_the_wait_are_refused(build_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "early.cu").write_text(KERNELS)
    plain = HostDevice(build_cache, folder=tmp_path)
    device = plain.with_defines("BATON_DEPENDENT=1")
    x, y = (device.zeros((8,), np.float32) for _ in range(2))

    def launch(name: str, *arrays: Any) -> None:
        device.launch(Kernel("early.cu", name), (2,), (4,), arrays)

    with device.watching_races():
        launch("waits", x)
        for name, arrays, what in (
            ("writes", [x], "write"), ("reads", [x, y], "read"), ("never", [x], "write"),
        ):  # fmt: skip
            with pytest.raises(LaunchFailed, match=rf"a {what} at early.cu:\d+ does not wait"):
                launch(name, *arrays)
    with plain.watching_races():  # which cannot begin early
        plain.launch(Kernel("early.cu", "never"), (2,), (4,), [x])


def test_a_decode_step_touches_nothing_before_it_waits(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters and penalties; the tokens are those of steps that begin later."""
    monkeypatch.setattr(device_steps, "BUCKETS", (1, 2, 4))
    work = [*mixed(1), *mixed(1, repetition_penalty=1.3)]
    work = [(prompt, replace(params, max_new_tokens=3)) for prompt, params in work]
    expected, _ = answers(folder, host_device, work)
    launched, launch = set(), HostDevice._run

    def noting(device: HostDevice, kernel: Kernel, *arguments: Any) -> None:
        launched.add(kernel)
        launch(device, kernel, *arguments)

    monkeypatch.setattr(HostDevice, "_run", noting)
    early = host_device.tuned(EARLY)
    with early.watching_races():
        found, steps = answers(folder, early, work)
    assert found == expected and steps.replays
    names = {kernel.name for kernel in launched if kernel.source in SOURCES}
    assert {
        "embed", "rms_norm_one", "add_rms_norm_one", "qk_norm_rope_append_64", "sample_draw_f32",
        "decode_attention_d64", "decode_combine_d64", "skinny_linear_silu_mul_1",
    } <= names  # fmt: skip


def test_how_many_nodes_a_step_has(folder: Path, host_device: HostDevice) -> None:
    """Nine for each layer: 294 for the 32 layers of an 8B model, and 300 with top-p."""
    for top_p, filters in ((1.0, 0), (0.9, 6)):
        _, steps = answers(folder, host_device.tuned(Tuning(fuse_from=0)), mixed(1, top_p=top_p))
        (graph,) = steps._graphs.values()
        (part,) = graph._parts
        assert len(part._graph.launches) == 6 + 9 * SHAPE.layers + filters


def test_products_touch_nothing_before_they_wait(
    host_device: HostDevice, rng: np.random.Generator
) -> None:
    early = host_device.tuned(EARLY)
    x, weight = random_bf16(rng, 11, 136), random_bf16(rng, 40, 136)
    expected = run_linear(host_device, x, weight)
    with early.watching_races():
        assert run_linear(early, x, weight).tobytes() == expected.tobytes()
        run_linear(early, random_bf16(rng, 17, 136), weight, np.ones(40, np.float32))


def test_every_kernel_of_these_sources_waits() -> None:
    csrc = Path(device_steps.__file__).parents[1] / "kernels/csrc"
    for name in sorted(SOURCES):
        text = (csrc / name).read_text("utf-8")
        kernels = text.count('extern "C" __global__')
        assert kernels and text.count("begin_after_previous();") == kernels, name
