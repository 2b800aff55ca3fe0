"""Without a GPU: importing costs nothing, and asking for one gives one clear sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from baton.engine.kernels.cuda import gpus
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.gpus import cuda_is_available
from baton.proto.errors import ConfigError

ON_THE_CPU = """
import sys
import baton.decode_worker.shell, baton.prefill_worker.shell
from baton.engine.kernels.load import load_backend
load_backend("numpy")
loaded = [name for name in sys.modules if name.split(".")[0] == "cupy" or ".kernels.cuda" in name]
assert not loaded, loaded
"""


def test_serving_on_the_cpu_imports_nothing_of_cuda():
    subprocess.run([sys.executable, "-c", ON_THE_CPU], check=True)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not cuda_is_available()
    with pytest.raises(
        ConfigError, match=r"^--device cuda needs CuPy: pip install 'baton-serve\[cuda\]'"
    ):
        CupyDevice()


def test_without_a_gpu_the_error_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpus, "cuda_is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^CuPy finds no CUDA device: no GPU, or its driver"):
        CupyDevice()


@pytest.mark.skipif(not cuda_is_available(), reason="CuPy finds no CUDA device")
def test_a_device_that_does_not_exist():
    with pytest.raises(ConfigError, match="device 4096 does not exist, this machine has"):
        CupyDevice(4096)
