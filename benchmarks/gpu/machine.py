"""Requirements of the GPU commands, and facts of the machine. Uses only the standard library."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CARRIED = ("msgspec", "pyzmq", "structlog", "llguidance", "httptools")
"""What a machine with CuPy may lack; wheels of 1 to 3 MB."""

_MODULES = {"pyzmq": "zmq", "cupy-cuda13x": "cupy"}
_NEEDED = (
    "numpy",
    *CARRIED,
    "tokenizers",
    "jinja2",
    "uvloop",
    "xxhash",
    "pytest",
    "pytest_timeout",
    "cupy-cuda13x",
)
_NAMED = (
    "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "transformers", "triton", "flashinfer-python",
    "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13",
)  # fmt: skip


def why_not(*, needs_gpu: bool = True) -> str:
    """One sentence about a missing requirement, or an empty string."""
    lacking = [
        name for name in _NEEDED if importlib.util.find_spec(_MODULES.get(name, name)) is None
    ]
    if not needs_gpu:
        lacking = [name for name in lacking if name != "cupy-cuda13x"]
    if lacking:
        return (
            f"Python {platform.python_version()} at {sys.executable} lacks {', '.join(lacking)}: "
            "install them, or name a folder of wheels with WHEELS=FOLDER (make gpu-wheels fills "
            "one where there is a network)"
        )
    return _no_gpu() if needs_gpu else ""


def _no_gpu() -> str:
    import cupy

    if cupy.cuda.is_available():
        return ""
    return "CuPy finds no CUDA device: this machine has no GPU, or its driver is missing or too old"


def description(commit: str = "") -> dict[str, Any]:
    """Commit, hardware, driver and versions; what cannot be found out is left out."""
    found: dict[str, Any] = {
        "commit": commit or commit_of(ROOT),
        "sources": sources_digest(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "packages": versions(),
    }
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    lines = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]).splitlines()
    if lines:
        found["gpu"] = lines[0]
    nvcc = _output(["nvcc", "--version"]).splitlines()
    if nvcc:
        found["nvcc"] = nvcc[-1]
    return found


def commit_of(folder: Path) -> str:
    """The commit that is checked out, with a + if files differ from it; empty without git."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"])
    if not commit:
        return ""
    dirty = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return commit + "+" * bool(dirty)


def sources_digest() -> str:
    """Digest of the CUDA sources, which identifies the kernels without git."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((ROOT / "engine/kernels/csrc").glob("*.cu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of the packages that figures depend on, as far as they are installed."""
    found = {}
    for name in _NAMED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
