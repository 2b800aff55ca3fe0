"""The GPUs that a process sees. ``python -m`` of this module prints them as JSON."""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.proto.errors import ConfigError
from baton.runtime.process.os_settings import end_with_parent

from ..backend import Gpu
from .driver import UUID_BYTES, driver_uuid

INSTALL_CUPY = "pip install 'baton-serve[cuda]'"
"""Installs CuPy with NVRTC, which compiles the kernels."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that limits which GPUs a process sees."""
MIG = "MIG"
"""Marks the UUID and the name of an instance of a split GPU (Multi-Instance GPU)."""


def cupy_is_installed() -> bool:
    """True if CuPy is installed; it may still find no GPU."""
    return importlib.util.find_spec("cupy") is not None


def cuda_is_available() -> bool:
    """True if CuPy is installed and finds a GPU; never raises."""
    if not cupy_is_installed():
        return False
    import cupy  # pyright: ignore[reportMissingImports]

    return bool(cupy.cuda.is_available())


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, by ordinal.

    An instance of a split GPU (MIG) counts as a GPU. CUDA shows only one instance to a process,
    however many the variable names. Does not create a CUDA context. Raises ConfigError without
    CuPy or a GPU, and if the variable names an instance beside another device.
    """
    if not cupy_is_installed():
        raise ConfigError(f"--device cuda needs CuPy: {INSTALL_CUPY}")
    shown = os.environ.get(VISIBLE)
    if problem := instances_problem(shown):
        raise ConfigError(problem)
    if not cuda_is_available():
        hides = "" if shown is None else f", or {VISIBLE}={shown[:80]} names none of this machine"
        raise ConfigError(
            f"CuPy finds no CUDA device: no GPU, or its driver is missing or old{hides}"
        )
    import cupy  # pyright: ignore[reportMissingImports]

    runtime = cupy.cuda.runtime
    found = [runtime.getDeviceProperties(each) for each in range(runtime.getDeviceCount())]
    return [described(ordinal, one) for ordinal, one in enumerate(found)]


def described(
    ordinal: int, properties: dict[str, Any], ask: Callable[[int], bytes] | None = None
) -> Gpu:
    """Describe a GPU by its properties from the CUDA runtime; ``ask``: UUID of an ordinal.

    CuPy 14 cuts a UUID at its first zero byte, which one GPU in sixteen has. The driver returns
    the whole UUID.
    """
    name, number = properties["name"].decode(), bytes(properties["uuid"])
    if len(number) != UUID_BYTES:
        number = (ask or driver_uuid)(ordinal)
    kind = MIG if MIG in name.split() else "GPU"
    return Gpu(ordinal, f"{kind}-{uuid.UUID(bytes=number)}", name)


def instances_problem(shown: str | None) -> str:
    """Return why CUDA would ignore a part of a CUDA_VISIBLE_DEVICES, or an empty text.

    A process sees only the first MIG instance of the list, and no other device beside it.
    """
    parts = [part.strip() for part in (shown or "").split(",") if part.strip()]
    instances = sum(part.startswith(f"{MIG}-") for part in parts)
    if not instances or len(parts) == 1:
        return ""
    return (
        f"{VISIBLE} has {len(parts)} entries, {instances} of them MIG instances, but CUDA shows a "
        "process one MIG instance: name one, or only instances for `baton serve`, which gives each "
        "worker one"
    )


def checked_gpu(ordinal: int, gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU with this ordinal. Raises ConfigError if it does not exist."""
    if not 0 <= ordinal < len(gpus):
        raise ConfigError(f"device {ordinal} does not exist, this machine has {len(gpus)}")
    return gpus[ordinal]


def main() -> int:
    """Print the visible GPUs as JSON, or the reason why no GPU is visible on standard error."""
    end_with_parent()
    try:
        found = visible_gpus()
    except ConfigError as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
