"""The instances of GPUs that are split by MIG. CUDA shows only one instance to a process.

The worker of an instance starts with CUDA_VISIBLE_DEVICES set to the name of this instance.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence

from baton.engine.kernels.backend import Gpu
from baton.engine.kernels.cuda.gpus import MIG, VISIBLE, instances_problem
from baton.proto.errors import ConfigError

_LISTER = "nvidia-smi"
_LISTER_S = 20.0
_GPU = re.compile(r"GPU \d+: (?P<name>.+) \(UUID: GPU-[^)]+\)")
_INSTANCE = re.compile(r"\s+(?P<profile>MIG \S+)\s+Device\s+\d+:\s+\(UUID: (?P<uuid>MIG-[^)]+)\)")

Ask = Callable[[str | None], Sequence[Gpu]]
"""Returns the GPUs of a process with this CUDA_VISIBLE_DEVICES; None: not set. ConfigError."""


def listed_instances(listing: str) -> list[Gpu]:
    """Return the instances in the output of ``nvidia-smi -L``, numbered in its order."""
    found: list[Gpu] = []
    gpu = ""
    for line in listing.splitlines():
        if match := _GPU.fullmatch(line.rstrip()):
            gpu = match["name"]
        elif match := _INSTANCE.fullmatch(line.rstrip()):
            found.append(Gpu(len(found), match["uuid"], f"{gpu} {match['profile']}"))
    return found


def workers_gpus(shown: str | None, ask: Ask, lister: Callable[[], str] | None = None) -> list[Gpu]:
    """Return the GPUs that workers can have, numbered from 0, with all instances of split GPUs.

    ``shown``: CUDA_VISIBLE_DEVICES of this process, None if it is not set. If it names several
    instances, a separate process checks each. If it is not set and CUDA shows an instance,
    ``nvidia-smi -L`` lists all instances; without this program the shown instance is used alone.
    Raises ConfigError if the variable names a GPU and an instance, an instance twice, or an
    instance that does not exist.
    """
    named = [part.strip() for part in (shown or "").split(",") if part.strip()]
    if len(named) > 1 and all(part.startswith(f"{MIG}-") for part in named):
        if twice := next((part for part in named if named.count(part) > 1), None):
            raise ConfigError(f"{VISIBLE} names {twice} twice")
        each = [_one(part, ask(part)) for part in named]
        # CUDA's own number of an instance may differ from the name that shows it.
        return [
            Gpu(at, name, gpu.name) for at, (name, gpu) in enumerate(zip(named, each, strict=True))
        ]
    if problem := instances_problem(shown):
        raise ConfigError(problem)
    found = list(ask(shown))
    if shown is None and len(found) == 1 and found[0].uuid.startswith(f"{MIG}-"):
        return listed_instances((lister or listing)()) or found
    return found


def _one(name: str, found: Sequence[Gpu]) -> Gpu:
    if len(found) != 1:
        raise ConfigError(f"{VISIBLE}={name} shows {len(found)} devices, not one MIG instance")
    return found[0]


def listing() -> str:
    """Return the output of ``nvidia-smi -L``; empty if it is not installed or fails."""
    program = shutil.which(_LISTER)
    if program is None:
        return ""
    try:
        ended = subprocess.run(  # noqa: S603 -- the driver's own program
            [program, "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LISTER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ended.returncode else ended.stdout.decode("utf-8", "replace")


def instances_of(gpus: Sequence[Gpu]) -> dict[int, str]:
    """Return the CUDA_VISIBLE_DEVICES of each instance's worker, by ordinal.

    Empty for a single instance, because every process sees it already.
    """
    if len(gpus) < 2:
        return {}
    return {gpu.ordinal: gpu.uuid for gpu in gpus if gpu.uuid.startswith(f"{MIG}-")}
