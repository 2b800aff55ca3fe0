"""Workers state how they divide a GPU's memory, and what does not fit beside other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.errors import ConfigError

from ..cuda.host_device import HostDevice
from ..cuda.small_model import SHAPE


class Shared(HostDevice):
    """A GPU of 1 GiB that another process uses as well."""

    used = 0

    def free_bytes(self) -> int:
        return self.memory_bytes() - self.used


@pytest.fixture
def shared(environment: dict[str, str]) -> Shared:
    return Shared(Path(environment["BATON_HOST_BUILDS"]))


def test_blocks_that_do_not_fit_beside_others_are_one_sentence(
    tmp_path: Path, shared: Shared
) -> None:
    folder = write_checkpoint(tmp_path / "m", SHAPE, "BF16")
    shared.used = 900 << 20
    config = RunnerConfig(
        model=str(folder), kv_bytes=0, gpu_memory_utilization=0.5, device_sharers=2
    )
    with pytest.raises(ConfigError) as caught:
        load_runner(config, backend=CudaBackend(shared))
    text = str(caught.value)
    assert " MiB of KV blocks do not fit: the GPU has 1.0 GiB, of which 124.0 MiB are" in text
    assert "divide it by gpu_memory_utilization" in text and "\n" not in text
    shared.used = 700 << 20
    assert load_runner(config, backend=CudaBackend(shared)).card.layout


def test_two_clusters_divide_a_gpu(tmp_path: Path, with_cupy: dict[str, str]) -> None:
    """A cluster's workers get its share of the GPU, and divide it."""
    folder = write_checkpoint(tmp_path / "m", SHAPE, "BF16")
    command = [sys.executable, "-P", "-m", "baton.cli", "serve", str(folder), "--device=cuda"]
    command += ["--no-http", f"--address=ipc://{tmp_path}/s", "--dry-run"]
    shown = [
        subprocess.run(
            [*command, *more], env={**os.environ, **with_cupy}, capture_output=True, text=True,
            check=True,
        ).stdout
        for more in ([], ["--gpu-memory-utilization=0.45"])
    ]  # fmt: skip
    assert '"gpu_memory_utilization": 0.9' in shown[0]
    assert '"gpu_memory_utilization": 0.45' in shown[1] and '"device_sharers": 2' in shown[1]
