"""Loading of the CPU's kernels: compiled, or NumPy's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from .host_backend import HostBackend
from .reference import NumpyBackend

BUILD_KERNELS = (
    "install a C compiler (such as gcc) and Python's headers, then build Baton again: make setup "
    "in a checkout, or pip install --force-reinstall --no-deps FOLDER"
)
"""Hint for users: how to get the compiled kernels."""


def load_backend(name: str = "auto", *, isa: str | None = None, threads: int = 1) -> HostBackend:
    """Return kernels: ``cpu`` (compiled), ``numpy``, or ``auto``: cpu if it was built.

    ``cpu-floats``: cpu, but quantized weights become float32, for comparisons.
    ``isa`` forces an instruction set of the cpu kernels (tests); None chooses the best one.
    ``threads``: threads of the cpu kernels; the backend's ``threads`` tells how many it got.

    Raises:
        ValueError: unknown name, or an instruction set that this machine does not have.
        ImportError: the extension was requested but not built, or built from other sources.

    """
    if name not in ("auto", "cpu", "cpu-floats", "numpy"):
        raise ValueError(f"unknown backend {name!r}; choose auto, cpu, cpu-floats or numpy")
    if name != "numpy":
        try:
            return _compiled()(isa, threads, floats=name == "cpu-floats")
        except ImportError:
            if name != "auto":
                raise
    return NumpyBackend()


def _compiled() -> Callable[..., HostBackend]:
    """Import the compiled kernels. Raises ImportError, also if they lack what these sources use."""
    try:
        from .cpu import CpuBackend
    except AttributeError as problem:
        raise ImportError(f"they were built from other sources: {problem}") from problem
    return CpuBackend


def compiled_kernels_problem() -> str:
    """Return why the compiled kernels cannot be loaded here; empty if they can."""
    if importlib.util.find_spec(f"{__package__}._cpu") is None:
        return "they were not built when Baton was installed"
    try:
        load_backend("cpu")
    except (ImportError, ValueError) as problem:
        return str(problem)
    return ""


def kernels_title(numerics: str) -> str:
    """Return a readable name of a numerics string: ``cpu-1-avx512/F32`` is ``C, avx512``."""
    kind, *parts = numerics.partition("/")[0].split("-")
    match kind, parts:
        case "cpu", [_, instructions]:
            return f"C, {instructions}"
        case "numpy", [version, _]:
            return f"NumPy {version}"
        case "cuda", [target, *_]:
            return f"CUDA, {target}"
    return numerics


def weights_dtype(numerics: str) -> str:
    """Return the weight dtypes of a numerics string: ``BF16`` for ``cpu-1-avx512/BF16``."""
    return numerics.partition("/")[2].partition("/")[0]
