"""A GPU that fails under a whole cluster, and installations that cannot use theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.client import Client

from ..processes import wait_until
from .failing_cluster import failing_cluster, generated

PROMPTS = [[5, 9, 2] * 7, [3] * 30]


def pids(client: Client) -> dict[str, int]:
    """Of the workers that are ready."""
    workers = client.status()["workers"]
    return {worker["id"]: worker["pid"] for worker in workers if worker["state"] == "ready"}


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kernel", ["decode_attention", "prefill_attention"])
def test_the_worker_is_replaced_and_its_requests_go_on(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    with failing_cluster(tmp_path, with_cupy, monkeypatch, kernel) as (served, _, order):
        undisturbed = generated(served.client, PROMPTS)
        before = pids(served.client)
        order.touch()
        assert generated(served.client, PROMPTS) == undisturbed
        assert not order.exists()

        def replaced() -> bool:
            now = pids(served.client)
            return len(now) == 2 and now != before

        wait_until(replaced, 60.0)
        assert generated(served.client, PROMPTS) == undisturbed
        said = served.log.read_text()
    assert "device lost: CUDARuntimeError: cudaErrorIllegalAddress" in said


MAKE = """
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.proto.errors import ConfigError
try:
    print(CudaBackend(CupyDevice()).numerics)
except ConfigError as error:
    print(error)
"""


def made(environment: dict[str, str]) -> str:
    command = [sys.executable, "-P", "-c", MAKE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_an_installation_that_cannot_compute_is_one_sentence(with_cupy: dict[str, str]) -> None:
    said = (
        "this installation of CuPy cannot compute: pip install 'baton-serve[cuda]' (RuntimeError: "
    )
    without = made({**with_cupy, "BATON_FAKE_NO_NVRTC": "1"})
    assert without == f"{said}CuPy failed to load libnvrtc.so.13: OSError: cannot open)"
    without = made({**with_cupy, "BATON_FAKE_NO_CUBLAS": "1"})
    assert without == f"{said}Failure finding libcublas.so.13)"


def test_compiler_and_cublas_are_part_of_what_decides_bits(with_cupy: dict[str, str]) -> None:
    assert made(with_cupy) == "cuda-sm_80-nvrtc13.0-cublas130101-3-bf16"
