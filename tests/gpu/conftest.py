"""CuPy's calls, and the driver's, on host memory: processes that tests start find them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.device import Device

from ..cuda.host.builder import COMPILER, why_not
from ..cuda.host_device import HostDevice

HERE = Path(__file__).parent


@pytest.fixture
def environment(pytestconfig: pytest.Config, tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose kernels run on the CPU."""
    if reason := why_not():
        pytest.skip(reason)
    cache = getattr(pytestconfig, "cache", None)
    builds = cache.mkdir("baton-cuda") if cache else tmp_path / "builds"
    builds.mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE), *sys.path])
    return {**os.environ, "BATON_HOST_BUILDS": str(builds), "PYTHONPATH": path}


ON_GPU = os.environ.get("BATON_CUDA_DEVICES") == "cuda"
"""Whether the tests run on this machine's GPU, as ``make gpu-check`` has them."""


@pytest.fixture
def with_cupy(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds CuPy, a driver and a GPU: see ``without_gpu``.

    On a machine with a GPU the real ones, if the tests are to run there.
    """
    if ON_GPU:
        return {}
    here, libraries = HERE / "without_gpu", tmp_path / "lib"
    libraries.mkdir()
    command = [COMPILER, "-O2", "-shared", "-fPIC", "-o", str(libraries / "libcuda.so.1")]
    subprocess.run([*command, str(here / "driver.cc")], check=True)
    found = {"PYTHONPATH": str(here), "LD_LIBRARY_PATH": str(libraries)}
    for name, before in ((name, environment.get(name)) for name in list(found)):
        found[name] += f"{os.pathsep}{before}" if before else ""
    return {**environment, **found}


@pytest.fixture
def device(environment: dict[str, str]) -> Device:
    """What the workers of ``with_cupy`` compute on, in this process."""
    return CupyDevice() if ON_GPU else HostDevice(Path(environment["BATON_HOST_BUILDS"]))


@pytest.fixture
def host_device(environment: dict[str, str]) -> HostDevice:
    """The kernels on the CPU, in this process."""
    return HostDevice(Path(environment["BATON_HOST_BUILDS"]))
