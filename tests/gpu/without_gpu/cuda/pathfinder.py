"""Finds the cuBLAS of ``tests/cuda/host/cublas.cc``, built once."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[3] / "cuda/host/cublas.cc"


def load_nvidia_dynamic_lib(name: str) -> SimpleNamespace:
    built = Path(os.environ["BATON_HOST_BUILDS"]) / f"libcublas-{os.getpid()}.so"
    command = ["g++", "-O2", "-shared", "-fPIC", "-o", str(built), str(SOURCE)]
    subprocess.run(command, check=True)
    return SimpleNamespace(abs_path=str(built))
