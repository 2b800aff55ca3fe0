"""Finds the cuBLAS of ``tests/cuda/host/cublas.cc``, built once for each content."""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[3] / "cuda/host/cublas.cc"


@ctypes.CFUNCTYPE(ctypes.c_int)
def _current_device() -> int:
    import cupy

    return int(cupy.cuda.here())


def load_nvidia_dynamic_lib(name: str) -> SimpleNamespace:
    if os.environ.get("BATON_FAKE_NO_CUBLAS"):
        raise RuntimeError("Failure finding libcublas.so.13")
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    built = Path(os.environ["BATON_HOST_BUILDS"]) / f"libcublas-{digest}.so"
    if not built.exists():
        work = built.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O2", "-shared", "-fPIC", "-o", str(work), str(SOURCE)]
        subprocess.run(command, check=True)
        work.replace(built)  # several processes may build it
    ctypes.CDLL(str(built)).baton_device(_current_device)
    return SimpleNamespace(abs_path=str(built))
