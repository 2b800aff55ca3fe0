"""A kernel that cannot run, a GPU that fails: the worker ends, and no request fails with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.cupy_device import Fate
from baton.engine.kernels.cuda.device import CaptureFailed, DeviceLost
from baton.engine.llm import LLMEngine
from baton.engine.loading.warm_up import warm_up
from baton.engine.pipeline.device_steps import DeviceSteps
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.step_time import StepTime
from baton.proto.errors import InternalError
from baton.proto.wire.messages import Terminal
from baton.runtime.process.main import EXIT_RESTART

from .host_device import HostDevice
from .small_model import GREEDY, chunks_of, load
from .test_workers import Workers


@dataclass
class Order:
    """What a device does at its next launches."""

    breaks: str = ""
    """The kernel that fails, by the start of its name."""
    loses: bool = False
    """The device fails with it."""
    events: int = 0
    """The event of the first stream, counted from now, at which the device fails."""
    lost: str = ""

    def lose(self) -> None:
        self.lost = "CUDARuntimeError: cudaErrorIllegalAddress"
        raise DeviceLost(self.lost)


class LostEvent:
    """A wait that raises the device's failure."""

    done = False

    def __init__(self, order: Order) -> None:
        self._order = order

    def wait(self) -> None:
        self._order.lose()


class Breaking:
    """A device that fails when it is told to."""

    def __init__(self, device: HostDevice, order: Order, first: bool = True) -> None:
        self._device, self._order, self._first = device, order, first

    @property
    def lost(self) -> str:
        return self._order.lost

    def another_stream(self, *, urgent: bool = False) -> Breaking:
        return Breaking(self._device.another_stream(urgent=urgent), self._order, first=False)

    def record(self) -> Any:
        event = self._device.record()
        if not self._first or not self._order.events:
            return event
        self._order.events -= 1
        return event if self._order.events else LostEvent(self._order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        if self._order.breaks and kernel.name.startswith(self._order.breaks):
            if self._order.loses:
                self._order.lose()
            raise RuntimeError("this kernel does not compile")
        self._device.launch(kernel, *arguments)


def test_a_worker_that_cannot_run_a_kernel_does_not_get_ready(
    folder: Path, host_device: HostDevice
) -> None:
    for kernel in ("add_rms_norm", "decode_attention", "prefill_attention", "sample_choose"):
        runner = load(folder, CudaBackend(Breaking(host_device, Order(kernel))))
        with pytest.raises(InternalError, match=r"first step failed: .* does not compile"):
            warm_up(runner.pipeline, StepTime())


def test_a_step_that_fails_half_way_has_ended_before_its_blocks_are_freed(
    folder: Path, host_device: HostDevice, rng: np.random.Generator
) -> None:
    late = host_device.late(3)
    order = Order()
    runner = load(folder, CudaBackend(Breaking(late, order)))
    chunks = chunks_of([20, 9], rng)
    order.breaks = "silu_mul"
    result = runner.pipeline.execute(StepPlan(1, tuple(chunks)))
    assert len(result.failed) == 2
    assert late._stream.finished == late._stream.queued > 0


def test_a_step_that_cannot_be_captured_is_launched_kernel_by_kernel(
    folder: Path, host_device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []
    tries = []

    def capture(work: Any) -> None:
        tries.append(work)
        work()
        raise CaptureFailed("cudaErrorStreamCaptureUnsupported")

    for refused in (False, True):
        runner = load(folder, CudaBackend(host_device))
        if refused:
            monkeypatch.setattr(host_device, "capture", capture)
        (context,) = LLMEngine(runner).generate([[5, 3, 9]], [GREEDY])
        tokens.append(context.tokens.generated.tolist())
        steps = runner.pipeline._computer
        assert isinstance(steps, DeviceSteps)
        assert bool(steps.replays) != refused
    assert tokens[0] == tokens[1]
    assert len(tries) == 1


class CudaError(RuntimeError):
    pass


def test_the_first_error_of_the_driver_is_kept() -> None:
    fate = Fate((CudaError,))
    with pytest.raises(ValueError, match="shape"), fate:
        raise ValueError("shape")
    assert not fate.lost
    for text in ("cudaErrorIllegalAddress", "cudaErrorLaunchFailure"):
        with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"), fate:
            raise CudaError(text)
    assert fate.lost == "CudaError: cudaErrorIllegalAddress"


@pytest.mark.parametrize(
    ("side", "kernel"),
    [
        (0, "prefill_attention"),
        (1, "decode_attention"),
        (0, "gather"),
        (1, "scatter"),
        (1, ""),  # a step that runs while the next one is queued
    ],
)
def test_a_worker_ends_with_its_gpu_and_fails_no_request(
    folder: Path, host_device: HostDevice, tmp_path: Path, side: int, kernel: str
) -> None:
    """Whichever thread sees it: steps run on the compute thread, moves start on the loop's."""
    orders = Order(), Order()
    devices = [Breaking(host_device.late(seed), orders[seed]) for seed in (0, 1)]
    workers = Workers(folder, tmp_path, (devices[0], devices[1]), in_place=False)
    shell = (workers.prefill, workers.decode)[side]
    orders[side].breaks, orders[side].loses = kernel, True
    orders[side].events = 0 if kernel else 3
    try:
        workers.serve(prompts(4))
        assert shell.exit_code == EXIT_RESTART
        assert not [m for m in workers.said if isinstance(m, Terminal)]
        assert not shell.close()
        assert (workers.decode, workers.prefill)[side].close()
    finally:
        workers.close()


def prompts(count: int) -> Sequence[Any]:
    return [[7] * (20 + n) for n in range(count)]
