"""The host device of ``tests/cuda`` by a name that does not collide with CUDA's packages."""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "cuda"


def _load():
    package = importlib.util.spec_from_loader("baton_test_cuda", loader=None, is_package=True)
    module = importlib.util.module_from_spec(package)
    module.__path__ = [str(_FOLDER)]
    sys.modules["baton_test_cuda"] = module
    return importlib.import_module("baton_test_cuda.host_device")


HostDevice = _load().HostDevice
